"""What holds for every parser: prefixes, segmentation, and bytes that nobody meant to send.

Each parser returns INCOMPLETE for every strict prefix of what it reads, comes to the same end however its input is cut,
and raises its own error and no other.
"""

from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.authority import Authority, AuthorityError, parse_absolute_http, parse_authority
from gateway.core.clienthello import MAX_HELLO_RECORDS, ClientHello, HelloError, parse_client_hello
from gateway.core.head import Head, HeadError, NoBody, body_framing, parse_head
from gateway.core.incomplete import INCOMPLETE, Incomplete
from gateway.core.proxy_header import SIGNATURE, ProxyHeader, ProxyHeaderError, parse_proxy_header
from gateway.core.verdict import DenyReason
from tests.support import client_hello

TOKEN = st.text("!#$%&'*+-.^_`|~0123456789abcxyzABCXYZ", min_size=1, max_size=20).map(str.encode)
VISIBLE = st.sampled_from([*range(0x21, 0x7F), *range(0x80, 0x100)])
TEXT = st.lists(st.one_of(VISIBLE, st.sampled_from([0x20, 0x09])), max_size=30).map(bytes)
BLANKS = st.sampled_from([b"", b" ", b"\t", b" \t "])


@st.composite
def heads(draw: st.DrawFn) -> tuple[bytes, Head]:
    """A request head as bytes and as what it says."""
    method, target = draw(TOKEN), bytes(draw(st.lists(VISIBLE, min_size=1, max_size=40)))
    minor = draw(st.sampled_from([0, 1]))
    fields = draw(st.lists(st.tuples(TOKEN, BLANKS, TEXT, BLANKS), max_size=8))
    lines = b"".join(name + b":" + before + value + after + b"\r\n" for name, before, value, after in fields)
    data = method + b" " + target + b" HTTP/1.%d\r\n" % minor + lines + b"\r\n"
    headers = tuple((name.lower(), value.strip(b" \t")) for name, _, value, _ in fields)
    return data, Head(method, target, minor, headers, len(data))


@st.composite
def proxy_headers(draw: st.DrawFn) -> tuple[bytes, ProxyHeader]:
    """A PROXY v2 header as bytes and as what it says."""
    kind = draw(st.sampled_from(["local", "v4", "v6"]))
    rest = draw(st.binary(max_size=100))
    source: IPv4Address | IPv6Address | None
    if kind == "local":
        command, family, source, addresses = 0x20, draw(st.integers(0, 255)), None, b""
    elif kind == "v4":
        source = draw(st.integers(0, 2**32 - 1).map(IPv4Address))
        command, family, addresses = 0x21, 0x11, source.packed + bytes(8)
    else:
        address = draw(st.integers(0, 2**128 - 1).map(IPv6Address))
        source = address.ipv4_mapped or address
        command, family, addresses = 0x21, 0x21, address.packed + bytes(20)
    body = addresses + rest
    data = SIGNATURE + bytes([command, family]) + len(body).to_bytes(2, "big") + body
    return data, ProxyHeader(source, len(data))


@st.composite
def hellos(draw: st.DrawFn) -> tuple[bytes, ClientHello]:
    """A ClientHello, cut into records anywhere, and what it says."""
    name = draw(st.none() | st.text("abcXYZ019-_.", min_size=1, max_size=40))
    protocols = tuple(draw(st.lists(st.binary(min_size=1, max_size=10), max_size=3)))
    hidden = draw(st.booleans())
    extensions = draw(
        st.lists(st.tuples(st.integers(20, 60), st.binary(max_size=40)), max_size=5, unique_by=lambda entry: entry[0])
    )
    built = [client_hello.extension(kind, content) for kind, content in extensions]
    if name is not None:
        built.append(client_hello.server_name(name.encode()))
    if protocols:
        built.append(client_hello.alpn(*protocols))
    if hidden:
        built.append(client_hello.encrypted())
    message = client_hello.message(draw(st.permutations(built)), session_id=draw(st.binary(max_size=32)))
    cuts = draw(st.lists(st.integers(1, 50), max_size=MAX_HELLO_RECORDS - 1))
    return client_hello.records(message, cuts), ClientHello(name, hidden, protocols)


@dataclass(frozen=True)
class Parser:
    """A parser with its error, and good inputs with what they mean."""

    parse: Callable[[bytes | bytearray], Any]
    error: type[Exception]
    good: st.SearchStrategy[tuple[bytes, Any]]

    def outcome(self, data: bytes | bytearray) -> object:
        """Return what the parser makes of `data`, where errors are the same if they are told to the client alike."""
        try:
            return self.parse(data)
        except HeadError as error:
            return type(error), error.status, error.reason
        except HelloError as error:
            return type(error), error.reason
        except self.error as error:
            return type(error)


PARSERS = {
    "head": Parser(lambda data: parse_head(data, 600), HeadError, heads()),
    "proxy_header": Parser(parse_proxy_header, ProxyHeaderError, proxy_headers()),
    "client_hello": Parser(lambda data: parse_client_hello(data, 900), HelloError, hellos()),
}
each_parser = pytest.mark.parametrize("parser", PARSERS.values(), ids=PARSERS)

# Bytes that come far enough into each parser to be interesting.
ODDITIES = st.sampled_from(
    [
        *(b"\r\n", b"\n", b"\r\n\r\n", b" ", b":", b"\x00", b"GET / HTTP/1.1\r\n", b"a: b\r\n"),
        *(SIGNATURE, b"\x21\x11", b"\x20\x00\x00\x00"),
        *(b"\x16\x03\x01", b"\x16\x03\x01\x00\x04\x01\x00\x00\x26", b"\x03\x03", b"\x00\x05", b"\xff"),
    ]
)
NOISE = st.one_of(
    st.binary(max_size=200), st.lists(st.one_of(ODDITIES, st.binary(max_size=8)), max_size=30).map(b"".join)
)


@each_parser
@given(data=st.data())
def test_reads_what_was_meant(parser: Parser, data: st.DataObject) -> None:
    raw, meant = data.draw(parser.good)
    result = parser.outcome(raw)
    if len(raw) <= 600:
        assert result == meant
    assert parser.outcome(raw + data.draw(st.binary(max_size=20))) == result


@each_parser
@given(data=st.data())
def test_every_strict_prefix_is_incomplete(parser: Parser, data: st.DataObject) -> None:
    raw, _ = data.draw(parser.good)
    raw = raw[:600]
    for size in range(len(raw)):
        assert parser.outcome(raw[:size]) is INCOMPLETE


def cut(parser: Parser, data: bytes, sizes: list[int]) -> object:
    """Return the first outcome that is not INCOMPLETE when `data` arrives in segments, or the last one."""
    arrived = 0
    for size in sizes:
        arrived += size
        outcome = parser.outcome(data[:arrived])
        if not isinstance(outcome, Incomplete):
            return outcome
    return parser.outcome(data)


@each_parser
@given(data=st.data(), sizes=st.lists(st.integers(1, 40), max_size=30))
def test_the_outcome_does_not_depend_on_how_a_good_input_is_cut(
    parser: Parser, data: st.DataObject, sizes: list[int]
) -> None:
    raw, _ = data.draw(parser.good)
    assert cut(parser, raw, sizes) == parser.outcome(raw)


@each_parser
@given(data=st.data(), sizes=st.lists(st.integers(1, 40), max_size=30))
def test_the_outcome_does_not_depend_on_how_a_damaged_input_is_cut(
    parser: Parser, data: st.DataObject, sizes: list[int]
) -> None:
    raw, _ = data.draw(parser.good)
    place = data.draw(st.integers(0, len(raw)))
    damaged = raw[:place] + data.draw(NOISE) + raw[place + data.draw(st.integers(0, 8)) :]
    assert cut(parser, damaged, sizes) == parser.outcome(damaged)


@each_parser
@given(data=NOISE, sizes=st.lists(st.integers(1, 40), max_size=30))
def test_noise_raises_only_the_parsers_own_error_however_it_is_cut(
    parser: Parser, data: bytes, sizes: list[int]
) -> None:
    assert cut(parser, data, sizes) == parser.outcome(data)


@each_parser
@given(data=NOISE)
def test_a_bytearray_reads_as_bytes_do(parser: Parser, data: bytes) -> None:
    assert parser.outcome(bytearray(data)) == parser.outcome(data)


@given(
    names=st.lists(st.sampled_from([b"content-length", b"transfer-encoding", b"host"]), max_size=4),
    values=st.lists(st.sampled_from([b"0", b"5", b"+5", b"chunked", b"CHUNKED", b"gzip, chunked", b""]), min_size=4),
    minor=st.sampled_from([0, 1]),
)
def test_a_body_has_one_framing_or_is_refused(names: list[bytes], values: list[bytes], minor: int) -> None:
    head = Head(b"POST", b"/", minor, tuple(zip(names, values, strict=False)), 0)
    framed = [name for name in names if name != b"host"]
    try:
        framing = body_framing(head)
    except HeadError as error:
        refusal = (error.status, error.reason)
        assert refusal == (400, DenyReason.MALFORMED_REQUEST)
        assert framed
        return
    assert len(framed) == (0 if framing == NoBody() else 1)


# -- authorities: no segments, one normal form

HOSTS = st.one_of(
    st.text("abcXYZ019-_.", max_size=80),
    st.text(max_size=40),
    st.text("0123456789abcdefx.:[]%", max_size=45).map(lambda text: f"[{text}]"),
    st.text("0123456789xX.", max_size=20),
    st.text("äßøÄ例え０１２．。｡①ⅷ\u00ad\u200d-.a", max_size=30),
    st.lists(st.text("abcdefghijklmnopqrstuvwxyz0123456789-", min_size=1, max_size=63), min_size=1, max_size=5).map(
        lambda labels: ".".join(f"xn--{label}" for label in labels)
    ),
)
PORTS = st.one_of(
    st.just(""), st.integers(-5, 70000).map(lambda port: f":{port}"), st.text("0123456789+: ", max_size=7)
)
AUTHORITIES = st.one_of(
    st.tuples(HOSTS, PORTS).map(lambda pair: (pair[0] + pair[1]).encode("utf-8", "surrogatepass")),
    st.binary(max_size=80),
)


def read(raw: bytes) -> Authority | None:
    try:
        return parse_authority(raw, 80)
    except AuthorityError:
        return None


@given(raw=AUTHORITIES)
def test_an_authority_is_in_normal_form_or_refused(raw: bytes) -> None:
    authority = read(raw)
    if authority is None:
        return
    assert 0 < authority.port <= 65535
    assert authority.host == authority.host.lower()
    assert authority.host.isascii()
    if authority.address is not None:
        assert str(authority.address) == authority.host
        return
    assert 0 < len(authority.host) <= 253
    for label in authority.host.split("."):
        assert 0 < len(label) <= 63
        assert all(character in "abcdefghijklmnopqrstuvwxyz0123456789-_" for character in label)
        assert not label.startswith("-")
        assert not label.endswith("-")
    # No reader takes the last label for the end of an IPv4 address.
    last = authority.host.split(".")[-1]
    assert not last.isdigit()
    assert not last.startswith("0x") or any(character not in "0123456789abcdef" for character in last[2:])


@given(raw=AUTHORITIES)
def test_the_normal_form_is_its_own_normal_form(raw: bytes) -> None:
    authority = read(raw)
    if authority is not None:
        assert parse_authority(str(authority).encode()) == authority


@given(raw=AUTHORITIES, path=st.binary(max_size=20))
def test_absolute_targets_raise_only_their_own_error(raw: bytes, path: bytes) -> None:
    for target in (b"http://" + raw + b"/" + path, b"http://" + raw + path, raw + path):
        try:
            authority, rest = parse_absolute_http(target)
        except AuthorityError:
            continue
        assert rest.startswith(b"/")
        assert parse_authority(str(authority).encode()) == authority
