"""What the provider says is passed on as it says it, but for the key."""

import json

import anthropic
import pytest

from tests.model.harness import KEY, TOKEN, running_proxy, until
from tests.model.wire import Peer, ask, connected, reply, request, scripted
from tests.support.provider import FakeProvider


@pytest.mark.parametrize(
    ("model", "status", "kind"),
    [
        ("fake-429", 429, "rate_limit_error"),
        ("fake-529", 529, "overloaded_error"),
        ("fake-400", 400, "invalid_request_error"),
    ],
)
async def test_errors_pass_verbatim(model: str, status: int, kind: str, provider: FakeProvider) -> None:
    async with running_proxy(f"http://127.0.0.1:{provider.port}") as proxy:
        body = json.dumps({"model": model}).encode()
        answer = await ask(proxy.port, request(body))
        direct = await ask(provider.port, request(body, path="/v1/messages", token=KEY))
        assert answer.status == status
        assert answer.body == direct.body
        assert json.loads(answer.body)["error"]["type"] == kind
        without_date = [line for line in direct.head.split(b"\r\n") if not line.startswith(b"Date")]
        assert [line for line in answer.head.split(b"\r\n") if not line.startswith(b"Date")] == without_date
        assert proxy.usage().output_tokens == 0


async def test_an_sdk_sees_the_providers_retry_after(provider: FakeProvider) -> None:
    async with running_proxy(f"http://127.0.0.1:{provider.port}") as proxy:
        async with anthropic.AsyncAnthropic(
            base_url=proxy.base_url, auth_token=TOKEN, api_key=None, max_retries=0
        ) as client:
            with pytest.raises(anthropic.RateLimitError) as caught:
                await client.messages.create(
                    model="fake-429", max_tokens=5, messages=[{"role": "user", "content": "x"}]
                )
            assert caught.value.response.headers["retry-after"] == "7"
            assert caught.value.request_id == "req_fake"


async def test_redirects_are_not_followed_and_the_key_goes_nowhere_else() -> None:
    async def trap(peer: Peer) -> None:
        await peer.request()

    async with scripted(trap) as elsewhere:

        async def handler(peer: Peer) -> None:
            await peer.request()
            location = f"location: http://127.0.0.1:{elsewhere.port}/v1/messages"
            await peer.send(reply(b"", status="307 Temporary Redirect", headers=(location,)))
            await peer.gone()

        async with scripted(handler) as upstream, running_proxy(upstream.url) as proxy:
            answer = await ask(proxy.port, request())
            assert answer.status == 307
        assert elsewhere.received == []


async def test_a_key_that_an_error_repeats_is_overwritten(provider: FakeProvider) -> None:
    async with running_proxy(f"http://127.0.0.1:{provider.port}") as proxy:
        answer = await ask(proxy.port, request(b'{"model":"fake-401-key"}'))
        assert answer.status == 401
        assert KEY.encode() not in answer.body
        assert json.loads(answer.body)["error"]["message"] == f"invalid key {'*' * len(KEY)} given"


async def test_a_key_in_pieces_is_overwritten_too() -> None:
    body = b'{"error":{"message":"no such key: ' + KEY.encode() + b"s" + KEY[:5].encode() + b'"}}'

    async def handler(peer: Peer) -> None:
        head, _, _ = reply(body, status="401 Unauthorized", headers=(f"x-echo: Bearer {KEY}",)).partition(b"{")
        while True:
            await peer.request()
            await peer.send(head)
            for index in range(len(body)):
                await peer.send(body[index : index + 1])

    async with scripted(handler) as upstream, running_proxy(upstream.url) as proxy, connected(proxy.port) as client:
        for _ in range(2):
            await client.send(request())
            answer = await client.reply()
            assert answer.body == body.replace(KEY.encode(), b"*" * len(KEY))
            assert KEY.encode() not in answer.head


async def test_the_key_can_be_changed_without_dropping_a_stream(provider: FakeProvider) -> None:
    async with running_proxy(f"http://127.0.0.1:{provider.port}") as proxy, connected(proxy.port) as client:
        await client.send(request(b'{"model":"fake-slow","stream":true}'))
        await client.reader.readuntil(b"\n\n\r\n")
        proxy.key[:] = b"sk-new-key"
        provider.key = "sk-new-key"
        assert (await ask(proxy.port, request())).status == 200
        await client.reader.readuntil(b"\r\n0\r\n\r\n")
        assert provider.requests[-1].header("x-api-key") == "sk-new-key"


async def test_no_key_is_sent_to_a_provider_that_needs_none() -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(reply(b"{}"))
        await peer.gone()

    async with scripted(handler) as upstream, running_proxy(upstream.url) as proxy:
        proxy.key[:] = b""
        assert (await ask(proxy.port, request())).status == 200
        assert b"x-api-key" not in bytes(upstream.received[0]).lower()
        await until(lambda: upstream.requests == 1)
