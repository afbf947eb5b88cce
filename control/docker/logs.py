"""A container's output, whole and in order, from before its start to after its end.

While the connection stands, output is taken from an attachment made before the start: byte for byte, and an instant exit
loses nothing. When it breaks (the engine restarts with live-restore), or control itself was restarted, it goes on with the
engine's own record, behind what was already taken (control.docker.alignment). That record replaces bytes that are not UTF-8
by U+FFFD.

Whether the record is whole only the engine knows that saw the container's end: with live-restore a container outlives the
engine, and what it prints then waits in a pipe for the engine's return; if it ends before that, the pipe goes with it (Docker
20.10). Nor has an engine that was killed recorded all that it had read. What may be missing for such a reason is said, in the
log and to whoever follows.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from control.docker.alignment import Alignment
from control.docker.demultiplex import Demultiplexer
from control.docker.engine import Engine
from control.docker.events import Events
from control.docker.stream import Stream
from control.docker.types import EngineUnavailableError, LogSink, LogStream, NotFoundError

log = logging.getLogger(__name__)

_RETRY_S: Final = 0.2
_RETRY_MOST_S: Final = 5.0

END_UNSEEN: Final = "the engine did not see the container's end: what it printed last may be missing from the logs"
RECORD_BROKEN: Final = "the engine no longer had all of the output when the logs were taken up: some may be missing from them, or be there twice"


@dataclass(slots=True)
class _Known:
    """How far the record of one output was read here, in bytes, and its first entry, by which it is known again."""

    first: bytes
    position: int


class LogFollower:
    """Follows one container. `attached` is set once no output of a start can be missed."""

    def __init__(self, engine: Engine, events: Events, container: str, sink: LogSink) -> None:
        self._engine = engine
        self._events = events
        self._container = container
        self._sink = sink
        self._known: dict[LogStream, _Known] = {}
        # Each once, in the order in which they were found.
        self._missing: dict[str, None] = {}
        self.attached = asyncio.Event()

    async def run(self) -> str:
        """Return when the container has ended, or is gone, and all its output that there is is in the sink.

        Returns what may be missing of it, a sentence each; empty when it is whole.
        Raises EngineError when the engine refuses; an engine that is away is waited for, and so is a disk that is full.
        """
        retry_s = _RETRY_S
        # An attachment that ended while the engine stayed the same brought everything.
        attached_in: int | None = None
        followed_in: int | None = None
        # Another one later: the engine was away meanwhile, as far as can be told from here.
        began_in: int | None = None
        while True:
            try:
                await self._events.listening()
                generation = self._events.generation
                began_in = generation if began_in is None else began_in
                state = (await self._engine.call(lambda api: api.inspect_container(self._container)))["State"]
                if state["Status"] == "created":
                    first = not self.attached.is_set()
                    await self._attach()
                    # The start waits for the first attachment only: it may have come before another one stood.
                    attached_in = generation if first else None
                elif not state["Running"]:
                    seen = await self._events.saw_end(self._container)
                    # That the engine is another one may be known from this before the events tell.
                    if attached_in != generation or not seen:
                        # Also after following: the engine ends that before a last line without a newline.
                        await self._read_record(follow=False)
                    if seen is False or (seen is None and generation != began_in):
                        self._say(LogStream.STDERR, END_UNSEEN)
                    return "; ".join(self._missing)
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
                return "; ".join(self._missing)
            except (EngineUnavailableError, OSError) as error:
                if isinstance(error, OSError):
                    log.warning("the output of container %s cannot be kept now: %s", self._container[:12], error)
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

        def consume(stream: Stream) -> None:
            loop.call_soon_threadsafe(self.attached.set)
            demultiplexer = Demultiplexer()
            while data := stream.read():
                for kind, piece in demultiplexer.feed(data):
                    self._sink.write(kind, piece)

        query = {"stream": "1", "stdout": "1", "stderr": "1"}
        await self._engine.in_thread("POST", f"/containers/{self._container}/attach", query, consume)

    async def _read_record(self, *, follow: bool) -> None:
        alignments = await self._align()
        left_out = {kind: self._known[kind].position for kind in alignments}

        def take(kind: LogStream, entry: bytes) -> None:
            if kind not in alignments:
                return
            known = self._known[kind]
            known.first = known.first or entry
            skipped = min(left_out[kind], len(entry))
            left_out[kind] -= skipped
            data = entry[skipped:] if skipped else alignments[kind].fresh(entry)
            if data:
                self._sink.write(kind, data)
            known.position += len(entry) - skipped

        self.attached.set()
        await self._records(take, follow=follow)

    async def _align(self) -> dict[LogStream, Alignment]:
        """Find where the record of each output that is not full goes on; say so where it does not."""
        alignments = {
            kind: Alignment(partial(self._sink.read, kind), self._sink.position(kind))
            for kind in LogStream
            if not self._sink.full(kind)
        }
        firsts = dict.fromkeys(LogStream, b"")

        def feed(kind: LogStream, entry: bytes) -> None:
            firsts[kind] = firsts[kind] or entry
            if kind in alignments:
                alignments[kind].feed(entry)

        if any(self._sink.position(kind) for kind in alignments):
            await self._records(feed, follow=False)
        for kind, alignment in alignments.items():
            known = self._known.get(kind)
            if alignment.parted and known is not None and known.first == firsts[kind]:
                # Read before, and its beginning is still there.
                continue
            self._known[kind] = _Known(firsts[kind], alignment.position)
            if alignment.broken:
                self._say(kind, RECORD_BROKEN)
        return alignments

    async def _records(self, take: Callable[[LogStream, bytes], None], *, follow: bool) -> None:
        """Bring the record's entries, each whole: it has a frame of its own."""

        def consume(stream: Stream) -> None:
            demultiplexer, entry = Demultiplexer(), bytearray()
            while data := stream.read():
                for kind, piece in demultiplexer.feed(data):
                    entry += piece
                    if demultiplexer.at_end:
                        take(kind, bytes(entry))
                        entry.clear()

        query = {"follow": str(int(follow)), "stdout": "1", "stderr": "1"}
        await self._engine.in_thread("GET", f"/containers/{self._container}/logs", query, consume)

    def _say(self, kind: LogStream, sentence: str) -> None:
        """Note what may be missing, in the log too: a line, unless it was the last one before control was restarted."""
        line = f"[opificia: {sentence}]\n".encode()
        end = self._sink.position(kind)
        last = self._sink.read(kind, max(0, end - len(line)), len(line))
        if last != line:
            self._sink.write(kind, line if last.endswith(b"\n") or not last else b"\n" + line)
        self._missing[sentence] = None
