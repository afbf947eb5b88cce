"""Folders to tar and back: what goes into a sandbox, and what comes out of one."""

import tarfile
from pathlib import Path
from typing import BinaryIO


class ArchiveError(Exception):
    """The folder or archive cannot be used; one sentence."""


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


def unpack(archive: Path, folder: Path) -> tuple[int, list[str]]:
    """Unpack what a sandbox left; return how many entries were made, and why others were not.

    The archive was written by untrusted code: the `data` filter (PEP 706) refuses links and names that lead out of the
    folder, devices, and special modes. An entry that is refused does not keep the others out. Raises ArchiveError.
    """
    made, refused = 0, []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archive, "r:") as tar:
            for member in tar:
                if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
                    refused.append(f"{member.name}: is neither file, folder nor link")
                    continue
                try:
                    tar.extract(member, folder, filter="data")
                except (tarfile.FilterError, KeyError, OSError) as error:
                    refused.append(f"{member.name}: {error}")
                else:
                    made += 1
    except (tarfile.TarError, OSError) as error:
        raise ArchiveError(f"the results cannot be unpacked into {folder}: {error}") from error
    return made, refused
