"""Clients and providers that take nothing, send ahead, leave early or answer oddly: what they hold is bounded, others wait for none."""

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import Iterator

import pytest

from gateway.net import upstream as upstream_module
from gateway.net.poller import Poller
from gateway.net.upstream import ConnectionKeeper
from tests.model.harness import running_proxy
from tests.model.test_ends import streaming
from tests.model.wire import Peer, ask, connected, reply, request, scripted
from tests.support.patience import until

# Far more than any buffer on the way, far less than what was gathered before it was bounded.
BOUND = 2_000_000


async def answering(peer: Peer) -> None:
    while True:
        await peer.request()
        await peer.send(reply(b"{}"))


@contextlib.contextmanager
def small_socket(port: int) -> Iterator[socket.socket]:
    """A client that lets the kernel hold next to nothing for it, and reads nothing."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.connect(("127.0.0.1", port))
        sock.setblocking(False)
        yield sock


async def test_a_paused_client_that_is_timed_out_leaves_the_clock_to_all_others() -> None:
    limits = {"model_idle_timeout_ms": 600, "head_timeout_ms": 1_000}
    async with scripted(streaming) as upstream, running_proxy(upstream.url, limits=limits) as proxy:
        async with connected(proxy.port) as client:
            await client.send(request())
            await client.reader.readuntil(b"\n\n\r\n")
            client.writer.write(request(b"x" * 100_000))
            await until(lambda: proxy.clients[0].is_paused)
            await client.closed()
        async with connected(proxy.port) as client:
            await client.send(b"POST /model/s1/v1/messages HTTP/1.1\r\nHo")
            assert (await client.reply()).status == 408


async def test_a_row_of_the_same_request_is_not_answered_into_memory_while_nothing_is_read() -> None:
    async with scripted(answering) as upstream, running_proxy(upstream.url, models=("none-*",)) as proxy:
        with small_socket(proxy.port) as sock:
            one, sent = request(), 0
            await until(lambda: bool(proxy.clients))
            (client,) = proxy.clients
            # Until it is not read from any more: then the kernel takes nothing either.
            while not (client.is_full and client.is_paused):
                with contextlib.suppress(BlockingIOError):
                    sent += sock.send(one)
                await asyncio.sleep(0)
                assert client.unsent_bytes < BOUND, sent


async def test_an_upload_on_a_new_connection_waits_for_the_provider(slow_line: None) -> None:
    body = bytes(30_000_000)
    with socket.create_server(("127.0.0.1", 0)) as provider:
        url = f"http://127.0.0.1:{provider.getsockname()[1]}"
        async with running_proxy(url) as proxy, connected(proxy.port) as client:
            client.writer.write(request(body))
            pool = proxy.gateway.model.default.pool
            await until(lambda: any(each.is_full for each in pool._open) and proxy.clients[0].is_paused)
            (connection,) = pool._open
            # What was on its way when the provider's side filled may still come in; nothing after that.
            for _ in range(200):
                await asyncio.sleep(0)
            assert proxy.clients[0].is_paused
            assert connection.unsent_bytes < BOUND
            # A reset: an end would stand behind all that is not taken.
            client.writer.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
            client.close()


@pytest.fixture
def slow_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections to the provider whose kernel takes little, as on a real line."""
    begin = upstream_module.UpstreamConnection.__init__

    def slowly(
        self: upstream_module.UpstreamConnection,
        pool: ConnectionKeeper,
        poller: Poller,
        sock: socket.socket,
        *,
        over_tls: bool,
    ) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)
        begin(self, pool, poller, sock, over_tls=over_tls)

    monkeypatch.setattr(upstream_module.UpstreamConnection, "__init__", slowly)


async def test_a_connection_that_has_not_taken_its_whole_request_is_not_used_again() -> None:
    go = asyncio.Event()

    async def early(peer: Peer) -> None:
        await peer.read(200)
        peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await peer.send(reply(b'{"a":1}', status="413 Too Large"))
        await go.wait()

    body = b'{"model":"fake-m","x":"' + b"y" * 20_000_000 + b'"}'
    async with scripted(early) as upstream, running_proxy(upstream.url, models=("fake-*",)) as proxy:
        async with connected(proxy.port) as client:
            client.writer.write(request(body))
            assert (await client.reply()).status == 413
            assert proxy.gateway.model.default.pool.idle_count == 0
            assert proxy.gateway.model.held_bytes == 0
        go.set()


async def test_a_large_body_that_came_before_the_sessions_were_known_is_served_when_they_are() -> None:
    body = json.dumps({"model": "fake-m", "x": "y" * 1_000_000}).encode()
    async with scripted(answering) as upstream, running_proxy(upstream.url, ready=False) as proxy:
        async with connected(proxy.port) as client:
            client.writer.write(request(body))
            await until(lambda: bool(proxy.clients) and proxy.clients[0].is_paused)
            proxy.put(models=("fake-*",))
            proxy.gateway.registry._become_ready()
            assert (await client.reply()).status == 200


async def test_connections_beyond_a_sessions_limit_are_closed_whatever_they_asked() -> None:
    row = request(b"", method="GET", path="/model/s1/v1/models")
    limits = {"model_requests_per_session": 2}
    async with (
        scripted(answering) as upstream,
        running_proxy(upstream.url, limits=limits) as proxy,
        contextlib.AsyncExitStack() as stack,
    ):
        statuses = []
        for _ in range(10):
            client = await stack.enter_async_context(connected(proxy.port))
            await client.send(row)
            statuses.append((await client.reply()).status)
        assert statuses == [200] * 4 + [429] * 6
        await until(lambda: proxy.gateway.model.client_count == 4)


async def test_a_request_sent_ahead_is_served_after_the_one_before_it_was_refused() -> None:
    async def once(peer: Peer) -> None:
        await peer.request()
        if len(upstream.received) > 1:
            await peer.send(reply(b"{}"))

    async with scripted(once) as upstream, running_proxy(upstream.url) as proxy, connected(proxy.port) as client:
        await client.send(request() + request())
        assert (await client.reply()).status == 502
        assert (await client.reply()).status == 200


async def test_a_status_that_there_is_not_goes_through_and_ends_its_request() -> None:
    async def odd(peer: Peer) -> None:
        while True:
            await peer.request()
            await peer.send(reply(b"{}", status="600 Odd"))

    async with scripted(odd) as upstream, running_proxy(upstream.url) as proxy, connected(proxy.port) as client:
        for _ in range(2):
            await client.send(request())
            assert (await client.reply()).status == 600
        assert proxy.gateway.model.running == 0


async def test_a_held_body_that_the_provider_still_reads_is_not_timed_out(slow_line: None) -> None:
    body = b'{"model":"fake-m","x":"' + b"y" * 4_000_000 + b'"}'

    async def slowly(peer: Peer) -> None:
        peer.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        transport, taken = peer.writer.transport, 0
        while taken < len(body):
            transport.resume_reading()  # type: ignore[attr-defined]
            taken += len(await peer.read(1 << 20))
            transport.pause_reading()  # type: ignore[attr-defined]
            # A line of about a megabyte a second: longer in all than the provider may take to answer.
            await asyncio.sleep(0.1)
        transport.resume_reading()  # type: ignore[attr-defined]
        await peer.send(reply(b"{}"))
        await peer.gone()

    limits = {"model_first_byte_timeout_ms": 2_000}
    async with scripted(slowly) as upstream, running_proxy(upstream.url, limits=limits, models=("fake-*",)) as proxy:
        assert (await ask(proxy.port, request(body))).status == 200
