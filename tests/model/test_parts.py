"""The pure parts: any segmentation, any bytes, one result."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.contract.framing import encode
from gateway.contract.policy import ModelBudget, Usage
from gateway.core.chunked import MAX_CHUNKS, ChunkedError, ChunkedReader, encode_chunk
from gateway.core.headers import ReplyHead, passed_headers
from gateway.core.incomplete import INCOMPLETE
from gateway.core.model_body import BodyFacts, read_body
from gateway.core.model_budget import ModelAccount, Outcome, Reservation
from gateway.core.model_refusal import ModelRefusal, encode_refusal
from gateway.core.model_request import Opening, RequestReader, RequestRules, is_for_model
from gateway.core.providers import ANTHROPIC, OPENAI, SHAPES, BodyRule, ProviderSettings, parse_upstream
from gateway.core.redact import Redactor
from gateway.core.usage import MAX_JSON_BYTES, MAX_LINE_BYTES, MAX_TOKENS, JsonUsage, Kept, StreamUsage, TokenUsage
from gateway.core.verdict import DenyReason


def cuts(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[start:end] for start, end in itertools.pairwise(edges)]


PLACES = st.lists(st.integers(0, 100_000), max_size=20)


# --- chunked


@given(pieces=st.lists(st.binary(min_size=1, max_size=40)), after=st.binary(max_size=20), places=PLACES)
def test_a_chunked_body_is_read_the_same_however_it_is_cut(
    pieces: list[bytes], after: bytes, places: list[int]
) -> None:
    data = b"".join(encode_chunk(piece) for piece in pieces) + b"0\r\nX: y\r\n\r\n"
    reader, body, rest = ChunkedReader(), b"", b""
    for piece in cuts(data + after, places):
        more, used = reader.feed(piece)
        body += more
        rest += piece[used:]
        assert reader.announced >= len(body)
    assert reader.done
    assert body == b"".join(pieces)
    assert rest == after


@given(data=st.binary(max_size=200))
def test_random_bytes_raise_only_the_readers_own_error(data: bytes) -> None:
    reader = ChunkedReader()
    try:
        reader.feed(data)
    except ChunkedError:
        pass


def test_a_body_of_very_many_chunks_is_refused() -> None:
    reader = ChunkedReader()
    reader.feed(b"1\r\nx\r\n" * MAX_CHUNKS)
    with pytest.raises(ChunkedError, match="too many"):
        reader.feed(b"1\r\nx\r\n")


# --- request heads

RULES = RequestRules(names=frozenset({"gateway"}), default=ANTHROPIC, others={b"openai": OPENAI}, max_head_bytes=400)
LINES = st.sampled_from(
    [
        b"Host: x", b"host: y", b"x-api-key: t", b"x-api-key: u", b"Content-Length: 5", b"Content-Length: 17",
        b"content-length: 99", b"Content-Length: 0", b"Content-Length: +5", b"Content-Length: 5, 5", b"CONTENT-LENGTH: 5",
        b"Content-Length:  5", b"Transfer-Encoding: chunked", b"X-A: Content-Length: 5", b"Expect: 100-continue",
    ]
)  # fmt: skip
HEADS = st.builds(
    lambda line, lines, end: b"\r\n".join([line, *lines]) + end,
    st.sampled_from(
        [
            b"POST /model/s1/v1/messages HTTP/1.1",
            b"POST /model/s2/v1/messages HTTP/1.1",
            b"GET /model/s1/v1/models HTTP/1.1",
        ]
    ),
    st.lists(LINES, max_size=5),
    st.sampled_from([b"\r\n\r\n", b"\r\n\r\nbody", b"\r\n", b"\r\nContent-Length: 5\r\n\r\n"]),
)


@given(heads=st.lists(HEADS, max_size=12))
def test_what_is_remembered_of_one_head_never_changes_the_reading_of_the_next(heads: list[bytes]) -> None:
    remembering = RequestReader(RULES)
    for head in heads:
        assert remembering.read(head) == RequestReader(RULES).read(head)


@given(data=st.binary(max_size=100), head=HEADS)
def test_every_beginning_of_a_head_is_incomplete_or_refused_as_the_whole(data: bytes, head: bytes) -> None:
    assert RequestReader(RULES).read(data) is not None
    whole = RequestReader(RULES).read(head)
    if isinstance(whole, Opening):
        for size in range(whole.size):
            assert RequestReader(RULES).read(head[:size]) is INCOMPLETE


@given(
    data=st.binary(max_size=100),
    path=st.sampled_from([b"/model/s1/v1/messages", b"http://gateway/model/", b"HTTP://GATEWAY:80/model/x"]),
)
def test_whatever_follows_or_is_wrong_a_line_for_the_model_proxy_is_known_by_its_target(
    data: bytes, path: bytes
) -> None:
    names = RULES.names
    assert is_for_model(b"POST " + path + b" " + data, names)
    assert is_for_model(b"p  " + path + b"\r\n" + data, names)
    assert not is_for_model(b"POST /v1" + path + data, names)
    assert not is_for_model(b"POST http://other" + data, names)
    assert not is_for_model(b"POST\r\n" + path + data, names)
    assert is_for_model(data, names) in (True, False)


# --- redactor


@given(
    secret=st.text("ab-", min_size=1, max_size=8).map(str.encode),
    data=st.text("ab-\n", max_size=60).map(str.encode),
    places=PLACES,
)
def test_a_secret_never_passes_however_it_is_cut(secret: bytes, data: bytes, places: list[int]) -> None:
    redactor = Redactor(secret)
    out = b"".join(redactor.feed(piece) for piece in cuts(data, places)) + redactor.flush()
    assert secret not in out
    assert len(out) == len(data)
    assert out == data.replace(secret, b"*" * len(secret))


# --- usage

STREAM = (
    b'event: message_start\r\ndata: {"type":"message_start","message":{"model":"m-1","usage":{"input_tokens":5,'
    b'"cache_read_input_tokens":2,"output_tokens":1}}}\r\n\r\n'
    b'data: {"type":"content_block_delta","delta":{"text":"say \\"usage\\": {\\"output_tokens\\": 999}"}}\n\n'
    b'data: {"usage": "not an object"}\n\ndata: "usage"\n\ndata: {"usage": broken\n\n'
    b'data:{"type":"message_delta","usage":{"output_tokens":15}}\n\ndata: {"type":"message_stop"}\n\n'
)


@given(places=PLACES)
def test_a_stream_is_counted_the_same_however_it_is_cut(places: list[int]) -> None:
    reader = StreamUsage(Kept())
    for piece in cuts(STREAM, places):
        reader.feed(piece)
    reader.end()
    assert reader.usage == TokenUsage(5, 15, 2, 0)
    assert (reader.model, reader.final) == ("m-1", True)
    assert reader.ends_with((b"message_stop",))


@pytest.mark.parametrize(
    "end", [b'data: {"type":"message_stop"}\n\n', b'event: message_stop\r\ndata: {"type":"message_stop"}\r\n\r\n']
)
def test_no_beginning_of_a_stream_is_taken_for_the_whole(end: bytes) -> None:
    """Not when the marker of the end was read, nor when a text has it: a cut is told only by what is missing."""
    whole = b'data: {"type":"content_block_delta","delta":{"text":"message_stop"}}\n\n' + end
    for size in range(len(whole) + 1):
        for step in (1, 7, size):
            reader = StreamUsage(Kept())
            for start in range(0, size, max(1, step)):
                reader.feed(whole[start : min(size, start + step)])
            assert reader.ends_with((b"message_stop",)) == (size == len(whole)), (size, step)


@given(data=st.binary(max_size=300), places=PLACES)
def test_random_replies_never_raise_and_never_count_below_zero(data: bytes, places: list[int]) -> None:
    for reader in (StreamUsage(Kept()), JsonUsage(Kept())):
        for piece in cuts(b'data: {"usage":' + data, places):
            reader.feed(piece)
        reader.end()
        assert min(reader.usage.input_tokens, reader.usage.output_tokens, reader.usage.cache_read_tokens) >= 0


def test_negative_counts_refill_nothing() -> None:
    reader = JsonUsage(Kept())
    reader.feed(b'{"usage":{"input_tokens":-5,"output_tokens":-1,"cache_read_input_tokens":-9}}')
    reader.end()
    assert reader.usage == TokenUsage()


def test_absurd_counts_are_bounded_so_that_reports_and_records_can_hold_their_sum() -> None:
    reader, account = JsonUsage(Kept()), ModelAccount(ModelBudget(), Usage())
    reader.feed(b'{"usage":{"input_tokens":%b,"output_tokens":%b}}' % (b"9" * 30, b"9" * 4_000))
    reader.end()
    account.settle(None, reader.usage, Outcome.KNOWN)
    account.settle(None, reader.usage, Outcome.KNOWN)
    assert account.usage().output_tokens == 2 * MAX_TOKENS
    encode(account.usage())
    encode(account.parked())


def test_a_line_or_reply_without_end_is_not_kept_without_end() -> None:
    stream, whole = StreamUsage(Kept()), JsonUsage(Kept())
    for _ in range(MAX_JSON_BYTES // 65536 + 2):
        stream.feed(b"x" * 65536)
        whole.feed(b"x" * 65536)
    assert stream._size <= MAX_LINE_BYTES
    assert whole._held == []
    stream.feed(b'\ndata: {"usage":{"output_tokens":3}}\n')
    whole.end()
    assert stream.usage.output_tokens == 3
    assert not whole.final


def test_the_models_name_is_short_and_ascii_in_the_log() -> None:
    reader = JsonUsage(Kept())
    reader.feed(('{"model":"' + "\u2028\\n\u00e9" * 200 + '"}').encode())
    reader.end()
    assert reader.model.isascii()
    assert len(reader.model) < 1000


# --- heads


def test_a_header_named_by_connection_is_dropped_even_when_it_is_wanted_elsewhere() -> None:
    headers = [(b"connection", b"close, anthropic-beta"), (b"anthropic-beta", b"x"), (b"x-a", b"y")]
    assert passed_headers(headers) == b"x-a: y\r\n"


@pytest.mark.parametrize("line", [b"connection: content-length, transfer-encoding, X-A\r\n", b"Connection:X-A\r\n"])
def test_a_replys_framing_is_never_dropped(line: bytes) -> None:
    raw = b"HTTP/1.1 200 OK\r\n" + line + b"content-length: 5\r\nx-a: 1\r\n\r\n"
    assert ReplyHead(200, raw).for_client(close=False, chunked=False) == b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n"


_REPLY_LINES = (
    b"Connection: keep-alive", b"connection: Keep-Alive", b"Connection:keep-alive", b"Connection: close", b"Connection: X-Named",
    b"Connection: keep-alive, X-Named", b"X-Named: 1", b"Keep-Alive: timeout=5", b"Upgrade: h2c", b"Content-Length: 0", b"Date: now",
    b"X-Text: connection: keep-alive",
)  # fmt: skip


@given(st.lists(st.sampled_from(_REPLY_LINES), max_size=6))
def test_a_reply_goes_on_without_what_is_about_the_providers_connection_wherever_it_stands(lines: list[bytes]) -> None:
    raw = b"\r\n".join((b"HTTP/1.1 200 OK", *lines, b"", b""))
    named = any(b"X-Named" in line for line in lines if line.startswith(b"Connection"))
    dropped = (b"connection:", b"keep-alive:", b"upgrade:", *((b"x-named:",) if named else ()))
    kept = [line for line in lines if not line.lower().startswith(dropped)]
    passed = ReplyHead(200, raw).for_client(close=False, chunked=False)
    assert passed == b"\r\n".join((b"HTTP/1.1 200 OK", *kept, b"", b""))


def test_every_reason_has_a_shape_in_every_providers_language() -> None:
    for shape in SHAPES.values():
        for reason in DenyReason:
            data = encode_refusal(shape, ModelRefusal(reason, 'a "message"\r\nX-Evil: 1', 3), close=True)
            head, _, body = data.partition(b"\r\n\r\n")
            assert b"X-Evil" not in head
            assert f"content-length: {len(body)}".encode() in head


# --- bodies


@given(data=st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_random_bodies_are_read_or_refused(data: bytes) -> None:
    for shape in (ANTHROPIC, OPENAI):
        for route in shape.routes.values():
            if route.body is not None:
                assert isinstance(read_body(data, route.body, ("x",), limits_tokens=True), BodyFacts | ModelRefusal)


def test_two_caps_reserve_the_larger_one_and_choices_multiply_it() -> None:
    rule = BodyRule(output_caps=("a", "b"), choices="n")
    assert read_body(b'{"model":"m","a":5,"b":9,"n":3}', rule, (), limits_tokens=True) == BodyFacts("m", 27)
    assert read_body(b'{"model":"m","n":3}', rule, (), limits_tokens=True) == BodyFacts("m", None)
    assert read_body(b'{"model":"m","a":null,"b":4}', rule, (), limits_tokens=True) == BodyFacts("m", 4)


# --- budgets


def test_a_window_of_a_minute_slides() -> None:
    account = ModelAccount(ModelBudget(requests_per_minute=2), Usage())
    assert account.start(0.0, 9, metered=True) is None
    assert account.start(30.0, 9, metered=True) is None
    refusal = account.start(31.0, 9, metered=True)
    assert refusal is not None
    assert refusal.retry_after_s == 29
    assert account.start(60.0, 9, metered=True) is None
    assert account.start(60.5, 9, metered=True) is not None


def test_a_smaller_minute_counts_what_was_started_under_a_larger_one() -> None:
    account = ModelAccount(ModelBudget(requests_per_minute=5), Usage())
    for _ in range(5):
        assert account.start(0.0, 9, metered=True) is None
    account.update(ModelBudget(requests_per_minute=2), Usage())
    refusal = account.start(1.0, 9, metered=True)
    assert refusal is not None
    assert refusal.retry_after_s == 59


@given(
    asks=st.lists(st.tuples(st.integers(0, 50), st.none() | st.integers(0, 50), st.integers(0, 50), st.booleans())),
    limit=st.integers(1, 200),
)
def test_a_budget_is_passed_by_no_more_than_one_reservation(
    asks: list[tuple[int, int | None, int, bool]], limit: int
) -> None:
    account = ModelAccount(ModelBudget(input_tokens=limit, output_tokens=limit), Usage())
    open_reservations: list[tuple[Reservation, int]] = []
    largest = 0
    for input_tokens, output_tokens, used, ends in asks:
        reservation = account.reserve(input_tokens, output_tokens)
        if isinstance(reservation, Reservation):
            largest = max(largest, reservation.input_tokens, reservation.output_tokens)
            open_reservations.append((reservation, used))
        if ends and open_reservations:
            reservation, used = open_reservations.pop(0)
            spent = TokenUsage(min(used, reservation.input_tokens), min(used, reservation.output_tokens))
            account.settle(reservation, spent, Outcome.KNOWN)
    for reservation, _ in open_reservations:
        account.settle(reservation, TokenUsage(), Outcome.UNREADABLE)
    assert account.usage().input_tokens <= limit + largest
    assert account.usage().output_tokens <= limit + largest
    assert account._reserved_input == account._reserved_output == 0


@pytest.mark.parametrize(
    ("outcome", "cap", "said", "relayed_bytes", "seconds", "booked"),
    [
        # Before the end was told: all that the request allowed, however little came, and whatever was said at the start.
        (Outcome.CUT, 900, 0, 0, 0.0, 900),
        (Outcome.CUT, 900, 0, 1600, 1.0, 900),
        (Outcome.CUT, 900, 1, 1600, 60.0, 900),
        (Outcome.CUT, 900, 950, 1600, 60.0, 950),
        # No limit in the request: by the time or by the bytes, and never more than was left.
        (Outcome.CUT, None, 0, 0, 3.0, 300),
        (Outcome.CUT, None, 1, 0, 3.0, 300),
        (Outcome.CUT, None, 0, 8000, 3.0, 500),
        (Outcome.CUT, None, 0, 0, 3600.0, 1000),
        # Told: what was said or what the bytes say, whichever is more.
        (Outcome.CUT_LATE, 900, 1, 1600, 60.0, 100),
        (Outcome.CUT_LATE, 900, 200, 1600, 60.0, 200),
        (Outcome.CUT_LATE, None, 1, 1600, 60.0, 100),
    ],
)
def test_what_a_cut_request_made_is_told_by_the_provider_or_assumed(
    outcome: Outcome, cap: int | None, said: int, relayed_bytes: int, seconds: float, booked: int
) -> None:
    account = ModelAccount(ModelBudget(input_tokens=500, output_tokens=1000), Usage())
    reservation = account.reserve(50, cap)
    assert isinstance(reservation, Reservation)
    account.settle(reservation, TokenUsage(output_tokens=said), outcome, relayed_bytes=relayed_bytes, seconds=seconds)
    assert account.usage() == Usage(input_tokens=50, output_tokens=booked)
    assert account._reserved_input == account._reserved_output == 0


# --- settings


@pytest.mark.parametrize(
    "url",
    ["ftp://x", "https://", "https://user:pw@host", "https://host?x=1", "https://host/#a", "https://host/v1",
     "https://host/a b", "https://host:99999", "https://ho\nst", "//host", "https://[::1"],
)  # fmt: skip
def test_an_upstream_that_is_no_plain_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_upstream(url)


def test_an_upstream_url_is_read() -> None:
    url = parse_upstream("https://[2001:db8::1]:8443/base/")
    assert (url.host, url.port, url.base_path, url.host_header) == (
        "2001:db8::1",
        8443,
        b"/base",
        b"[2001:db8::1]:8443",
    )
    assert parse_upstream("https://api.example.com").host_header == b"api.example.com"


@pytest.mark.parametrize("name", ["", "v1", "Open", "a/b", "x" * 33])
def test_a_provider_has_a_name_that_fits_a_path(name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        ProviderSettings(name=name, upstream="https://x")
