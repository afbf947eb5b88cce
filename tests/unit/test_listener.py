"""Test servers leave nothing to the garbage collector, whose warning would fail another test."""

import asyncio
import gc
import socket
import ssl
import warnings
from collections.abc import Callable

import pytest
import uvloop

from tests.support.listener import StreamServer
from tests.support.patience import within
from tests.support.sockets import Client, drop_clients
from tests.support.tls_server import Authority

LOOPS = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])


async def write_more_than_is_read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(bytes(10_000_000))
    await reader.read()


async def stopped_after(turns: int, tls: ssl.SSLContext | None) -> None:
    """Stop a server that many turns of the loop after connections came."""
    server = StreamServer(write_more_than_is_read, ("127.0.0.1", 0), tls=tls)
    peers = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(10)]
    for _ in range(turns):
        await asyncio.sleep(0)
    await server.stop()
    for peer in peers:
        peer.close()


@LOOPS
@pytest.mark.parametrize("tls", [False, True])
def test_a_server_that_stops_at_any_moment_leaves_no_connection_open(
    new_loop: Callable[[], asyncio.AbstractEventLoop], *, tls: bool
) -> None:
    context = Authority().server_context("a.example") if tls else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for turns in (*range(16), 100):
            with asyncio.Runner(loop_factory=new_loop) as runner:
                runner.run(stopped_after(turns, context))
        gc.collect()
    assert [str(each.message) for each in caught] == []


async def test_what_has_closed_before_is_left_alone_by_a_stop() -> None:
    async def write_much_and_close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # The transport closes later, when all is sent.
        writer.write(bytes(10_000_000))
        writer.close()

    async with StreamServer(write_much_and_close, ("127.0.0.1", 0)) as server:
        client = await Client.connect(("127.0.0.1", server.port))
        assert len(await client.read_to_end()) == 10_000_000
        await client.close()
    await drop_clients()


@LOOPS
def test_a_tls_connection_that_its_client_leaves_open_ends_with_the_server(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    authority = Authority()

    async def close_twice(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(1))
        writer.close()

    async def talk() -> None:
        server = StreamServer(close_twice, ("127.0.0.1", 0), tls=authority.server_context("a.example"))
        with socket.create_connection(("127.0.0.1", server.port)) as plain:

            def ask() -> bytes:
                with authority.client_context().wrap_socket(plain.dup(), server_hostname="a.example") as peer:
                    peer.send(b"x")
                    return peer.recv(1)

            assert await asyncio.to_thread(ask) == b"x"
            await server.stop()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(talk())
        gc.collect()
    assert [str(each.message) for each in caught] == []


async def test_a_client_that_nobody_closed_is_dropped_at_the_end() -> None:
    async with StreamServer(write_more_than_is_read, ("127.0.0.1", 0)) as server:
        client = await Client.connect(("127.0.0.1", server.port))
        sock = client.writer.get_extra_info("socket")
        await drop_clients()
        assert sock.fileno() == -1


async def test_what_is_promised_within_a_time_is_cut_off_after_it() -> None:
    async with within(5):
        await asyncio.sleep(0)
    with pytest.raises(TimeoutError):
        async with within(0.02):
            await asyncio.Event().wait()
