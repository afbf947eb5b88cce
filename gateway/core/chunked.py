"""Chunked bodies (RFC 9112 §7.1), read strictly and framed anew.

What goes on is framed by us, so that no reader behind us can find another end than we found.
"""

import re
from typing import Final

# Chunk size line with its extensions, which nobody uses. nginx refuses a size of more than 16 digits.
MAX_SIZE_LINE_BYTES: Final = 256
MAX_TRAILER_BYTES: Final = 8 * 1024
# 32 MiB in chunks of 128 bytes. Chunks of one byte cost a reader hundreds of times what they cost the sender.
MAX_CHUNKS: Final = 256 * 1024

_match_size: Final = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[\t\x20-\x7e\x80-\xff]*)?").fullmatch
_match_trailer: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*").fullmatch

_SIZE: Final = 0
_DATA: Final = 1
_DATA_END: Final = 2
_TRAILER: Final = 3
_DONE: Final = 4


class ChunkedError(Exception):
    """The bytes are no chunked body."""


class ChunkedReader:
    """Reads one chunked body of at most `max_chunks` (None: as many as come).

    `announced` counts its bytes including those of a chunk that has only begun.
    """

    __slots__ = ("_chunks", "_left", "_line", "_max_chunks", "_state", "_trailer_bytes", "announced")

    def __init__(self, max_chunks: int | None = MAX_CHUNKS) -> None:
        self._max_chunks = max_chunks
        self._state = _SIZE
        self._left = 0
        self._line = bytearray()
        self._chunks = 0
        self._trailer_bytes = 0
        self.announced = 0

    @property
    def done(self) -> bool:
        """Whether the body is whole."""
        return self._state == _DONE

    @property
    def left(self) -> int:
        """Bytes that are still to come of the chunk being read."""
        return self._left

    def feed(self, data: bytes) -> tuple[bytes, int]:
        """Return the body bytes in `data`, and how much of `data` belongs to this body. Raises ChunkedError."""
        pieces: list[bytes] = []
        position = 0
        while position < len(data) and self._state != _DONE:
            if self._state == _DATA:
                piece = data[position : position + self._left]
                pieces.append(piece)
                position += len(piece)
                self._left -= len(piece)
                if not self._left:
                    self._state = _DATA_END
            else:
                position = self._read_line(data, position)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces), position

    def _read_line(self, data: bytes, position: int) -> int:
        limit = MAX_TRAILER_BYTES if self._state == _TRAILER else MAX_SIZE_LINE_BYTES
        newline = data.find(b"\n", position, position + limit)
        end = len(data) if newline < 0 else newline + 1
        self._line += data[position:end]
        if len(self._line) > limit:
            raise ChunkedError("a line of the chunked body is too long")
        if newline < 0:
            if end - position >= limit:
                raise ChunkedError("a line of the chunked body is too long")
            return end
        if not self._line.endswith(b"\r\n"):
            raise ChunkedError("a line of the chunked body ends in a bare newline")
        line = bytes(self._line[:-2])
        self._line.clear()
        self._take_line(line)
        return end

    def _take_line(self, line: bytes) -> None:
        if self._state == _DATA_END:
            if line:
                raise ChunkedError("a chunk is longer than its size")
            self._state = _SIZE
        elif self._state == _SIZE:
            match = _match_size(line)
            if match is None:
                raise ChunkedError("a chunk size is not a hexadecimal number")
            self._left = int(match[1], 16)
            self.announced += self._left
            self._chunks += 1
            if self._max_chunks is not None and self._chunks > self._max_chunks:
                raise ChunkedError("the body has too many chunks")
            self._state = _DATA if self._left else _TRAILER
        elif not line:
            self._state = _DONE
        else:
            # Trailers are dropped: a header that comes after the head escaped every check of the head.
            self._trailer_bytes += len(line) + 2
            if self._trailer_bytes > MAX_TRAILER_BYTES or _match_trailer(line) is None:
                raise ChunkedError("the trailer of the chunked body is malformed or too long")


def encode_chunk(data: bytes) -> bytes:
    """Return `data`, which is not empty, as one chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


LAST_CHUNK: Final = b"0\r\n\r\n"
