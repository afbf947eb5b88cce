"""From the first bytes of a connection to who asks for what."""

from pytest_benchmark.fixture import BenchmarkFixture

from bench.micro.samples import BASIC, CONNECT, MODEL, PROXY_V2
from gateway.core.authority import parse_absolute_http, parse_authority
from gateway.core.credentials import parse_basic, parse_bearer
from gateway.core.head import Head, body_framing, parse_head
from gateway.core.proxy_header import ProxyHeader, parse_proxy_header
from gateway.core.replies import refusal
from gateway.core.verdict import DenyReason
from gateway.net.decisions import key_of_connect


def test_parse_head_of_a_connect(benchmark: BenchmarkFixture) -> None:
    head = benchmark(parse_head, CONNECT)
    assert head.target == b"files.pythonhosted.org:443"


def test_parse_head_of_a_model_request(benchmark: BenchmarkFixture) -> None:
    head = benchmark(parse_head, MODEL)
    assert len(head.headers) == 14


def test_key_of_connect(benchmark: BenchmarkFixture) -> None:
    assert benchmark(key_of_connect, CONNECT, 16384)[1] == len(CONNECT)


def test_body_framing(benchmark: BenchmarkFixture) -> None:
    head = parse_head(MODEL)
    assert isinstance(head, Head)
    assert benchmark(body_framing, head).length == 115000


def test_parse_authority_of_a_name(benchmark: BenchmarkFixture) -> None:
    assert benchmark(parse_authority, b"files.pythonhosted.org:443").port == 443


def test_parse_authority_of_an_address(benchmark: BenchmarkFixture) -> None:
    assert benchmark(parse_authority, b"93.184.215.14:443").address is not None


def test_parse_authority_of_an_international_name(benchmark: BenchmarkFixture) -> None:
    assert benchmark(parse_authority, "bücher.example:443".encode()).host == "xn--bcher-kva.example"


def test_parse_absolute_http(benchmark: BenchmarkFixture) -> None:
    assert benchmark(parse_absolute_http, b"http://packages.example/debian/dists/bookworm/InRelease")[0].port == 80


def test_parse_basic(benchmark: BenchmarkFixture) -> None:
    assert benchmark(parse_basic, BASIC) == ("a-session-0123", "t" * 43)


def test_parse_bearer(benchmark: BenchmarkFixture) -> None:
    assert benchmark(parse_bearer, b"Bearer " + b"t" * 43) == "t" * 43


def test_parse_proxy_header(benchmark: BenchmarkFixture) -> None:
    header = benchmark(parse_proxy_header, PROXY_V2 + CONNECT)
    assert isinstance(header, ProxyHeader)
    assert str(header.source) == "10.231.0.16"


def test_refusal(benchmark: BenchmarkFixture) -> None:
    def refuse() -> bytes:
        message = "this host is not on the list of this session"
        return refusal(403, DenyReason.HOST_NOT_LISTED, message, host="elsewhere.example", port=443)

    assert benchmark(refuse).startswith(b"HTTP/1.1 403 host_not_listed")
