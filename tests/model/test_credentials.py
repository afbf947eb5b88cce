"""Who may ask: the session's token, once, from the session's own container."""

import json

import pytest

from gateway.core.model_request import Opening
from gateway.net.model import ModelClient
from tests.model.harness import KEY, TOKEN, running_proxy
from tests.model.wire import ask, connected, request
from tests.support.patience import until
from tests.support.provider import FakeProvider


@pytest.mark.parametrize(
    "headers",
    [
        (f"x-api-key: {TOKEN}",),
        (f"Authorization: Bearer {TOKEN}",),
        (f"authorization: bearer {TOKEN}",),
        (f"x-api-key: {TOKEN}", f"Authorization: Bearer {TOKEN}"),
        ("x-api-key:", f"Authorization: Bearer {TOKEN}"),
    ],
)
async def test_lets_the_sessions_token_in_however_an_sdk_sends_it(
    headers: tuple[str, ...], provider: FakeProvider
) -> None:
    async with running_proxy(f"http://127.0.0.1:{provider.port}") as proxy:
        assert (await ask(proxy.port, request(token=None, headers=headers))).status == 200
    assert provider.requests[0].header("x-api-key") == KEY
    assert provider.requests[0].header("authorization") is None


@pytest.mark.parametrize(
    "headers",
    [
        (),
        ("x-api-key:",),
        ("x-api-key: wrong",),
        (f"x-api-key: {TOKEN}x",),
        (f"x-api-key: {KEY}",),
        (f"Authorization: Basic {TOKEN}",),
        (f"Authorization: {TOKEN}",),
        ("Authorization: Bearer",),
        (f"Authorization: Bearer {TOKEN} {TOKEN}",),
        (f"x-api-key: {TOKEN}", "Authorization: Bearer other"),
        ("x-api-key: other", f"Authorization: Bearer {TOKEN}"),
        (f"x-api-key: {TOKEN}", "x-api-key: other"),
        (f"x-api-key: {TOKEN}", "Authorization: Basic czE6dG9rZW4="),
        (f"Proxy-Authorization: Bearer {TOKEN}",),
        (f"Cookie: x-api-key={TOKEN}",),
        ("x-api-key: caf\xe9",),
    ],
)
async def test_answers_401_to_everything_else(headers: tuple[str, ...], provider: FakeProvider) -> None:
    async with running_proxy(f"http://127.0.0.1:{provider.port}") as proxy:
        reply = await ask(proxy.port, request(token=None, headers=headers))
        assert reply.status == 401
        assert json.loads(reply.body)["error"]["type"] == "authentication_error"
        assert TOKEN.encode() not in reply.head + reply.body
        # Nobody is known to be behind it, so no session's log is filled.
        assert proxy.audit.lines == []
    assert provider.requests == []


async def test_refuses_one_sessions_token_for_another_session(provider: FakeProvider) -> None:
    async with running_proxy(f"http://127.0.0.1:{provider.port}") as proxy:
        proxy.put("s2", "token-of-session-s2")
        assert (await ask(proxy.port, request(path="/model/s2/v1/messages"))).status == 401
        assert (await ask(proxy.port, request(token="token-of-session-s2"))).status == 401
        assert (await ask(proxy.port, request(path="/model/s3/v1/messages"))).status == 401
    assert provider.requests == []


async def test_refuses_the_right_token_from_another_container(provider: FakeProvider) -> None:
    async with running_proxy(f"http://127.0.0.1:{provider.port}", caller="192.0.2.17") as proxy:
        proxy.put(address="192.0.2.17")
        assert (await ask(proxy.port, request())).status == 200
        proxy.put(address="192.0.2.18")
        assert (await ask(proxy.port, request())).status == 401
    assert len(provider.requests) == 1


async def test_a_request_waits_for_the_sessions_after_a_restart(provider: FakeProvider) -> None:
    async with running_proxy(f"http://127.0.0.1:{provider.port}", ready=False) as proxy:
        async with connected(proxy.port) as client:
            await client.send(request())
            await until(lambda: bool(proxy.gateway.registry._waiting))
            assert proxy.gateway.registry.replace_all(()) == ()
            assert (await client.reply()).status == 401
        proxy.gateway.registry.ready = False
        async with connected(proxy.port) as client:
            await client.send(request()[:-5])
            await until(lambda: bool(proxy.gateway.registry._waiting))
            proxy.put()
            proxy.gateway.registry._become_ready()
            await client.send(request()[-5:])
            assert (await client.reply()).status == 200


async def test_answers_503_when_the_sessions_do_not_come_in_time(provider: FakeProvider) -> None:
    limits = {"resync_wait_ms": 50}
    async with running_proxy(f"http://127.0.0.1:{provider.port}", ready=False, limits=limits) as proxy:
        reply = await ask(proxy.port, request())
        assert reply.status == 503
        assert reply.header(b"retry-after") == b"1"
        assert reply.header(b"x-should-retry") is None
        assert not proxy.gateway.registry._waiting


async def test_a_request_that_ends_by_what_another_does_when_the_sessions_come_is_counted_out_once(
    provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_proxy(f"http://127.0.0.1:{provider.port}", ready=False) as proxy:
        judge = ModelClient._judge

        def end_the_others(client: ModelClient, opening: Opening) -> None:
            for other in proxy.clients:
                if other is not client:
                    other.abort()
            judge(client, opening)

        async with connected(proxy.port) as first, connected(proxy.port) as second:
            await first.send(request())
            await second.send(request())
            await until(lambda: len(proxy.gateway.registry._waiting) == 2)
            monkeypatch.setattr(ModelClient, "_judge", end_the_others)
            proxy.gateway.registry.replace_all(())
            assert proxy.gateway.model._waiting == 0


async def test_a_fault_with_one_request_that_waited_for_the_sessions_leaves_the_others_theirs(
    provider: FakeProvider, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_proxy(f"http://127.0.0.1:{provider.port}", ready=False) as proxy:
        judge, judged = ModelClient._judge, 0

        def fail_first(client: ModelClient, opening: Opening) -> None:
            nonlocal judged
            judged += 1
            if judged == 1:
                raise ZeroDivisionError
            judge(client, opening)

        async with connected(proxy.port) as first, connected(proxy.port) as second:
            await first.send(request())
            await second.send(request())
            await until(lambda: len(proxy.gateway.registry._waiting) == 2)
            monkeypatch.setattr(ModelClient, "_judge", fail_first)
            proxy.gateway.registry.replace_all(())
            ends = [await client.closed() for client in (first, second)]
            # In whatever order they were told: one was cut, the other answered.
            assert sorted(end[9:12] for end in ends) == [b"", b"401"]
        assert "ZeroDivisionError" in caplog.text
