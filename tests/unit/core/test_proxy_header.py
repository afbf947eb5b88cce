"""PROXY v2: who is calling, and what is no such header."""

from ipaddress import IPv4Address, IPv6Address

import pytest

from gateway.core.incomplete import INCOMPLETE
from gateway.core.proxy_header import (
    MAX_PROXY_HEADER_BYTES,
    SIGNATURE,
    ProxyHeader,
    ProxyHeaderError,
    parse_proxy_header,
)


def header(command: int, family: int, body: bytes) -> bytes:
    return SIGNATURE + bytes([command, family]) + len(body).to_bytes(2, "big") + body


V4 = bytes([192, 0, 2, 7, 192, 0, 2, 1]) + b"\x9c\x40\x22\xc4"
V6 = IPv6Address("2001:db8::7").packed + IPv6Address("2001:db8::1").packed + b"\x9c\x40\x22\xc4"
TLV = b"\x04\x00\x03abc" + b"\x20\x00\x01\x00"


def test_reads_the_source_of_an_ipv4_connection() -> None:
    data = header(0x21, 0x11, V4)
    assert parse_proxy_header(data) == ProxyHeader(IPv4Address("192.0.2.7"), 28)


def test_reads_the_source_of_an_ipv6_connection() -> None:
    data = header(0x21, 0x21, V6)
    assert parse_proxy_header(data) == ProxyHeader(IPv6Address("2001:db8::7"), 52)


def test_reads_a_mapped_source_as_the_ipv4_address_it_is() -> None:
    data = header(0x21, 0x21, IPv6Address("::ffff:192.0.2.7").packed + V6[16:])
    assert parse_proxy_header(data) == ProxyHeader(IPv4Address("192.0.2.7"), 52)


def test_skips_extensions_and_leaves_what_follows_alone() -> None:
    data = header(0x21, 0x11, V4 + TLV)
    assert parse_proxy_header(data + b"CONNECT ") == ProxyHeader(IPv4Address("192.0.2.7"), len(data))


@pytest.mark.parametrize("family", [0x00, 0x11, 0x21, 0x31, 0xFF])
def test_a_local_header_has_no_source_whatever_its_family(family: int) -> None:
    assert parse_proxy_header(header(0x20, family, V4)) == ProxyHeader(None, 28)
    assert parse_proxy_header(header(0x20, family, b"")) == ProxyHeader(None, 16)


def test_reads_a_bytearray() -> None:
    assert parse_proxy_header(bytearray(header(0x21, 0x21, V6))) == ProxyHeader(IPv6Address("2001:db8::7"), 52)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"CONNECT example.com:443 HTTP/1.1\r\n\r\n", "signature"),
        (b"C", "signature"),
        (b"PROXY TCP4 192.0.2.7 192.0.2.1 40000 8900\r\n", "signature"),
        (b"\x16\x03\x01", "signature"),
        (b"\r\n\r\nX", "signature"),
        (SIGNATURE + b"\x11", "version"),
        (header(0x22, 0x11, V4), "version"),
        (header(0x31, 0x11, V4), "version"),
        (header(0x21, 0x00, b""), "TCP"),
        (header(0x21, 0x12, V4), "TCP"),
        (header(0x21, 0x22, V6), "TCP"),
        (header(0x21, 0x31, bytes(216)), "TCP"),
        (header(0x21, 0x11, V4[:-1]), "short"),
        (header(0x21, 0x21, V6[:-1]), "short"),
        (header(0x21, 0x11, b""), "short"),
        (header(0x21, 0x11, bytes(MAX_PROXY_HEADER_BYTES - 15)), "large"),
        (header(0x20, 0x00, bytes(65535)), "large"),
    ],
)
def test_refuses_anything_else(data: bytes, why: str) -> None:
    with pytest.raises(ProxyHeaderError, match=why):
        parse_proxy_header(data)


def test_refuses_as_soon_as_no_byte_can_mend_it() -> None:
    # The length alone says that more will come than is ever read.
    with pytest.raises(ProxyHeaderError, match="large"):
        parse_proxy_header(SIGNATURE + b"\x21\x11\xff\xff")
    with pytest.raises(ProxyHeaderError, match="TCP"):
        parse_proxy_header(SIGNATURE + b"\x21\x31\x00\xd8")


def test_accepts_the_largest_header_there_is() -> None:
    data = header(0x21, 0x11, V4 + bytes(MAX_PROXY_HEADER_BYTES - 28))
    assert parse_proxy_header(data) == ProxyHeader(IPv4Address("192.0.2.7"), MAX_PROXY_HEADER_BYTES)


def test_a_header_that_is_not_whole_is_incomplete() -> None:
    data = header(0x21, 0x11, V4 + TLV)
    assert all(parse_proxy_header(data[:size]) is INCOMPLETE for size in range(len(data)))
