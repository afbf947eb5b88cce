"""Servers that end with everything they accepted.

asyncio's own leave connections behind: one accepted in the turn before `close` becomes a transport that nobody closes
(`Server._attach` fails in its constructor), and nobody closes one that is in a TLS handshake, whose task was cancelled
before its first step, or whose peer does not read what is left to send. The ResourceWarning of each fails whatever test
runs when the garbage collector comes by. A `Listener` knows every connection from its accept on.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, Final, Self

from tests.support.patience import PATIENCE_S

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Place = tuple[str, int] | Path | socket.socket

_BACKLOG: Final = 1024


def bound(place: Place) -> socket.socket:
    """Return a listening socket: at an address (port 0: any that is free), at a path, or the one that is given."""
    if isinstance(place, socket.socket):
        return place
    if isinstance(place, tuple):
        return socket.create_server(place, backlog=_BACKLOG)
    listening = socket.socket(socket.AF_UNIX)
    try:
        listening.bind(str(place))
        listening.listen(_BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening


class Listener:
    """Accepts from construction on, in the running loop, and gives each connection a protocol of its own."""

    def __init__(
        self, place: Place, protocol: Callable[[], asyncio.BaseProtocol], *, tls: ssl.SSLContext | None = None
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._protocol = protocol
        self._tls = tls
        # Those that are open, with the transport of each that has one yet.
        self._open: dict[socket.socket, asyncio.WriteTransport | None] = {}
        # Connections that become transports, and what else is to end with us.
        self.tasks: set[asyncio.Task[None]] = set()
        self.socket = bound(place)
        self.socket.setblocking(False)
        self._loop.add_reader(self.socket.fileno(), self._accept)

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self.socket.getsockname()[1])

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` as a task that ends with us."""
        task = self._loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def close(self) -> None:
        """Accept no more: what is in the kernel's queue is reset. Harmless when repeated."""
        if self.socket.fileno() >= 0:
            self._loop.remove_reader(self.socket.fileno())
            self.socket.close()

    async def stop(self) -> None:
        """Stop listening, drop every connection and wait until all are closed."""
        self.close()
        # A task that is cancelled before its first step does nothing, not even in `finally`.
        await asyncio.sleep(0)
        async with asyncio.timeout(PATIENCE_S):
            while self._forget_closed() or self.tasks:
                for task in self.tasks:
                    if not task.cancelling():
                        task.cancel()
                for sock, transport in self._open.items():
                    if self._tls is not None:
                        # A transport of TLS that was closed twice cannot be aborted (CPython 3.11), but sees this.
                        with contextlib.suppress(OSError):
                            sock.shutdown(socket.SHUT_RDWR)
                    elif transport is not None:
                        transport.abort()
                await asyncio.sleep(0)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def _accept(self) -> None:
        try:
            sock, _ = self.socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        sock.setblocking(False)
        self._forget_closed()
        self._open[sock] = None
        self.start(self._connect(sock))

    async def _connect(self, sock: socket.socket) -> None:
        try:
            transport, _ = await self._loop.connect_accepted_socket(self._protocol, sock, ssl=self._tls)
        except (OSError, ssl.SSLError):
            return  # no TLS after all, or gone already; the loop closes the socket
        self._open[sock] = transport

    def _forget_closed(self) -> bool:
        """Forget connections that are closed, which may not be aborted any more; tell whether others are open."""
        self._open = {sock: transport for sock, transport in self._open.items() if sock.fileno() >= 0}
        return bool(self._open)


class StreamServer(Listener):
    """A listener whose connections are served by a handler, as `asyncio.start_server` does; closed when it returns."""

    def __init__(
        self, handler: Handler, place: Place, *, tls: ssl.SSLContext | None = None, limit: int = 1 << 16
    ) -> None:
        """`limit` is that of a reader's lines and buffer, in bytes."""
        self._handler = handler
        self._limit = limit
        super().__init__(place, self._streams, tls=tls)

    def _streams(self) -> asyncio.StreamReaderProtocol:
        reader = asyncio.StreamReader(limit=self._limit, loop=self._loop)
        return asyncio.StreamReaderProtocol(reader, self._connected, loop=self._loop)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.start(self._serve(reader, writer))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._handler(reader, writer)
        finally:
            writer.close()
