"""A session's journal: `events.jsonl`, one JSON line an event, synced to disk before anything is done about it.

It is what survives when the database is away or the machine loses power; the database is brought up to it.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from control.db.rows import StoredEvent

_decoder = msgspec.json.Decoder(StoredEvent)


def append(path: Path, events: Sequence[StoredEvent]) -> None:
    """Add `events` to the journal and return when they are on disk. Blocks: call it in a thread. Raises OSError."""
    lines = b"".join(msgspec.json.encode(event) + b"\n" for event in events)
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o640)
    try:
        size = os.fstat(fd).st_size
        view = memoryview(lines)
        try:
            while view:
                view = view[os.write(fd, view) :]
            os.fdatasync(fd)
            if size == 0:
                # The file's name is on disk only when its folder is (fsync(2)).
                _sync_folder(path.parent)
        except OSError:
            # A full disk may leave half a line, to which the next event would be glued.
            os.ftruncate(fd, size)
            raise
    finally:
        os.close(fd)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read(path: Path, after: int = 0, *, repair: bool = True) -> list[StoredEvent]:
    """Return the events with numbers above `after`; none if there is no journal.

    A last line that a power cut tore is left out and, with `repair`, cut off so that the next event starts a line of its own.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    whole = data.rfind(b"\n") + 1
    if repair and whole < len(data):
        os.truncate(path, whole)
    found = []
    for line in data[:whole].splitlines():
        try:
            # As text: of the documents in it msgspec would not look whether they are any.
            event = _decoder.decode(line.decode())
        except (ValueError, RecursionError):
            # Not written by us; what follows cannot be trusted to continue the numbers.
            break
        if event.number > after:
            found.append(event)
    return found
