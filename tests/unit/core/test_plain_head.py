"""Plain-HTTP heads: what is understood of a request and a response, and what is passed on of each."""

import pytest

from gateway.core.authority import Authority, parse_authority
from gateway.core.head import Chunked, ContentLength, Head, HeadError, NoBody, parse_head
from gateway.core.incomplete import INCOMPLETE
from gateway.core.plain_head import (
    PlainRequest,
    ResponseError,
    ResponseHead,
    UntilClose,
    parse_response_head,
    read_request,
    response_bytes,
    response_framing,
)
from gateway.core.verdict import DenyReason

TUNNEL = parse_authority(b"a.example:80")


def parsed(*lines: str) -> Head:
    head = parse_head("\r\n".join([*lines, "", ""]).encode("latin-1"))
    assert isinstance(head, Head)
    return head


def request(*lines: str, tunnel: Authority | None = None) -> PlainRequest:
    return read_request(parsed(*lines), tunnel)


def get(method: str = "GET", version: str = "1.1") -> PlainRequest:
    return request(f"{method} http://a.example/ HTTP/{version}", "Host: a.example")


def response(*lines: str) -> ResponseHead:
    head = parse_response_head("\r\n".join([*lines, "", ""]).encode("latin-1"))
    assert isinstance(head, ResponseHead)
    return head


# -- requests


def test_an_absolute_target_becomes_an_origin_target_with_the_same_host() -> None:
    read = request("GET http://A.example:80/p?q=1 HTTP/1.1", "Host: a.EXAMPLE")
    assert read.authority == Authority("a.example", 80)
    assert read.head == b"GET /p?q=1 HTTP/1.1\r\nHost: a.example\r\n\r\n"


def test_an_empty_path_becomes_a_slash_and_another_port_stays() -> None:
    assert request("GET http://a.example:8080 HTTP/1.1", "Host: a.example:8080").head == (
        b"GET / HTTP/1.1\r\nHost: a.example:8080\r\n\r\n"
    )


def test_an_ipv6_literal_keeps_its_brackets() -> None:
    assert (
        b"\r\nHost: [2001:db8::1]\r\n" in request("GET http://[2001:DB8::1]/ HTTP/1.1", "Host: [2001:db8::1]:80").head
    )


def test_headers_of_this_hop_are_dropped_and_the_rest_passed_on() -> None:
    read = request(
        "GET http://a.example/ HTTP/1.1",
        "Host: a.example",
        "Proxy-Authorization: Basic c2VjcmV0",
        "Proxy-Connection: keep-alive",
        "Proxy-Odd: 1",
        "Connection: keep-alive, X-Private , upgrade",
        "Keep-Alive: timeout=5",
        "X-Private: 1",
        "TE: trailers",
        "Trailer: X",
        "Upgrade: h2c",
        "HTTP2-Settings: AAMAAABkAAQAAP__",
        "Accept: */*",
        "Authorization: Bearer mine",
        "Expect: 100-continue",
    )
    assert read.head == (
        b"GET / HTTP/1.1\r\nHost: a.example\r\nAccept: */*\r\nAuthorization: Bearer mine\r\nExpect: 100-continue\r\n\r\n"
    )


def test_connection_cannot_name_away_host_or_framing() -> None:
    read = request(
        "POST http://a.example/ HTTP/1.1",
        "Host: a.example",
        "Connection: host, content-length",
        "Content-Length: 3",
    )
    assert read.head == b"POST / HTTP/1.1\r\nHost: a.example\r\nContent-Length: 3\r\n\r\n"
    assert read.framing == ContentLength(3)


def test_a_chunked_body_is_announced_as_exactly_that() -> None:
    read = request("POST http://a.example/ HTTP/1.1", "Host: a.example", "Transfer-Encoding: CHUNKED")
    assert read.framing == Chunked()
    assert read.head.endswith(b"\r\nTransfer-Encoding: chunked\r\n\r\n")


@pytest.mark.parametrize(
    "lines",
    [
        ("Content-Length: 3", "Transfer-Encoding: chunked"),
        ("Content-Length: 3", "Content-Length: 3"),
        ("Content-Length: 3", "Content-Length: 4"),
        ("Content-Length: 3, 3",),
        ("Content-Length: +3",),
        ("Content-Length: 0x3",),
        ("Content-Length: -1",),
        ("Content-Length:",),
        ("Transfer-Encoding: gzip, chunked",),
        ("Transfer-Encoding: chunked, chunked",),
        ("Transfer-Encoding: xchunked",),
        ("Transfer-Encoding: chunked", "Transfer-Encoding: identity"),
        ("Transfer-Encoding: \x0bchunked",),
    ],
)
def test_a_body_that_two_readers_could_measure_differently_is_refused(lines: tuple[str, ...]) -> None:
    with pytest.raises(HeadError) as refused:
        request("POST http://a.example/ HTTP/1.1", "Host: a.example", *lines)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("target", "hosts"),
    [
        ("http://a.example/", ["b.example"]),
        ("http://a.example/", ["a.example:81"]),
        ("http://a.example:81/", ["a.example"]),
        ("http://a.example/", ["a.example", "b.example"]),
        ("http://a.example/", ["a.example", "a.example"]),
        ("http://a.example/", []),
        ("http://a.example/", [""]),
        ("http://a.example@b.example/", ["b.example"]),
        ("http://a.example\\@b.example/", ["a.example"]),
        ("http://a.example/#@b.example", ["a.example"]),
        ("https://a.example/", ["a.example"]),
        ("ftp://a.example/", ["a.example"]),
        ("http:///", [""]),
        ("http:a.example", ["a.example"]),
        ("/", ["a.example"]),
        ("*", ["a.example"]),
        ("a.example:80", ["a.example"]),
        ("http://127.1/", ["127.1"]),
        ("http://a.example:+80/", ["a.example"]),
        ("http://[a.example]/", ["a.example"]),
    ],
)
def test_a_proxy_request_names_exactly_one_host(target: str, hosts: list[str]) -> None:
    with pytest.raises(HeadError) as refused:
        request(f"GET {target} HTTP/1.1", *(f"Host: {host}" for host in hosts))
    assert (refused.value.status, refused.value.reason) == (400, DenyReason.MALFORMED_AUTHORITY)


def test_a_request_in_a_tunnel_is_for_the_tunnels_host() -> None:
    read = request("GET /p HTTP/1.1", "Host: A.example", tunnel=TUNNEL)
    assert (read.authority, read.head) == (TUNNEL, b"GET /p HTTP/1.1\r\nHost: a.example\r\n\r\n")
    absolute = request("GET http://a.example/p HTTP/1.1", "Host: a.example", tunnel=TUNNEL)
    assert absolute.head == read.head
    assert request("OPTIONS * HTTP/1.1", "Host: a.example", tunnel=TUNNEL).head.startswith(b"OPTIONS * HTTP/1.1\r\n")


@pytest.mark.parametrize(
    ("target", "host"),
    [
        ("/", "b.example"),
        ("/", "a.example:8080"),
        ("http://b.example/", "b.example"),
        ("http://b.example/", "a.example"),
        ("http://a.example/", "b.example"),
        ("/#b", "a.example"),
        ("b.example:80", "a.example"),
    ],
)
def test_a_request_in_a_tunnel_for_another_host_is_refused(target: str, host: str) -> None:
    with pytest.raises(HeadError) as refused:
        request(f"GET {target} HTTP/1.1", f"Host: {host}", tunnel=TUNNEL)
    assert (refused.value.status, refused.value.reason) == (400, DenyReason.MALFORMED_AUTHORITY)


@pytest.mark.parametrize("tunnel", [None, TUNNEL])
def test_a_connect_is_no_plain_request(tunnel: Authority | None) -> None:
    with pytest.raises(HeadError) as refused:
        request("CONNECT a.example:80 HTTP/1.1", "Host: a.example:80", tunnel=tunnel)
    assert refused.value.reason == DenyReason.MALFORMED_REQUEST


def test_http_1_0_is_passed_on_as_itself_and_ends_the_connection() -> None:
    read = request("GET http://a.example/ HTTP/1.0", "Connection: keep-alive")
    assert read.head == b"GET / HTTP/1.0\r\nHost: a.example\r\nConnection: close\r\n\r\n"
    assert read.is_http_1_0
    assert not read.keep_alive


def test_a_client_that_says_close_gets_one_answer() -> None:
    assert get().keep_alive
    assert not request("GET http://a.example/ HTTP/1.1", "Host: a.example", "Connection: Close").keep_alive


def test_only_a_request_that_changes_nothing_may_be_sent_again() -> None:
    assert get().is_repeatable
    assert get("HEAD").is_repeatable
    assert not get("POST").is_repeatable
    assert not get("DELETE").is_repeatable
    assert not request("GET http://a.example/ HTTP/1.1", "Host: a.example", "Content-Length: 1").is_repeatable


# -- responses


def test_every_strict_prefix_of_a_response_head_is_incomplete() -> None:
    whole = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n"
    for size in range(len(whole)):
        assert parse_response_head(whole[:size]) is INCOMPLETE
    head = parse_response_head(bytearray(whole + b"abc"))
    assert head == ResponseHead(1, 200, b"OK", ((b"Content-Length", b"3"),), len(whole))


@pytest.mark.parametrize("line", ["HTTP/1.1 200", "HTTP/1.1 200 ", "HTTP/1.0 404 Not Found", "HTTP/1.1 299 \xe9"])
def test_a_status_line_may_do_without_a_phrase(line: str) -> None:
    assert response(line).headers == ()


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"\x16\x03",
        b"\r\nHTTP/1.1 200 OK\r\n\r\n",
        b"ICY 200 OK\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.2 200 OK\r\n\r\n",
        b"HTTP/1.1 20 OK\r\n\r\n",
        b"HTTP/1.1 000 OK\r\n\r\n",
        b"HTTP/1.1  200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\nContent-Length: 3\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: 1\n\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: 1\r\n folded\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length : 3\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n: 3\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: \x00\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: b\rSet-Cookie: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: " + b"x" * 65536,
    ],
)
def test_what_is_no_response_is_refused(data: bytes) -> None:
    with pytest.raises(ResponseError):
        parse_response_head(data)


@pytest.mark.parametrize(
    ("asked", "lines", "framing"),
    [
        (get(), ["HTTP/1.1 200 OK", "Content-Length: 3"], ContentLength(3)),
        (get(), ["HTTP/1.1 200 OK", "Content-Length: 03"], ContentLength(3)),
        (get(), ["HTTP/1.1 200 OK", "Transfer-Encoding: Chunked"], Chunked()),
        (get(), ["HTTP/1.1 200 OK"], UntilClose()),
        (get(), ["HTTP/1.0 200 OK"], UntilClose()),
        (get(), ["HTTP/1.1 204 No Content", "Content-Length: 5"], NoBody()),
        (get(), ["HTTP/1.1 304 Not Modified", "Content-Length: 5"], NoBody()),
        (get(), ["HTTP/1.1 304 Not Modified", "Transfer-Encoding: chunked"], NoBody()),
        (get(), ["HTTP/1.1 100 Continue"], NoBody()),
        (get("HEAD"), ["HTTP/1.1 200 OK", "Content-Length: 5"], NoBody()),
        (get("HEAD"), ["HTTP/1.1 200 OK"], NoBody()),
        (get(version="1.0"), ["HTTP/1.1 200 OK", "Content-Length: 5"], ContentLength(5)),
    ],
)
def test_finds_where_a_response_ends(asked: PlainRequest, lines: list[str], framing: object) -> None:
    assert response_framing(response(*lines), asked) == framing


@pytest.mark.parametrize(
    ("asked", "lines"),
    [
        (get(), ["HTTP/1.1 200 OK", "Content-Length: 3", "Transfer-Encoding: chunked"]),
        (get("HEAD"), ["HTTP/1.1 200 OK", "Content-Length: 3", "Transfer-Encoding: chunked"]),
        (get(), ["HTTP/1.1 200 OK", "Content-Length: 3", "Content-Length: 3"]),
        (get(), ["HTTP/1.1 200 OK", "Content-Length: 3, 3"]),
        (get(), ["HTTP/1.1 200 OK", "Content-Length: +3"]),
        (get(), ["HTTP/1.1 200 OK", "Content-Length:"]),
        (get(), ["HTTP/1.1 200 OK", "Content-Length: 9999999999999999999"]),
        (get(), ["HTTP/1.1 200 OK", "Transfer-Encoding: gzip, chunked"]),
        (get(), ["HTTP/1.1 200 OK", "Transfer-Encoding: identity"]),
        (get(), ["HTTP/1.1 200 OK", "Transfer-Encoding: chunked", "Transfer-Encoding: chunked"]),
        (get(), ["HTTP/1.0 200 OK", "Transfer-Encoding: chunked"]),
        (get(version="1.0"), ["HTTP/1.1 200 OK", "Transfer-Encoding: chunked"]),
        (get(), ["HTTP/1.1 101 Switching Protocols", "Upgrade: websocket"]),
    ],
)
def test_refuses_a_response_that_two_readers_could_measure_differently(asked: PlainRequest, lines: list[str]) -> None:
    with pytest.raises(ResponseError):
        response_framing(response(*lines), asked)


def test_a_response_loses_the_headers_of_its_hop_and_what_would_ask_for_the_gateways_credentials() -> None:
    head = response(
        "HTTP/1.0 200 Fine",
        "Connection: X-Private, close",
        "X-Private: 1",
        "Keep-Alive: timeout=5",
        "Proxy-Authenticate: Basic",
        "Proxy-Connection: x",
        "Upgrade: h2c",
        "Trailer: X",
        "Set-Cookie: a=1",
        "set-cookie: b=2",
        "Content-Length: 3",
    )
    assert response_bytes(head, ContentLength(3), close=False) == (
        b"HTTP/1.1 200 Fine\r\nSet-Cookie: a=1\r\nset-cookie: b=2\r\nContent-Length: 3\r\n\r\n"
    )


def test_the_length_of_what_head_asks_about_is_passed_on() -> None:
    head = response("HTTP/1.1 200 OK", "Content-Length: 5")
    assert b"Content-Length: 5\r\n" in response_bytes(head, NoBody(), close=False)


@pytest.mark.parametrize("line", ["HTTP/1.1 204 No Content", "HTTP/1.1 103 Early Hints"])
def test_a_response_without_a_body_has_no_length(line: str) -> None:
    head = response(line, "Content-Length: 5", "Link: x")
    assert response_bytes(head, NoBody(), close=False) == line.encode() + b"\r\nLink: x\r\n\r\n"


def test_the_end_of_the_clients_connection_is_announced_with_the_last_response_only() -> None:
    assert response_bytes(response("HTTP/1.1 200 OK"), UntilClose(), close=True).endswith(
        b"\r\nConnection: close\r\n\r\n"
    )
    assert b"close" not in response_bytes(response("HTTP/1.1 100 Continue"), NoBody(), close=True)


def test_tells_whether_the_server_takes_another_request() -> None:
    assert response("HTTP/1.1 200 OK").keep_alive
    assert not response("HTTP/1.1 200 OK", "Connection: x, CLOSE").keep_alive
    assert not response("HTTP/1.0 200 OK", "Connection: keep-alive").keep_alive
