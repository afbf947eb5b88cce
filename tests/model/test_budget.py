"""What a session may spend, and how it is told that there is no more."""

import asyncio
import contextlib
import json
from typing import Any

import anthropic
import pytest

from gateway.contract.policy import ModelBudget, Usage
from gateway.core.providers import ShapeName
from tests.model.harness import TOKEN, Proxy, running_proxy
from tests.model.wire import STREAM_HEAD, Peer, Reply, ask, connected, request, scripted
from tests.support.listener import bound
from tests.support.patience import until
from tests.support.provider import INPUT_TOKENS, OUTPUT_TOKENS, FakeProvider

COST_IN = 35  # all the input of one reply of the fake provider, its cache included


def message(max_tokens: int | None = 20, **more: object) -> bytes:
    cap = {} if max_tokens is None else {"max_tokens": max_tokens}
    return request(json.dumps({"model": "fake-model", **cap, **more}).encode())


def assert_spent(answer: Reply) -> None:
    assert answer.status == 403
    assert answer.header(b"x-should-retry") == b"false"
    assert answer.header(b"x-opificia-reason") == b"budget_exhausted"
    assert json.loads(answer.body)["error"]["type"] == "permission_error"


async def in_order(proxy: Proxy, *requests: bytes) -> list[int]:
    statuses = []
    for each in requests:
        statuses.append((await ask(proxy.port, each)).status)
        await proxy.settled()
    return statuses


async def test_over_the_output_budget_is_403_and_not_worth_a_retry(provider: FakeProvider) -> None:
    budget = ModelBudget(output_tokens=2 * OUTPUT_TOKENS)
    async with running_proxy(f"http://127.0.0.1:{provider.port}", budget=budget) as proxy:
        assert await in_order(proxy, message(), message()) == [200, 200]
        assert_spent(await ask(proxy.port, message()))
        # What costs nothing is still to be had.
        assert (await ask(proxy.port, request(path="/model/s1/v1/messages/count_tokens"))).status == 200
        assert proxy.usage().output_tokens == 2 * OUTPUT_TOKENS
    assert len(provider.requests) == 3


async def test_input_that_was_cached_counts_as_input(provider: FakeProvider) -> None:
    async with running_proxy(
        f"http://127.0.0.1:{provider.port}", budget=ModelBudget(input_tokens=INPUT_TOKENS + 1)
    ) as proxy:
        assert await in_order(proxy, message()) == [200]
        assert_spent(await ask(proxy.port, message()))


async def test_what_earlier_epochs_used_is_used(provider: FakeProvider) -> None:
    async with running_proxy(f"http://127.0.0.1:{provider.port}") as proxy:
        proxy.put(model_budget=ModelBudget(output_tokens=100), used=Usage(output_tokens=100))
        assert_spent(await ask(proxy.port, message()))
        proxy.put(model_budget=ModelBudget(output_tokens=101), used=Usage(output_tokens=100))
        assert (await ask(proxy.port, message())).status == 200
    assert len(provider.requests) == 1


async def test_many_calls_at_the_last_of_a_budget_pass_it_by_no_more_than_one_reservation(
    provider: FakeProvider,
) -> None:
    budget = ModelBudget(output_tokens=OUTPUT_TOKENS + 1)
    async with running_proxy(f"http://127.0.0.1:{provider.port}", budget=budget) as proxy:
        answers = await asyncio.gather(*(ask(proxy.port, message(20)) for _ in range(40)))
        await proxy.settled()
        assert proxy.usage().output_tokens <= budget.output_tokens + 20
        # What is reserved may come free again: those are told to come back, not that it is over.
        assert {answer.status for answer in answers} <= {200, 403, 429}
        for answer in answers:
            if answer.status == 429:
                assert answer.header(b"retry-after") == b"1"
        while (last := await ask(proxy.port, message(20))).status == 200:
            await proxy.settled()
        assert_spent(last)
    assert len(provider.requests) == 2


async def test_an_sdk_stops_at_the_end_of_a_budget(provider: FakeProvider) -> None:
    async with running_proxy(f"http://127.0.0.1:{provider.port}", budget=ModelBudget(output_tokens=1)) as proxy:
        async with anthropic.AsyncAnthropic(base_url=proxy.base_url, auth_token=TOKEN, api_key=None) as client:
            ask_once = {"model": "fake-model", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
            await client.messages.create(**ask_once)
            with pytest.raises(anthropic.PermissionDeniedError, match="budget of 1 output tokens is used up"):
                await client.messages.create(**ask_once)
    assert len(provider.requests) == 1


async def test_a_minutes_requests_are_limited_and_the_wait_is_told(provider: FakeProvider) -> None:
    budget = ModelBudget(requests_per_minute=3)
    async with running_proxy(f"http://127.0.0.1:{provider.port}", budget=budget) as proxy:
        assert await in_order(proxy, *[request(path="/model/s1/v1/messages/count_tokens")] * 3) == [200] * 3
        answer = await ask(proxy.port, request())
        assert answer.status == 429
        assert 50 <= int(answer.header(b"retry-after") or b"") <= 60
        assert json.loads(answer.body)["error"]["type"] == "rate_limit_error"
        assert answer.header(b"x-should-retry") is None
    assert len(provider.requests) == 3


async def test_requests_at_once_are_limited(provider: FakeProvider) -> None:
    limits = {"model_requests_per_session": 2}
    async with running_proxy(f"http://127.0.0.1:{provider.port}", limits=limits) as proxy:
        async with connected(proxy.port) as first, connected(proxy.port) as second:
            for client in (first, second):
                await client.send(request(b'{"model":"fake-silent"}'))
            await until(lambda: len(provider.requests) == 2)
            answer = await ask(proxy.port, request())
            assert answer.status == 429
            assert answer.header(b"x-opificia-reason") == b"no_free_slot"
            assert answer.header(b"retry-after") == b"1"
        await proxy.settled()
        assert (await ask(proxy.port, request())).status == 200


async def test_connections_that_are_only_kept_open_are_limited_too(provider: FakeProvider) -> None:
    limits = {"model_requests_per_session": 2}
    async with running_proxy(f"http://127.0.0.1:{provider.port}", limits=limits) as proxy:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(4):
                client = await stack.enter_async_context(connected(proxy.port))
                await client.send(request())
                assert (await client.reply()).status == 200
            answer = await ask(proxy.port, request())
            assert answer.status == 429
            # A connection belongs to whom its last request was for.
            proxy.put("s2", "token-of-session-s2")
            await client.send(request(path="/model/s2/v1/messages", token="token-of-session-s2"))
            assert (await client.reply()).status == 200
            assert (await ask(proxy.port, request())).status == 200
        await until(lambda: proxy.gateway.model.client_count == 0)
        assert [session.model.connections for session in proxy.gateway.registry] == [0, 0]


@pytest.mark.parametrize(("model", "status"), [("claude-haiku-4", 200), ("claude-opus-4", 403), ("", 400)])
async def test_models_are_limited_by_pattern(model: str, status: int, provider: FakeProvider) -> None:
    async with running_proxy(f"http://127.0.0.1:{provider.port}", models=("claude-haiku-*", "x?")) as proxy:
        answer = await ask(proxy.port, request(json.dumps({"model": model}).encode()))
        assert answer.status == status
        if status == 403:
            assert answer.header(b"x-opificia-reason") == b"model_not_allowed"
            assert proxy.audit.lines[-1].event == "refuse"
        count = request(json.dumps({"model": model}).encode(), path="/model/s1/v1/messages/count_tokens")
        assert (await ask(proxy.port, count)).status == status
        assert (await ask(proxy.port, request(b"", method="GET", path="/model/s1/v1/models"))).status == 200


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"model":"fake-model","max_tokens":5}', 200),
        (b'{"model":"fake-model"}', 200),
        (b'{"model":"fake-model","max_tokens":5,"max_tokens":9}', 400),
        (b'{"model":"a","model":"fake-model"}', 400),
        (b'{"mod\\u0065l":"a","model":"fake-model"}', 400),
        (b'{"Model":"a","model":"fake-model"}', 400),
        (b'{"MODEL":"fake-model"}', 400),
        (b'{"model":"fake-model","Max_Tokens":5}', 400),
        (b'{"model":"fake-model","max_tokens":"5"}', 400),
        (b'{"model":"fake-model","max_tokens":-5}', 400),
        (b'{"model":"fake-model","max_tokens":1e400}', 400),
        (b'{"model":"fake-model","max_tokens":99999999999999999999}', 400),
        (b'{"model":["fake-model"]}', 400),
        (b'{"model":null}', 400),
        (b'\xef\xbb\xbf{"model":"fake-model"}', 400),
        ('{"model":"fake-model"}'.encode("utf-16"), 400),
        (b'{"model":"fake-model"} {}', 400),
        (b'{"model":"fake-model","a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400),
        (b'[{"model":"fake-model"}]', 400),
        (b"", 400),
    ],
)
async def test_under_a_budget_a_body_has_one_reading(body: bytes, status: int, provider: FakeProvider) -> None:
    async with running_proxy(f"http://127.0.0.1:{provider.port}", budget=ModelBudget(output_tokens=1000)) as proxy:
        answer = await ask(proxy.port, request(body))
        assert answer.status == status
        assert [each.body for each in provider.requests] == ([body] if status == 200 else [])


async def test_a_compressed_body_cannot_be_read_under_a_rule(provider: FakeProvider) -> None:
    compressed = request(headers=("Content-Encoding: gzip",))
    async with running_proxy(f"http://127.0.0.1:{provider.port}", models=("*",)) as proxy:
        assert (await ask(proxy.port, compressed)).status == 415
    assert provider.requests == []
    async with running_proxy(f"http://127.0.0.1:{provider.port}") as proxy:
        await ask(proxy.port, compressed)
    assert provider.requests[0].header("content-encoding") == "gzip"


READ_OTHERWISE = [
    ("Content-Type: application/json; charset=utf-7",),
    ('Content-Type: application/json;CHARSET="UTF-7"',),
    ("Content-Type: application/json; charset=utf-16",),
    ("Content-Type: application/json; charset=iso-8859-1",),
    ("Content-Type: application/json; charset='utf-8'",),
    ('Content-Type: application/json; charset="utf-8',),
    ("Content-Type: application/json; charset",),
    ("Content-Type: application/json; charset=",),
    ("Content-Type: application/json; charset=utf-8; charset=utf-7",),
    ("Content-Type: application/json; x=y; charset=utf-7",),
    ("Content-Type: application/json, text/plain; charset=utf-7",),
    ("Content-Type: application/json charset=utf-7",),
    ("Content-Type: application",),
    ("Content-Type:",),
    ("Content-Type: application/json", "Content-Type: application/json"),
    ("Content-Type: application/json", "content-type: application/json; charset=utf-7"),
    # What curl calls every body: a form.
    ("Content-Type: application/x-www-form-urlencoded",),
    ("Content-Type: multipart/form-data",),
    ("Content-Type: multipart/form-data; boundary=x",),
    ("Content-Type: text/plain",),
    ("Content-Type: text/json",),
    ("Content-Type: application/octet-stream",),
    ("Content-Type: application/jsonl",),
    ("Content-Type: application/+json",),
]


@pytest.mark.parametrize("rule", [{"models": ("*",)}, {"budget": ModelBudget(output_tokens=1000)}])
@pytest.mark.parametrize("headers", READ_OTHERWISE)
async def test_under_a_rule_a_body_of_another_type_or_charset_than_json_in_utf_8_is_refused(
    headers: tuple[str, ...], rule: dict[str, Any], provider: FakeProvider
) -> None:
    async with running_proxy(f"http://127.0.0.1:{provider.port}", **rule) as proxy:
        answer = await ask(proxy.port, request(headers=headers))
        assert answer.status == 415
        assert json.loads(answer.body)["type"] == "error"
        assert answer.header(b"x-should-retry") == b"false"
    assert provider.requests == []


async def test_without_a_rule_the_type_of_a_body_is_the_providers_business(provider: FakeProvider) -> None:
    async with running_proxy(f"http://127.0.0.1:{provider.port}") as proxy:
        for headers in READ_OTHERWISE:
            # This provider refuses two headers by itself.
            assert (await ask(proxy.port, request(headers=headers[:1]))).status == 200
    assert len(provider.requests) == len(READ_OTHERWISE)


@pytest.mark.parametrize(
    "kind",
    [
        "application/json",
        "application/json; charset=utf-8",
        "application/json;charset=UTF-8",
        'application/json ; charset="utf-8"',
        "Application/JSON; Charset=US-ASCII",
        "application/json; charset=utf8",
        "application/vnd.api+json",
    ],
)
async def test_under_a_rule_a_body_in_utf_8_is_read(kind: str, provider: FakeProvider) -> None:
    async with running_proxy(f"http://127.0.0.1:{provider.port}", models=("fake-*",)) as proxy:
        assert (await ask(proxy.port, request(headers=(f"Content-Type: {kind}",)))).status == 200
    assert provider.requests[0].header("content-type") == kind


@pytest.mark.parametrize("model", ["fake-no-usage", "fake-gzip"])
@pytest.mark.parametrize("stream", [True, False])
async def test_unreadable_usage_books_the_reservation(model: str, provider: FakeProvider, *, stream: bool) -> None:
    if model == "fake-gzip" and not stream:
        return
    budget = ModelBudget(input_tokens=10_000, output_tokens=10_000)
    async with running_proxy(f"http://127.0.0.1:{provider.port}", budget=budget) as proxy:
        body = json.dumps({"model": model, "max_tokens": 777, "stream": stream}).encode()
        assert (await ask(proxy.port, request(body))).status == 200
        await proxy.settled()
        assert (proxy.usage().input_tokens, proxy.usage().output_tokens) == (len(body), 777)


async def test_a_refusal_of_the_providers_books_nothing_and_returns_the_reservation(provider: FakeProvider) -> None:
    budget = ModelBudget(output_tokens=10)
    async with running_proxy(f"http://127.0.0.1:{provider.port}", budget=budget) as proxy:
        for _ in range(3):
            assert (await ask(proxy.port, request(b'{"model":"fake-429","max_tokens":10}'))).status == 429
            await proxy.settled()
        assert proxy.usage() == Usage(model_requests=3)


# What a model does unseen is billed all the same: Anthropic sends nothing of it but that it began, OpenAI not even that.
THINKING: dict[str, Any] = {
    "anthropic": (
        (
            b'data: {"type":"message_start","message":{"usage":{"input_tokens":9,"output_tokens":1}}}\n\n'
            b'data: {"type":"content_block_start","index":0,"content_block":{"type":"thinking","thinking":""}}\n\n'
        ),
        b'data: {"type":"message_delta","usage":{"output_tokens":700}}\n\n',
        "/model/s1/v1/messages",
        {"max_tokens": 4000, "stream": True},
    ),
    "openai": (
        b'data: {"type":"response.created","response":{"model":"m","usage":null}}\n\n',
        b'data: {"type":"response.completed","response":{"usage":{"input_tokens":9,"output_tokens":700}}}\n\n',
        "/model/s1/v1/responses",
        {"max_output_tokens": 4000, "stream": True},
    ),
}


@pytest.mark.parametrize("shape", ["anthropic", "openai"])
@pytest.mark.parametrize("is_told", [False, True])
async def test_to_leave_before_the_last_event_is_not_cheaper_than_to_stay(shape: ShapeName, *, is_told: bool) -> None:
    start, end, path, body = THINKING[shape]
    events = start + (end if is_told else b": ping\n\n")

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD + b"%x\r\n%b\r\n" % (len(events), events))
        await peer.gone()

    async with (
        scripted(handler) as upstream,
        running_proxy(upstream.url, shape=shape, budget=ModelBudget(output_tokens=5000)) as proxy,
    ):
        async with connected(proxy.port) as client:
            await client.send(request(json.dumps({"model": "m", **body}).encode(), path=path))
            await client.reader.readuntil(events)
        await proxy.settled()
        assert proxy.usage().output_tokens == (700 if is_told else 4000)


async def test_to_leave_before_the_first_byte_costs_the_reservation() -> None:
    async def silent(peer: Peer) -> None:
        await peer.request()
        await peer.gone()

    budget = ModelBudget(input_tokens=10_000, output_tokens=1000)
    async with scripted(silent) as upstream, running_proxy(upstream.url, budget=budget) as proxy:
        for count in (1, 2):
            async with connected(proxy.port) as client:
                await client.send(message(900))
                await until(lambda count=count: upstream.requests == count)  # type: ignore[misc]
            await proxy.settled()
            assert proxy.usage().output_tokens == count * 900
        assert_spent(await ask(proxy.port, message(900)))


async def test_to_leave_a_whole_reply_in_the_middle_costs_the_reservation() -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(b'HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{"usage":{"output_tokens":9},')
        await peer.gone()

    async with (
        scripted(handler) as upstream,
        running_proxy(upstream.url, budget=ModelBudget(output_tokens=1000)) as proxy,
    ):
        async with connected(proxy.port) as client:
            await client.send(message(900))
            await client.reader.readuntil(b"},")
        await proxy.settled()
        assert proxy.usage().output_tokens == 900


async def test_an_error_that_is_cut_costs_no_more_than_a_whole_one() -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 529 Overloaded\r\ncontent-length: 100\r\n\r\n{}")
        await peer.gone()

    budget = ModelBudget(input_tokens=1000, output_tokens=1000)
    async with scripted(handler) as upstream, running_proxy(upstream.url, budget=budget) as proxy:
        async with connected(proxy.port) as client:
            await client.send(message(900))
            await client.reader.readuntil(b"{}")
        await proxy.settled()
        assert proxy.usage() == Usage(model_requests=1)


@pytest.mark.parametrize("leaves", [True, False])
async def test_a_request_that_was_never_sent_costs_nothing(*, leaves: bool) -> None:
    limits = {} if leaves else {"model_connect_timeout_ms": 500}
    budget = ModelBudget(input_tokens=1000, output_tokens=1000)
    with bound(("127.0.0.1", 0)) as deaf:
        # Its TLS is never answered, so no connection is ever there.
        upstream = f"https://127.0.0.1:{deaf.getsockname()[1]}"
        async with running_proxy(upstream, budget=budget, limits=limits) as proxy, connected(proxy.port) as client:
            await client.send(message(900))
            if leaves:
                await until(lambda: proxy.usage().model_requests == 1)
                client.close()
            else:
                assert (await client.reply()).status == 504
            await proxy.settled()
            assert proxy.usage() == Usage(model_requests=1)


async def test_a_new_grant_changes_the_budget_of_a_running_session(provider: FakeProvider) -> None:
    async with running_proxy(f"http://127.0.0.1:{provider.port}", budget=ModelBudget(output_tokens=1)) as proxy:
        assert await in_order(proxy, message(), message()) == [200, 403]
        proxy.put(model_budget=ModelBudget(output_tokens=OUTPUT_TOKENS + 1))
        assert await in_order(proxy, message(), message()) == [200, 403]
        proxy.put()
        assert await in_order(proxy, message()) == [200]
