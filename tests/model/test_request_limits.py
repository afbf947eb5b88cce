"""Requests that are too large, framed in two ways or never finished."""

import asyncio
import json
import socket

import pytest

from tests.model.harness import running_proxy
from tests.model.wire import Peer, ask, chunked, connected, reply, request, scripted
from tests.support.patience import until, within
from tests.support.provider import FakeProvider

SMALL = {"max_request_bytes": 100_000}


@pytest.mark.parametrize("expect", [(), ("Expect: 100-continue",)])
async def test_a_declared_length_over_the_limit_is_refused_at_once(
    expect: tuple[str, ...], provider: FakeProvider
) -> None:
    async with running_proxy(f"http://127.0.0.1:{provider.port}") as proxy, connected(proxy.port) as client:
        await client.send(request(b"", length=False, headers=(f"Content-Length: {32 * 1024 * 1024 + 1}", *expect)))
        # The first thing that comes is the refusal, no 100.
        reply = await client.reply()
        assert reply.status == 413
        assert json.loads(reply.body)["error"]["type"] == "request_too_large"
        assert reply.header(b"connection") == b"close"
        assert await client.closed() == b""
    assert provider.requests == []


async def test_the_refusal_reaches_a_client_that_goes_on_sending(provider: FakeProvider) -> None:
    async with running_proxy(f"http://127.0.0.1:{provider.port}", limits={"max_request_bytes": 8_000_000}) as proxy:
        async with connected(proxy.port) as client:
            await client.send(request(b"", length=False, headers=("Content-Length: 8000001",)))
            for _ in range(70):
                await client.send(b"x" * 100_000)
            assert (await client.reply()).status == 413


async def test_a_body_of_exactly_the_limit_passes(provider: FakeProvider) -> None:
    body = json.dumps({"model": "fake-model", "x": ""}).encode()
    body = body[:-2] + b"x" * (SMALL["max_request_bytes"] - len(body)) + body[-2:]
    async with running_proxy(f"http://127.0.0.1:{provider.port}", limits=SMALL) as proxy:
        assert (await ask(proxy.port, request(body))).status == 200
        data = request(b"", length=False, headers=("Transfer-Encoding: chunked",))
        assert (await ask(proxy.port, data + chunked(body[:50_000], body[50_000:]))).status == 200
    assert [each.body for each in provider.requests] == [body, body]


async def test_a_chunked_body_that_grows_past_the_limit_is_refused_and_the_upstream_aborted() -> None:
    async def handler(peer: Peer) -> None:
        await peer.gone()

    async with scripted(handler) as upstream, running_proxy(upstream.url, limits=SMALL) as proxy:
        async with connected(proxy.port) as client:
            await client.send(request(b"", length=False, headers=("Transfer-Encoding: chunked",)))
            await client.send(b"c350\r\n" + b"x" * 50_000 + b"\r\n")
            await until(lambda: len(upstream.ended) == 1)
            assert not upstream.ended[0].is_set()
            # The size alone is enough to know.
            await client.send(b"c351\r\n")
            reply = await client.reply()
            assert reply.status == 413
            async with within(1):
                await upstream.ended[0].wait()


MALFORMED = [
    ("Content-Length: 2", "Transfer-Encoding: chunked"),
    ("Content-Length: 2", "Content-Length: 2"),
    ("Content-Length: 2", "Content-Length: 3"),
    ("Content-Length: 2, 2",),
    ("Content-Length: +10",),
    ("Content-Length: -1",),
    ("Content-Length: 0x10",),
    ("Content-Length: 1e3",),
    ("Content-Length: 02",),
    ("Content-Length: ",),
    ("Content-Length: 99999999999999999999",),
    ("Transfer-Encoding: gzip, chunked",),
    ("Transfer-Encoding: chunked, identity",),
    ("Transfer-Encoding: \x0bchunked",),
    ("Transfer-Encoding : chunked",),
    ("Transfer-Encoding: chunked", "Transfer-Encoding: chunked"),
    ("X-A: 1\r\n folded",),
    ("X-A: 1\nX-B: 2",),
    ("X-A: 1\rX-B: 2",),
    ("X-A: \x00",),
    ("X A: 1",),
    (": 1",),
    ("Host: second",),
    ("Expect: 200-ok",),
]


@pytest.mark.parametrize("headers", MALFORMED)
async def test_a_head_that_can_be_read_in_two_ways_is_refused(headers: tuple[str, ...], provider: FakeProvider) -> None:
    async with running_proxy(f"http://127.0.0.1:{provider.port}") as proxy, connected(proxy.port) as client:
        smuggled = request(path="/model/s1/v1/models", method="GET")
        await client.send(request(b"", length=False, headers=headers) + b"0\r\n\r\n" + smuggled)
        reply = await client.reply()
        assert reply.status == 400
        assert json.loads(reply.body)["error"]["type"] == "invalid_request_error"
        # What follows a head that was not understood is not looked at.
        assert await client.closed() == b""
    assert provider.requests == []


@pytest.mark.parametrize(
    "line",
    [
        b"POST /model/s1/v1/messages HTTP/1.0\r\nHost: x\r\n",
        b"POST /model/s1/v1/messages HTTP/1.1\r\n",
        b"POST /model/s1/v1/messages HTTP/2.0\r\nHost: x\r\n",
        b"POST  /model/s1/v1/messages HTTP/1.1\r\nHost: x\r\n",
        b"POST /model/s1/v1/messages\r\nHost: x\r\n",
        b"\r\nPOST /model/s1/v1/messages HTTP/1.1\r\nHost: x\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
async def test_another_version_or_no_request_line_is_refused(line: bytes, provider: FakeProvider) -> None:
    async with running_proxy(f"http://127.0.0.1:{provider.port}") as proxy:
        assert (await ask(proxy.port, line + b"x-api-key: token-of-session-s1\r\n\r\n")).status == 400
    assert provider.requests == []


async def test_a_get_with_a_body_is_refused(provider: FakeProvider) -> None:
    async with running_proxy(f"http://127.0.0.1:{provider.port}") as proxy:
        reply = await ask(proxy.port, request(b"{}", method="GET", path="/model/s1/v1/models"))
        assert reply.status == 400
    assert provider.requests == []


async def test_a_head_over_the_limit_is_refused(provider: FakeProvider) -> None:
    async with running_proxy(f"http://127.0.0.1:{provider.port}", limits={"head_bytes": 1000}) as proxy:
        reply = await ask(proxy.port, request(headers=("X-A: " + "a" * 1000,)))
        assert reply.status == 431
    assert provider.requests == []


@pytest.mark.parametrize(
    "body",
    [
        b"2\nab\n0\n\n",
        b"2\r\nabc\r\n0\r\n\r\n",
        b"0x2\r\nab\r\n0\r\n\r\n",
        b"+2\r\nab\r\n0\r\n\r\n",
        b" 2\r\nab\r\n0\r\n\r\n",
        b"-2\r\nab\r\n0\r\n\r\n",
        b"ffffffffffffffff\r\nab",
        b"2;" + b"x" * 300 + b"\r\nab\r\n0\r\n\r\n",
        b"x" * 300,
        b"\r\n",
        b"2\r\nab\r\n0\r\nbad trailer\r\n\r\n",
        b"2\r\nab\r\n0\r\n" + b"X: y\r\n" * 2000 + b"\r\n",
    ],
)
async def test_a_chunked_body_that_is_none_is_refused_and_the_upstream_aborted(body: bytes) -> None:
    async def handler(peer: Peer) -> None:
        await peer.gone()

    async with scripted(handler) as upstream, running_proxy(upstream.url) as proxy, connected(proxy.port) as client:
        await client.send(request(b"", length=False, headers=("Transfer-Encoding: chunked",)) + body)
        assert (await client.reply()).status in (400, 413)
        assert await client.closed() == b""
        async with within(1):
            for received, ended in zip(upstream.received, upstream.ended, strict=True):
                # A connection on which nothing was sent yet is kept for the next request.
                if received:
                    await ended.wait()


async def test_trailers_and_chunk_extensions_go_nowhere() -> None:
    async def handler(peer: Peer) -> None:
        assert await peer.request() == b'{"model":"m"}'
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

    async with scripted(handler) as upstream, running_proxy(upstream.url) as proxy:
        body = b'5;ext="a"\r\n{"mod\r\n8\r\nel":"m"}\r\n0\r\nx-api-key: other\r\nX-T: t\r\n\r\n'
        data = request(b"", length=False, headers=("Transfer-Encoding: chunked", "Trailer: X-T"))
        assert (await ask(proxy.port, data + body)).status == 200
        received = bytes(upstream.received[0]).lower()
        assert b"ext" not in received
        assert b"x-t" not in received
        assert b"trailer" not in received
        assert b"other" not in received


async def test_a_client_that_asks_is_told_to_continue() -> None:
    async def handler(peer: Peer) -> None:
        assert await peer.request() == b"0123456789"
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

    async with scripted(handler) as upstream, running_proxy(upstream.url) as proxy, connected(proxy.port) as client:
        await client.send(request(b"", length=False, headers=("Content-Length: 10", "Expect: 100-continue")))
        assert (await client.reply()).status == 100
        await client.send(b"0123456789")
        assert (await client.reply()).status == 200
        assert b"expect" not in bytes(upstream.received[0]).lower()


async def test_a_head_that_does_not_come_in_time_is_refused(provider: FakeProvider) -> None:
    limits = {"head_timeout_ms": 1_000}
    async with running_proxy(f"http://127.0.0.1:{provider.port}", limits=limits) as proxy:
        reply = await ask(proxy.port, b"POST /model/s1/v1/messages HTTP/1.1\r\nHo")
        assert reply.status == 408
        # A connection on which nothing was said is closed without a word.
        async with connected(proxy.port) as client:
            assert await client.closed() == b""


async def test_a_body_that_does_not_come_in_time_is_refused() -> None:
    async def handler(peer: Peer) -> None:
        await peer.gone()

    limits = {"model_idle_timeout_ms": 800}
    async with scripted(handler) as upstream, running_proxy(upstream.url, limits=limits) as proxy:
        assert (await ask(proxy.port, request(b"123", length=False, headers=("Content-Length: 10",)))).status == 408
        async with within(1):
            await upstream.ended[0].wait()


async def test_bodies_held_for_a_rule_have_a_deadline_and_a_cap_all_together(provider: FakeProvider) -> None:
    limits = {"model_first_byte_timeout_ms": 2_000, "max_held_body_bytes": 1000}
    async with running_proxy(f"http://127.0.0.1:{provider.port}", limits=limits, models=("fake-*",)) as proxy:
        async with connected(proxy.port) as first:
            await first.send(request(b"x" * 600, length=False, headers=("Content-Length: 700",)))
            await until(lambda: proxy.gateway.model.held_bytes == 600)
            reply = await ask(proxy.port, request(b"x" * 500))
            assert reply.status == 503
            assert json.loads(reply.body)["error"]["type"] == "overloaded_error"
            assert (await ask(proxy.port, request(b'{"model":"fake-model"}'))).status == 200
            assert (await first.reply()).status == 408
            assert proxy.gateway.model.held_bytes == 0


async def test_a_body_that_was_held_counts_until_the_provider_has_taken_it() -> None:
    """A sandbox fills memory faster than a line to a provider empties it."""
    reading = asyncio.Event()

    async def handler(peer: Peer) -> None:
        # Else the kernel may take as much as the body has.
        peer.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await reading.wait()
        peer.writer.transport.resume_reading()  # type: ignore[attr-defined]
        await peer.request()
        await peer.send(reply(b"{}"))

    body = b'{"model":"fake-model","padding":"' + b"x" * (24 << 20) + b'"}'
    limits = {"max_held_body_bytes": len(body) + 1000}
    async with scripted(handler) as upstream, running_proxy(upstream.url, limits=limits, models=("fake-*",)) as proxy:
        async with connected(proxy.port) as first:
            await first.send(request(body))
            await until(lambda: proxy.gateway.model.held_bytes == len(body) and len(upstream.received) == 1)
            assert (await ask(proxy.port, request(b"x" * 1001))).status == 503
            assert proxy.gateway.model.held_bytes == len(body)
            reading.set()
            assert (await first.reply()).status == 200
            assert proxy.gateway.model.held_bytes == 0


async def test_a_body_of_very_many_keys_is_refused_before_it_is_taken_apart(provider: FakeProvider) -> None:
    """A million keys would take seconds, in which nobody else is served, and a gigabyte of memory."""
    keys = b"".join(b',"%x":1' % number for number in range(1 << 20))
    async with running_proxy(f"http://127.0.0.1:{provider.port}", models=("fake-*",)) as proxy:
        answer = await ask(proxy.port, request(b'{"model":"fake-model"' + keys + b"}"))
        assert answer.status == 400
        assert "too many keys" in json.loads(answer.body)["error"]["message"]
