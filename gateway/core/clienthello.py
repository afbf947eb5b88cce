"""The first message of a TLS connection, read before any byte of it goes on (RFC 8446 §4.1.2, RFC 5246
§7.4.1.2).

Only enough is read to know which server the client will ask for. What two TLS stacks might read differently
is refused.
"""

from dataclasses import dataclass
from typing import Final

from gateway.core.incomplete import INCOMPLETE, Incomplete
from gateway.core.verdict import DenyReason

# Browsers with post-quantum key shares send about 2 KiB.
MAX_HELLO_BYTES: Final = 16 * 1024
# A client needs one record; some split it into a few. The bound keeps rereading after each segment cheap.
MAX_HELLO_RECORDS: Final = 64

_HANDSHAKE: Final = 22
_CLIENT_HELLO: Final = 1
_MAX_RECORD_BYTES: Final = 1 << 14  # RFC 8446 §5.1
_SERVER_NAME: Final = 0
_ALPN: Final = 16
# encrypted_client_hello (RFC 9849) and the code points of its drafts, encrypted_server_name the first of
# them.
_ENCRYPTED: Final = frozenset({0xFE0D, 0xFE0C, 0xFE0B, 0xFE0A, 0xFE09, 0xFE08, 0xFFCE})


class HelloError(Exception):
    """The bytes do not begin a TLS connection. `reason` is `not_tls` or `hello_malformed`."""

    def __init__(self, reason: DenyReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


@dataclass(frozen=True, slots=True)
class ClientHello:
    """What a client asks a TLS server for.

    `server_name` is the SNI host name as sent (ASCII), None without one. `encrypted` tells that the real
    names are in an encrypted ClientHello and `server_name` is only the outer one.
    """

    server_name: str | None
    encrypted: bool
    alpn: tuple[bytes, ...]


class _Reader:
    """Takes length-prefixed fields off a message; running past its end is the caller's HelloError."""

    __slots__ = ("data", "position")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0

    def take(self, size: int) -> bytes:
        start = self.position
        self.position = start + size
        if self.position > len(self.data):
            raise _malformed("a field is longer than what holds it")
        return self.data[start : self.position]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def vector(self, prefix: int) -> "_Reader":
        return _Reader(self.take(self.number(prefix)))

    @property
    def rest(self) -> int:
        return len(self.data) - self.position

    def end(self) -> None:
        if self.rest:
            raise _malformed("a field has bytes left over")


def parse_client_hello(data: bytes | bytearray, max_bytes: int = MAX_HELLO_BYTES) -> ClientHello | Incomplete:
    """Read SNI, ALPN and the presence of ECH from the TLS records at the start of `data`.

    The message may be split over records, and `data` may end anywhere; what follows the message's last record
    is not looked at. Returns INCOMPLETE until the message has arrived whole. Raises HelloError if no
    continuation of `data` could be a ClientHello, or if it does not end within `max_bytes` and
    MAX_HELLO_RECORDS records.
    """
    message = _join_records(data, max_bytes)
    if message is None:
        return INCOMPLETE
    return _read_hello(message)


def _malformed(message: str) -> HelloError:
    return HelloError(DenyReason.HELLO_MALFORMED, f"The ClientHello is malformed: {message}")


def _join_records(data: bytes | bytearray, max_bytes: int) -> bytes | None:
    """Return the body of the handshake message that the records carry; None while it is not whole."""
    size = len(data)
    message = bytearray()
    position = 0
    records = 0
    while True:
        header = data[position : position + 5]
        if (header[:1] and header[0] != _HANDSHAKE) or (header[1:2] and header[1] != 3):
            if position:
                raise _malformed("another record interrupts it")
            raise HelloError(DenyReason.NOT_TLS, "Only TLS may go to this port; the connection does not begin with it")
        if len(header) < 5:
            break
        length = header[3] << 8 | header[4]
        if not 0 < length <= _MAX_RECORD_BYTES:
            raise _malformed("a record is empty or too large")
        records += 1
        if records > MAX_HELLO_RECORDS:
            raise _malformed(f"it is split over more than {MAX_HELLO_RECORDS} records")
        fragment = data[position + 5 : position + 5 + length]
        message += fragment
        if message and message[0] != _CLIENT_HELLO:
            raise _malformed("the first message is another")
        position += 5 + length
        if len(message) >= 4:
            whole = 4 + int.from_bytes(message[1:4], "big")
            arrived = len(message) - len(fragment) + length  # what this record will bring the message to
            if whole > max_bytes or (whole <= arrived and position > max_bytes):
                raise _malformed(f"it is larger than {max_bytes} bytes")
            # RFC 8446 §5.1: a key change follows, so nothing may share the record with it.
            if whole < arrived:
                raise _malformed("its record holds more than the message")
            if whole == arrived and position <= size:
                return bytes(message[4:])
        if position > size:
            break
    if size >= max_bytes:
        raise _malformed(f"it is larger than {max_bytes} bytes")
    return None


def _read_hello(message: bytes) -> ClientHello:
    reader = _Reader(message)
    if reader.number(2) >> 8 != 3:
        raise _malformed("its version is not TLS")
    reader.take(32)
    if len(reader.vector(1).data) > 32:
        raise _malformed("the session id is too long")
    suites = reader.vector(2).data
    if not suites or len(suites) % 2:
        raise _malformed("the cipher suites are not a list of pairs")
    if not reader.vector(1).data:
        raise _malformed("no compression method")
    server_name: str | None = None
    alpn: tuple[bytes, ...] = ()
    seen: set[int] = set()
    if reader.rest:
        extensions = reader.vector(2)
        while extensions.rest:
            kind = extensions.number(2)
            body = extensions.vector(2)
            # RFC 8446 §4.2: "There MUST NOT be more than one extension of the same type"; which one counts is
            # anyone's guess.
            if kind in seen:
                raise _malformed("an extension is given twice")
            seen.add(kind)
            if kind == _SERVER_NAME:
                server_name = _read_server_name(body)
            elif kind == _ALPN:
                alpn = _read_alpn(body)
    reader.end()
    return ClientHello(server_name, not _ENCRYPTED.isdisjoint(seen), alpn)


def _read_server_name(body: _Reader) -> str:
    """Read the one host name that RFC 6066 §3 allows."""
    names = body.vector(2)
    body.end()
    if names.number(1) != 0:
        raise _malformed("the server name is of an unknown type")
    name = names.vector(2).data
    names.end()
    if not name or not all(0x21 <= byte <= 0x7E for byte in name):
        raise _malformed("the server name is not a host name")
    return name.decode("ascii")


def _read_alpn(body: _Reader) -> tuple[bytes, ...]:
    names = body.vector(2)
    body.end()
    protocols = []
    while names.rest:
        protocols.append(names.vector(1).data)
    return tuple(protocols)
