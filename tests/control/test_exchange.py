"""The client's way over the wire, against peers that answer early, late, in pieces, or not as they should."""

import asyncio
import contextlib
import io
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from control.client import ControlClient, ControlError, ControlUnavailableError
from control.exchange import Address, ExchangeError, exchange
from tests.support.listener import StreamServer


@dataclass
class Peer:
    """The daemon's end of a connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


@asynccontextmanager
async def answering(act: Callable[[Peer], Awaitable[None]]) -> AsyncIterator[str]:
    """Serve a unix socket with `act`, whose connections end with it; yields the address."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await act(Peer(reader, writer))

    with tempfile.TemporaryDirectory(prefix="opificia-") as folder:
        path = Path(folder) / "api.sock"
        async with StreamServer(serve, path):
            yield f"unix:{path}"


async def body_of(address: str, method: str = "GET", body: Any = b"") -> tuple[int, bytes]:
    async with exchange(Address.parse(address), method, "/x", {}, body) as answer:
        return answer.status, await answer.read(1_000_000)


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\na\nb\nc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\na\nb\r\n2\r\n\nc\r\n0\r\n\r\n",
    ],
)
async def test_an_answer_is_the_same_however_it_is_cut(raw: bytes) -> None:
    async def act(other: Peer) -> None:
        await other.reader.readuntil(b"\r\n\r\n")
        for position in range(len(raw)):
            other.writer.write(raw[position : position + 1])
            await other.writer.drain()

    async with answering(act) as address, exchange(Address.parse(address), "GET", "/x", {}) as answer:
        assert answer.status == 200
        assert [line async for line in answer.lines()] == [b"a\n", b"b\n", b"c"]


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "ended in the middle"),
        (b"HTTP/1.1 200 OK\r\nContent-", "ended in the middle"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", "ended in the middle"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n", "ended in the middle"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "does not speak HTTP"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n", "does not speak HTTP"),
    ],
)
async def test_an_answer_that_is_none_or_not_whole_is_an_error_that_says_why(raw: bytes, why: str) -> None:
    async def act(other: Peer) -> None:
        await other.reader.readuntil(b"\r\n\r\n")
        other.writer.write(raw)

    async with answering(act) as address:
        with pytest.raises(ExchangeError, match=why):
            await body_of(address)
        async with ControlClient(address) as client:
            with pytest.raises(ControlUnavailableError, match=why):
                await client.get("s1")


async def test_an_answer_that_comes_before_the_body_is_sent_is_the_answer() -> None:
    async def act(other: Peer) -> None:
        await other.reader.readuntil(b"\r\n\r\n")
        other.writer.write(b"HTTP/1.1 413 No\r\nContent-Length: 2\r\n\r\nno")
        await other.writer.drain()

    class Endless(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            return len(buffer)

    async with answering(act) as address:
        assert await body_of(address, "PUT", io.BufferedReader(Endless())) == (413, b"no")


async def test_a_file_is_sent_whole() -> None:
    data = bytes(range(256)) * 4_000
    taken = bytearray()

    async def act(other: Peer) -> None:
        await other.reader.readuntil(b"\r\n\r\n")
        while size := int(await other.reader.readline(), 16):
            taken.extend(await other.reader.readexactly(size))
            assert await other.reader.readexactly(2) == b"\r\n"
        other.writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    async with answering(act) as address:
        assert await body_of(address, "PUT", io.BytesIO(data)) == (200, b"")
    assert taken == data


async def test_a_failure_of_the_callers_own_disk_is_not_blamed_on_the_daemon(tmp_path: Path) -> None:
    async def act(other: Peer) -> None:
        await other.reader.readuntil(b"\r\n\r\n")
        other.writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc")
        await other.writer.drain()

    class Broken(io.BytesIO):
        def read(self, _size: int | None = -1) -> bytes:
            raise OSError(5, "Input/output error")

    async with answering(act) as address, ControlClient(address) as client:
        with pytest.raises(OSError, match="No space left"):
            await client.out("s1", Path("/dev/full"))

    async def silent(other: Peer) -> None:
        await other.reader.read()

    async with answering(silent) as address, ControlClient(address) as client:
        with pytest.raises(OSError, match="Input/output"):
            await client.put_input("s1", Broken())


async def test_no_header_makes_another(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="one line"):
        async with exchange(Address.parse("unix:/x"), "GET", "/x", {"A": "b\r\nC: d"}):
            pass


async def test_an_answer_that_is_a_problem_of_another_program_is_told_as_it_is() -> None:
    async def act(other: Peer) -> None:
        await other.reader.readuntil(b"\r\n\r\n")
        other.writer.write(b"HTTP/1.0 502 Bad Gateway\r\nContent-Length: 11\r\n\r\n<h1>hm</h1>")

    async with answering(act) as address, ControlClient(address) as client:
        with pytest.raises(ControlError, match="<h1>hm</h1>") as refused:
            await client.get("s1")
    assert refused.value.problem.status == 502


@pytest.mark.parametrize(
    "text",
    ["", "unix:", "unix:relative", "ftp://x", "http://", "http://a/path", "http://u@a", "http://a?b", "http://a:x"],
)
def test_what_is_no_address_is_none(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Address.parse(text)


def test_addresses_are_read() -> None:
    assert Address.parse("unix:/run/x.sock") == Address(unix="/run/x.sock")
    assert Address.parse("http://[::1]:8902/") == Address(host="::1", port=8902, authority="[::1]:8902")
    assert Address.parse("https://h") == Address(host="h", port=443, tls=True, authority="h")


@pytest.mark.parametrize("body", [b"{torn\n", b"[]\n", b'{"x":' + b"[" * 5_000 + b"\n", b"\xff\n"])
async def test_a_line_of_a_stream_that_cannot_be_read_is_an_error_that_says_so_at_once(body: bytes) -> None:
    async def act(other: Peer) -> None:
        await other.reader.readuntil(b"\r\n\r\n")
        other.writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body) + 6, b"data: " + body))

    async with answering(act) as address, ControlClient(address) as client:
        for lines in (client.events("s"), client.follow_events("s", 60), client.logs("s"), client.egress("s")):
            with pytest.raises(ControlUnavailableError, match="not of this version"):
                async for _ in lines:
                    pass


async def test_an_interim_answer_is_not_the_answer_and_what_follows_the_answer_is_none_of_it() -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
    whole = b"HTTP/1.1 201 Created\r\nContent-Length: 2\r\n\r\nok"

    async def at_once(other: Peer) -> None:
        await other.reader.readuntil(b"\r\n\r\n")
        other.writer.write(interim + whole + b"HTTP/1.1 500 No\r\nContent-Length: 3\r\n\r\nbadrubbish")

    async def in_pieces(other: Peer) -> None:
        await other.reader.readuntil(b"\r\n\r\n")
        for position in range(len(interim + whole)):
            other.writer.write((interim + whole)[position : position + 1])
            await other.writer.drain()

    for act in (at_once, in_pieces):
        async with answering(act) as address:
            assert await body_of(address) == (201, b"ok")
