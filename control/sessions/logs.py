"""A session's logs on disk: `stdout.log` and `stderr.log` apart, capped, and an index that says what came when.

The index makes one merged, timestamped view of the two without keeping the text twice: 13 bytes for each piece.
"""

import itertools
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from control.docker.types import LogStream

_PIECE: Final = struct.Struct(">QBI")
# The end of the year 9999, in milliseconds: the last that RFC 3339 can say.
_MAX_AT: Final = 253_402_300_799_999
# Pieces are as long as what is read of the engine at once.
_MAX_PIECE_BYTES: Final = 16 * 1024 * 1024
_STREAMS: Final = (LogStream.STDOUT, LogStream.STDERR)
# A program that writes single bytes would make an index thirteen times its log.
MAX_PIECES: Final = 1_000_000
# What is read of the index, and of the text that it tells of, at once.
PIECES_AT_ONCE: Final = 1_000
BYTES_AT_ONCE: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Piece:
    """Where a piece of output lies. `at`: milliseconds since the epoch, when control received it."""

    at: int
    stream: LogStream
    offset: int
    length: int


class LogFiles:
    """Takes a container's output (control.docker.types.LogSink). Used by one log thread at a time.

    `changed` is called after each piece, from that thread.
    """

    def __init__(self, folder: Path, limit_bytes: int, clock: Callable[[], int], changed: Callable[[], None]) -> None:
        self._limit = limit_bytes
        self._clock = clock
        self._changed = changed
        opened: list[int] = []
        try:
            for name in (*(f"{stream.value}.log" for stream in _STREAMS), "logs.index"):
                opened.append(_open(folder / name))  # noqa: PERF401 - those that came before a failure are closed
        except OSError:
            # Who is short of descriptors must not lose those that he got.
            for fd in opened:
                os.close(fd)
            raise
        self._files = dict(zip(_STREAMS, opened[:-1], strict=True))
        self._index = opened[-1]
        # The marker at the cap lies beyond the limit, so the size alone tells how much came in.
        self._taken = {stream: min(os.fstat(fd).st_size, limit_bytes) for stream, fd in self._files.items()}
        self._pieces = os.fstat(self._index).st_size // _PIECE.size
        # A crash in the middle of an entry would shift all that follow.
        os.ftruncate(self._index, self._pieces * _PIECE.size)

    def position(self, stream: LogStream) -> int:
        """Return how many bytes of `stream` are kept."""
        return self._taken[stream]

    def read(self, stream: LogStream, offset: int, length: int) -> bytes:
        """Return what is kept of `stream` from an offset on, at most `length` bytes, without the line at the limit."""
        return os.pread(self._files[stream], max(0, min(length, self._taken[stream] - offset)), offset)

    def full(self, stream: LogStream) -> bool:
        """Tell whether `stream` has reached the limit, and nothing more of it is kept."""
        return self._taken[stream] >= self._limit

    def write(self, stream: LogStream, data: bytes) -> None:
        """Keep the next bytes of `stream`, up to the limit; then one line that says so, then nothing.

        Raises OSError when the disk does not take them; they are then not kept at all, and may come again.
        """
        room = self._limit - self._taken[stream]
        kept = data[:room] if room > 0 else b""
        size = os.fstat(self._files[stream]).st_size
        whole = kept
        if len(kept) < len(data):
            if size > self._limit:
                return
            whole += b"\n[opificia: output beyond %d bytes is not kept]\n" % self._limit
        try:
            _write(self._files[stream], whole)
            if self._pieces < MAX_PIECES:
                _write(self._index, _PIECE.pack(self._clock(), _STREAMS.index(stream), len(whole)))
        except OSError:
            # What a full disk took of them would stand before the same bytes when they come again.
            os.ftruncate(self._files[stream], size)
            os.ftruncate(self._index, self._pieces * _PIECE.size)
            raise
        self._taken[stream] += len(kept)
        self._pieces = min(self._pieces + 1, MAX_PIECES)
        self._changed()

    def close(self) -> None:
        """Close the files."""
        for fd in (*self._files.values(), self._index):
            os.close(fd)


class PieceReader:
    """Reads the index of a session's folder as it grows. Blocks: use a thread."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "logs.index"
        self._read = 0
        self._offsets = dict.fromkeys(_STREAMS, 0)

    def skip(self, count: int) -> None:
        """Leave out the next `count` pieces, as far as they are there."""
        while entries := self._entries(min(count, PIECES_AT_ONCE)):
            for _, number, length in entries:
                self._pass(number, length)
            count -= len(entries)

    def next(self) -> list[Piece]:
        """Return the next pieces in order, a bounded number of pieces and bytes; none when there are no more yet."""
        found: list[Piece] = []
        taken = 0
        for at, number, length in self._entries(PIECES_AT_ONCE):
            taken += length
            if found and taken > BYTES_AT_ONCE:
                break
            stream = _STREAMS[number]
            found.append(Piece(at, stream, self._offsets[stream], length))
            self._pass(number, length)
        return found

    def _entries(self, count: int) -> list[tuple[int, int, int]]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                data = file.read(count * _PIECE.size)
        except FileNotFoundError:
            return []
        entries = _PIECE.iter_unpack(data[: len(data) // _PIECE.size * _PIECE.size])
        # A power cut may leave blocks of anything; behind an entry that is none, offsets mean nothing.
        return list(itertools.takewhile(_is_entry, entries))

    def _pass(self, number: int, length: int) -> None:
        self._offsets[_STREAMS[number]] += length
        self._read += _PIECE.size


def _is_entry(entry: tuple[int, int, int]) -> bool:
    at, number, length = entry
    return at <= _MAX_AT and number < len(_STREAMS) and length <= _MAX_PIECE_BYTES


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o640)
