"""Request heads, strictly: what is not plainly one HTTP/1 request is refused, never repaired.

Two readers who disagree on where a request ends, or on what it asks for, are how requests are smuggled (RFC
9112 §11.2). So lines end in CRLF only, names are tokens, nothing is folded, and framing that can be read in
two ways is an error. Knows nothing of who may ask for what.
"""

import re
from dataclasses import dataclass
from typing import Final, NoReturn

from gateway.core.incomplete import INCOMPLETE, Incomplete
from gateway.core.verdict import DenyReason

# Largest request head kept. nginx allows 4 x 8 KiB; a CONNECT head is under 1 KiB.
MAX_HEAD_BYTES: Final = 16 * 1024
# Header lines in one head. Apache's LimitRequestFields is 100; browsers send about 20.
MAX_HEADERS: Final = 128
# The longest registered method is UPDATEREDIRECTREF (17).
MAX_METHOD_BYTES: Final = 32

_TOKEN: Final = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]"
# Repeated characters are possessive (`++`): nothing is tried twice, so matching takes linear time on any input. Groups
# are not: up to Python 3.11.4 a possessive group keeps what its last, failed round consumed (CPython gh-106052).
_LINE: Final = rb"(%b{1,%d}+) ([\x21-\x7e\x80-\xff]++) HTTP/1\.([01])\r\n" % (_TOKEN, MAX_METHOD_BYTES)
_FIELD: Final = rb"%b++:[ \t]*+[\t\x20-\x7e\x80-\xff]*+\r\n" % _TOKEN

_match_head: Final = re.compile(rb"%b((?:%b)*)\r\n" % (_LINE, _FIELD)).fullmatch
_match_line: Final = re.compile(_LINE).fullmatch
_match_method: Final = re.compile(rb"%b{1,%d}+(?: |\Z)" % (_TOKEN, MAX_METHOD_BYTES)).match
_match_version: Final = re.compile(rb"[^ ]++ [\x21-\x7e\x80-\xff]++ HTTP/[0-9.]+\r\n").fullmatch
_match_fields: Final = re.compile(rb"(?:%b)*" % _FIELD).match
_match_name: Final = re.compile(rb"%b++:" % _TOKEN).match
_find_fields: Final = re.compile(rb"([^:]++):[ \t]*+([^\r]*+)\r\n").findall
_match_length: Final = re.compile(rb"0|[1-9][0-9]{0,17}").fullmatch

_TLS_HANDSHAKE: Final = 0x16
_SOCKS_VERSIONS: Final = (0x04, 0x05)


class HeadError(Exception):
    """The bytes are no request to be served: `status` and `reason` for the reply, `message` for a person."""

    def __init__(self, status: int, reason: DenyReason, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.message = message


@dataclass(frozen=True, slots=True)
class Head:
    """One request head. Header names are lower-case, values stripped of surrounding blanks, both in order.

    `size` is the number of bytes the head takes in the buffer, the empty line included.
    """

    method: bytes
    target: bytes
    minor_version: int
    headers: tuple[tuple[bytes, bytes], ...]
    size: int

    def get(self, name: bytes) -> bytes | None:
        """Return the value of a header that must have only one, None without it.

        `name` is lower-case. Raises HeadError if the header is repeated with different values.
        """
        found: bytes | None = None
        for key, value in self.headers:
            if key == name:
                if found is not None and found != value:
                    _malformed(f"header {name.decode('latin-1')} is given twice with different values")
                found = value
        return found

    def get_all(self, name: bytes) -> list[bytes]:
        """Return every value of a header, in order. `name` is lower-case."""
        return [value for key, value in self.headers if key == name]


@dataclass(frozen=True, slots=True)
class NoBody:
    """The request has no body."""


@dataclass(frozen=True, slots=True)
class ContentLength:
    """The body has `length` bytes."""

    length: int


@dataclass(frozen=True, slots=True)
class Chunked:
    """The body is chunked (RFC 9112 §7.1)."""


BodyFraming = NoBody | ContentLength | Chunked


def parse_head(data: bytes | bytearray, max_bytes: int = MAX_HEAD_BYTES) -> Head | Incomplete:
    """Read the request head at the start of `data` (RFC 9112 §3, §5).

    Returns INCOMPLETE until the empty line has arrived. Raises HeadError with status 431 if the head does not
    end within `max_bytes` or has more than MAX_HEADERS lines, and with 400 if no continuation of `data` could
    be a request, at the first byte already for TLS and SOCKS: such a client waits for an answer of its own
    kind and would otherwise hang.
    """
    end = data.find(b"\r\n\r\n", 0, max_bytes)
    if end < 0:
        _refuse_early(data[:max_bytes])
        if len(data) >= max_bytes:
            raise HeadError(431, DenyReason.HEAD_TOO_LARGE, f"the request head is larger than {max_bytes} bytes")
        return INCOMPLETE
    size = end + 4
    match = _match_head(data, 0, size)
    if match is None:
        _diagnose(bytes(data[:size]))
    method, target, minor, block = match.groups()
    headers = tuple([(name.lower(), value.rstrip(b" \t")) for name, value in _find_fields(block)])
    if len(headers) > MAX_HEADERS:
        raise HeadError(431, DenyReason.HEAD_TOO_LARGE, f"the request has more than {MAX_HEADERS} header lines")
    return Head(method, target, 1 if minor == b"1" else 0, headers, size)


def body_framing(head: Head) -> BodyFraming:
    """Tell how the body of a request is framed (RFC 9112 §6).

    Raises HeadError with status 400 on everything that two readers might take differently: Content-Length
    beside Transfer-Encoding, more than one of either, a length that is not plain digits, a coding other than
    exactly `chunked`, Transfer-Encoding in HTTP/1.0.
    """
    lengths = head.get_all(b"content-length")
    codings = head.get_all(b"transfer-encoding")
    if codings:
        # RFC 9112 §6.1: "A server MAY reject a request that contains both"; a proxy that does not is the
        # classic smuggler.
        if lengths:
            _malformed("Content-Length and Transfer-Encoding together")
        if head.minor_version == 0:
            _malformed("Transfer-Encoding in an HTTP/1.0 request")
        if len(codings) > 1 or codings[0].lower() != b"chunked":
            _malformed("Transfer-Encoding other than chunked")
        return Chunked()
    if not lengths:
        return NoBody()
    if len(lengths) > 1:
        _malformed("more than one Content-Length")
    if _match_length(lengths[0]) is None:
        _malformed("Content-Length is not a plain number")
    return ContentLength(int(lengths[0]))


def _malformed(message: str) -> NoReturn:
    raise HeadError(400, DenyReason.MALFORMED_REQUEST, message)


def _refuse_early(data: bytes | bytearray) -> None:
    """Refuse a head that no continuation can mend. Cheap: it runs once for every segment."""
    if not data:
        return
    if _match_method(data) is None:
        _diagnose(bytes(data))
    # Every newline ends a CRLF. (A lone CR at the end may still get its newline.)
    if data.count(b"\n") != data.count(b"\r\n"):
        _malformed("a line ends in a bare newline; HTTP lines end in CRLF")
    line_end = data.find(b"\r\n")
    if line_end >= 0 and _match_line(data, 0, line_end + 2) is None:
        _diagnose(bytes(data[: line_end + 2]))


def _diagnose(data: bytes) -> NoReturn:
    """Raise the HeadError that says best what is wrong with bytes that are known to be no request."""
    first = data[0]
    if first == _TLS_HANDSHAKE:
        _malformed("TLS arrived on a plain HTTP proxy port; use http:// for the proxy's own address")
    if first in _SOCKS_VERSIONS:
        _malformed("SOCKS arrived on an HTTP proxy port; use an http:// proxy address")
    if _match_method(data) is None:
        _malformed("the request does not start with a method")
    line, newline, rest = data.partition(b"\r\n")
    if _match_line(line + newline) is None:
        if _match_version(line + newline):
            _malformed("only HTTP/1.0 and HTTP/1.1 are spoken here")
        _malformed("the request line is not `METHOD target HTTP/1.1`")
    # The first line that is no header field, without the empty line that ends a head.
    good = _match_fields(rest)
    field = rest[good.end() :].partition(b"\r\n")[0] if good else rest
    if field.startswith((b" ", b"\t")):
        _malformed("a header line is folded (RFC 9112 section 5.2)")
    if _match_name(field) is None:
        _malformed("a header name is not a token followed by a colon")
    _malformed("a header value holds a control character")
