"""Bytes on the wire: requests written by hand, replies read whole, and an upstream that answers as it is told."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from tests.model.harness import TOKEN
from tests.support.listener import StreamServer
from tests.support.patience import PATIENCE_S

PATH = "/model/s1/v1/messages"


def request(
    body: bytes = b'{"model":"fake-model","max_tokens":10,"messages":[]}',
    *,
    method: str = "POST",
    path: str = PATH,
    token: str | None = TOKEN,
    headers: tuple[str, ...] = (),
    length: bool = True,
) -> bytes:
    """Return one request."""
    lines = [f"{method} {path} HTTP/1.1", "Host: opificia-gateway:8900", *headers]
    if token is not None:
        lines.append(f"x-api-key: {token}")
    if length and (body or method == "POST"):
        lines.append(f"Content-Length: {len(body)}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body


def chunked(*pieces: bytes) -> bytes:
    """Return a chunked body."""
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


@dataclass
class Reply:
    """A reply that was read whole."""

    status: int
    head: bytes
    body: bytes

    def header(self, name: bytes) -> bytes | None:
        """Return a header's value."""
        for line in self.head.split(b"\r\n")[1:]:
            key, _, value = line.partition(b":")
            if key.lower() == name:
                return value.strip()
        return None


class Client:
    """A client connection that hides nothing."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        """Write and drain."""
        self.writer.write(data)
        await self.writer.drain()

    async def reply(self) -> Reply:
        """Read one reply whole, as its head says it is framed. Raises IncompleteReadError when it is cut."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        reply = Reply(status, head, b"")
        if status < 200 or status in (204, 304):
            return reply
        if (length := reply.header(b"content-length")) is not None:
            reply.body = await self.reader.readexactly(int(length))
        elif reply.header(b"transfer-encoding") == b"chunked":
            pieces = []
            while size := int((await self.reader.readuntil(b"\r\n")).split(b";")[0], 16):
                pieces.append(await self.reader.readexactly(size))
                assert await self.reader.readexactly(2) == b"\r\n"
            assert await self.reader.readuntil(b"\r\n") == b"\r\n"
            reply.body = b"".join(pieces)
        else:
            raise AssertionError(f"a reply that ends with the connection: {head!r}")
        return reply

    async def closed(self) -> bytes:
        """Return what comes until the connection ends; a reset counts as an end."""
        data = b""
        with contextlib.suppress(ConnectionError):
            while more := await self.reader.read(65536):
                data += more
        return data

    def close(self) -> None:
        """Leave without a word."""
        self.writer.transport.abort()


@contextlib.asynccontextmanager
async def connected(port: int) -> AsyncIterator[Client]:
    """Connect a client for a block that must end."""
    async with asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
        client = Client(reader, writer)
        try:
            yield client
        finally:
            client.close()


async def ask(port: int, data: bytes) -> Reply:
    """Send bytes on a connection of their own; return the reply."""
    async with connected(port) as client:
        await client.send(data)
        return await client.reply()


@dataclass
class Upstream:
    """A provider that does what `handler` does. `received` holds what came on each connection."""

    port: int = 0
    received: list[bytearray] = field(default_factory=list)
    ended: list[asyncio.Event] = field(default_factory=list)

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def requests(self) -> int:
        """Requests that began to arrive."""
        return sum(bytes(data).count(b" HTTP/1.1\r\n") for data in self.received)


class Peer:
    """One connection to the upstream."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, received: bytearray) -> None:
        self._reader = reader
        self._received = received
        self.writer = writer

    async def request(self) -> bytes:
        """Read one request whole; return its body."""
        head = await self._reader.readuntil(b"\r\n\r\n")
        self._received += head
        lower = head.lower()
        if b"transfer-encoding: chunked" in lower:
            body = b""
            while True:
                line = await self._reader.readuntil(b"\r\n")
                size = int(line, 16)
                data = await self._reader.readexactly(size + 2)
                self._received += line + data
                if not size:
                    return body
                body += data[:-2]
        _, found, rest = lower.partition(b"content-length: ")
        body = await self._reader.readexactly(int(rest.split(b"\r\n")[0])) if found else b""
        self._received += body
        return body

    async def read(self, size: int = 65536) -> bytes:
        """Read what comes."""
        data = await self._reader.read(size)
        self._received += data
        return data

    async def send(self, data: bytes) -> None:
        """Write and drain."""
        self.writer.write(data)
        await self.writer.drain()

    async def gone(self) -> None:
        """Wait until the gateway has closed."""
        with contextlib.suppress(ConnectionError):
            while await self.read():
                pass

    def cut(self) -> None:
        """End with a reset."""
        self.writer.transport.abort()


@contextlib.asynccontextmanager
async def scripted(
    handler: Callable[[Peer], Awaitable[None]], tls: ssl.SSLContext | None = None
) -> AsyncIterator[Upstream]:
    """Run an upstream whose every connection is served by `handler`, and closed after it."""
    upstream = Upstream()
    failures: list[BaseException] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received, ended = bytearray(), asyncio.Event()
        upstream.received.append(received)
        upstream.ended.append(ended)
        try:
            await handler(Peer(reader, writer, received))
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        except BaseException as error:
            failures.append(error)
        finally:
            ended.set()

    async with StreamServer(serve, ("127.0.0.1", 0), tls=tls, limit=1 << 24) as server:
        upstream.port = server.port
        yield upstream
    if failures:
        raise failures[0]


def reply(
    body: bytes, *, status: str = "200 OK", kind: str = "application/json", headers: tuple[str, ...] = ()
) -> bytes:
    """Return a reply with a length."""
    lines = [f"HTTP/1.1 {status}", f"content-type: {kind}", f"content-length: {len(body)}", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
