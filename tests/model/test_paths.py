"""Only the routes that there are, matched on the raw bytes; everything else is a 404 and goes nowhere."""

import json

import pytest

from gateway.core.providers import ProviderSettings
from tests.model.harness import running_proxy
from tests.model.wire import ask, connected, request
from tests.support.provider import FakeProvider

NOT_THERE = [
    "/model/s1/../s2/v1/messages",
    "/model/s1/%2e%2e/s2/v1/messages",
    "/model/s1%2Fv1/messages",
    "/model/s1/v1%2Fmessages",
    "/model/s1//v1/messages",
    "//model/s1/v1/messages",
    "/model//v1/messages",
    "/model/s1/v1/v1/messages",
    "/model/s1/v1/messages/",
    "/model/s1/v1/messages/../models",
    "/model/s1/v1\\messages",
    "/model/s1/v1/messages%00",
    "/model/s1/v1/messages;x=1",
    "/model/s1/v1/messages#fragment",
    "/model/s1/v1/messages?q=#fragment",
    "/model/s1/v1/messages?q=\\",
    "/model/s1/v1/messages?q=\xe9",
    "/model/s1/v1/Messages",
    "/model/s1/v1/complete",
    "/model/s1/v1/files",
    "/model/s1/v1/messages/batches",
    "/model/S1/v1/messages",
    "/model/s1/unknown/v1/messages",
    "/model/s1/openai/v1/messages",
    "/model/s1/openai/v1/files",
    "/model/s1",
    "/model/",
    "/model",
    "/v1/messages",
    "/",
    "*",
    "http://opificia-gateway@evil.example/model/s1/v1/messages",
    "https://opificia-gateway/model/s1/v1/messages",
    "http://opificia-gateway",
]


@pytest.mark.parametrize("path", NOT_THERE)
async def test_answers_404_in_the_providers_shape_and_passes_nothing_on(path: str, provider: FakeProvider) -> None:
    url = f"http://127.0.0.1:{provider.port}"
    others = (ProviderSettings(name="openai", upstream=url),)
    async with running_proxy(url, providers=others) as proxy:
        reply = await ask(proxy.port, request(path=path))
        assert reply.status == 404
        error = json.loads(reply.body)
        assert error["type"] == "error"
        assert error["error"]["type"] == "not_found_error"
        assert reply.header(b"x-opificia-reason") == b"not_found"
        assert reply.header(b"x-should-retry") == b"false"
    assert provider.requests == []


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/model/s1/v1/messages"),
        ("PUT", "/model/s1/v1/messages"),
        ("POST", "/model/s1/v1/models"),
        ("post", "/model/s1/v1/messages"),
        ("HEAD", "/model/s1/v1/models"),
        ("OPTIONS", "/model/s1/v1/messages"),
    ],
)
async def test_answers_404_to_another_method(method: str, path: str, provider: FakeProvider) -> None:
    async with running_proxy(f"http://127.0.0.1:{provider.port}") as proxy:
        assert (await ask(proxy.port, request(method=method, path=path))).status == 404
    assert provider.requests == []


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("/model/s1/v1/messages", "/v1/messages"),
        ("/model/s1/v1/messages?beta=true", "/v1/messages?beta=true"),
        ("/model/s1/v1/messages/count_tokens?beta=true&x=%2e%2e/", "/v1/messages/count_tokens?beta=true&x=%2e%2e/"),
        ("http://opificia-gateway:8900/model/s1/v1/messages?a=b", "/v1/messages?a=b"),
        ("HTTP://OPIFICIA-GATEWAY/model/s1/v1/messages", "/v1/messages"),
    ],
)
async def test_passes_a_route_on_with_its_query(path: str, target: str, provider: FakeProvider) -> None:
    async with running_proxy(f"http://127.0.0.1:{provider.port}") as proxy:
        assert (await ask(proxy.port, request(path=path))).status == 200
    assert [each.target for each in provider.requests] == [target]


@pytest.mark.parametrize("path", ["http://api.anthropic.com/v1/messages", "http://deb.example/model/s1/v1/messages"])
async def test_a_request_for_another_host_is_left_to_whoever_routes_after_the_reply_before(
    path: str, provider: FakeProvider
) -> None:
    elsewhere = request(path=path) + request()
    async with running_proxy(f"http://127.0.0.1:{provider.port}") as proxy, connected(proxy.port) as client:
        await client.send(request() + elsewhere)
        assert (await client.reply()).status == 200
        assert await client.closed() == b""
        assert proxy.given == [elsewhere]
    assert len(provider.requests) == 1


async def test_gets_the_list_of_models(provider: FakeProvider) -> None:
    async with running_proxy(f"http://127.0.0.1:{provider.port}") as proxy:
        reply = await ask(proxy.port, request(b"", method="GET", path="/model/s1/v1/models?limit=5"))
        assert json.loads(reply.body)["data"][0]["id"] == "fake-model"
    assert provider.requests[0].target == "/v1/models?limit=5"
    assert provider.requests[0].header("content-length") is None


async def test_puts_a_base_path_of_the_upstream_before_every_route() -> None:
    from tests.model.wire import Peer, scripted
    from tests.model.wire import reply as whole

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(whole(b"{}"))

    async with scripted(handler) as upstream, running_proxy(f"{upstream.url}/team/anthropic/") as proxy:
        assert (await ask(proxy.port, request())).status == 200
        assert upstream.received[0].startswith(b"POST /team/anthropic/v1/messages HTTP/1.1\r\n")
