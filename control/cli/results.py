"""Results of sessions: lists what is in the tar that the daemon keeps, or unpacks it."""

import asyncio
import sys
import tarfile
import tempfile
from pathlib import Path

import msgspec

from control.archive import ArchiveError, Unpacked, unpack
from control.cli.output import as_json, cell, fail, show, table
from control.cli.text import escape_line
from control.client import ControlClient


class Entry(msgspec.Struct, frozen=True):
    """One file or folder among the results. `kind`: file, folder, link or other."""

    path: str
    kind: str
    bytes: int


async def list_out(client: ControlClient, session: str, json: bool) -> None:
    """Print the entries of a session's results."""
    with tempfile.TemporaryDirectory(prefix="opificia-out-") as temporary:
        archive = Path(temporary) / "out.tar"
        await client.out(session, archive)
        try:
            entries = await asyncio.to_thread(_entries, archive)
        except (tarfile.TarError, OSError) as error:
            fail(f"the results cannot be read: {error}")
    if json:
        as_json(entries)
        return
    made = table("PATH", "KIND", "BYTES")
    for each in entries:
        made.add_row(cell(each.path), each.kind, str(each.bytes))
    show(made)


def _entries(archive: Path) -> list[Entry]:
    entries = []
    with tarfile.open(archive) as tar:
        for member in tar:
            # Names are relative to /out, which is there itself as ".".
            path = member.name.removeprefix(".").removeprefix("/")
            if path:
                entries.append(Entry(_text(path), _kind(member), member.size if member.isreg() else 0))
    return entries


def _text(name: str) -> str:
    """Return a name as text: it is the sandbox's own bytes, and JSON has only text."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _kind(member: tarfile.TarInfo) -> str:
    if member.isdir():
        return "folder"
    if member.isreg():
        return "file"
    return "link" if member.issym() or member.islnk() else "other"


async def fetch_out(client: ControlClient, session: str, folder: Path, *, quiet: bool, json: bool = False) -> None:
    """Unpack a session's results into `folder`."""
    with tempfile.TemporaryDirectory(prefix="opificia-out-") as temporary:
        archive = Path(temporary) / "out.tar"
        await client.out(session, archive)
        try:
            done = await asyncio.to_thread(_unpack_out, archive, folder)
        except (ArchiveError, OSError) as error:
            fail(f"the results cannot be unpacked into {folder}: {error}")
    if json:
        left_out = [_text(line) for line in done.refused]
        as_json({"entries": done.entries, "bytes": done.bytes, "left_out": left_out})
        return
    for line in done.refused:
        print(f"opificia: left out {escape_line(line)}", file=sys.stderr)
    if not quiet and sys.stderr.isatty():
        print(f"opificia: {done.entries} entries in {folder}", file=sys.stderr)


def _unpack_out(archive: Path, folder: Path) -> Unpacked:
    folder.mkdir(parents=True, exist_ok=True)
    # The daemon has bounded it already, by the size of /out.
    return unpack(archive, folder, max_bytes=2**62, max_entries=2**62, strict=False)
