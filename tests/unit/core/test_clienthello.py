"""ClientHello: what OpenSSL sends, and what no client should."""

import pytest

from gateway.core.clienthello import MAX_HELLO_RECORDS, ClientHello, HelloError, parse_client_hello
from gateway.core.incomplete import INCOMPLETE
from gateway.core.verdict import DenyReason
from tests.support.client_hello import (
    alpn,
    encrypted,
    extension,
    hello,
    message,
    openssl_hello,
    records,
    server_name,
    vector,
)


def refused(data: bytes, max_bytes: int = 16384) -> HelloError:
    with pytest.raises(HelloError) as caught:
        parse_client_hello(data, max_bytes)
    return caught.value


def test_reads_what_openssl_sends() -> None:
    data = openssl_hello("registry.example.com", ["h2", "http/1.1"])
    assert parse_client_hello(data) == ClientHello("registry.example.com", False, (b"h2", b"http/1.1"))


def test_reads_what_openssl_sends_without_a_name() -> None:
    assert parse_client_hello(openssl_hello(None)) == ClientHello(None, False, ())


def test_reads_a_bytearray_and_leaves_what_follows_alone() -> None:
    data = bytearray(hello(b"example.com") + b"\x17\x03\x03\x00\x05early and more")
    assert parse_client_hello(data) == ClientHello("example.com", False, ())


def test_reads_a_hello_without_extensions() -> None:
    assert parse_client_hello(records(message(None))) == ClientHello(None, False, ())
    assert parse_client_hello(records(message())) == ClientHello(None, False, ())


@pytest.mark.parametrize("kind", [0xFE0D, 0xFE0C, 0xFE0A, 0xFE08, 0xFFCE])
def test_sees_an_encrypted_hello_and_its_drafts(kind: int) -> None:
    assert parse_client_hello(hello(b"outer.example", encrypted(kind))) == ClientHello("outer.example", True, ())


def test_reads_a_hello_split_over_three_records() -> None:
    data = records(message([server_name(b"example.com"), alpn(b"h2")]), [1, 60])
    assert data.count(b"\x16\x03\x01") == 3
    assert parse_client_hello(data) == ClientHello("example.com", False, (b"h2",))


def test_reads_a_hello_split_over_as_many_records_as_are_read() -> None:
    content = message([server_name(b"example.com")])
    most = MAX_HELLO_RECORDS - 1
    assert parse_client_hello(records(content, [1] * most)) == ClientHello("example.com", False, ())
    assert "records" in refused(records(content, [1] * (most + 1))).message


@pytest.mark.parametrize(
    "name", [b"a" * 63 + b".example", b"EXAMPLE.com", b"my_host.example", b"xn--bcher-kva.example"]
)
def test_keeps_a_name_as_it_was_sent(name: bytes) -> None:
    assert parse_client_hello(hello(name)) == ClientHello(name.decode(), False, ())


@pytest.mark.parametrize(
    "data",
    [
        b"S",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00",
        b"\x80\x2e\x01\x03\x01",  # SSL 2.0's own hello
        b"\x15\x03\x03\x00\x02\x02\x28",
        b"\x17\x03\x03\x00\x05",
        b"\x16\x02",
        b"\x16\x04\x00\x00\x05",
    ],
)
def test_what_is_no_tls_is_refused_at_its_first_bytes(data: bytes) -> None:
    assert refused(data).reason is DenyReason.NOT_TLS
    assert refused(data[:2]).reason is DenyReason.NOT_TLS


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (records(b"\x02" + vector(bytes(70), 3)), "first message"),
        (records(b"\x00"), "first message"),
        (b"\x16\x03\x01\x00\x00", "empty or too large"),
        (b"\x16\x03\x01\x40\x01", "empty or too large"),
        (records(message(), [5])[:10] + b"\x15", "another record"),
        (records(message(), [5])[:10] + b"\x16\x02", "another record"),
        (records(message() + b"\x00"), "more than the message"),
        (records(message() + message()), "more than the message"),
        (records(b"\x01\x00\x40\x00"), "larger"),
        (records(b"\x01\xff\xff\xff"), "larger"),
        (records(message(version=b"\x02\x00")), "version"),
        (records(message(session_id=bytes(33))), "session id"),
        (records(message(suites=b"")), "cipher suites"),
        (records(message(suites=b"\x13\x01\x13")), "cipher suites"),
        (records(message(compression=b"")), "compression"),
        (records(message(after=b"\x00")), "do not fill"),
        (records(message(None, after=b"\x00")), "longer than"),
        (records(message(None, after=b"\x00\x05\x00")), "do not fill"),
        (records(message([b"\x00"])), "longer than"),
        (records(message([b"\x00\x0a\x00\x05\x00"])), "longer than"),
        (records(b"\x01" + vector(b"\x03\x03" + bytes(20), 3)), "longer than"),
        (records(b"\x01" + vector(b"", 3)), "longer than"),
        (records(b"\x01" + vector(b"\x03\x03" + bytes(32) + b"\x20", 3)), "longer than"),
        (records(b"\x01" + vector(b"\x03\x03" + bytes(33) + b"\xff\xfe", 3)), "longer than"),
        (hello(b"a.example", server_name(b"b.example")), "given twice"),
        (hello(b"a.example", server_name(b"a.example")), "given twice"),
        (hello(b"a.example", encrypted(), encrypted()), "given twice"),
        (hello(None, extension(0, b"")), "server name"),
        (hello(None, extension(0, b"\x00\x00")), "server name"),
        (hello(None, server_name(b"")), "server name"),
        (hello(None, server_name(b"a.example", kind=1)), "server name"),
        (hello(None, server_name(b"a\x00.example")), "server name"),
        (hello(None, server_name(b"a.example\n")), "server name"),
        (hello(None, server_name("bücher.example".encode())), "server name"),
        (hello(None, server_name(b"a example")), "server name"),
        (hello(None, server_name(b"[::1]")), "server name"),
        (hello(None, server_name(b"a" * 256)), "server name"),
        (hello(None, extension(0, vector(b"\x00" + vector(b"a.example", 2), 2) + b"x")), "lengths"),
        (hello(None, extension(0, vector(b"\x00" + vector(b"a.ex", 2) + b"ample", 2))), "lengths"),
        (
            # Two names: which of them counts?
            hello(None, extension(0, vector((b"\x00" + vector(b"a.example", 2)) * 2, 2))),
            "server name",
        ),
        (hello(None, extension(16, b"")), "longer than"),
        (hello(None, extension(16, b"\x00")), "longer than"),
        (hello(None, extension(16, b"\x00\x05\x02h2")), "does not fill"),
        (hello(None, extension(16, b"\x00\x03\x05h2")), "longer than"),
    ],
)
def test_refuses_what_two_tls_stacks_may_read_differently(data: bytes, why: str) -> None:
    error = refused(data)
    assert error.reason is DenyReason.HELLO_MALFORMED
    assert why in error.message
    assert error.message == str(error)


def test_refuses_a_hello_larger_than_the_limit_as_soon_as_it_says_so() -> None:
    large = records(message([extension(21, bytes(2000))]))
    assert parse_client_hello(large, 4096) == ClientHello(None, False, ())
    assert "larger than 1024" in refused(large, 1024).message
    assert "larger than 1024" in refused(large[:20], 1024).message
    assert parse_client_hello(large, len(large)) == ClientHello(None, False, ())
    assert "larger" in refused(large, len(large) - 1).message


def test_the_limit_counts_the_record_headers_too() -> None:
    split = records(message(), [1] * 15)
    assert len(split) > 120 > len(message())
    # Fifteen records of one byte, then the header of the last one, which says how far it will go.
    assert parse_client_hello(split[:94], 120) is INCOMPLETE
    assert "larger than 120" in refused(split[:95], 120).message
    assert "larger than 120" in refused(split, 120).message
    assert parse_client_hello(split, len(split)) == ClientHello(None, False, ())


def test_refuses_a_hello_that_has_filled_the_limit_and_not_ended() -> None:
    split = records(message(), [1] * 15)
    assert parse_client_hello(split[:89], 90) is INCOMPLETE
    assert "larger than 90" in refused(split[:90], 90).message


def test_a_hello_that_is_not_whole_is_incomplete() -> None:
    data = records(message([server_name(b"example.com")]), [3, 40])
    assert all(parse_client_hello(data[:size]) is INCOMPLETE for size in range(len(data)))
