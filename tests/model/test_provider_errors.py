"""What the provider says is passed on as it says it, but for the key."""

import asyncio
import json

import anthropic
import pytest

from tests.model.harness import KEY, TOKEN, running_proxy
from tests.model.wire import Peer, ask, chunked, connected, reply, request, scripted
from tests.support.patience import until
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


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("framing", ["chunked", "close"])
async def test_a_key_in_two_chunks_is_overwritten_and_the_body_framed_anew(framing: str, *, at_once: bool) -> None:
    body = b'{"error":{"message":"no such key: ' + KEY.encode() + b"s" + KEY[:5].encode() + b'"}}'
    cut = body.index(KEY.encode()) + 7

    async def handler(peer: Peer) -> None:
        head = b"HTTP/1.1 401 Unauthorized\r\ncontent-type: application/json\r\n"
        if framing == "close":
            await peer.request()
            await peer.send(head + b"\r\n" + body[:cut])
            await peer.send(body[cut:])
            return
        # Neither an extension nor a trailer carries it out.
        data = chunked(body[:cut], body[cut:])[:-2] + b"x-key: " + KEY.encode() + b"\r\n\r\n"
        data = data.replace(b"\r\n", b";key=" + KEY.encode() + b"\r\n", 1)
        while True:
            await peer.request()
            await peer.send(head + b"transfer-encoding: chunked\r\n\r\n")
            for piece in [data] if at_once else [data[index : index + 1] for index in range(len(data))]:
                await peer.send(piece)

    async with scripted(handler) as upstream, running_proxy(upstream.url) as proxy, connected(proxy.port) as client:
        for _ in range(2):
            await client.send(request())
            answer = await client.reply()
            assert answer.status == 401
            assert answer.body == body.replace(KEY.encode(), b"*" * len(KEY))


async def test_an_error_in_chunks_that_the_provider_cuts_is_cut() -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 500 No\r\ntransfer-encoding: chunked\r\n\r\n" + chunked(b"{}")[:-5])

    async with scripted(handler) as upstream, running_proxy(upstream.url) as proxy, connected(proxy.port) as client:
        await client.send(request())
        data = await client.closed()
        assert data.endswith(b"2\r\n{}\r\n")


@pytest.mark.parametrize("line", ["", "transfer-encoding: chunked\r\n"])
async def test_a_reply_that_has_no_body_gets_none(line: str) -> None:
    async def handler(peer: Peer) -> None:
        for _ in range(2):
            await peer.request()
            await peer.send(f"HTTP/1.1 304 Not Modified\r\n{line}\r\n".encode())

    async with scripted(handler) as upstream, running_proxy(upstream.url) as proxy, connected(proxy.port) as client:
        for _ in range(2):
            await client.send(request())
            assert (await client.reply()).status == 304


async def test_the_key_that_was_sent_is_overwritten_when_there_is_another_by_then() -> None:
    rotated = asyncio.Event()

    async def handler(peer: Peer) -> None:
        await peer.request()
        await rotated.wait()
        await peer.send(reply(b"bad key " + KEY.encode(), status="401 Unauthorized"))
        await peer.gone()

    async with scripted(handler) as upstream, running_proxy(upstream.url) as proxy, connected(proxy.port) as client:
        await client.send(request())
        await until(lambda: upstream.requests == 1)
        proxy.key[:] = b"sk-new"
        rotated.set()
        assert (await client.reply()).body == b"bad key " + b"*" * len(KEY)


async def test_a_key_in_an_interim_reply_is_overwritten() -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(f"HTTP/1.1 103 Early Hints\r\nx-echo: {KEY}\r\n\r\n".encode() + reply(b"{}"))
        await peer.gone()

    async with scripted(handler) as upstream, running_proxy(upstream.url) as proxy, connected(proxy.port) as client:
        await client.send(request())
        assert (await client.reply()).header(b"x-echo") == b"*" * len(KEY)
        assert (await client.reply()).status == 200


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
