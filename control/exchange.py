"""One request to the control daemon and its answer (HTTP/1.1, RFC 9112), over a connection of its own.

No general client: to import one takes longer than all else that a command does. A connection is not kept for the next request,
so none is found dead after a restart of the daemon; what answers is our own daemon, and still bounded.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import BinaryIO, Final
from urllib.parse import urlsplit

import httptools

# A line of output is at most a frame of the runner.
MAX_LINE_BYTES: Final = 8 * 1024 * 1024
_CONNECT_S: Final = 10.0
_CHUNK: Final = 256 * 1024


class ExchangeError(Exception):
    """The daemon cannot be connected to, or the connection broke; the message says why."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where the daemon listens: a unix socket, or a host and port with or without TLS."""

    unix: str = ""
    host: str = ""
    port: int = 0
    tls: bool = False
    authority: str = "control"

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Read `unix:/path`, `http://host:port` or `https://host:port`. Raises ValueError."""
        if text.startswith("unix:/"):
            return cls(unix=text.removeprefix("unix:"))
        parts = urlsplit(text)
        plain = parts.scheme in ("http", "https") and parts.path in ("", "/") and not (parts.query or parts.fragment)
        if not plain or not parts.hostname or "@" in parts.netloc or not (text.isascii() and text.isprintable()):
            raise ValueError("it is neither unix:/path nor http://host:port")
        tls = parts.scheme == "https"
        port = parts.port if parts.port is not None else 443 if tls else 80
        return cls(host=parts.hostname, port=port, tls=tls, authority=parts.netloc)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return a new connection. Raises ExchangeError."""
        try:
            async with asyncio.timeout(_CONNECT_S):
                if self.unix:
                    return await asyncio.open_unix_connection(self.unix, limit=_CHUNK)
                return await asyncio.open_connection(self.host, self.port, ssl=self.tls or None, limit=_CHUNK)
        except (OSError, TimeoutError) as error:
            raise ExchangeError(_why(error)) from error


class Answer:
    """What the daemon answers: its status, then its body as it comes. Each body can be read once."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self.status = 0
        self._reader = reader
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: deque[bytes] = deque()
        self._whole = False

    async def head(self) -> None:
        """Wait for the status. Raises ExchangeError."""
        while not self.status:
            await self._receive()

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes. Raises ExchangeError, also when the body does not come to its end."""
        while True:
            while self._pieces:
                yield self._pieces.popleft()
            if self._whole:
                return
            await self._receive()

    async def lines(self) -> AsyncIterator[bytes]:
        """Yield the body line by line, each with its newline. Raises ExchangeError."""
        pending = b""
        async for chunk in self.chunks():
            *lines, pending = (pending + chunk).split(b"\n")
            if len(pending) > MAX_LINE_BYTES:
                raise ExchangeError("a line of the answer is too long")
            for line in lines:
                yield line + b"\n"
        if pending:
            yield pending

    async def read(self, limit: int) -> bytes:
        """Return the body, of a longer one about as much as `limit`. Raises ExchangeError."""
        body = bytearray()
        async for chunk in self.chunks():
            body += chunk
            if len(body) >= limit:
                break
        return bytes(body)

    async def _receive(self) -> None:
        try:
            data = await self._reader.read(_CHUNK)
            if not data:
                raise ExchangeError("the connection ended in the middle of an answer")
            self._parser.feed_data(data)
        except OSError as error:
            raise ExchangeError(_why(error)) from error
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if self._whole:
                return
            raise ExchangeError(f"what answers there does not speak HTTP: {error}") from error

    # --- httptools' callbacks

    def on_headers_complete(self) -> None:
        """Note the status, unless it is an interim one, which another follows (RFC 9110 §15.2)."""
        status = self._parser.get_status_code()
        if not self._whole and status >= 200:
            self.status = status

    def on_body(self, data: bytes) -> None:
        """Keep a piece of the body until it is asked for."""
        if not self._whole:
            self._pieces.append(data)

    def on_message_complete(self) -> None:
        """Note that the body is whole; what comes after it belongs to no answer."""
        self._whole = self.status != 0


@asynccontextmanager
async def exchange(
    address: Address, method: str, target: str, headers: Mapping[str, str], body: bytes | BinaryIO = b""
) -> AsyncIterator[Answer]:
    """Send a request, its body from memory or from a file, and yield the answer as soon as its head is there.

    An answer that comes before all of the body is sent is the answer. Raises ExchangeError, and what reading the file raises.
    """
    lines = [f"{method} {target} HTTP/1.1", f"Host: {address.authority}", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if not isinstance(body, bytes):
        lines.append("Transfer-Encoding: chunked")
    elif body or method != "GET":
        lines.append(f"Content-Length: {len(body)}")
    if not all(line.isprintable() for line in lines):
        raise ValueError("a header's value must be one line of text")
    reader, writer = await address.connect()
    writer.write("".join(f"{line}\r\n" for line in [*lines, ""]).encode())
    sending = asyncio.create_task(_send(writer, body))
    answer = Answer(reader)
    heading = asyncio.create_task(answer.head())
    try:
        await asyncio.wait([sending, heading], return_when=asyncio.FIRST_COMPLETED)
        if not heading.done():
            await sending
        await heading
        yield answer
    finally:
        # Nothing is waited for: a loop that ends closes this generator beside the one that is using it.
        for task in (sending, heading):
            if not task.cancel() and not task.cancelled():
                task.exception()
        writer.transport.abort()


async def _send(writer: asyncio.StreamWriter, body: bytes | BinaryIO) -> None:
    """Send a body. One whose reader has gone is no failure: it may have answered before."""
    if isinstance(body, bytes):
        writer.write(body)
        with contextlib.suppress(OSError):
            await writer.drain()
        return
    while chunk := await asyncio.to_thread(body.read, _CHUNK):
        try:
            writer.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
            await writer.drain()
        except OSError:
            return
    writer.write(b"0\r\n\r\n")


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or "it does not answer in time"
