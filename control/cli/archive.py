"""Packs a folder for a sandbox's /in."""

import tarfile
from pathlib import Path
from typing import BinaryIO

from control.archive import ArchiveError


def pack(folder: Path, target: BinaryIO) -> None:
    """Write the contents of `folder` as a tar. Raises ArchiveError."""
    if not folder.is_dir():
        raise ArchiveError(f"{folder} is not a folder")

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        # Sockets, FIFOs and devices mean nothing in another place.
        if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
            return None
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member

    try:
        with tarfile.open(fileobj=target, mode="w") as tar:
            for entry in sorted(folder.iterdir()):
                tar.add(entry, arcname=entry.name, filter=plain)
    except OSError as error:
        raise ArchiveError(f"{error.filename or folder} cannot be read: {error.strerror}") from error
