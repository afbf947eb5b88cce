"""Which headers go up, and which come down."""

import pytest

from tests.model.harness import KEY, TOKEN, running_proxy
from tests.model.wire import STREAM_HEAD, Peer, ask, connected, reply, request, scripted
from tests.support.provider import FakeProvider

PASSED = [
    ("anthropic-version", "2023-06-01"),
    ("anthropic-beta", "a-1,b-2"),
    ("anthropic-dangerous-direct-browser-access", "true"),
    ("user-agent", "claude-cli/2.0 (external, cli)"),
    ("x-stainless-lang", "js"),
    ("x-stainless-retry-count", "0"),
    ("x-app", "cli"),
    ("accept", "application/json"),
    ("content-type", "application/json; charset=utf-8"),
    ("idempotency-key", "k"),
    ("x-odd", "caf\xe9 \t two"),
]
DROPPED = [
    ("Authorization", f"Bearer {TOKEN}"),
    ("Cookie", "a=b"),
    ("Proxy-Authorization", "Basic czE6dG9rZW4="),
    ("Forwarded", "for=192.0.2.1"),
    ("X-Forwarded-For", "192.0.2.1"),
    ("X-Forwarded-Host", "evil.example"),
    ("x-forwarded-anything", "1"),
    ("X-Real-IP", "192.0.2.1"),
    ("Via", "1.1 sandbox"),
    ("Keep-Alive", "timeout=5"),
    ("Proxy-Connection", "keep-alive"),
    ("TE", "trailers"),
    ("Trailer", "X-T"),
    ("Upgrade", "h2c"),
    ("x_api_key", "stolen"),
    ("X_Forwarded_For", "192.0.2.1"),
    ("Named", "by Connection"),
    ("Also-Named", "by Connection"),
]


async def test_credentials_and_hop_by_hop_headers_stay_here_and_the_rest_is_untouched(provider: FakeProvider) -> None:
    sent = [f"{name}: {value}" for name, value in [*PASSED, *DROPPED]]
    sent += ["Connection: keep-alive, named , ALSO-NAMED", "Accept-Encoding: gzip, deflate, br, zstd"]
    async with running_proxy(f"http://127.0.0.1:{provider.port}") as proxy:
        assert (await ask(proxy.port, request(headers=tuple(sent)))).status == 200
    arrived = [(name.lower(), value) for name, value in provider.requests[0].headers]
    ours = [
        ("host", f"127.0.0.1:{provider.port}"),
        ("accept-encoding", "identity"),
        ("x-api-key", KEY),
        ("content-length", str(len(provider.requests[0].body))),
    ]
    assert sorted(arrived) == sorted([*ours, *PASSED])
    assert [each for each in arrived if each in PASSED] == PASSED


async def test_a_reply_keeps_its_head_but_for_what_is_about_the_providers_connection() -> None:
    body = b"{}"
    head = (
        b"HTTP/1.1 200 Fine Thanks\r\nContent-Type: application/json\r\nRequest-Id: r1\r\nX-Odd:  two  blanks \r\n"
        b"Set-Cookie: a=b\r\nSet-Cookie: c=d\r\nConnection: keep-alive, X-Hop\r\nX-Hop: 1\r\nKeep-Alive: timeout=5\r\n"
        b"anthropic-ratelimit-requests-limit: 50\r\nContent-Length: 2\r\n\r\n"
    )

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(head + body)
        await peer.gone()

    async with scripted(handler) as upstream, running_proxy(upstream.url) as proxy:
        answer = await ask(proxy.port, request())
        hop = (b"Connection: keep-alive, X-Hop\r\n", b"X-Hop: 1\r\n", b"Keep-Alive: timeout=5\r\n")
        expected = head
        for line in hop:
            expected = expected.replace(line, b"")
        assert answer.head == expected


@pytest.mark.parametrize("connection", [b"", b"Connection: close\r\n"])
async def test_the_clients_connection_outlives_the_providers(connection: bytes) -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\n" + connection + b"Content-Length: 2\r\n\r\n{}")

    async with scripted(handler) as upstream, running_proxy(upstream.url) as proxy, connected(proxy.port) as client:
        for _ in range(3):
            await client.send(request())
            answer = await client.reply()
            assert answer.status == 200
            assert answer.header(b"connection") is None
        assert upstream.requests == 3


async def test_a_client_that_wants_to_close_is_closed(provider: FakeProvider) -> None:
    async with running_proxy(f"http://127.0.0.1:{provider.port}") as proxy, connected(proxy.port) as client:
        await client.send(request(headers=("Connection: close",)))
        answer = await client.reply()
        assert answer.header(b"connection") == b"close"
        assert await client.closed() == b""


async def test_interim_replies_come_before_the_final_one() -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n" + reply(b"{}"))

    async with scripted(handler) as upstream, running_proxy(upstream.url) as proxy, connected(proxy.port) as client:
        await client.send(request())
        assert [(await client.reply()).status for _ in range(3)] == [100, 103, 200]


@pytest.mark.parametrize(
    "bad",
    [
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\nContent-Length: 2\n\n{}",
        b"SSH-2.0-OpenSSH_9\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: " + b"a" * 70_000 + b"\r\n\r\n",
        b"HTTP/1.1 102 Processing\r\n\r\n" * 20,
    ],
)
async def test_a_reply_that_is_none_becomes_502(bad: bytes) -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(bad)
        await peer.gone()

    async with scripted(handler) as upstream, running_proxy(upstream.url) as proxy, connected(proxy.port) as client:
        await client.send(request())
        while (answer := await client.reply()).status < 200:
            pass
        assert answer.status == 502
        assert answer.header(b"x-opificia-reason") == b"upstream_failed"


async def test_bytes_after_a_whole_reply_are_never_taken_for_the_next_one() -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(reply(b"{}"))
        await peer.send(reply(b'{"for":"nobody"}'))
        await peer.gone()

    async with scripted(handler) as upstream, running_proxy(upstream.url) as proxy, connected(proxy.port) as client:
        for _ in range(5):
            await client.send(request())
            try:
                answer = await client.reply()
            except EOFError:
                # Both came in one segment: the provider broke the protocol, and the client can tell.
                return
            assert answer.body == b"{}"
            assert answer.status == 200


async def test_a_reply_that_ends_with_the_connection_is_given_a_framing_of_its_own() -> None:
    events = b'data: {"type":"message_start"}\n\ndata: {"type":"message_stop"}\n\n'

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + events)

    async with scripted(handler) as upstream, running_proxy(upstream.url) as proxy, connected(proxy.port) as client:
        for _ in range(2):
            await client.send(request())
            answer = await client.reply()
            assert answer.head.startswith(b"HTTP/1.1 200 OK\r\n")
            assert answer.body == events


async def test_a_stream_that_ends_with_the_connection_before_its_last_event_is_cut() -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(b'HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: {"type":"message_start"}\n\n')

    async with scripted(handler) as upstream, running_proxy(upstream.url) as proxy, connected(proxy.port) as client:
        await client.send(request())
        with pytest.raises(EOFError):
            await client.reply()


@pytest.mark.parametrize(("body", "whole"), [(b'{"a":[1,2]}', True), (b'{"a":[1,', False)])
async def test_json_that_ends_with_the_connection_is_passed_on_if_it_is_whole(body: bytes, *, whole: bool) -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n" + body)

    async with scripted(handler) as upstream, running_proxy(upstream.url) as proxy, connected(proxy.port) as client:
        await client.send(request())
        if whole:
            assert (await client.reply()).body == body
        else:
            with pytest.raises(EOFError):
                await client.reply()


async def test_an_event_stream_keeps_its_own_framing_byte_for_byte() -> None:
    body = b"5;x=y\r\ndata:\r\n2\r\n\r\n\r\n0\r\nX-Trailer: t\r\n\r\n"

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD + body)
        await peer.gone()

    async with scripted(handler) as upstream, running_proxy(upstream.url) as proxy, connected(proxy.port) as client:
        await client.send(request(headers=("Connection: close",)))
        assert (await client.closed()).partition(b"\r\n\r\n")[2] == body
