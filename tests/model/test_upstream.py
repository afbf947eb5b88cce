"""Connections to the provider: kept, checked, bounded, and never used twice for one request."""

import asyncio
import ssl

import pytest
import trustme

from tests.model.harness import KEY, running_proxy
from tests.model.wire import Peer, ask, connected, reply, request, scripted
from tests.support.patience import until
from tests.support.provider import FakeProvider


async def test_one_connection_serves_many_requests(provider: FakeProvider) -> None:
    async with running_proxy(f"http://127.0.0.1:{provider.port}") as proxy, connected(proxy.port) as client:
        for _ in range(5):
            await client.send(request())
            assert (await client.reply()).status == 200
        # Another client's requests go over the same connection.
        assert (await ask(proxy.port, request())).status == 200
    assert len({each.peer for each in provider.requests}) == 1


async def test_a_connection_that_the_provider_closed_between_requests_is_made_anew() -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(reply(b"{}"))

    async with scripted(handler) as upstream, running_proxy(upstream.url) as proxy, connected(proxy.port) as client:
        for number in range(1, 20):
            await client.send(request())
            assert (await client.reply()).status == 200
            assert upstream.requests == number


async def test_a_request_that_crosses_the_close_of_its_connection_is_sent_once_more_and_once_only() -> None:
    """The provider closes while the request is on its way: it takes nothing of it, so nothing is doubled."""
    closing = asyncio.Event()

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(reply(b"{}"))
        if not closing.is_set():
            await closing.wait()
        else:
            await peer.gone()

    async with scripted(handler) as upstream, running_proxy(upstream.url) as proxy, connected(proxy.port) as client:
        await client.send(request())
        assert (await client.reply()).status == 200
        pool = proxy.gateway.model.default.pool
        (connection,) = pool._idle
        # The close has arrived at the kernel, and is not looked at before the request is written.
        connection.pause()
        closing.set()
        await upstream.ended[0].wait()
        await client.send(request(b'{"model":"second"}'))
        await until(lambda: connection._owner is not None)
        connection.resume()
        assert (await client.reply()).status == 200
        assert [bytes(data).count(b"second") for data in upstream.received] == [0, 1]


async def test_a_request_that_the_provider_took_is_never_sent_twice() -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(reply(b"{}"))
        await peer.request()

    async with scripted(handler) as upstream, running_proxy(upstream.url) as proxy, connected(proxy.port) as client:
        await client.send(request())
        assert (await client.reply()).status == 200
        await client.send(request(b'{"model":"second"}'))
        answer = await client.reply()
        assert answer.status == 502
        assert answer.header(b"x-should-retry") is None
        assert upstream.requests == 2
        # The client's connection goes on.
        await client.send(request())
        assert (await client.reply()).status == 200


async def test_unasked_bytes_on_an_idle_connection_close_it() -> None:
    go = asyncio.Event()

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(reply(b'{"a":1}'))
        if not go.is_set():
            await go.wait()
            await peer.send(reply(b'{"poison":1}'))
        await peer.gone()

    async with scripted(handler) as upstream, running_proxy(upstream.url) as proxy, connected(proxy.port) as client:
        await client.send(request())
        assert (await client.reply()).body == b'{"a":1}'
        go.set()
        await upstream.ended[0].wait()
        await client.send(request())
        assert (await client.reply()).body == b'{"a":1}'


async def test_connections_are_bounded_and_requests_wait_for_one(provider: FakeProvider) -> None:
    limits = {"model_upstream_connections": 2}
    async with running_proxy(f"http://127.0.0.1:{provider.port}", limits=limits) as proxy:
        slow = request(b'{"model":"fake-slow","stream":true}')
        answers = await asyncio.gather(*(ask(proxy.port, slow) for _ in range(4)))
        assert [answer.status for answer in answers] == [200] * 4
        assert len(proxy.gateway.model.default.pool) <= 2
    assert len({each.peer for each in provider.requests}) == 2


async def test_a_request_that_gets_no_connection_in_time_becomes_503(provider: FakeProvider) -> None:
    limits = {"model_upstream_connections": 1, "model_connect_timeout_ms": 1_500}
    async with running_proxy(f"http://127.0.0.1:{provider.port}", limits=limits) as proxy:
        async with connected(proxy.port) as client:
            await client.send(request(b'{"model":"fake-silent"}'))
            await until(lambda: len(provider.requests) == 1)
            answer = await ask(proxy.port, request())
            assert answer.status == 503
            assert answer.header(b"retry-after") == b"1"


async def test_a_provider_that_never_finishes_the_handshake_becomes_504() -> None:
    async def handler(peer: Peer) -> None:
        await peer.gone()

    limits = {"model_connect_timeout_ms": 100}
    async with scripted(handler) as upstream:
        async with running_proxy(f"https://127.0.0.1:{upstream.port}", limits=limits) as proxy:
            assert (await ask(proxy.port, request())).status == 504


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def server_context(authority: trustme.CA, name: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(name).configure_cert(context)
    return context


async def test_streams_over_tls_verified_by_a_ca_file(authority: trustme.CA, tmp_path: object) -> None:
    ca_file = f"{tmp_path}/ca.pem"
    authority.cert_pem.write_to_path(ca_file)
    seen: list[str | None] = []
    context = server_context(authority, "localhost")
    context.sni_callback = lambda _sock, name, _context: seen.append(name)  # type: ignore[assignment]
    fake = FakeProvider(KEY)
    await fake.start(tls=context)
    try:
        async with running_proxy(f"https://localhost:{fake.port}", ca_file=ca_file) as proxy:
            for body in (b'{"model":"fake-model","stream":true}', b'{"model":"fake-model"}'):
                assert (await ask(proxy.port, request(body))).status == 200
            assert (await ask(proxy.port, request(b'{"model":"fake-big","stream":true}'))).status == 200
            async with connected(proxy.port) as client:
                await client.send(request(b'{"model":"fake-cut","stream":true}'))
                data = await client.closed()
                assert data
                assert not data.endswith(b"0\r\n\r\n")
            async with connected(proxy.port) as client:
                await client.send(request(b'{"model":"fake-long","stream":true}'))
                await client.reader.readuntil(b"\n\n\r\n")
            await until(lambda: fake.cancelled > 0)
        assert set(seen) == {"localhost"}
        assert fake.requests[0].header("host") == f"localhost:{fake.port}"
    finally:
        await fake.close()


async def test_a_large_body_goes_up_whole_over_tls_to_a_provider_that_reads_slowly(
    authority: trustme.CA, tmp_path: object
) -> None:
    ca_file = f"{tmp_path}/ca.pem"
    authority.cert_pem.write_to_path(ca_file)
    body = bytes(range(256)) * 40_000
    go = asyncio.Event()

    async def handler(peer: Peer) -> None:
        peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await go.wait()
        peer.writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert await peer.request() == body
        await peer.send(reply(b"{}"))

    async with scripted(handler, tls=server_context(authority, "localhost")) as upstream:
        url = f"https://localhost:{upstream.port}"
        async with running_proxy(url, ca_file=ca_file) as proxy, connected(proxy.port) as client:
            client.writer.write(request(body))
            await until(lambda: bool(proxy.clients) and proxy.clients[0].is_paused)
            go.set()
            assert (await client.reply()).status == 200


@pytest.mark.parametrize("wrong", ["name", "authority"])
async def test_a_certificate_that_does_not_fit_is_not_accepted(
    wrong: str, authority: trustme.CA, tmp_path: object
) -> None:
    ca_file = f"{tmp_path}/ca.pem"
    (authority if wrong == "name" else trustme.CA()).cert_pem.write_to_path(ca_file)
    fake = FakeProvider(KEY)
    await fake.start(tls=server_context(authority, "other.example" if wrong == "name" else "localhost"))
    try:
        async with running_proxy(f"https://localhost:{fake.port}", ca_file=ca_file) as proxy:
            answer = await ask(proxy.port, request())
            assert answer.status == 502
            assert b"TLS" in answer.body
        assert fake.requests == []
    finally:
        await fake.close()


@pytest.mark.parametrize("took", [False, True])
async def test_over_tls_too_a_request_is_sent_again_only_if_nothing_of_it_was_taken(
    authority: trustme.CA, tmp_path: object, *, took: bool
) -> None:
    ca_file = f"{tmp_path}/ca.pem"
    authority.cert_pem.write_to_path(ca_file)
    closing = asyncio.Event()

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(reply(b"{}"))
        if took:
            await peer.request()
        elif not closing.is_set():
            await closing.wait()
            # No close_notify: the process died.
            peer.cut()
        else:
            await peer.gone()

    async with scripted(handler, tls=server_context(authority, "localhost")) as upstream:
        url = f"https://localhost:{upstream.port}"
        async with running_proxy(url, ca_file=ca_file) as proxy, connected(proxy.port) as client:
            await client.send(request())
            assert (await client.reply()).status == 200
            if not took:
                closing.set()
                await upstream.ended[0].wait()
            await client.send(request(b'{"model":"second"}'))
            assert (await client.reply()).status == (502 if took else 200)
            assert sum(bytes(data).count(b"second") for data in upstream.received) == 1
