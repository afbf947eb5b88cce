"""A session's folder on the host: what was given to it, its logs, its results. All calls block: use a thread."""

import os
import shutil
import stat
from pathlib import Path
from typing import Final

from control.archive import ArchiveError, unpack

# Entries of an uploaded archive; as many as /out may hold.
MAX_IN_ENTRIES: Final = 100_000


class InputError(Exception):
    """What the caller gave cannot be used; the message says why."""


def put_aside(folder: Path, now: int) -> None:
    """Rename the folder that an earlier session of this name left, if there is one.

    The database does not know that session any more (it is an older backup): its journal and logs are not the new one's.
    No session id has a dot, so the name is nobody's.
    """
    if folder.exists():
        folder.rename(folder.with_name(f"{folder.name}.until-{now}"))


def make(folder: Path) -> None:
    """Make a session's folder with an empty `in`."""
    folder.mkdir(mode=0o750, parents=True, exist_ok=True)
    # The sandbox's user is another one and must be able to read it; the folder above keeps the host's users out.
    inside = folder / "in"
    inside.mkdir(exist_ok=True)
    inside.chmod(0o755)


def unpack_input(folder: Path, archive: Path, limit_bytes: int) -> None:
    """Unpack an uploaded tar into `in`. Raises InputError; nothing is left of it then."""
    target = folder / "in"
    try:
        unpack(archive, target, max_bytes=limit_bytes, max_entries=MAX_IN_ENTRIES, strict=True)
    except ArchiveError as error:
        _empty(target)
        raise InputError(f"the input is not an archive that can be used: {error}") from error


def _empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(exist_ok=True)
    folder.chmod(0o755)


def check_in_dir(path: str, roots: tuple[str, ...]) -> str:
    """Return the folder to mount for an `in_dir`, walked without following a link below its root. Raises InputError.

    A link would lead the mount out of the operator's roots; a socket or FIFO in the folder, into its owner.
    """
    root = next((each for each in roots if Path(path).is_relative_to(each)), None)
    if root is None:
        raise InputError("in_dir is not under one of the operator's sandbox.in_roots")
    try:
        fd = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for part in Path(path).relative_to(root).parts:
                below = os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
                os.close(fd)
                fd = below
            real = str(Path(f"/proc/self/fd/{fd}").readlink())
        finally:
            os.close(fd)
    except OSError as error:
        raise InputError(f"in_dir cannot be opened without following a link: {error.strerror}") from error
    try:
        _refuse_doors(real)
    except OSError as error:
        raise InputError(f"in_dir cannot be read to its end: {error.strerror}; let the daemon read it") from error
    return real


def _refuse_doors(folder: str) -> None:
    """Refuse a folder that holds a way to a process of the host. Raises InputError, OSError.

    A read-only mount keeps nobody from connecting to a socket or from writing to a FIFO.
    """
    count = 0
    unseen = [folder]
    while unseen:
        with os.scandir(unseen.pop()) as entries:
            for entry in entries:
                count += 1
                if count > MAX_IN_ENTRIES:
                    raise InputError(f"in_dir holds more than {MAX_IN_ENTRIES} files and folders")
                mode = entry.stat(follow_symlinks=False).st_mode
                if stat.S_ISDIR(mode):
                    unseen.append(entry.path)
                elif not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
                    raise InputError(
                        "in_dir holds a socket, FIFO or device, through which a sandbox would reach whoever is behind it"
                    )


def remove(folder: Path) -> None:
    """Remove a session's folder with all that is in it."""
    shutil.rmtree(folder, ignore_errors=True)


def size(folder: Path) -> int:
    """Return the bytes that a session's folder takes of the disk, 0 when it is gone. No link is followed."""
    taken = 0
    for directory, _folders, files in os.walk(folder):
        for name in files:
            try:
                # In units of 512 bytes (stat(2)); a sparse file takes less than it is long.
                taken += Path(directory, name).lstat().st_blocks * 512
            except FileNotFoundError:
                continue
    return taken
