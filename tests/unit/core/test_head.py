"""Request heads: what is read, what is refused, and how early."""

import pytest

from gateway.core.head import (
    MAX_HEADERS,
    Chunked,
    ContentLength,
    Head,
    HeadError,
    NoBody,
    body_framing,
    parse_head,
)
from gateway.core.incomplete import INCOMPLETE
from gateway.core.verdict import DenyReason

CONNECT = (
    b"CONNECT registry.example.com:443 HTTP/1.1\r\n"
    b"Host: registry.example.com:443\r\n"
    b"Proxy-Authorization:\tBasic czE6dG9rZW4= \r\n"
    b"User-Agent: npm/10 node/v20 (x, y)\r\n"
    b"\r\n"
)


def parsed(data: bytes) -> Head:
    head = parse_head(data)
    assert isinstance(head, Head)
    return head


def refused(data: bytes, max_bytes: int = 16384) -> HeadError:
    with pytest.raises(HeadError) as caught:
        parse_head(data, max_bytes)
    return caught.value


def test_reads_a_connect_head() -> None:
    head = parsed(CONNECT)
    assert head == Head(
        method=b"CONNECT",
        target=b"registry.example.com:443",
        minor_version=1,
        headers=(
            (b"host", b"registry.example.com:443"),
            (b"proxy-authorization", b"Basic czE6dG9rZW4="),
            (b"user-agent", b"npm/10 node/v20 (x, y)"),
        ),
        size=len(CONNECT),
    )


def test_leaves_what_follows_the_head_alone() -> None:
    early = b"\x16\x03\x01\x00\x05hello\r\n\r\n"
    assert parsed(CONNECT + early) == parsed(CONNECT)
    assert (CONNECT + early)[parsed(CONNECT + early).size :] == early


def test_reads_a_bytearray_into_bytes() -> None:
    head = parse_head(bytearray(CONNECT))
    assert head == parsed(CONNECT)
    assert isinstance(head, Head)
    assert type(head.target) is bytes
    assert all(type(part) is bytes for header in head.headers for part in header)


def test_reads_a_head_without_headers() -> None:
    assert parsed(b"GET http://example.com/ HTTP/1.0\r\n\r\n").minor_version == 0


@pytest.mark.parametrize(
    ("line", "value"),
    [
        (b"X:", b""),
        (b"X:  ", b""),
        (b"X:a", b"a"),
        (b"X: \t a \t ", b"a"),
        (b"X: a: b", b"a: b"),
        (b"X: caf\xc3\xa9 \xff", b"caf\xc3\xa9 \xff"),
        (b"X: a\tb", b"a\tb"),
    ],
)
def test_strips_blanks_around_a_value_and_nothing_else(line: bytes, value: bytes) -> None:
    assert parsed(b"GET / HTTP/1.1\r\n" + line + b"\r\n\r\n").headers == ((b"x", value),)


def test_keeps_international_names_for_the_authority_parser() -> None:
    target = "bücher.example:443".encode()
    assert parsed(b"CONNECT " + target + b" HTTP/1.1\r\n\r\n").target == target


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"GET  / HTTP/1.1\r\n\r\n", "request line"),
        (b"GET / HTTP/1.1 \r\n\r\n", "request line"),
        (b"GET /\r\n\r\n", "request line"),
        (b"GET / a HTTP/1.1\r\n\r\n", "request line"),
        (b"GET\t/ HTTP/1.1\r\n\r\n", "method"),
        (b" GET / HTTP/1.1\r\n\r\n", "method"),
        (b"\r\nGET / HTTP/1.1\r\n\r\n", "method"),
        (b"G(T / HTTP/1.1\r\n\r\n", "method"),
        (b"A" * 33 + b" / HTTP/1.1\r\n\r\n", "method"),
        (b"GET / HTTP/2.0\r\n\r\n", "HTTP/1.0 and HTTP/1.1"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "HTTP/1.0 and HTTP/1.1"),
        (b"GET / HTTP/0.9\r\n\r\n", "HTTP/1.0 and HTTP/1.1"),
        (b"GET / HTTP/1.2\r\n\r\n", "HTTP/1.0 and HTTP/1.1"),
        (b"GET / http/1.1\r\n\r\n", "request line"),
        (b"GET / HTTP/1.01\r\n\r\n", "HTTP/1.0 and HTTP/1.1"),
        (b"GET /\x00 HTTP/1.1\r\n\r\n", "request line"),
        (b"GET /\x7f HTTP/1.1\r\n\r\n", "request line"),
        (b"GET /a\rb HTTP/1.1\r\n\r\n", "request line"),
        (b"GET / HTTP/1.1\r\nHost : a\r\n\r\n", "header name"),
        (b"GET / HTTP/1.1\r\nHo st: a\r\n\r\n", "header name"),
        (b"GET / HTTP/1.1\r\n: a\r\n\r\n", "header name"),
        (b"GET / HTTP/1.1\r\nHost\r\n\r\n", "header name"),
        (b"GET / HTTP/1.1\r\nH\xc3\xb6st: a\r\n\r\n", "header name"),
        (b"GET / HTTP/1.1\r\nHost: a\r\n b\r\n\r\n", "folded"),
        (b"GET / HTTP/1.1\r\n Host: a\r\n\r\n", "folded"),
        (b"GET / HTTP/1.1\r\n\tHost: a\r\n\r\n", "folded"),
        (b"GET / HTTP/1.1\r\nHost: a\x00b\r\n\r\n", "control character"),
        (b"GET / HTTP/1.1\r\nHost: a\rX: b\r\n\r\n", "control character"),
        (b"GET / HTTP/1.1\r\nHost: a\x0bb\r\n\r\n", "control character"),
        (b"GET / HTTP/1.1\r\nHost: a\x7f\r\n\r\n", "control character"),
        (b"GET / HTTP/1.1\nHost: a\r\n\r\n", "request line"),
        (b"GET / HTTP/1.1\r\nHost: a\nX: b\r\n\r\n", "control character"),
    ],
)
def test_refuses_what_two_readers_may_take_differently(data: bytes, why: str) -> None:
    error = refused(data)
    assert (error.status, error.reason) == (400, DenyReason.MALFORMED_REQUEST)
    assert why in error.message
    assert error.message == str(error)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\x16", "TLS"),
        (b"\x16\x03\x01\x02", "TLS"),
        (b"\x05\x01\x00", "SOCKS"),
        (b"\x04\x01\x00\x50", "SOCKS"),
        (b"\x00", "method"),
        (b"\r", "method"),
        (b"\xff", "method"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "method"),
        (b"EHLO mail.example.com\r\n", "request line"),
        (b"A" * 33, "method"),
        (b"GET / HTTP/1.1\n", "newline"),
        (b"GET / HTTP/1.1\r\nHost: a\n", "newline"),
        (b"GET / HTTP/2.0\r\n", "HTTP/1.0 and HTTP/1.1"),
    ],
)
def test_refuses_at_once_what_no_further_byte_can_mend(data: bytes, why: str) -> None:
    assert why in refused(data).message


def test_a_head_that_is_not_whole_is_incomplete() -> None:
    assert parse_head(b"") is INCOMPLETE
    assert parse_head(b"CON") is INCOMPLETE
    assert parse_head(CONNECT[:-1]) is INCOMPLETE
    assert parse_head(b"GET / HTTP/1.1\r") is INCOMPLETE


def test_refuses_a_head_of_64_kib() -> None:
    error = refused(b"GET / HTTP/1.1\r\nX: " + b"a" * 65536)
    assert (error.status, error.reason) == (431, DenyReason.HEAD_TOO_LARGE)


def test_refuses_a_head_that_has_filled_the_limit_and_not_ended() -> None:
    assert parse_head(b"GET /" + b"a" * 94, 100) is INCOMPLETE
    assert refused(b"GET /" + b"a" * 95, 100).status == 431


def test_the_limit_counts_the_whole_head_and_nothing_after_it() -> None:
    assert parse_head(CONNECT + b"x" * 100, len(CONNECT)) == parsed(CONNECT)
    assert refused(CONNECT, len(CONNECT) - 1).status == 431
    assert parse_head(CONNECT[:-1], len(CONNECT)) is INCOMPLETE


def test_refuses_more_header_lines_than_any_client_sends() -> None:
    lines = b"".join(b"a%d: b\r\n" % number for number in range(MAX_HEADERS))
    assert len(parsed(b"GET / HTTP/1.1\r\n" + lines + b"\r\n").headers) == MAX_HEADERS
    assert refused(b"GET / HTTP/1.1\r\n" + lines + b"one: more\r\n\r\n").status == 431


def test_returns_the_only_value_of_a_header() -> None:
    head = parsed(b"GET / HTTP/1.1\r\nHost: a\r\nX: 1\r\nhost: a\r\nx: 2\r\n\r\n")
    assert head.get(b"host") == b"a"
    assert head.get(b"accept") is None
    assert head.get_all(b"x") == [b"1", b"2"]
    assert head.get_all(b"accept") == []


def test_refuses_a_header_with_two_different_values() -> None:
    head = parsed(b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n")
    with pytest.raises(HeadError, match="host is given twice") as caught:
        head.get(b"host")
    assert caught.value.status == 400


def framing(*headers: bytes, version: bytes = b"1.1") -> NoBody | ContentLength | Chunked:
    lines = b"".join(header + b"\r\n" for header in headers)
    return body_framing(parsed(b"POST / HTTP/" + version + b"\r\n" + lines + b"\r\n"))


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ((), NoBody()),
        ((b"Content-Length: 0",), ContentLength(0)),
        ((b"Content-Length: 33554432",), ContentLength(33554432)),
        ((b"Transfer-Encoding: chunked",), Chunked()),
        ((b"transfer-encoding: CHUNKED",), Chunked()),
    ],
)
def test_reads_how_a_body_is_framed(headers: tuple[bytes, ...], expected: NoBody | ContentLength | Chunked) -> None:
    assert framing(*headers) == expected


@pytest.mark.parametrize(
    "headers",
    [
        (b"Content-Length: 5", b"Transfer-Encoding: chunked"),
        (b"Transfer-Encoding: chunked", b"Content-Length: 5"),
        (b"Content-Length: 5", b"Content-Length: 5"),
        (b"Content-Length: 5", b"Content-Length: 6"),
        (b"Content-Length: 5, 5",),
        (b"Content-Length: +10",),
        (b"Content-Length: -1",),
        (b"Content-Length: 0x10",),
        (b"Content-Length: 010",),
        (b"Content-Length: 1_0",),
        (b"Content-Length: 1 0",),
        (b"Content-Length: \xd9\xa1",),
        (b"Content-Length:",),
        (b"Content-Length: 9999999999999999999",),
        (b"Transfer-Encoding: gzip, chunked",),
        (b"Transfer-Encoding: chunked, chunked",),
        (b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked"),
        (b"Transfer-Encoding: identity",),
        (b"Transfer-Encoding: xchunked",),
        (b"Transfer-Encoding: chunked;q=1",),
        (b"Transfer-Encoding:",),
        (b"Transfer-Encoding: \x0c",),
    ],
)
def test_refuses_framing_that_smuggles(headers: tuple[bytes, ...]) -> None:
    with pytest.raises(HeadError) as caught:
        framing(*headers)
    assert (caught.value.status, caught.value.reason) == (400, DenyReason.MALFORMED_REQUEST)


def test_refuses_chunks_in_http_1_0() -> None:
    with pytest.raises(HeadError, match=r"HTTP/1\.0"):
        framing(b"Transfer-Encoding: chunked", version=b"1.0")
