"""A provider's reply on its way to the client: its head, its body as it is framed, what it says it used.

Nothing is held back but a key that an error repeats. A body that only ends with its connection is framed anew, so that the
client can tell its end from a cut; so is an error in chunks, because a key in two of them is whole only without their framing.
"""

from collections.abc import Callable

from gateway.core.chunked import LAST_CHUNK, encode_chunk
from gateway.core.headers import ReplyHead
from gateway.core.model_budget import Outcome
from gateway.core.providers import Route
from gateway.core.redact import Redactor, redact
from gateway.core.usage import NO_USAGE, JsonUsage, Kept, StreamUsage, UsageReader


class Reply:
    """One final reply to a request of `route`, by its status and its whole head.

    `key` is what must not reach the client, `kept` what the session keeps of its replies, `close` whether the client's
    connection ends with the reply. While `is_plain` is True body bytes pass as they are; otherwise what `take` returns is
    passed. Whoever has the body without its transfer coding gives it to `body_reader` first.
    """

    __slots__ = (
        "_ends_at_close",
        "_head",
        "_is_rechunked",
        "_redacted",
        "_redactor",
        "_route",
        "is_plain",
        "status",
        "usage",
    )

    def __init__(self, route: Route, status: int, head: bytes, key: bytes, kept: Kept, *, close: bool) -> None:
        self.status = status
        self.usage: UsageReader = NO_USAGE
        self._route = route
        self._redactor: Redactor | None = None
        # Body bytes without the key that have not been passed on yet.
        self._redacted = b""
        reply = ReplyHead(status, head)
        self._ends_at_close = self._is_rechunked = not reply.is_delimited
        if 200 <= status < 300:
            if route.metered and not reply.is_encoded:
                self.usage = StreamUsage(kept) if reply.is_event_stream else JsonUsage(kept)
        elif key:
            # Some providers repeat the key in the error about it.
            self._redactor = Redactor(key)
            reply = ReplyHead(status, redact(head, key))
            # A 304 has no body, whatever its head says (RFC 9112 §6.3). Stars in place of the key change no length.
            self._is_rechunked = status != 304 and b"\ncontent-length:" not in head.lower()
        # Goes out with the first body bytes.
        self._head = reply.for_client(close=close, chunked=self._ends_at_close)
        self.is_plain = False

    @property
    def body_reader(self) -> Callable[[bytes], object]:
        """Who takes the body without its transfer coding, each piece before `take` is called for it."""
        return self.usage.feed if self._redactor is None else self._redact

    def take(self, data: bytes) -> bytes:
        """Return what goes to the client for body bytes as they came, the head before the first of them."""
        if self._redactor is not None:
            data, self._redacted = self._redacted, b""
        if self._is_rechunked and data:
            data = encode_chunk(data)
        if self._head:
            data = self._head + data
            self._head = b""
        self.is_plain = self._redactor is None and not self._is_rechunked
        return data

    def end(self) -> bytes:
        """The body is whole: return what still goes to the client."""
        self.usage.end()
        if self.is_plain:
            return b""
        held = self._redactor.flush() if self._redactor is not None else b""
        if not self._is_rechunked:
            return held
        return (encode_chunk(held) if held else b"") + LAST_CHUNK

    def is_whole_at_close(self) -> bool:
        """Tell whether a body that ended with its connection, in good order, is whole by what it says itself."""
        return self._ends_at_close and self.usage.ends_with(self._route.end_markers)

    @property
    def outcome(self) -> Outcome:
        """What is known of the cost of a request whose reply is whole."""
        if self._route.metered and 200 <= self.status < 300 and not self.usage.final:
            return Outcome.UNREADABLE
        return Outcome.KNOWN

    def _redact(self, body: bytes) -> None:
        assert self._redactor is not None
        self._redacted += self._redactor.feed(body)
