"""A request's body on its way to the provider, as its framing says where it ends. What goes on is framed anew."""

from gateway.core.chunked import LAST_CHUNK, ChunkedReader, encode_chunk
from gateway.core.head import BodyFraming, Chunked, ContentLength


class Upload:
    """Reads one body. `done` tells whether it is whole, `announced` how long it is as far as is known."""

    __slots__ = ("_chunks", "_left", "announced", "done")

    def __init__(self, framing: BodyFraming) -> None:
        self._chunks = ChunkedReader() if isinstance(framing, Chunked) else None
        self._left = self.announced = framing.length if isinstance(framing, ContentLength) else 0
        self.done = self._chunks is None and not self._left

    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        """Return the body bytes in `data`, and what follows the body. Raises ChunkedError."""
        if self._chunks is None:
            body = data[: self._left] if len(data) > self._left else data
            self._left -= len(body)
            self.done = not self._left
            return body, data[len(body) :]
        body, used = self._chunks.feed(data)
        self.announced = self._chunks.announced
        self.done = self._chunks.done
        return body, data[used:]

    def encode(self, body: bytes) -> bytes:
        """Return body bytes that `feed` gave as they go on."""
        if self._chunks is None:
            return body
        return (encode_chunk(body) if body else b"") + (LAST_CHUNK if self.done else b"")

    @property
    def framing(self) -> bytes:
        """The header line that says how `encode` frames the body."""
        return framing_line(self.announced if self._chunks is None else None)


def framing_line(length: int | None) -> bytes:
    """Return the header line for a body of `length` bytes, or for a chunked one."""
    return b"transfer-encoding: chunked\r\n" if length is None else b"content-length: %d\r\n" % length
