"""The first message of a TLS connection, read before any byte of it goes on.

Only enough is read to know which server the client will ask for (RFC 8446 §4.1.2, RFC 5246 §7.4.1.2). What two
TLS stacks might read differently is refused.
"""

import re
import struct
from dataclasses import dataclass
from typing import Final

from gateway.core.incomplete import INCOMPLETE, Incomplete
from gateway.core.verdict import DenyReason

# Browsers with post-quantum key shares send about 2 KiB.
MAX_HELLO_BYTES: Final = 16 * 1024
# A client needs one record; some split it into a few. The bound keeps it cheap to read again after each segment.
MAX_HELLO_RECORDS: Final = 16

_HANDSHAKE: Final = 22
_CLIENT_HELLO: Final = 1
_MAX_RECORD_BYTES: Final = 1 << 14  # RFC 8446 §5.1
_RECORD_HEADER: Final = 5
_MESSAGE_HEADER: Final = 4
_SERVER_NAME: Final = 0
_ALPN: Final = 16
# encrypted_client_hello (RFC 9849), the code points of its drafts, and encrypted_server_name before them.
_ENCRYPTED: Final = frozenset({0xFE0D, 0xFE0C, 0xFE0B, 0xFE0A, 0xFE09, 0xFE08, 0xFFCE})

_read_u16: Final = struct.Struct(">H").unpack_from
_read_extension: Final = struct.Struct(">HH").unpack_from
# RFC 6066 §3: a list with one entry, of type host_name (0). The two lengths are compared by the code.
_match_server_name: Final = re.compile(rb"(..)\x00(..)([0-9A-Za-z._-]{1,255})", re.DOTALL).fullmatch


class HelloError(Exception):
    """The bytes do not begin a TLS connection. `reason` is `not_tls` or `hello_malformed`."""

    def __init__(self, reason: DenyReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


@dataclass(frozen=True, slots=True)
class ClientHello:
    """What a client asks a TLS server for.

    `server_name` is the SNI host name as sent (ASCII), None without one. `encrypted` tells that the real names
    are in an encrypted ClientHello and `server_name` is only the outer one.
    """

    server_name: str | None
    encrypted: bool
    alpn: tuple[bytes, ...]


def parse_client_hello(data: bytes | bytearray, max_bytes: int = MAX_HELLO_BYTES) -> ClientHello | Incomplete:
    """Read SNI, ALPN and the presence of ECH from the TLS records at the start of `data`.

    The message may be split over records, and `data` may end anywhere; what follows the message's last record is
    not looked at. Returns INCOMPLETE until the message has arrived whole. Raises HelloError if no continuation of
    `data` could be a ClientHello, or if it does not end within `max_bytes` and MAX_HELLO_RECORDS records.
    """
    message = _join_records(data, max_bytes)
    return INCOMPLETE if message is None else _read_hello(message)


def _malformed(message: str) -> HelloError:
    return HelloError(DenyReason.HELLO_MALFORMED, f"the ClientHello is malformed: {message}")


def _join_records(data: bytes | bytearray, max_bytes: int) -> bytes | None:
    """Return the body of the handshake message that the records carry; None while it is not whole."""
    size = len(data)
    message = b""
    start = 0
    for _ in range(MAX_HELLO_RECORDS):
        # Each field is checked as soon as it is there, so that what is no TLS is refused at its first byte.
        if (size > start and data[start] != _HANDSHAKE) or (size > start + 1 and data[start + 1] != 3):
            if start:
                raise _malformed("another record interrupts it")
            raise HelloError(DenyReason.NOT_TLS, "only TLS may go to this port; the connection does not begin with it")
        if size < start + _RECORD_HEADER:
            break
        length = data[start + 3] << 8 | data[start + 4]
        if not 0 < length <= _MAX_RECORD_BYTES:
            raise _malformed("a record is empty or too large")
        start += _RECORD_HEADER
        will_hold = len(message) + length
        end = start + length
        message += data[start:end]
        start = end
        if message and message[0] != _CLIENT_HELLO:
            raise _malformed("the first message is another")
        if len(message) >= _MESSAGE_HEADER:
            whole = _MESSAGE_HEADER + int.from_bytes(message[1:4], "big")
            if whole > max_bytes or (whole <= will_hold and end > max_bytes):
                raise _malformed(f"it is larger than {max_bytes} bytes")
            # RFC 8446 §5.1: a key change follows, so nothing may share the record with it.
            if whole < will_hold:
                raise _malformed("its record holds more than the message")
            if whole == len(message):
                return message[_MESSAGE_HEADER:]
        if size < end:
            break
    else:
        raise _malformed(f"it is split over more than {MAX_HELLO_RECORDS} records")
    if size >= max_bytes:
        raise _malformed(f"it is larger than {max_bytes} bytes")
    return None


def _read_hello(message: bytes) -> ClientHello:
    size = len(message)
    server_name: str | None = None
    alpn: tuple[bytes, ...] = ()
    seen: set[int] = set()
    try:
        # Two bytes of version, 32 of random, then the session id.
        if message[0] != 3:
            raise _malformed("its version is not TLS")
        if message[34] > 32:
            raise _malformed("the session id is too long")
        position = 35 + message[34]
        (suites,) = _read_u16(message, position)
        if not suites or suites % 2:
            raise _malformed("the cipher suites are not a list of pairs")
        position += 2 + suites
        if not message[position]:
            raise _malformed("no compression method")
        position += 1 + message[position]
        if position == size:
            return ClientHello(None, False, ())  # before TLS 1.3 extensions may be left out
        (length,) = _read_u16(message, position)
        position += 2
        if position + length != size:
            raise _malformed("the extensions do not fill the message")
        while position < size:
            kind, length = _read_extension(message, position)
            position += 4
            end = position + length
            if end > size:
                raise _malformed("a field is longer than what holds it")
            # RFC 8446 §4.2: "There MUST NOT be more than one extension of the same type"; which of two counts is
            # anyone's guess.
            if kind in seen:
                raise _malformed("an extension is given twice")
            seen.add(kind)
            if kind == _SERVER_NAME:
                server_name = _read_server_name(message[position:end])
            elif kind == _ALPN:
                alpn = _read_alpn(message[position:end])
            position = end
    except (IndexError, struct.error):
        raise _malformed("a field is longer than what holds it") from None
    return ClientHello(server_name, not _ENCRYPTED.isdisjoint(seen), alpn)


def _read_server_name(body: bytes) -> str:
    match = _match_server_name(body)
    if match is None:
        raise _malformed("the server name is not one host name")
    outer, inner, name = match.groups()
    if int.from_bytes(outer, "big") != len(name) + 3 or int.from_bytes(inner, "big") != len(name):
        raise _malformed("the server name's lengths do not agree")
    return name.decode("ascii")


def _read_alpn(body: bytes) -> tuple[bytes, ...]:
    """Read a list of protocol names (RFC 7301 §3.1). Raises IndexError or struct.error if it is cut short."""
    protocols = []
    (length,) = _read_u16(body, 0)
    if length + 2 != len(body):
        raise _malformed("the protocol list does not fill its extension")
    position = 2
    while position < len(body):
        end = position + 1 + body[position]
        if end > len(body):
            raise _malformed("a field is longer than what holds it")
        protocols.append(body[position + 1 : end])
        position = end
    return tuple(protocols)
