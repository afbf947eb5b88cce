"""What a session used is what the provider said, once."""

import asyncio
import json

import pytest

from gateway.contract.policy import ModelBudget, Usage
from gateway.core.usage import KEPT_UNCOUNTED_BYTES, MAX_KEPT_BYTES, JsonUsage, StreamUsage
from gateway.net.model_exchange import Exchange
from tests.model.harness import running_proxy
from tests.model.wire import STREAM_HEAD, Peer, ask, chunked, reply, request, scripted
from tests.support.patience import until
from tests.support.provider import (
    CACHE_READ_TOKENS,
    CACHE_WRITE_TOKENS,
    INPUT_TOKENS,
    OUTPUT_TOKENS,
    FakeProvider,
)

WHOLE = Usage(
    model_requests=1,
    input_tokens=INPUT_TOKENS,
    output_tokens=OUTPUT_TOKENS,
    cache_read_tokens=CACHE_READ_TOKENS,
    cache_write_tokens=CACHE_WRITE_TOKENS,
)


@pytest.mark.parametrize("stream", [True, False])
async def test_streams_and_json_are_counted_alike(provider: FakeProvider, *, stream: bool) -> None:
    async with running_proxy(f"http://127.0.0.1:{provider.port}") as proxy:
        await ask(proxy.port, request(json.dumps({"model": "fake-model", "stream": stream}).encode()))
        await proxy.settled()
        assert proxy.usage() == WHOLE


async def test_a_later_count_replaces_an_earlier_one_and_a_missing_one_changes_nothing() -> None:
    events = (
        b'data: {"type":"message_start","message":{"usage":{"input_tokens":3,"output_tokens":1}}}\n\n'
        b'data: {"type":"message_delta","usage":{"output_tokens":7}}\n\n'
        b'data: {"type":"message_delta","usage":{"output_tokens":15,"cache_read_input_tokens":4,"input_tokens":null}}\n\n'
        b'data: {"type":"message_stop"}\n\n'
    )

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD + chunked(events))
        await peer.gone()

    async with scripted(handler) as upstream, running_proxy(upstream.url) as proxy:
        await ask(proxy.port, request())
        await proxy.settled()
        assert proxy.usage() == Usage(model_requests=1, input_tokens=3, output_tokens=15, cache_read_tokens=4)


@pytest.mark.parametrize(
    ("path", "method"), [("/model/s1/v1/messages/count_tokens", "POST"), ("/model/s1/v1/models", "GET")]
)
async def test_what_costs_nothing_books_no_tokens(path: str, method: str, provider: FakeProvider) -> None:
    async with running_proxy(f"http://127.0.0.1:{provider.port}") as proxy:
        body = b'{"model":"fake-model"}' if method == "POST" else b""
        assert (await ask(proxy.port, request(body, path=path, method=method))).status == 200
        await proxy.settled()
        assert proxy.usage() == Usage(model_requests=1)


async def test_a_reply_in_pieces_of_one_byte_is_counted() -> None:
    body = json.dumps({"content": [{"text": '"usage":{"output_tokens":99}'}], "usage": {"output_tokens": 15}}).encode()

    async def handler(peer: Peer) -> None:
        await peer.request()
        whole = reply(body)
        for index in range(len(whole)):
            await peer.send(whole[index : index + 1])
        await peer.gone()

    async with scripted(handler) as upstream, running_proxy(upstream.url) as proxy:
        assert (await ask(proxy.port, request())).body == body
        await proxy.settled()
        assert proxy.usage().output_tokens == 15


async def test_usage_is_kept_across_a_new_grant_and_joined_by_that_of_earlier_epochs(provider: FakeProvider) -> None:
    async with running_proxy(f"http://127.0.0.1:{provider.port}") as proxy:
        await ask(proxy.port, request())
        await proxy.settled()
        proxy.put(used=Usage(input_tokens=1000))
        assert proxy.usage() == WHOLE


async def test_each_request_leaves_one_line_with_its_cost_and_nothing_of_its_content(provider: FakeProvider) -> None:
    async with running_proxy(f"http://127.0.0.1:{provider.port}") as proxy:
        await ask(proxy.port, request(b'{"model":"fake-model","messages":[{"content":"a secret plan"}]}'))
        await proxy.settled()
        allowed, closed = proxy.audit.lines
        assert (allowed.event, closed.event, closed.reason) == ("allow", "close", "done")
        cost = closed.details["model"]
        assert (cost.model, cost.status) == ("fake-model", 200)
        assert (cost.input_tokens, cost.output_tokens) == (INPUT_TOKENS, OUTPUT_TOKENS)
        assert 0 <= cost.first_byte_ms <= closed.details["ms"]
        assert closed.details["bytes_up"] == len(provider.requests[0].body)
        assert "secret" not in str(proxy.audit.lines)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_what_a_sessions_large_replies_keep_to_be_read_is_bounded_in_sum_and_none_of_them_is_touched(
    *, is_stream: bool
) -> None:
    number, go = 12, asyncio.Event()
    body = json.dumps({"response": {"output": "x" * 2_000_000, "usage": {"output_tokens": 7}}}).encode()
    if is_stream:
        body = b"data: " + body + b"\n\n"
    whole = reply(body, kind="text/event-stream" if is_stream else "application/json")
    sent = 0

    async def handler(peer: Peer) -> None:
        nonlocal sent
        await peer.request()
        await peer.send(whole[:-10])
        sent += 1
        await go.wait()
        await peer.send(whole[-10:])
        await peer.gone()

    budget = ModelBudget(output_tokens=1 << 40)
    async with scripted(handler) as upstream, running_proxy(upstream.url, budget=budget) as proxy:
        message = request(b'{"model":"m","max_tokens":100}')
        asking = [asyncio.ensure_future(ask(proxy.port, message)) for _ in range(number)]

        def exchanges() -> list[Exchange]:
            return [client._exchange for client in proxy.clients if client._exchange is not None]

        await until(
            lambda: sent == number and sum(each._bytes_down for each in exchanges()) == number * (len(body) - 10)
        )
        readers = [each._reply.usage for each in exchanges() if each._reply is not None]
        held = sum(len(piece) for each in readers if isinstance(each, JsonUsage | StreamUsage) for piece in each._held)
        assert 0 < held <= MAX_KEPT_BYTES + number * (KEPT_UNCOUNTED_BYTES + 256 * 1024)
        go.set()
        assert [(await each).body == body for each in asking] == [True] * number
        await proxy.settled()
        # Those that could not be read book their reservation.
        booked = proxy.usage().output_tokens
        assert booked in [7 * read + 100 * (number - read) for read in range(1, MAX_KEPT_BYTES // len(body) + 1)]


async def test_a_large_reply_that_is_cut_leaves_nothing_kept() -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(reply(b"[" + b" " * 1_000_000 + b"]")[:-1])
        await go.wait()

    go = asyncio.Event()
    async with scripted(handler) as upstream, running_proxy(upstream.url) as proxy:
        session = proxy.gateway.registry.get("s1")
        assert session is not None
        asking = asyncio.ensure_future(ask(proxy.port, request()))
        await until(lambda: session.model.kept.size > 0)
        go.set()
        with pytest.raises(EOFError):
            await asking
        await proxy.settled()
        assert session.model.kept.size == 0
