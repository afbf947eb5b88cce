"""Where in the engine's record of one output that ends which is kept of it already. Pure: bytes in, a position out.

The record is no copy of what was kept. The engine writes whole lines of at most 16 KiB, with U+FFFD for each byte that is
not UTF-8; one that was killed has not written all that it had passed on; and of a long record it throws the oldest away. So
what is kept is compared with the record, not counted.
"""

import codecs
from collections.abc import Callable
from typing import Final

# Of a line that is longer the engine makes several entries.
ENTRY_BYTES: Final = 16 * 1024
# What is kept is looked for by its end; this much is taken for unmistakable.
_TAIL_BYTES: Final = 4096
# What an engine that is killed can have passed on and not recorded: it holds up to 1 MB for a slow reader.
_UNRECORDED_BYTES: Final = 1024 * 1024
# An entry of 16 KiB that are not UTF-8 is three times as long in the record.
_READ_BYTES: Final = 4 * ENTRY_BYTES
_REPLACED: Final = "\ufffd".encode()
_ERRORS: Final = "opificia.one-per-byte"


def _replace_each(error: UnicodeError) -> tuple[str, int]:
    # As Go's encoder does; Python's own "replace" makes one of several bytes.
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(_ERRORS, _replace_each)


class Alignment:
    """Takes the record's entries in order; `position` and `broken` are right when it has had all that there are.

    Entries that come later, behind `position`, are for `fresh`: what is kept of a line is not recorded before its end.
    `parted`: what is kept is not simply the record's beginning, and `position` was looked for.
    """

    def __init__(self, read: Callable[[int, int], bytes], size: int) -> None:
        """`read` returns what is kept, from an offset on, up to a length; `size`: how much that is in all."""
        self._read = read
        self._size = size
        self._buffer = b""
        self._compared = 0
        # How much of the record is the same as what is kept, from its beginning.
        self._same = 0
        self.parted = False
        self._fed = 0
        self._head = b""
        self._recent = b""
        self._tail = b""
        self._found: int | None = None
        self._ambiguous = False

    def feed(self, entry: bytes) -> None:
        """Take the next entry of the record."""
        if not self.parted:
            if self._compared == self._size:
                return
            if self._compare(entry):
                return
            self.parted = True
            self._tail = _recorded(_whole(self._read(max(0, self._size - _TAIL_BYTES), _TAIL_BYTES)))
        self._look_for_tail(entry)

    def fresh(self, entry: bytes) -> bytes:
        """Return what is not kept of the next entry behind `position`."""
        if self.parted or self._compared == self._size:
            return entry
        before = self._same
        self.parted = not self._compare(entry)
        return entry if self.parted else entry[self._same - before :]

    @property
    def position(self) -> int:
        """How many bytes of the record are kept already."""
        return self._end()[0]

    @property
    def broken(self) -> bool:
        """Tell whether something may be missing between what is kept and what the record has behind it."""
        return self._end()[1]

    def _compare(self, entry: bytes) -> bool:
        """Go on by one entry, if it is what is kept next, or begins with all that is left of that."""
        if len(self._buffer) < _READ_BYTES:
            self._buffer += self._read(self._compared + len(self._buffer), _READ_BYTES)
        left = self._size - self._compared
        kept = self._buffer[:left]
        if left < len(entry) and entry.startswith(kept):
            self._same += left
            self._compared = self._size
            return True
        length = _length_of(entry, kept)
        if length:
            self._same += len(entry)
            self._compared += length
            self._buffer = self._buffer[length:]
            return True
        last = _recorded(kept) if left < len(entry) else b""
        if last and entry.startswith(last):
            self._same += len(last)
            self._compared = self._size
            return True
        return False

    def _look_for_tail(self, entry: bytes) -> None:
        self._fed += len(entry)
        if len(self._head) < _TAIL_BYTES:
            self._head += entry
        self._recent += entry
        at = self._recent.find(self._tail)
        while at >= 0 and self._size > _TAIL_BYTES:
            if self._found is None:
                self._found = self._same + self._fed - len(self._recent) + at + len(self._tail)
            else:
                self._ambiguous = True
            at = self._recent.find(self._tail, at + 1)
        self._recent = self._recent[-len(self._tail) + 1 :] if len(self._tail) > 1 else b""

    def _end(self) -> tuple[int, bool]:
        if not self.parted:
            return self._same, False
        if self._found is not None:
            return self._found, self._ambiguous
        # Little came since they parted: the last lines kept are the first ones that the record has behind that place.
        start = 0
        while start < len(self._tail):
            if self._head.startswith(self._tail[start:]):
                return self._same + len(self._tail) - start, False
            start = self._tail.find(b"\n", start) + 1 or len(self._tail)
        # A record that begins as what is kept, nearly to its end, has lost nothing at its beginning: what follows is new.
        return self._same, self._same == 0 or self._size - self._compared > _UNRECORDED_BYTES


def _length_of(entry: bytes, kept: bytes) -> int:
    """Return how many bytes at the beginning of `kept` the engine records as this entry; 0: they are others."""
    if kept.startswith(entry):
        return len(entry)
    for length in (kept.find(b"\n") + 1, ENTRY_BYTES, len(entry) - 2 * entry.count(_REPLACED)):
        if 0 < length <= len(kept) and _recorded(kept[:length]) == entry:
            return length
    return 0


def _recorded(data: bytes) -> bytes:
    return data.decode("utf-8", _ERRORS).encode()


def _whole(data: bytes) -> bytes:
    """Leave out the rest of a character that was cut."""
    return data[next((n for n in range(min(3, len(data))) if data[n] & 0xC0 != 0x80), 3) :]
