"""Heads as they are passed on: a request's to the provider, a reply's to the client. Bytes in, bytes out.

The key is put in here and nowhere else; a credential that the sandbox sent never goes further.
"""

import re
from collections.abc import Iterable
from typing import Final

from gateway.core.providers import KEY_HEADERS

# For one connection only (RFC 9110 §7.6.1), with RFC 2616's Keep-Alive and the non-standard Proxy-Connection.
_HOP_BY_HOP: Final = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
# Set here, because they belong to the new connection or to the relay itself.
_REPLACED: Final = frozenset({b"host", b"content-length", b"accept-encoding", b"expect"})
# What would tell the provider about the sandbox, or speak with another's voice.
_PRIVATE: Final = frozenset({b"authorization", b"cookie", b"proxy-authorization", b"forwarded", b"via", b"x-real-ip"})
_DROPPED: Final = _HOP_BY_HOP | _REPLACED | _PRIVATE | KEY_HEADERS
_FORWARDED: Final = b"x-forwarded-"

_remove_hop_by_hop: Final = re.compile(
    rb"\r\n(?:%b):[^\r\n]*"
    % b"|".join(re.escape(name) for name in sorted(_HOP_BY_HOP - {b"transfer-encoding", b"trailer"})),
    re.IGNORECASE,
).sub
_find_framing: Final = re.compile(rb"\r\n(?:content-length:|transfer-encoding:[^\r\n]*chunked)", re.IGNORECASE).search
_find_connection: Final = re.compile(rb"\r\nconnection:([^\r\n]*)", re.IGNORECASE).findall
_find_content_type: Final = re.compile(rb"\r\ncontent-type:[ \t]*([^\r\n;]*)", re.IGNORECASE).search
_find_encoding: Final = re.compile(rb"\r\ncontent-encoding:[ \t]*([^\r\n]*)", re.IGNORECASE).search
# Names in `Connection` that are about the connection itself and name no other header.
_CONNECTION_OPTIONS: Final = frozenset({b"close", b"keep-alive", b"upgrade", b"te", b""})


def passed_headers(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the lines of a request's headers that go on to the provider, each ended by CRLF, in their order.

    Names are in lower case. What the new connection needs (host, key, framing) is not among them.
    """
    parts: list[bytes] = []
    named: frozenset[bytes] = _DROPPED
    for name, value in headers:
        if name == b"connection":
            named |= _named(value) - _CONNECTION_OPTIONS
    for name, value in headers:
        # CGI-like servers take `x_api_key` for `x-api-key`.
        plain = name.replace(b"_", b"-") if b"_" in name else name
        if name not in named and plain not in named and not plain.startswith(_FORWARDED):
            parts += (name, b": ", value, b"\r\n")
    return b"".join(parts)


def reply_head(raw: bytes, *, close: bool, chunked: bool) -> bytes:
    """Return a reply's head for the client: verbatim but for what is about the provider's connection only.

    `raw` ends in the empty line and has passed a strict parser. `close` announces that the client's connection ends with
    the reply. `chunked` adds the framing for a body that the provider ends by closing.
    """
    named = {name for value in _find_connection(raw) for name in _named(value)} - _CONNECTION_OPTIONS
    head = _remove_hop_by_hop(b"", raw)
    if named:
        lines = head.split(b"\r\n")
        kept = [
            line
            for line in lines[1:]
            if line.partition(b":")[0].lower() not in named - {b"transfer-encoding", b"content-length"}
        ]
        head = b"\r\n".join(lines[:1] + kept)
    # An intermediary answers with its own version (RFC 9110 §6.2); to an HTTP/1.0 reply a client would not keep alive.
    head = b"HTTP/1.1" + head[8:-2]
    if chunked:
        head += b"transfer-encoding: chunked\r\n"
    if close:
        head += b"connection: close\r\n"
    return head + b"\r\n"


def is_delimited(status: int, raw: bytes) -> bool:
    """Tell whether the body after a reply's head ends by itself, rather than with the connection (RFC 9112 §6.3)."""
    return status in (204, 304) or _find_framing(raw) is not None


def is_event_stream(raw: bytes) -> bool:
    """Tell whether a reply's head announces server-sent events."""
    match = _find_content_type(raw)
    return match is not None and match[1].strip().lower() == b"text/event-stream"


def is_encoded(raw: bytes) -> bool:
    """Tell whether a reply's head announces a content coding, through which usage cannot be read."""
    match = _find_encoding(raw)
    return match is not None and match[1].strip().lower() not in (b"", b"identity")


def _named(value: bytes) -> set[bytes]:
    return {name.strip().lower() for name in value.split(b",")}
