"""Bodies of plain-HTTP exchanges: how much of what has come belongs to the body, and what of it is passed on.

A chunked body is framed anew: chunk extensions and trailers go no further, so no reader behind the gateway can find
another end of it. All other bodies are passed on as they are.
"""

from typing import Final, Protocol, assert_never

from gateway.core.chunked import LAST_CHUNK, ChunkedError, ChunkedReader, encode_chunk
from gateway.core.head import Chunked, ContentLength, NoBody
from gateway.core.plain_head import ResponseFraming, UntilClose

# Read at once of a body in small chunks. Chunks of one byte cost about 2 µs each, so a turn ends after some 700 of them.
CHUNKS_TURN_BYTES: Final = 4 * 1024


class BodyError(Exception):
    """The bytes are no body of this framing. The message is one sentence for a person."""


class BodyReader(Protocol):
    """Reads one body."""

    @property
    def done(self) -> bool:
        """Whether the body is whole."""

    @property
    def ends_with_connection(self) -> bool:
        """Whether the end of the connection is the end of the body."""

    def read(self, data: bytearray) -> bytes:
        """Remove from the front of `data` what can be read of the body now, and return what is passed on.

        Raises BodyError. To be called again while it removes anything.
        """


class CountedBody:
    """A body of `length` bytes; of 0 where there is none."""

    __slots__ = ("_left",)
    ends_with_connection: Final = False

    def __init__(self, length: int) -> None:
        self._left = length

    @property
    def done(self) -> bool:
        """Whether the body is whole."""
        return self._left == 0

    def read(self, data: bytearray) -> bytes:
        """Take what is there, up to the length."""
        piece = bytes(data[: self._left])
        del data[: len(piece)]
        self._left -= len(piece)
        return piece


class ChunkedBody:
    """A chunked body, passed on as chunks of the gateway's own."""

    __slots__ = ("_reader",)
    ends_with_connection: Final = False

    def __init__(self) -> None:
        # A download may have any number of chunks; they are counted in bytes against the budget, and read in turns.
        self._reader = ChunkedReader(max_chunks=None)

    @property
    def done(self) -> bool:
        """Whether the last chunk and its trailers are read."""
        return self._reader.done

    def read(self, data: bytearray) -> bytes:
        """Take what one turn may read. Raises BodyError."""
        reader = self._reader
        try:
            body, size = reader.feed(bytes(data[: max(reader.left, CHUNKS_TURN_BYTES)]))
        except ChunkedError as error:
            raise BodyError(str(error)) from None
        del data[:size]
        passed = encode_chunk(body) if body else b""
        return passed + LAST_CHUNK if reader.done else passed


class EndlessBody:
    """A body that ends with the connection."""

    __slots__ = ()
    done: Final = False
    ends_with_connection: Final = True

    def read(self, data: bytearray) -> bytes:
        """Take what is there."""
        piece = bytes(data)
        data.clear()
        return piece


def body_reader(framing: ResponseFraming) -> BodyReader:
    """Return the reader for a framing."""
    match framing:
        case NoBody():
            return CountedBody(0)
        case ContentLength(length):
            return CountedBody(length)
        case Chunked():
            return ChunkedBody()
        case UntilClose():
            return EndlessBody()
        case _:
            assert_never(framing)
