"""Ends of a connection for network tests: a raw client of the sandbox port, and servers that do as told."""

import asyncio
import base64
import ipaddress
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

from tests.support.listener import Handler, StreamServer
from tests.support.patience import PATIENCE_S

_PROXY_V2_SIGNATURE: Final = b"\r\n\r\n\x00\r\nQUIT\n"


def proxy_v2(source: str | None, source_port: int = 40_000, *, tlvs: bytes = b"") -> bytes:
    """Return a PROXY v2 header for a caller at `source`; None makes a LOCAL one (a health check)."""
    if source is None:
        return _PROXY_V2_SIGNATURE + struct.pack("!BBH", 0x20, 0x00, 0)
    address = ipaddress.ip_address(source).packed
    family = 0x11 if len(address) == 4 else 0x21
    body = address + address + struct.pack("!HH", source_port, 8900) + tlvs
    return _PROXY_V2_SIGNATURE + struct.pack("!BBH", 0x21, family, len(body)) + body


def basic(session: str, token: str) -> str:
    """Return the value of a Proxy-Authorization header."""
    return "Basic " + base64.b64encode(f"{session}:{token}".encode()).decode()


@dataclass(frozen=True, slots=True)
class Reply:
    """A response head and the body that its Content-Length announces. Header names are in lower case."""

    status: int
    phrase: str
    headers: dict[str, str]
    body: bytes

    @property
    def reason(self) -> str | None:
        """The gateway's reason for a refusal."""
        return self.headers.get("x-opificia-reason")


_connected: list[tuple[asyncio.WriteTransport, socket.socket]] = []


def drop_at_end(writer: asyncio.StreamWriter) -> None:
    """Have a connection dropped by `drop_clients`, should it be open then."""
    # As it is before TLS: what stands for a connection then is not to be had when it has closed.
    _connected.append((writer.transport, writer.get_extra_info("socket")))


async def drop_clients() -> None:
    """Drop every connection that a failed test left open: else its ResourceWarning fails a test that comes after."""
    while _connected:
        transport, sock = _connected.pop()
        # asyncio's transports may not be aborted after they have closed.
        if sock.fileno() >= 0:
            transport.abort()
    # A transport closes its socket in the loop's next turn.
    await asyncio.sleep(0)


class Client:
    """One raw connection to the sandbox port, or to any server; it sends what the test says and no more."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        drop_at_end(writer)

    @classmethod
    async def connect(cls, to: tuple[str, int] | Path, *, proxy: bytes = b"", source: str = "") -> Self:
        """Connect to a TCP address (from `source`) or a unix socket and send `proxy` (see `proxy_v2`) first."""
        if isinstance(to, Path):
            reader, writer = await asyncio.open_unix_connection(to)
        else:
            reader, writer = await asyncio.open_connection(*to, local_addr=(source, 0) if source else None)
        client = cls(reader, writer)
        if proxy:
            await client.send(proxy)
        return client

    async def send(self, data: bytes) -> None:
        """Send all of `data`."""
        self.writer.write(data)
        async with asyncio.timeout(PATIENCE_S):
            await self.writer.drain()

    async def send_slowly(self, data: bytes, piece: int = 1) -> None:
        """Send `data` in pieces that arrive as segments of their own:

        each leaves before the next is written.
        """
        self.set_nodelay()
        for start in range(0, len(data), piece):
            await self.send(data[start : start + piece])
            # One turn of the loop, so that a gateway in the same process reads between the pieces.
            await asyncio.sleep(0)

    def set_nodelay(self) -> None:
        """Turn Nagle's algorithm off, where there is one."""
        raw = self.writer.get_extra_info("socket")
        if raw.family != socket.AF_UNIX:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def tunnel(self, authority: str, credentials: tuple[str, str] | None = None, *, early: bytes = b"") -> Reply:
        """Send a CONNECT head, `early` in the same segment, and return the reply."""
        head = f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n"
        if credentials is not None:
            head += f"Proxy-Authorization: {basic(*credentials)}\r\n"
        return await self.ask(head.encode() + b"\r\n" + early, body=False)

    async def ask(self, request: bytes, *, body: bool = True) -> Reply:
        """Send `request` as it is and return the reply."""
        await self.send(request)
        return await self.reply(body=body)

    async def reply(self, *, body: bool = True) -> Reply:
        """Read one response;

        a refusal is read with its body even if `body` is False (a 2xx to CONNECT has none).
        """
        async with asyncio.timeout(PATIENCE_S):
            head = await self.reader.readuntil(b"\r\n\r\n")
            status_line, *lines = head[:-4].decode("latin-1").split("\r\n")
            _, status, phrase = status_line.split(" ", 2)
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            wanted = int(headers.get("content-length", "0")) if body or int(status) >= 300 else 0
            return Reply(int(status), phrase, headers, await self.reader.readexactly(wanted))

    async def read_exactly(self, size: int) -> bytes:
        """Read `size` bytes; raises asyncio.IncompleteReadError when the peer ends before."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.reader.readexactly(size)

    async def read_line(self) -> bytes:
        """Read a line without its CRLF; raises asyncio.IncompleteReadError when the peer ends before."""
        async with asyncio.timeout(PATIENCE_S):
            return (await self.reader.readuntil(b"\r\n"))[:-2]

    async def read_to_end(self) -> bytes:
        """Read until the peer's end of stream; raises ConnectionResetError on a reset."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.reader.read()

    async def start_tls(self, context: ssl.SSLContext, server_name: str) -> None:
        """Become a TLS client inside the tunnel.

        Raises ssl.SSLError or ConnectionError when the other side refuses.
        """
        async with asyncio.timeout(PATIENCE_S):
            await self.writer.start_tls(context, server_hostname=server_name)

    def end(self) -> None:
        """Send our end of stream and go on reading (half-close)."""
        self.writer.write_eof()

    def reset(self) -> None:
        """Close with a TCP reset, as a killed client's kernel does with unread data."""
        raw = self.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def close(self) -> None:
        """Close, whatever state the connection is in."""
        self.writer.close()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self.writer.wait_closed()
        except (OSError, ssl.SSLError):
            pass

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


@dataclass(slots=True)
class Conversation:
    """What one connection brought to a server."""

    received: bytearray = field(default_factory=bytearray)
    # "end": the peer's end of stream; "reset": a reset; None: still open.
    ended: str | None = None


class Server:
    """A TCP server on 127.0.0.1 that keeps what it was sent. Its handler decides what it answers."""

    def __init__(self, handler: Handler | None = None) -> None:
        self._handler = handler
        self._server: StreamServer | None = None
        self._changed = asyncio.Condition()
        self.conversations: list[Conversation] = []

    @property
    def port(self) -> int:
        """The port it listens on."""
        assert self._server is not None, "the server is not started"
        return self._server.port

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        return ("127.0.0.1", self.port)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds of what was received; looked at on each connection, chunk and end."""
        async with asyncio.timeout(PATIENCE_S), self._changed:
            await self._changed.wait_for(condition)

    async def start(self, *, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen."""
        self._server = StreamServer(self._serve, (host, port), tls=tls)

    async def stop(self) -> None:
        """Stop listening and drop every connection."""
        assert self._server is not None, "the server is not started"
        await self._server.stop()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if self._handler is None:
                await self._record(reader)
            else:
                await self._handler(reader, writer)
        except (ConnectionError, ssl.SSLError, asyncio.IncompleteReadError):
            pass  # the test's client went away; what it saw is what the test looks at

    async def _record(self, reader: asyncio.StreamReader) -> None:
        conversation = Conversation()
        self.conversations.append(conversation)
        await self._tell()
        try:
            while chunk := await reader.read(65536):
                conversation.received += chunk
                await self._tell()
            conversation.ended = "end"
        except ConnectionError:
            conversation.ended = "reset"
        await self._tell()

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send back what comes, and end when the peer ends."""
    while chunk := await reader.read(65536):
        writer.write(chunk)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


def greet_first(greeting: bytes) -> Handler:
    """Return a handler for a server that speaks first (SSH, SMTP), then echoes."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        await writer.drain()
        await echo(reader, writer)

    return handler


def answer_after_end(answer: bytes) -> Handler:
    """Return a handler that reads to the end of the request, then sends `answer` and ends."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.write(answer)
        await writer.drain()

    return handler


@asynccontextmanager
async def echo_server() -> AsyncIterator[Server]:
    """Run an echo server on 127.0.0.1."""
    async with Server(echo) as server:
        yield server
