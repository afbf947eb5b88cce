"""Every way in which a request can end early: nothing is left open, and the other side can tell."""

import asyncio
import gc
import json
import socket
import struct
import time

import pytest

from gateway.contract.policy import ModelBudget
from gateway.core.model_reply import Reply
from gateway.core.verdict import CloseReason
from gateway.net import model as model_module
from gateway.net import model_proxy
from tests.model.harness import running_proxy
from tests.model.wire import STREAM_HEAD, Peer, ask, connected, request, scripted
from tests.support.patience import until, within
from tests.support.provider import FakeProvider

START = (
    b'event: message_start\ndata: {"type":"message_start","message":{"model":"m","usage":{"input_tokens":25,'
    b'"output_tokens":1}}}\n\n'
)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def streaming(peer: Peer) -> None:
    """Begin a stream and go on until the gateway leaves."""
    await peer.request()
    await peer.send(STREAM_HEAD + chunk(START))
    await peer.gone()


async def silent(peer: Peer) -> None:
    """Never answer."""
    await peer.request()
    await peer.gone()


async def test_the_provider_is_left_within_a_second_of_the_client_leaving_in_mid_stream() -> None:
    async with scripted(streaming) as upstream, running_proxy(upstream.url) as proxy:
        async with connected(proxy.port) as client:
            await client.send(request())
            await client.reader.readuntil(b"\n\n\r\n")
        async with within(1):
            await upstream.ended[0].wait()
        await proxy.settled()
        assert (proxy.usage().input_tokens, proxy.usage().output_tokens) == (25, 1)
        assert proxy.audit.lines[-1].reason == "client_gone"


@pytest.mark.parametrize("how", ["reset", "close", "half-close"])
async def test_the_provider_is_left_within_a_second_of_the_client_leaving_before_the_first_byte(how: str) -> None:
    async with scripted(silent) as upstream, running_proxy(upstream.url) as proxy:
        async with connected(proxy.port) as client:
            await client.send(request())
            await until(lambda: upstream.requests == 1)
            if how == "close":
                client.writer.close()
            elif how == "half-close":
                client.writer.write_eof()
            else:
                client.close()
            async with within(1):
                await upstream.ended[0].wait()


async def test_the_provider_is_left_when_the_client_leaves_in_mid_body() -> None:
    async with scripted(silent) as upstream, running_proxy(upstream.url) as proxy:
        async with connected(proxy.port) as client:
            await client.send(request(b"x" * 100, length=False, headers=("Content-Length: 1000",)))
            await until(lambda: upstream.requests == 1)
        async with within(1):
            await upstream.ended[0].wait()


async def test_a_client_that_leaves_while_it_is_not_read_is_noticed() -> None:
    async def deaf(peer: Peer) -> None:
        peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await release.wait()

    release = asyncio.Event()
    async with scripted(deaf) as upstream, running_proxy(upstream.url) as proxy:
        async with connected(proxy.port) as client:
            client.writer.write(request(b"x" * 20_000_000))
            await until(lambda: bool(proxy.clients) and proxy.clients[0].is_paused)
            # A reset: a plain close would wait in the kernel behind the bytes that nobody takes.
            sock = client.writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        async with within(1):
            await proxy.settled()
        release.set()


@pytest.mark.parametrize("how", ["reset", "close", "half-close"])
async def test_a_client_that_leaves_without_reading_its_reply_is_noticed(how: str) -> None:
    """The reply waits for the client, so nothing is written that could fail: its end must be heard of all the same."""

    async def endless(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD)
        while True:
            await peer.send(chunk(b"x" * 60_000))

    async with scripted(endless) as upstream, running_proxy(upstream.url) as proxy, connected(proxy.port) as client:
        client.writer.transport.pause_reading()
        await client.send(request())
        await until(lambda: bool(proxy.clients) and proxy.clients[0].is_full)
        if how == "close":
            client.writer.close()
        elif how == "half-close":
            client.writer.write_eof()
        else:
            client.close()
        async with within(1):
            await upstream.ended[0].wait()
        await proxy.settled()
        assert proxy.audit.lines[-1].reason == "client_gone"


async def test_a_client_that_closes_while_a_row_of_its_requests_waits_is_noticed() -> None:
    """What it sent ahead is more than is read before the reply is whole, so its end stands behind unread bytes."""
    async with scripted(streaming) as upstream, running_proxy(upstream.url) as proxy, connected(proxy.port) as client:
        await client.send(request())
        await client.reader.readuntil(b"\n\n\r\n")
        client.writer.write(request(b"x" * 100_000))
        await until(lambda: proxy.clients[0].is_paused)
        client.writer.write_eof()
        async with within(1):
            await upstream.ended[0].wait()


async def test_the_provider_is_left_when_the_client_leaves_while_the_connection_is_being_made() -> None:
    async with scripted(silent) as upstream, running_proxy(upstream.url) as proxy:
        async with connected(proxy.port) as client:
            await client.send(request())
            await until(lambda: bool(proxy.clients) and proxy.gateway.model.client_count == 1)
        await until(lambda: proxy.gateway.model.client_count == 0)
    # What was begun for nobody stays for the next request, or is closed with the pool.
    assert upstream.requests in (0, 1)


@pytest.mark.parametrize("clean", [True, False])
async def test_a_stream_that_the_provider_cuts_never_ends_cleanly(*, clean: bool) -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD + chunk(START))
        if not clean:
            peer.cut()

    async with scripted(handler) as upstream, running_proxy(upstream.url) as proxy, connected(proxy.port) as client:
        await client.send(request())
        data = await client.closed()
        assert data.endswith(chunk(START))
        assert b"\r\n0\r\n\r\n" not in data
        assert proxy.audit.lines[-1].reason == "upstream_failed"


async def test_a_body_with_a_length_that_the_provider_cuts_is_cut() -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{}")

    async with scripted(handler) as upstream, running_proxy(upstream.url) as proxy, connected(proxy.port) as client:
        await client.send(request())
        with pytest.raises(EOFError):
            await client.reply()


async def test_a_provider_that_closes_without_a_reply_becomes_502() -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()

    async with scripted(handler) as upstream, running_proxy(upstream.url) as proxy:
        answer = await ask(proxy.port, request())
        assert answer.status == 502
        assert json.loads(answer.body)["error"]["type"] == "api_error"
    assert upstream.requests == 1


async def test_a_provider_that_stays_silent_becomes_504() -> None:
    limits = {"model_first_byte_timeout_ms": 800}
    async with scripted(silent) as upstream, running_proxy(upstream.url, limits=limits) as proxy:
        answer = await ask(proxy.port, request())
        assert answer.status == 504
        assert json.loads(answer.body)["error"]["type"] == "timeout_error"
        assert answer.header(b"x-should-retry") is None
        async with within(1):
            await upstream.ended[0].wait()


async def test_a_provider_that_falls_silent_in_mid_stream_is_cut() -> None:
    limits = {"model_idle_timeout_ms": 800}
    async with scripted(streaming) as upstream, running_proxy(upstream.url, limits=limits) as proxy:
        async with connected(proxy.port) as client:
            await client.send(request())
            data = await client.closed()
        assert data.endswith(chunk(START))
        assert proxy.audit.lines[-1].reason == "timeout"
        async with within(1):
            await upstream.ended[0].wait()


async def test_a_stream_that_goes_on_for_too_long_is_cut(provider: FakeProvider) -> None:
    limits = {"model_total_timeout_ms": 1_500}
    async with running_proxy(f"http://127.0.0.1:{provider.port}", limits=limits) as proxy:
        async with connected(proxy.port) as client:
            await client.send(request(b'{"model":"fake-long","stream":true}'))
            data = await client.closed()
        assert data.count(b"content_block_delta") > 2
        assert b"message_stop" not in data
        await until(lambda: provider.cancelled == 1)


async def test_a_provider_that_cannot_be_reached_becomes_502(unused_tcp_port: int) -> None:
    async with running_proxy(f"http://127.0.0.1:{unused_tcp_port}") as proxy:
        answer = await ask(proxy.port, request())
        assert answer.status == 502
        assert answer.header(b"x-opificia-reason") == b"connect_failed"
        assert b"127.0.0.1" not in answer.head + answer.body


async def test_a_provider_whose_name_does_not_resolve_becomes_502() -> None:
    async with running_proxy("http://no-such-host.invalid") as proxy:
        answer = await ask(proxy.port, request())
        assert answer.status == 502
        assert b"no-such-host" not in answer.head + answer.body


async def test_a_session_that_is_revoked_loses_its_streams_at_once() -> None:
    async with scripted(streaming) as upstream, running_proxy(upstream.url) as proxy:
        async with connected(proxy.port) as client:
            await client.send(request())
            await client.reader.readuntil(b"\n\n\r\n")
            session = proxy.gateway.registry.revoke("s1")
            assert session is not None
            assert await client.closed() == b""
            assert session.model.usage().input_tokens == 25
        async with within(1):
            await upstream.ended[0].wait()
        assert proxy.audit.lines[-1].reason == "revoked"


async def test_a_session_that_is_revoked_loses_its_idle_connections_too(provider: FakeProvider) -> None:
    async with running_proxy(f"http://127.0.0.1:{provider.port}") as proxy, connected(proxy.port) as client:
        await client.send(request())
        assert (await client.reply()).status == 200
        proxy.gateway.registry.revoke("s1")
        assert await client.closed() == b""


async def test_whoever_does_not_leave_after_the_last_reply_is_closed_when_the_time_is_over(
    provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The clock of the proxy itself never comes to it.
    monkeypatch.setattr(model_module, "LINGER_S", 10_000.0)
    async with running_proxy(f"http://127.0.0.1:{provider.port}") as proxy, connected(proxy.port) as client:
        await client.send(request(token="wrong"))
        assert (await client.reply()).status == 401
        (served,) = proxy.clients
        # It has ended for its part.
        assert await client.closed() == b""
        # It is that time and no other: the others are below it.
        assert served._deadline > time.monotonic() + 5_000
        served.tick(served._deadline - 1)
        assert not served.is_closed
        served.tick(served._deadline)
        assert served.is_closed
        assert proxy.gateway.model._lingering == 0


async def test_very_many_refusals_at_once_are_closed_without_waiting(
    provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_proxy, "MAX_LINGERING", 2)
    async with running_proxy(f"http://127.0.0.1:{provider.port}") as proxy:
        for _ in range(5):
            async with connected(proxy.port) as client:
                await client.send(request(token="wrong"))
                assert (await client.reply()).status == 401
        await until(lambda: proxy.gateway.model.client_count == 0)
        assert proxy.gateway.model._lingering == 0


async def test_a_fault_of_ours_ends_the_request_and_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_reply: Reply, _data: bytes) -> bytes:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(Reply, "take", fail)
    async with scripted(streaming) as upstream, running_proxy(upstream.url) as proxy, connected(proxy.port) as client:
        await client.send(request())
        assert await client.closed() == b""
        await upstream.ended[0].wait()
        await proxy.settled()
        assert proxy.audit.lines[-1].reason == "upstream_failed"
    assert "a fault of ours" in caplog.text


async def test_draining_lets_streams_end_and_takes_no_more(provider: FakeProvider) -> None:
    async with running_proxy(f"http://127.0.0.1:{provider.port}") as proxy:
        async with connected(proxy.port) as idle, connected(proxy.port) as busy:
            await idle.send(request())
            assert (await idle.reply()).status == 200
            await busy.send(request(b'{"model":"fake-slow","stream":true}'))
            await busy.reader.readuntil(b"\n\n\r\n")
            proxy.gateway.model.drain()
            assert await idle.closed() == b""
            data = await busy.closed()
            assert data.endswith(b"0\r\n\r\n")


async def test_closing_ends_everything_at_once() -> None:
    async with scripted(streaming) as upstream, running_proxy(upstream.url) as proxy:
        async with connected(proxy.port) as client:
            await client.send(request())
            await client.reader.readuntil(b"\n\n\r\n")
            await proxy.gateway.model.close()
            assert await client.closed() == b""
        assert proxy.audit.lines[-1].reason == CloseReason.SHUTDOWN


async def test_memory_stays_flat_over_thousands_of_clients_that_leave() -> None:
    """A thousand instead of 10,000, which would take half a minute: one object left by each is twice what is let pass here."""

    async def leave(port: int) -> None:
        async with connected(port) as client:
            await client.send(request())
            await client.reader.readuntil(b"\n\n\r\n")

    budget = ModelBudget(output_tokens=1 << 40)
    async with scripted(streaming) as upstream, running_proxy(upstream.url, budget=budget) as proxy:

        async def round_of(count: int) -> int:
            for _ in range(count // 20):
                await asyncio.gather(*(leave(proxy.port) for _ in range(20)))
            await proxy.settled()
            await until(lambda: proxy.gateway.model.client_count == 0)
            proxy.clients.clear()
            proxy.audit.lines.clear()
            upstream.received.clear()
            upstream.ended.clear()
            gc.collect()
            return len(gc.get_objects())

        before = await round_of(200)
        after = await round_of(1000)
        assert after - before < 500, f"{after - before} more objects after 1000 clients"
