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

_find_hop_by_hop: Final = re.compile(
    rb"\n(?:" + b"|".join(sorted(_HOP_BY_HOP - {b"transfer-encoding", b"trailer"})) + rb"):"
).search
# What most providers' replies have of it, and nothing else.
_KEEP_ALIVE: Final = b"\r\nconnection: keep-alive\r\n"
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


class ReplyHead:
    """A reply's head, whole, that has passed a strict parser. Looked at by plain searches: it is in every request's way."""

    __slots__ = ("_lower", "_raw", "_status")

    def __init__(self, status: int, raw: bytes) -> None:
        self._status = status
        self._raw = raw
        self._lower = raw.lower()

    @property
    def is_delimited(self) -> bool:
        """Whether the body ends by itself, rather than with the connection (RFC 9112 §6.3)."""
        if b"\ncontent-length:" in self._lower or self._status in (204, 304):
            return True
        return b"\ntransfer-encoding:" in self._lower and any(
            b"chunked" in value for value in self._values(b"transfer-encoding")
        )

    @property
    def is_event_stream(self) -> bool:
        """Whether the body is server-sent events."""
        return b"text/event-stream" in self._lower and any(
            value.startswith(b"text/event-stream") for value in self._values(b"content-type")
        )

    @property
    def is_encoded(self) -> bool:
        """Whether the body has a content coding, through which usage cannot be read."""
        return b"\ncontent-encoding:" in self._lower and not {b"", b"identity"}.issuperset(
            self._values(b"content-encoding")
        )

    def for_client(self, *, close: bool, chunked: bool) -> bytes:
        """Return the head for the client: verbatim but for what is about the provider's connection only.

        `close` announces that the client's connection ends with the reply. `chunked` adds the framing for a body that the
        provider ends by closing.
        """
        head = self._raw
        found = _find_hop_by_hop(self._lower)
        if found is not None:
            start = found.start() - 1
            if self._lower.startswith(_KEEP_ALIVE, start) and _find_hop_by_hop(self._lower, found.end()) is None:
                head = head[:start] + head[start + len(_KEEP_ALIVE) - 2 :]
            else:
                head = self._without_hop_by_hop()
        # An intermediary answers with its own version (RFC 9110 §6.2); after HTTP/1.0 a client would not keep alive.
        end = (b"transfer-encoding: chunked\r\n" if chunked else b"") + (b"connection: close\r\n" if close else b"")
        if end or not head.startswith(b"HTTP/1.1"):
            head = b"HTTP/1.1" + head[8:-2] + end + b"\r\n"
        return head

    def _without_hop_by_hop(self) -> bytes:
        named = {name.strip() for value in self._values(b"connection") for name in value.split(b",")}
        # Whatever `Connection` names, the framing is never dropped: without it the body's end would be another.
        dropped = (named | _HOP_BY_HOP) - {b"content-length", b"transfer-encoding", b"trailer"}
        lines = self._raw.split(b"\r\n")
        kept = [line for line in lines[1:] if line.partition(b":")[0].lower() not in dropped]
        return b"\r\n".join((lines[0], *kept))

    def _values(self, name: bytes) -> list[bytes]:
        """Return the values of a header, in lower case."""
        mark, lower = b"\r\n" + name + b":", self._lower
        values: list[bytes] = []
        start = lower.find(mark)
        while start >= 0:
            start += len(mark)
            values.append(lower[start : lower.index(b"\r\n", start)].strip())
            start = lower.find(mark, start)
        return values


def _named(value: bytes) -> set[bytes]:
    return {name.strip().lower() for name in value.split(b",")}
