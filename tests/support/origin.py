"""A plain-HTTP server that answers by script and keeps what it was asked."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from tests.support.patience import PATIENCE_S
from tests.support.sockets import Server

Script = Callable[["Exchange"], Awaitable[None]]

HELLO = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"


class Exchange:
    """One request at the server: its head as it came, and the connection to read its body from and to answer on."""

    def __init__(self, head: bytes, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.head = head
        # Which connection to the server this is, from 0.
        self.number = number
        self.reader = reader
        self.writer = writer

    async def answer(self, data: bytes) -> None:
        """Send `data`."""
        self.writer.write(data)
        await self.writer.drain()

    async def body(self, size: int) -> bytes:
        """Read `size` bytes of the request's body."""
        return await self.reader.readexactly(size)


async def say_hello(exchange: Exchange) -> None:
    """Answer with HELLO."""
    await exchange.answer(HELLO)


class Origin:
    """The server. `exchanges` are the requests so far; `closed` counts connections that the gateway ended."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._changed = asyncio.Event()
        self.server = Server(self._serve)
        self.exchanges: list[Exchange] = []
        self.connections = 0
        self.closed = 0

    @property
    def heads(self) -> list[bytes]:
        """The heads of all requests."""
        return [exchange.head for exchange in self.exchanges]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds; looked at on each connection, request and end."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = self.connections
        self.connections += 1
        self._changed.set()
        try:
            while True:
                exchange = Exchange(await reader.readuntil(b"\r\n\r\n"), number, reader, writer)
                self.exchanges.append(exchange)
                self._changed.set()
                await self._script(exchange)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.closed += 1
            self._changed.set()


@asynccontextmanager
async def origin(script: Script = say_hello, *, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[Origin]:
    """Run an origin on a loopback address."""
    one = Origin(script)
    await one.server.start(host=host, port=port)
    try:
        yield one
    finally:
        await one.server.stop()
