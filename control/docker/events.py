"""What happens to this installation's containers, as the engine tells it, for those who wait for one of them.

One stream serves all. It may break (the engine restarts) or miss something, so an event only wakes: the truth is what
an inspection then says. A stream that broke is resumed behind the last event that came (`since`), and whoever waits looks
again, for an engine that was restarted remembers nothing. `generation` counts the breaks, which tells a reader of another
stream whether that one ended by itself or with the engine.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator
from typing import Final

from control.docker.engine import Engine
from control.docker.stream import Stream
from control.docker.types import EngineError
from control.plan.container import LABEL_HOST

_RETRY_FIRST_S: Final = 0.1
_RETRY_MOST_S: Final = 5.0
# How many events the engine remembers at most, and only since its start (daemon/events/events.go).
_REMEMBERED: Final = 256
# An event of the engine is about 1 KiB; labels could make it larger.
_MAX_EVENT_BYTES: Final = 1024 * 1024


class Events:
    """Wakes waiters of a container when the engine reports its end or removal, and all of them after a break."""

    def __init__(self, engine: Engine, host_id: str) -> None:
        self._engine = engine
        # Of the eight or so events of a container's life only its end is waited for.
        kinds = {"type": ["container"], "event": ["die", "destroy"]}
        self._filters = json.dumps({**kinds, "label": [f"{LABEL_HOST}={host_id}"]})
        self._waiters: dict[str, set[asyncio.Event]] = {}
        self._task: asyncio.Task[None] | None = None
        self._listening = asyncio.Event()
        # From as far back as the engine remembers: what ended while control was away is among it.
        self._since = "1"
        # Containers whose end was seen, until they are removed.
        self._ended: set[str] = set()
        self.generation = 0

    async def close(self) -> None:
        """Stop listening."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def begin(self) -> None:
        """Begin to listen, if not done before."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="engine-events")

    async def listening(self) -> None:
        """Return once events come in; an engine that is away is waited for."""
        self.begin()
        await self._listening.wait()

    @contextlib.contextmanager
    def watch(self, container: str) -> Iterator[asyncio.Event]:
        """Hand out an event that is set whenever the container is worth another look. The waiter clears it."""
        wake = asyncio.Event()
        self._waiters.setdefault(container, set()).add(wake)
        try:
            yield wake
        finally:
            waiters = self._waiters[container]
            waiters.remove(wake)
            if not waiters:
                del self._waiters[container]

    async def saw_end(self, container: str) -> bool | None:
        """Tell whether an engine saw a container's end and lived to tell: then it has recorded all of its output.

        One that was restarted has seen no end but those since; so has seen from outside one that has forgotten it, among
        newer events: None. Raises EngineError.
        """
        if container in self._ended:
            return True
        # On its way, perhaps.
        query = {"since": "1", "until": f"{time.time():.9f}"}
        remembered = (await self._engine.in_thread("GET", "/events", query, _whole)).splitlines()
        if any(_parsed(line)[:2] == ("die", container) for line in remembered):
            return True
        # Fewer are told than it remembers, by those that come after the question.
        return None if len(remembered) > _REMEMBERED // 2 else False

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        retry_s = _RETRY_FIRST_S

        def consume(stream: Stream) -> None:
            loop.call_soon_threadsafe(self._opened)
            pending = b""
            while data := stream.read():
                *lines, pending = (pending + data).split(b"\n")
                if len(pending) > _MAX_EVENT_BYTES:
                    raise EngineError("An event of the engine is longer than any of them can be.")
                for line in lines:
                    if line:
                        loop.call_soon_threadsafe(self._take, *_parsed(line))

        while True:
            began = loop.time()
            query = {"filters": self._filters, "since": self._since}
            with contextlib.suppress(EngineError):
                await self._engine.in_thread("GET", "/events", query, consume)
            self.generation += 1
            self._listening.clear()
            self._wake_all()
            # An engine that was there for a while is looked for at once, one that stays away less and less often.
            retry_s = _RETRY_FIRST_S if loop.time() - began > _RETRY_MOST_S else min(retry_s * 2, _RETRY_MOST_S)
            await asyncio.sleep(retry_s)

    def _opened(self) -> None:
        self._listening.set()
        if self.generation:
            self._wake_all()

    def _take(self, event: str, container: str, since: str) -> None:
        self._since = since or self._since
        if event == "die":
            self._ended.add(container)
        else:
            self._ended.discard(container)
        for wake in self._waiters.get(container, ()):
            wake.set()

    def _wake_all(self) -> None:
        for waiters in self._waiters.values():
            for wake in waiters:
                wake.set()


def _whole(stream: Stream) -> bytes:
    answer = bytearray()
    while data := stream.read():
        answer += data
        if len(answer) > _REMEMBERED * _MAX_EVENT_BYTES:
            raise EngineError("The engine's answer to what it remembers does not end.")
    return bytes(answer)


def _parsed(line: bytes) -> tuple[str, str, str]:
    """Return what happened to which container, and when, as `since` takes it: seconds and nanoseconds. Empty: it has none."""
    try:
        event = json.loads(line)
        seconds, nanoseconds = divmod(int(event["timeNano"]), 1_000_000_000)
        return str(event["Action"]), str(event["Actor"]["ID"]), f"{seconds}.{nanoseconds:09d}"
    except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError):
        return "", "", ""
