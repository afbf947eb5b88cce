"""A proxy that misbehaves: it stands between two parts of the system and delays, stalls, cuts or thins what they say.

TCP or unix socket on either side. It runs in a thread with a loop of its own, so that it goes on whatever the test waits for.
"""

import asyncio
import contextlib
import enum
import socket
import struct
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self, TypeVar

T = TypeVar("T")
Address = tuple[str, int] | Path

_PIECE: Final = 64 * 1024
# SO_LINGER on and 0 seconds: close(2) sends a reset (socket(7)).
_RESET: Final = struct.pack("ii", 1, 0)


class Kind(enum.StrEnum):
    """What is done to connections."""

    DELAY = "delay"
    """Each piece waits `seconds`."""
    STALL = "stall"
    """Nothing is carried, nothing is closed."""
    RESET = "reset"
    """Both ends are reset (a unix socket is closed with data unread)."""
    TRUNCATE = "truncate"
    """Both ends are closed in order, in the middle of what is said."""
    SPLIT = "split"
    """Pieces of at most `size` bytes, each by itself."""
    HALF_CLOSE = "half_close"
    """The receiver sees the end; what comes after is thrown away; the other way goes on."""
    BANDWIDTH = "bandwidth"
    """At most `rate` bytes a second."""


class Way(enum.Flag):
    """Directions, from the side that connects."""

    UP = enum.auto()
    DOWN = enum.auto()
    BOTH = UP | DOWN


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of misbehaviour. It begins when a connection has carried `after` bytes since it was set; 0: at once."""

    kind: Kind
    way: Way = Way.BOTH
    after: int = 0
    seconds: float = 0.02
    size: int = 7
    rate: int = 256 * 1024


@dataclass(eq=False)
class _Link:
    client: socket.socket
    server: socket.socket
    tasks: list["asyncio.Task[None]"] = field(default_factory=list)
    carried: dict[Way, int] = field(default_factory=lambda: {Way.UP: 0, Way.DOWN: 0})
    # Ways that are closed for good.
    closed: Way = field(default_factory=lambda: Way(0))


class FaultProxy:
    """Carries connections from `listen` to `to`. Use as a context manager; all calls block until they are in effect."""

    def __init__(self, to: Address, listen: Address = ("127.0.0.1", 0)) -> None:
        self._to = to
        self._listen = listen
        self._fault: Fault | None = None
        self._links: set[_Link] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="faults", daemon=True)
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._acted = 0

    @property
    def address(self) -> tuple[str, int]:
        """The TCP address that it listens on."""
        assert self._listener is not None
        host, port = self._listener.getsockname()[:2]
        return host, port

    @property
    def acted(self) -> int:
        """How often the present fault was done to a connection."""
        return self._acted

    @property
    def connections(self) -> int:
        """How many connections stand."""
        return len(self._links)

    def set(self, fault: Fault) -> None:
        """Misbehave so from now on, also on connections that stand."""
        self._call(self._set(fault))

    def clear(self) -> None:
        """Behave; what a stall held back is carried on."""
        self._call(self._set(None))

    def __enter__(self) -> Self:
        self._thread.start()
        self._call(self._open())
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        calling: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return calling.result(30)

    async def _open(self) -> None:
        listener = socket.socket(socket.AF_UNIX if isinstance(self._listen, Path) else socket.AF_INET)
        if isinstance(self._listen, Path):
            self._listen.unlink(missing_ok=True)
            listener.bind(str(self._listen))
            # Whoever may reach what lies behind is decided by whoever uses us.
            self._listen.chmod(0o666)
        else:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(self._listen)
        listener.listen(128)
        listener.setblocking(False)
        self._listener = listener
        self._accepting = asyncio.create_task(self._accept(listener))

    async def _close(self) -> None:
        assert self._accepting is not None
        assert self._listener is not None
        self._accepting.cancel()
        await asyncio.gather(self._accepting, return_exceptions=True)
        self._listener.close()
        for link in list(self._links):
            await self._end(link)

    async def _set(self, fault: Fault | None) -> None:
        self._fault = fault
        self._acted = 0
        self._changed.set()
        self._changed = asyncio.Event()
        for link in list(self._links):
            link.carried = {Way.UP: 0, Way.DOWN: 0}
            self._act_at_once(link)

    def _act_at_once(self, link: _Link) -> None:
        fault = self._fault
        if fault is not None and fault.after == 0:
            for way in (Way.UP, Way.DOWN):
                if way in fault.way and link in self._links:
                    self._act(link, way, fault)

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            client, _ = await self._loop.sock_accept(listener)
            server = socket.socket(socket.AF_UNIX if isinstance(self._to, Path) else socket.AF_INET)
            client.setblocking(False)
            server.setblocking(False)
            try:
                await self._loop.sock_connect(server, str(self._to) if isinstance(self._to, Path) else self._to)
            except OSError:
                client.close()
                server.close()
                continue
            link = _Link(client, server)
            self._links.add(link)
            link.tasks = [
                asyncio.create_task(self._carry(link, client, server, Way.UP)),
                asyncio.create_task(self._carry(link, server, client, Way.DOWN)),
            ]
            self._act_at_once(link)

    async def _carry(self, link: _Link, source: socket.socket, sink: socket.socket, way: Way) -> None:
        try:
            while data := await self._loop.sock_recv(source, _PIECE):
                while data and way not in link.closed:
                    size = await self._permitted(link, way, len(data))
                    if size == 0:
                        continue
                    await self._loop.sock_sendall(sink, data[:size])
                    link.carried[way] += size
                    data = data[size:]
            if way not in link.closed:
                link.closed |= way
                sink.shutdown(socket.SHUT_WR)
        except OSError:
            # One end was reset: the other one learns it.
            self._reset(link)
        if link.closed == Way.BOTH:
            self._forget(link)

    async def _permitted(self, link: _Link, way: Way, size: int) -> int:
        """Return how many bytes may be carried now; 0 to ask again. Waits as the fault says."""
        fault = self._fault
        if fault is None or way not in fault.way:
            return size
        left = fault.after - link.carried[way]
        if left > 0:
            return min(size, left)
        changed = self._changed
        match fault.kind:
            case Kind.DELAY:
                self._acted += 1
                await asyncio.sleep(fault.seconds)
            case Kind.STALL:
                self._acted += 1
                await changed.wait()
                return 0
            case Kind.SPLIT:
                self._acted += 1
                # Leaves before the next one is written.
                await asyncio.sleep(0)
                return min(size, fault.size)
            case Kind.BANDWIDTH:
                self._acted += 1
                size = min(size, max(1, fault.rate // 50))
                await asyncio.sleep(size / fault.rate)
            case Kind.RESET | Kind.TRUNCATE | Kind.HALF_CLOSE:
                self._act(link, way, fault)
                return 0
        return size

    def _act(self, link: _Link, way: Way, fault: Fault) -> None:
        """Do at once what does not wait for bytes."""
        match fault.kind:
            case Kind.RESET:
                self._acted += 1
                self._reset(link)
            case Kind.TRUNCATE:
                self._acted += 1
                self._forget(link)
            case Kind.HALF_CLOSE if way not in link.closed:
                self._acted += 1
                link.closed |= way
                with contextlib.suppress(OSError):
                    (link.server if way is Way.UP else link.client).shutdown(socket.SHUT_WR)
            case _:
                pass

    def _reset(self, link: _Link) -> None:
        if link in self._links:
            for end in (link.client, link.server):
                if end.family == socket.AF_INET:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self._forget(link)

    def _forget(self, link: _Link) -> None:
        if link not in self._links:
            return
        self._links.discard(link)
        link.closed = Way.BOTH
        current = asyncio.current_task()
        for task in link.tasks:
            if task is not current:
                task.cancel()
        for end in (link.client, link.server):
            self._loop.remove_reader(end.fileno())
            self._loop.remove_writer(end.fileno())
            end.close()

    async def _end(self, link: _Link) -> None:
        self._forget(link)
        await asyncio.gather(*link.tasks, return_exceptions=True)
