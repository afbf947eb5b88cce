"""Unpacks tar archives that untrusted code may have written, into a folder and never out of it.

Every folder on the way to an entry is opened without following links, so nothing is ever written through one. (Python's own
`data` filter, PEP 706, checks names before it writes; it is missing from the 3.11 of Debian 12.) Entries keep their content,
their names and whether they can be executed; owners, set-id bits, times and devices are left behind.
"""

import contextlib
import errno
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Final

_CHUNK: Final = 1024 * 1024
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Failures that are not one entry's fault.
_HOPELESS: Final = frozenset({errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOSPC})
# Deeper than any project, shallower than what exhausts file descriptors or a path's length.
MAX_DEPTH: Final = 128
# Names, link targets and attributes of one entry. PATH_MAX is 4 KiB; a map of a sparse file's holes may be larger.
MAX_HEADER_BYTES: Final = 1024 * 1024


class ArchiveError(Exception):
    """The archive cannot be unpacked; one sentence."""


class RefusedEntryError(Exception):
    """An entry of the archive must not be made; the message says why."""


@dataclass(slots=True)
class Unpacked:
    """What became of an archive: entries made, and why others were not."""

    entries: int = 0
    bytes: int = 0
    refused: list[str] = field(default_factory=list)


def unpack(archive: Path, folder: Path, *, max_bytes: int, max_entries: int, strict: bool) -> Unpacked:
    """Unpack `archive` into the existing `folder`; files that are there already are replaced.

    `strict`: an entry that must not be made is an ArchiveError; else it is left out and told. Raises ArchiveError, also when
    a bound is met; what was unpacked until then stays.
    """
    done = Unpacked()
    try:
        root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # Not compressed: a megabyte would unfold to a name of gigabytes before anybody could count them.
            with archive.open("rb") as file, tarfile.open(fileobj=(source := _Source(file)), mode="r:") as tar:  # type: ignore[call-overload]
                while (member := tar.next()) is not None:
                    source.header_left = None
                    tar.members.clear()
                    done.bytes += member.size
                    if done.bytes > max_bytes or done.entries + len(done.refused) >= max_entries:
                        raise ArchiveError(f"it holds more than {max_bytes} bytes or {max_entries} entries")
                    try:
                        _unpack_one(tar, member, root)
                        done.entries += 1
                    except (RefusedEntryError, OSError, ValueError) as error:
                        if isinstance(error, OSError) and error.errno in _HOPELESS:
                            raise
                        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
                        if strict:
                            raise ArchiveError(f"{member.name[:200]!r} {why}") from error
                        done.refused.append(f"{member.name[:200]}: {why}")
                    source.header_left = MAX_HEADER_BYTES
        finally:
            os.close(root)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ArchiveError(f"it cannot be unpacked: {error}") from error
    return done


class _Source:
    """An archive's file, as `tarfile` reads it. Headers, which it reads whole into memory, are bounded."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.header_left: int | None = MAX_HEADER_BYTES

    def read(self, size: int) -> bytes:
        """Read content, or a part of a header while `header_left` says how much that may be. Raises ArchiveError."""
        if self.header_left is not None:
            self.header_left -= size
            if self.header_left < 0:
                raise ArchiveError(f"a header in it is longer than {MAX_HEADER_BYTES} bytes")
        return self._file.read(size)

    def seek(self, position: int) -> int:
        """Go to a position."""
        return self._file.seek(position)

    def tell(self) -> int:
        """Return the position."""
        return self._file.tell()


def _unpack_one(tar: tarfile.TarFile, member: tarfile.TarInfo, root: int) -> None:
    parts = _parts(member.name)
    if not parts:
        return
    with _parent(root, parts) as parent:
        name = parts[-1]
        if member.isdir():
            os.close(_folder(name, parent))
        elif member.isreg():
            content = tar.extractfile(member)
            assert content is not None
            _write(content, parent, name, 0o755 if member.mode & 0o100 else 0o644)
        elif member.issym():
            _link(member, parts, parent)
        elif member.islnk():
            _hard_link(_parts(member.linkname), root, parent, name)
        else:
            raise RefusedEntryError("is neither file, folder nor link")


def _parts(name: str) -> tuple[str, ...]:
    parts = tuple(part for part in PurePosixPath(name).parts if part not in ("/", "//"))
    if ".." in parts or "\0" in name:
        raise RefusedEntryError("leads out of the folder")
    if len(parts) > MAX_DEPTH:
        raise RefusedEntryError(f"lies deeper than {MAX_DEPTH} folders")
    return parts


@contextlib.contextmanager
def _parent(root: int, parts: tuple[str, ...]) -> Iterator[int]:
    """Open the folder that an entry goes into, making what is missing, following nothing."""
    current = os.dup(root)
    try:
        for part in parts[:-1]:
            below = _folder(part, current)
            os.close(current)
            current = below
        yield current
    finally:
        os.close(current)


def _folder(name: str, parent: int) -> int:
    """Open a folder, made if it is missing; the mode is set apart, whatever the umask."""
    try:
        os.mkdir(name, 0o755, dir_fd=parent)
    except FileExistsError:
        return os.open(name, _FOLDER, dir_fd=parent)
    made = os.open(name, _FOLDER, dir_fd=parent)
    os.fchmod(made, 0o755)
    return made


def _write(content: IO[bytes], parent: int, name: str, mode: int) -> None:
    _remove(parent, name)
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=parent)
    with os.fdopen(fd, "wb", buffering=0) as file:
        os.fchmod(fd, mode)
        while chunk := content.read(_CHUNK):
            view = memoryview(chunk)
            while view:
                view = view[file.write(view) :]


def _link(member: tarfile.TarInfo, parts: tuple[str, ...], parent: int) -> None:
    """Make a symbolic link, if it is relative and stays inside by its text alone."""
    depth = len(parts) - 1
    for part in PurePosixPath(member.linkname).parts:
        depth += -1 if part == ".." else 1
        if part == "/" or part == "//" or depth < 0:
            raise RefusedEntryError(f"is a link that leads out of the folder, to {member.linkname[:200]!r}")
    _remove(parent, parts[-1])
    os.symlink(member.linkname, parts[-1], dir_fd=parent)


def _hard_link(target: tuple[str, ...], root: int, parent: int, name: str) -> None:
    if not target:
        raise RefusedEntryError("is a link to nothing")
    with _parent(root, target) as folder:
        _remove(parent, name)
        # Not followed: a link to a symbolic link is another name for the link itself.
        os.link(target[-1], name, src_dir_fd=folder, dst_dir_fd=parent, follow_symlinks=False)


def _remove(parent: int, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=parent)
