"""A model request's head and body, a reply's head, and the events that pass by."""

import json

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.micro.samples import MODEL
from gateway.contract.policy import ModelBudget, Usage
from gateway.core.chunked import ChunkedReader
from gateway.core.head import Head, parse_head
from gateway.core.headers import ReplyHead, passed_headers
from gateway.core.model_body import BodyFacts, read_body
from gateway.core.model_budget import ModelAccount, Outcome, Reservation
from gateway.core.model_request import Opening, RequestReader, RequestRules
from gateway.core.providers import ANTHROPIC
from gateway.core.redact import Redactor
from gateway.core.usage import JsonUsage, Kept, StreamUsage, TokenUsage

_REPLY_HEAD = (
    b"HTTP/1.1 200 OK\r\nDate: Mon, 01 Jun 2026 00:00:00 GMT\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    b"Transfer-Encoding: chunked\r\nConnection: keep-alive\r\nCache-Control: no-cache\r\nrequest-id: req_0123456789\r\n"
    b"anthropic-ratelimit-requests-limit: 4000\r\nanthropic-ratelimit-requests-remaining: 3999\r\n\r\n"
)
_DELTA = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"word"}}\n\n'
_FINAL = (
    b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn","stop_sequence":null},'
    b'"usage":{"input_tokens":25000,"cache_read_input_tokens":20000,"cache_creation_input_tokens":100,"output_tokens":512}}\n\n'
)
_BODY = json.dumps(
    {
        "model": "claude-sonnet-4-5",
        "max_tokens": 32000,
        "stream": True,
        "system": "s" * 15_000,
        "messages": [{"role": "user", "content": "word " * 20_000}],
    }
).encode()

_RULES = RequestRules(names=frozenset({"opificia-gateway"}), default=ANTHROPIC, others={}, max_head_bytes=16384)


def test_read_the_head_of_a_request(benchmark: BenchmarkFixture) -> None:
    opening = benchmark(lambda: RequestReader(_RULES).read(MODEL))
    assert isinstance(opening, Opening)
    assert opening.request.destination.session_id == "a-session-0123"


def test_read_the_head_of_a_request_again(benchmark: BenchmarkFixture) -> None:
    reader = RequestReader(_RULES)
    first = reader.read(MODEL)
    assert isinstance(first, Opening)
    assert benchmark(reader.read, MODEL).request is first.request


def test_pass_on_the_headers_of_a_request(benchmark: BenchmarkFixture) -> None:
    head = parse_head(MODEL)
    assert isinstance(head, Head)
    assert b"authorization" not in benchmark(passed_headers, head.headers)


def test_read_a_large_body(benchmark: BenchmarkFixture) -> None:
    rule = ANTHROPIC.routes[b"/v1/messages"].body
    assert rule is not None
    facts = benchmark(lambda: read_body(_BODY, rule, ("claude-*",), limits_tokens=True))
    assert facts == BodyFacts("claude-sonnet-4-5", 32000)


def test_pass_on_the_head_of_a_reply(benchmark: BenchmarkFixture) -> None:
    def pass_on() -> bytes:
        head = ReplyHead(200, _REPLY_HEAD)
        assert head.is_delimited
        assert head.is_event_stream
        assert not head.is_encoded
        return head.for_client(close=False, chunked=False)

    assert benchmark(pass_on).startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize("piece", [_DELTA, _DELTA * 8, _DELTA[:60]], ids=["an-event", "eight-events", "half-an-event"])
def test_scan_events_without_usage(benchmark: BenchmarkFixture, piece: bytes) -> None:
    reader = StreamUsage(Kept())

    def scan() -> None:
        reader.feed(piece)
        reader.feed(b"\n")

    benchmark(scan)
    assert not reader.final


def test_scan_an_event_with_usage(benchmark: BenchmarkFixture) -> None:
    reader = StreamUsage(Kept())
    benchmark(reader.feed, _FINAL)
    assert reader.final
    assert reader.usage == TokenUsage(25000, 512, 20000, 100)


def test_read_the_usage_of_a_whole_reply(benchmark: BenchmarkFixture) -> None:
    reply = json.dumps(
        {"model": "m", "content": [{"text": "t" * 4000}], "usage": {"input_tokens": 3, "output_tokens": 4}}
    ).encode()

    def read() -> TokenUsage:
        reader = JsonUsage(Kept())
        reader.feed(reply)
        reader.end()
        return reader.usage

    assert benchmark(read) == TokenUsage(3, 4)


def test_redact_an_event(benchmark: BenchmarkFixture) -> None:
    redactor = Redactor(b"sk-ant-" + b"k" * 90)
    assert benchmark(redactor.feed, _DELTA) == _DELTA


def test_read_a_chunk(benchmark: BenchmarkFixture) -> None:
    chunk = b"%x\r\n%b\r\n" % (len(_DELTA), _DELTA)

    def read() -> bytes:
        return ChunkedReader().feed(chunk)[0]

    assert benchmark(read) == _DELTA


def test_account_for_a_request(benchmark: BenchmarkFixture) -> None:
    account = ModelAccount(ModelBudget(requests_per_minute=0, input_tokens=10**15, output_tokens=10**15), Usage())

    def use() -> None:
        assert account.start(0.0, 64, metered=True) is None
        reservation = account.reserve(25_000, 32_000)
        assert isinstance(reservation, Reservation)
        account.settle(reservation, TokenUsage(25_000, 512), Outcome.KNOWN, relayed_bytes=4000, seconds=1.0)
        account.finish()

    benchmark(use)
    assert account.in_flight == 0
