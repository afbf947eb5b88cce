"""Heads of plain-HTTP exchanges: what a request asks for, where a response ends, and what of each is passed on.

Nothing of either is passed on as it came: the start line, Host and the framing are written anew from what was understood,
so that no reader behind the gateway can understand something else (RFC 9112 §11.2). No `Via` is added: servers turn
compression off for it, and the loops it is for cannot happen, because the gateway's own addresses are refused.
"""

import re
from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import Final, assert_never

from gateway.core.authority import Authority, AuthorityError, parse_absolute_http, parse_authority
from gateway.core.head import BodyFraming, Chunked, ContentLength, Head, HeadError, NoBody, body_framing
from gateway.core.incomplete import INCOMPLETE, Incomplete
from gateway.core.verdict import DenyReason

HTTP: Final = 80
# Largest response head passed on. Cookies and security policies make them larger than requests; Go's client takes 10 MiB,
# Node's 16 KiB.
MAX_RESPONSE_HEAD_BYTES: Final = 64 * 1024

# For one connection only (RFC 9110 §7.6.1). What starts with `proxy-` is so as well: from a client it is for the gateway,
# and from a server it would ask the client for the gateway's credentials.
_HOP_BY_HOP: Final = frozenset(
    {b"connection", b"http2-settings", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade"}
)
_REWRITTEN: Final = frozenset({b"host", b"content-length"})
# Requests of these methods change nothing, so one may be sent again if a kept connection ends under it (RFC 9110 §9.2.2).
_SAFE_METHODS: Final = frozenset({b"GET", b"HEAD", b"OPTIONS", b"TRACE"})

_TOKEN: Final = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]"
_FIELD: Final = rb"%b++:[ \t]*+[\t\x20-\x7e\x80-\xff]*+\r\n" % _TOKEN
# Groups are not possessive: up to Python 3.11.4 such a group keeps what its last, failed round consumed (gh-106052).
_match_response: Final = re.compile(
    rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: ([\t\x20-\x7e\x80-\xff]*+))?\r\n((?:%b)*)\r\n" % _FIELD
).fullmatch
_find_fields: Final = re.compile(rb"([^:]++):[ \t]*+([^\r]*+)\r\n").findall
_match_length: Final = re.compile(rb"[0-9]{1,18}").fullmatch
_START: Final = b"HTTP/1."

Headers = tuple[tuple[bytes, bytes], ...]


class ResponseError(Exception):
    """The bytes are no response that could be passed on. The message is one sentence for a person."""


@dataclass(frozen=True, slots=True)
class PlainRequest:
    """One request as it is understood.

    `head` is what goes upstream, whole. `is_http_1_0` clients get no interim response and no second answer on the same
    connection. `wants_body` is False for HEAD, whose response has none. `is_repeatable`: it may be sent again.
    """

    authority: Authority
    head: bytes
    framing: BodyFraming
    is_http_1_0: bool
    keep_alive: bool
    wants_body: bool
    is_repeatable: bool


@dataclass(frozen=True, slots=True)
class UntilClose:
    """The body ends with the connection."""


ResponseFraming = BodyFraming | UntilClose


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """One response head. Header names are as they came, values stripped. `size` is in bytes of the buffer."""

    minor_version: int
    status: int
    phrase: bytes
    headers: Headers
    size: int

    @property
    def is_interim(self) -> bool:
        """Another response to the same request follows (RFC 9110 §15.2)."""
        return self.status < 200

    @property
    def keep_alive(self) -> bool:
        """The server will take another request on its connection."""
        return self.minor_version == 1 and b"close" not in _connection_options(self.headers)


def names_one_of(names: Set[str], head: Head) -> bool:
    """Tell whether a request of a proxy client is for one of these hosts, on whatever port."""
    if head.target[:7].lower() != b"http://":
        return False
    try:
        return parse_absolute_http(head.target)[0].host in names
    except AuthorityError:
        # Whoever serves it says what is wrong with it.
        return False


def read_request(head: Head, tunnel: Authority | None) -> PlainRequest:
    """Understand one request: `http://host/path` from a proxy client, `/path` inside a `tunnel` to one host.

    Raises HeadError (400, with the reason) where target, Host and tunnel do not agree on one host, or the body's framing
    could be read in two ways.
    """
    if head.method == b"CONNECT":
        raise HeadError(400, DenyReason.MALFORMED_REQUEST, "a CONNECT opens a connection of its own")
    try:
        authority, target = _read_target(head, tunnel)
        _check_host(head, authority)
        if tunnel is not None and authority != tunnel:
            raise AuthorityError("the request names another host than the tunnel's")
    except AuthorityError as error:
        raise HeadError(400, DenyReason.MALFORMED_AUTHORITY, str(error)) from None
    framing = body_framing(head)
    options = _connection_options(head.headers)
    is_http_1_0 = head.minor_version == 0
    parts = [b"%b %b HTTP/1.%d\r\nHost: %b\r\n" % (head.method, target, head.minor_version, host_header(authority))]
    # Written as most clients write them: there are servers that look at the spelling.
    parts += [b"%b: %b\r\n" % (name.title(), value) for name, value in _end_to_end(head.headers, options, _REWRITTEN)]
    parts.append(_framing_line(framing))
    if is_http_1_0:
        # Passed on as HTTP/1.0: to another version a server may answer in chunks, which this client cannot read.
        parts.append(b"Connection: close\r\n")
    parts.append(b"\r\n")
    has_body = not isinstance(framing, NoBody) and framing != ContentLength(0)
    return PlainRequest(
        authority=authority,
        head=b"".join(parts),
        framing=framing,
        is_http_1_0=is_http_1_0,
        keep_alive=not is_http_1_0 and b"close" not in options,
        wants_body=head.method != b"HEAD",
        is_repeatable=head.method in _SAFE_METHODS and not has_body,
    )


def host_header(authority: Authority) -> bytes:
    """Return the value of Host for an authority: the port is left out where it is HTTP's own (RFC 9110 §4.2.3)."""
    text = str(authority)
    return (text.removesuffix(f":{HTTP}") if authority.port == HTTP else text).encode("ascii")


def parse_response_head(data: bytes | bytearray, max_bytes: int = MAX_RESPONSE_HEAD_BYTES) -> ResponseHead | Incomplete:
    """Read the response head at the start of `data` (RFC 9112 §4, §5), as strictly as a request's.

    Returns INCOMPLETE until the empty line has arrived. Raises ResponseError if no continuation could be a response.
    """
    if data[:7] != _START[: len(data)]:
        raise ResponseError("the host does not answer in HTTP/1")
    end = data.find(b"\r\n\r\n", 0, max_bytes)
    if end < 0:
        if len(data) >= max_bytes:
            raise ResponseError(f"the response head is larger than {max_bytes} bytes")
        # No continuation mends a bare newline, and the empty line may never come.
        if data.count(b"\n") != data.count(b"\r\n"):
            raise ResponseError("a line of the response head ends in a bare newline")
        return INCOMPLETE
    match = _match_response(data, 0, end + 4)
    if match is None:
        raise ResponseError("the response head is malformed")
    minor, status, phrase, block = match.groups()
    headers = tuple([(name, value.rstrip(b" \t")) for name, value in _find_fields(block)])
    return ResponseHead(1 if minor == b"1" else 0, int(status), phrase or b"", headers, end + 4)


def response_framing(head: ResponseHead, request: PlainRequest) -> ResponseFraming:
    """Tell how the body of a response to `request` is framed (RFC 9112 §6.3).

    Raises ResponseError on what two readers might take differently, and on a protocol that nobody asked for.
    """
    if head.status == 101:
        raise ResponseError("the host switched to another protocol, which was not asked for")
    lengths = [value for name, value in head.headers if name.lower() == b"content-length"]
    codings = [value for name, value in head.headers if name.lower() == b"transfer-encoding"]
    if len(lengths) > 1 or len(codings) > 1 or (lengths and codings):
        raise ResponseError("the response has more than one framing")
    if lengths and _match_length(lengths[0]) is None:
        raise ResponseError("the response's Content-Length is not a plain number")
    if codings and (codings[0].lower() != b"chunked" or head.minor_version == 0 or request.is_http_1_0):
        raise ResponseError("the response's Transfer-Encoding is not one that was asked for")
    if head.is_interim or head.status in (204, 304) or not request.wants_body:
        return NoBody()
    if codings:
        return Chunked()
    return ContentLength(int(lengths[0])) if lengths else UntilClose()


def response_bytes(head: ResponseHead, framing: ResponseFraming, *, close: bool) -> bytes:
    """Return a response head for the client. `close` announces that its connection ends after this response."""
    options = _connection_options(head.headers)
    parts = [b"HTTP/1.1 %d %b\r\n" % (head.status, head.phrase)]
    # A length that frames nothing here (HEAD, 304) tells of the resource and is passed on; interim responses and 204 must
    # not have one (RFC 9110 §8.6), and a client that believed it would wait for a body or take the next response for one.
    informs = isinstance(framing, NoBody) and not head.is_interim and head.status != 204
    rewritten = _REWRITTEN - {b"content-length"} if informs else _REWRITTEN
    parts += [b"%b: %b\r\n" % field for field in _end_to_end(head.headers, options, rewritten)]
    parts.append(_framing_line(framing))
    if close and not head.is_interim:
        parts.append(b"Connection: close\r\n")
    parts.append(b"\r\n")
    return b"".join(parts)


def _read_target(head: Head, tunnel: Authority | None) -> tuple[Authority, bytes]:
    target = head.target
    # A server must take the absolute form as well (RFC 9112 §3.2.2), so a client may send it through a tunnel.
    if tunnel is None or not (target.startswith(b"/") or target == b"*"):
        return parse_absolute_http(target)
    if b"#" in target:
        raise AuthorityError("the target holds a fragment")
    return tunnel, target


def _check_host(head: Head, authority: Authority) -> None:
    """Hold the Host header against what was asked for (RFC 9112 §3.2)."""
    hosts = head.get_all(b"host")
    if len(hosts) > 1:
        raise AuthorityError("the request has more than one Host header")
    if not hosts:
        if head.minor_version == 1:
            raise AuthorityError("the request has no Host header")
        return
    if parse_authority(hosts[0], HTTP) != authority:
        raise AuthorityError("the Host header names another host than the request")


def _connection_options(headers: Headers) -> set[bytes]:
    """Return the names in all Connection headers, lower-case."""
    values = [value for name, value in headers if name.lower() == b"connection"]
    return {option.strip(b" \t").lower() for value in values for option in value.split(b",")}


def _end_to_end(headers: Headers, options: set[bytes], rewritten: frozenset[bytes]) -> Iterable[tuple[bytes, bytes]]:
    """Yield the headers that are passed on."""
    for name, value in headers:
        lower = name.lower()
        if not (lower in _HOP_BY_HOP or lower in rewritten or lower in options or lower.startswith(b"proxy-")):
            yield name, value


def _framing_line(framing: ResponseFraming) -> bytes:
    match framing:
        case NoBody() | UntilClose():
            return b""
        case ContentLength(length):
            return b"Content-Length: %d\r\n" % length
        case Chunked():
            return b"Transfer-Encoding: chunked\r\n"
        case _:
            assert_never(framing)
