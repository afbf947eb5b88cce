"""A plain HTTP exchange as apt makes it: the request's head, the response's, and what of both is passed on."""

from pytest_benchmark.fixture import BenchmarkFixture

from gateway.core.head import Head, parse_head
from gateway.core.plain_head import ResponseHead, parse_response_head, read_request, response_bytes, response_framing

_REQUEST = (
    b"GET http://packages.example/debian/dists/bookworm/InRelease HTTP/1.1\r\nHost: packages.example\r\n"
    b"User-Agent: Debian APT-HTTP/1.3 (2.6.1)\r\nCache-Control: max-age=0\r\nAccept: text/*\r\n\r\n"
)
_RESPONSE = (
    b"HTTP/1.1 200 OK\r\nDate: Mon, 01 Jun 2026 00:00:00 GMT\r\nServer: Apache\r\nContent-Type: text/plain\r\n"
    b'Content-Length: 151082\r\nConnection: keep-alive\r\nETag: "24e2a-5f1"\r\nAccept-Ranges: bytes\r\nAge: 12\r\n\r\n'
)


def _request() -> Head:
    head = parse_head(_REQUEST)
    assert isinstance(head, Head)
    return head


def _response() -> ResponseHead:
    head = parse_response_head(_RESPONSE)
    assert isinstance(head, ResponseHead)
    return head


def test_read_a_plain_request(benchmark: BenchmarkFixture) -> None:
    assert benchmark(read_request, _request(), None).authority.host == "packages.example"


def test_parse_the_head_of_a_plain_response(benchmark: BenchmarkFixture) -> None:
    assert benchmark(parse_response_head, _RESPONSE) == _response()


def test_pass_on_the_head_of_a_plain_response(benchmark: BenchmarkFixture) -> None:
    request, head = read_request(_request(), None), _response()

    def pass_on() -> bytes:
        return response_bytes(head, response_framing(head, request), close=False)

    assert b"Content-Length: 151082" in benchmark(pass_on)
