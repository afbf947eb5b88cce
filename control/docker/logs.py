"""A container's output, whole and in order, from before its start to after its end.

While the connection stands, output is taken from an attachment made before the start: byte for byte, and an instant exit
loses nothing. When it breaks (the engine restarts with live-restore), or control itself was restarted, the engine's own
record is read from the beginning and what was already taken is left out. That record replaces bytes that are not UTF-8
by U+FFFD, so what was taken is counted as the record would hold it.
"""

import asyncio
import codecs
import contextlib
import logging
import math
import time
from collections.abc import Callable
from datetime import datetime
from typing import Final

from control.docker.demultiplex import Demultiplexer
from control.docker.engine import Engine
from control.docker.events import Events
from control.docker.stream import Stream
from control.docker.types import EngineUnavailableError, LogSink, LogStream, NotFoundError

log = logging.getLogger(__name__)

_RETRY_S: Final = 0.2
_RETRY_MOST_S: Final = 5.0

MAY_MISS: Final = "the engine was away when the container ended: what it printed meanwhile may be missing from the logs"

_ERRORS: Final = "opificia.one-per-byte"


def _replace_each(error: UnicodeError) -> tuple[str, int]:
    # As Go's encoder does; Python's own "replace" makes one of several bytes.
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(_ERRORS, _replace_each)


class Tally:
    """How much of each output was taken, in bytes of the engine's record."""

    def __init__(self, sink: LogSink) -> None:
        self._counts = {stream: sink.position(stream) for stream in LogStream}
        self._decoders = {stream: codecs.getincrementaldecoder("utf-8")(_ERRORS) for stream in LogStream}

    def __getitem__(self, stream: LogStream) -> int:
        return self._counts[stream]

    def add(self, stream: LogStream, data: bytes) -> None:
        """Count bytes as they came from an attachment."""
        if data.isascii() and self._decoders[stream].getstate()[0] == b"":
            self._counts[stream] += len(data)
        else:
            self._counts[stream] += len(self._decoders[stream].decode(data).encode())

    def add_recorded(self, stream: LogStream, count: int) -> None:
        """Count bytes that came from the record."""
        self._counts[stream] += count


class LogFollower:
    """Follows one container. `attached` is set once no output of a start can be missed."""

    def __init__(self, engine: Engine, events: Events, container: str, sink: LogSink) -> None:
        self._engine = engine
        self._events = events
        self._container = container
        self._sink = sink
        self._tally = Tally(sink)
        self.attached = asyncio.Event()

    async def run(self) -> str:
        """Return when the container has ended, or is gone, and all its output that there is is in the sink.

        Returns what may be missing of it, one sentence; empty when it is whole.
        Raises EngineError when the engine refuses; an engine that is away is waited for, and so is a disk that is full.
        """
        retry_s = _RETRY_S
        # An attachment that ended while the engine stayed the same brought everything.
        attached_in: int | None = None
        followed_in: int | None = None
        # Between which times the engine was away last.
        away = (math.inf, 0.0)
        last: int | None = None
        gone_at = 0.0
        while True:
            try:
                gone_at = gone_at or time.time()
                await self._events.listening()
                generation = self._events.generation
                if last not in (None, generation):
                    away = (gone_at, time.time())
                last, gone_at = generation, 0.0
                state = (await self._engine.call(lambda api: api.inspect_container(self._container)))["State"]
                if state["Status"] == "created":
                    first = not self.attached.is_set()
                    await self._attach()
                    # The start waits for the first attachment only: it may have come before another one stood.
                    attached_in = generation if first else None
                elif not state["Running"]:
                    if attached_in != generation:
                        # Also after following: the engine ends that before a last line without a newline.
                        await self._read_record(follow=False)
                    # With live-restore a container outlives the engine, and what it prints waits in a pipe for the engine's
                    # return. If it ends before that, the pipe goes with it (Docker 20.10).
                    return MAY_MISS if away[0] <= _seconds(state["FinishedAt"]) <= away[1] else ""
                elif generation in (attached_in, followed_in):
                    # Both outputs are closed: by the program, by its end, which is not recorded yet, or by whatever is between
                    # us and the engine. The record tells, should the container still run after another look.
                    attached_in = followed_in = None
                    await self._another_look()
                else:
                    await self._read_record(follow=True)
                    followed_in = generation
                retry_s = _RETRY_S
            except NotFoundError:
                return ""
            except (EngineUnavailableError, OSError) as error:
                if isinstance(error, OSError):
                    log.warning("the output of container %s cannot be kept now: %s", self._container[:12], error)
                else:
                    gone_at = gone_at or time.time()
                # Whatever an attachment brings after this comes from the record.
                attached_in = followed_in = None
                await asyncio.sleep(retry_s)
                retry_s = min(retry_s * 2, _RETRY_MOST_S)

    async def _another_look(self) -> None:
        with self._events.watch(self._container) as wake, contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_RETRY_MOST_S):
                await wake.wait()

    async def _attach(self) -> None:
        loop = asyncio.get_running_loop()

        def take(stream_kind: LogStream, data: bytes) -> None:
            self._sink.write(stream_kind, data)
            self._tally.add(stream_kind, data)

        def consume(stream: Stream) -> None:
            loop.call_soon_threadsafe(self.attached.set)
            _demultiplex(stream, take)

        query = {"stream": "1", "stdout": "1", "stderr": "1"}
        await self._engine.in_thread("POST", f"/containers/{self._container}/attach", query, consume)

    async def _read_record(self, *, follow: bool) -> None:
        left_out = {stream: self._tally[stream] for stream in LogStream}

        def take(stream_kind: LogStream, data: bytes) -> None:
            skipped = min(left_out[stream_kind], len(data))
            left_out[stream_kind] -= skipped
            if skipped < len(data):
                fresh = data[skipped:]
                self._sink.write(stream_kind, fresh)
                self._tally.add_recorded(stream_kind, len(fresh))

        self.attached.set()
        query = {"follow": str(int(follow)), "stdout": "1", "stderr": "1"}
        path = f"/containers/{self._container}/logs"
        await self._engine.in_thread("GET", path, query, lambda stream: _demultiplex(stream, take))


def _seconds(time_of_end: str) -> float:
    try:
        return datetime.fromisoformat(time_of_end).timestamp()
    except ValueError:
        return -math.inf


def _demultiplex(stream: Stream, take: Callable[[LogStream, bytes], None]) -> None:
    demultiplexer = Demultiplexer()
    while data := stream.read():
        for kind, piece in demultiplexer.feed(data):
            take(kind, piece)
