"""What a sandbox left in /out, as a tar file of bounded size. Nothing is ever extracted here.

The archive is made by the engine from the ended container, in a chroot of it, so that no link in /out leads out. This
module reads tar headers only to count entries and to cut between two of them; names are bytes that nobody interprets.
"""

import os
import re
from pathlib import Path
from typing import Final

from control.docker.stream import Stream
from control.docker.types import EngineError, OutLimits, OutSummary

_BLOCK: Final = 512
_match_octal: Final = re.compile(rb"[0-7]*").fullmatch
_END: Final = bytes(2 * _BLOCK)
# Names, link targets and extended attributes of one entry; PATH_MAX is 4 KiB, an ext4 attribute at most a block.
_MAX_EXTENSION_BYTES: Final = 1024 * 1024
# Entries that only describe the next one: pax (POSIX.1-2001) and GNU's long names.
_EXTENSIONS: Final = b"xgLK"
# What the engine writes: files, links, devices, folders, FIFOs. Of others readers do not agree whether content follows.
_KINDS: Final = b"0123456"
# Only files carry content; a size in any other header means nothing.
_FILE: Final = ord("0")


class TarCut:
    """Passes a tar stream through up to its bounds, cut between two entries. Pure."""

    def __init__(self, limits: OutLimits) -> None:
        self._limits = limits
        self._pending = bytearray()
        self._extensions = bytearray()
        self._pax_size: int | None = None
        self._content_left = 0
        self._bytes = 0
        self._entries = 0
        self._truncated = False
        self.done = False

    def feed(self, data: bytes) -> bytes:
        """Return what is to be written for the next bytes. Once `done`, nothing more is needed.

        Raises EngineError when it is no tar.
        """
        out = bytearray()
        self._pending += data
        while not self.done:
            if self._content_left:
                piece = self._pending[: self._content_left]
                if not piece:
                    break
                del self._pending[: len(piece)]
                self._content_left -= len(piece)
                out += piece
            elif not self._header(out):
                break
        self._bytes += len(out)
        return bytes(out)

    def end(self) -> tuple[bytes, OutSummary]:
        """Return the end mark and the summary. Raises EngineError when the stream ended inside an entry."""
        if not self.done and (self._content_left or self._pending or self._extensions):
            raise EngineError("The engine's archive of /out ended in the middle of an entry.")
        return _END, OutSummary(self._bytes + len(_END), self._entries, self._truncated)

    def _header(self, out: bytearray) -> bool:
        """Take one header if it is there whole; with it, what describes it. Return whether to go on."""
        if len(self._pending) < _BLOCK:
            return False
        header = bytes(self._pending[:_BLOCK])
        if not any(header):
            self.done = True
            return False
        _check(header)
        kind, size = header[156], _number(header[124:136])
        if kind in _EXTENSIONS:
            return self._extension(header, kind, size)
        if kind not in _KINDS:
            raise EngineError("The engine's archive of /out holds an entry of an unknown kind.")
        if self._pax_size is not None:
            size = self._pax_size
        content = _padded(size) if kind == _FILE else 0
        total = self._bytes + len(out) + len(self._extensions) + _BLOCK + content + len(_END)
        if self._entries >= self._limits.entries or total > self._limits.bytes:
            # What would come after it could only be had by reading past it: a sparse file may claim exabytes.
            self._truncated = self.done = True
            return False
        out += self._extensions
        out += header
        del self._pending[:_BLOCK]
        self._extensions.clear()
        self._pax_size = None
        self._content_left = content
        self._entries += 1
        return True

    def _extension(self, header: bytes, kind: int, size: int) -> bool:
        if len(self._extensions) + size > _MAX_EXTENSION_BYTES:
            raise EngineError("The engine's archive of /out holds a header longer than any of them can be.")
        whole = _BLOCK + _padded(size)
        if len(self._pending) < whole:
            return False
        if kind == ord("x"):
            self._pax_size = _pax_size(bytes(self._pending[_BLOCK : _BLOCK + size]))
        self._extensions += self._pending[:whole]
        del self._pending[:whole]
        return True


def collect(stream: Stream, destination: Path, limits: OutLimits) -> OutSummary:
    """Write the engine's archive to `destination`, which appears only when it is whole. Raises EngineError, OSError."""
    cut = TarCut(limits)
    partial = destination.with_name(f"{destination.name}.partial")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(partial, flags, 0o640), "wb") as file:  # noqa: PTH123 - O_NOFOLLOW
            while not cut.done and (data := stream.read()):
                file.write(cut.feed(data))
            end, summary = cut.end()
            file.write(end)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(destination)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return summary


def _check(header: bytes) -> None:
    """Raise EngineError unless the header's checksum is right (POSIX ustar: its own field counts as spaces)."""
    expected = sum(header) - sum(header[148:156]) + 8 * ord(" ")
    if _number(header[148:156]) != expected:
        raise EngineError("The engine's archive of /out is no tar.")


def _number(field: bytes) -> int:
    if field[0] & 0x80:
        # GNU: binary in the rest of the field, for what octal digits cannot say.
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
    # Not int() alone, which also takes signs, underscores and "0o".
    digits = field.strip(b"\0 ")
    if not _match_octal(digits):
        raise EngineError("The engine's archive of /out is no tar.")
    return int(digits or b"0", 8)


def _pax_size(records: bytes) -> int | None:
    """Return the `size` among pax records ("LENGTH KEY=VALUE\\n"), None if there is none. Raises EngineError."""
    size = None
    position = 0
    try:
        while position < len(records):
            space = records.index(b" ", position)
            length = _decimal(records[position:space])
            if length <= space - position or position + length > len(records):
                raise ValueError
            key, _, value = records[space + 1 : position + length - 1].partition(b"=")
            if key == b"size":
                size = _decimal(value)
            position += length
    except ValueError as error:
        raise EngineError("The engine's archive of /out holds a broken pax header.") from error
    return size


def _decimal(digits: bytes) -> int:
    if not digits.isdigit():
        raise ValueError
    return int(digits)


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK
