"""Targets in control: what a runner says, what a container prints and leaves; and a torn journal."""

import contextlib
import tempfile
from pathlib import Path

import msgspec

from control.archive import ArchiveError, unpack
from control.db.rows import StoredEvent
from control.docker.demultiplex import Demultiplexer
from control.docker.types import EngineError
from control.plan.session import ToolCalled, ToolReturned
from control.runner.channel import _kept
from control.runner.messages import FrameError, FromRunner, Output, ToolCall, ToolResult, decode
from control.sessions import journal
from tests.fuzz.properties import pieces

_MAX_UNPACKED = 1 << 20


def runner_frame(data: bytes) -> None:
    """`decode`: a message within its bounds, or a reason that fits into a frame of its own."""
    try:
        message = decode(data)
    except FrameError as error:
        refused = error
    else:
        assert getattr(message, "seq", 1) >= 1
        assert decode(msgspec.json.encode(message)) == message
        _check_kept(message)
        if isinstance(message, Output):
            with contextlib.suppress(ValueError):
                message.content()
        return
    assert refused.reason in ("malformed", "unknown_type", "invalid")
    assert len(str(refused)) < 1_000


def _check_kept(message: FromRunner) -> None:
    """Check that what is kept of a report is one line, which is read again also by who has little room to call itself."""
    if not isinstance(message, ToolCall | ToolResult):
        return
    kept = _kept(message)
    if isinstance(kept, ToolCall):
        stored = StoredEvent(1, 2, ToolCalled(kept.seq, kept.call, kept.name, kept.arguments))
    else:
        assert isinstance(kept, ToolResult)
        stored = StoredEvent(1, 2, ToolReturned(kept.seq, kept.call, kept.ok, kept.content))
    line = msgspec.json.encode(stored)
    assert b"\n" not in line
    assert b"\r" not in line

    def read(room: int) -> StoredEvent:
        return read(room - 1) if room else msgspec.json.decode(line, type=StoredEvent)

    assert read(300) == stored


def archive(data: bytes) -> None:
    """`unpack`: nothing is made outside of the folder, and no more than may be."""
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        (base / "in.tar").write_bytes(data)
        target = base / "inside" / "folder"
        target.mkdir(parents=True)
        try:
            done = unpack(base / "in.tar", target, max_bytes=_MAX_UNPACKED, max_entries=50, strict=False)
        except ArchiveError:
            pass
        else:
            assert done.entries <= 50
            assert done.bytes <= _MAX_UNPACKED
        assert {path.name for path in base.iterdir()} == {"in.tar", "inside"}
        assert [path.name for path in (base / "inside").iterdir()] == ["folder"]
        for path in target.rglob("*"):
            if path.is_symlink():
                assert path.parent.joinpath(path.readlink()).is_relative_to(target)
            else:
                assert path.stat().st_mode & 0o7000 == 0


def output(data: bytes) -> None:
    """`Demultiplexer`: the two outputs do not depend on how the engine's stream arrives."""

    def read(parts: list[bytes]) -> object:
        demultiplexer, found = Demultiplexer(), {"stdout": b"", "stderr": b""}
        try:
            for part in parts:
                for stream, piece in demultiplexer.feed(part):
                    found[stream.value] += piece
        except EngineError:
            pass
        return found

    assert read(pieces(data)) == read([data])


def journaled(data: bytes) -> None:
    """`journal.read`: what a torn or spoilt file still says, in order; what is written behind it is read again."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "events.jsonl"
        path.write_bytes(data)
        found = journal.read(path, repair=False)
        assert path.read_bytes() == data
        assert journal.read(path) == found
        kept = path.read_bytes()
        assert kept == data[: data.rfind(b"\n") + 1]
        assert all(each.number > 0 for each in found)
        assert all(msgspec.json.encode(each.event).decode() for each in found)
        if found and len(found) == kept.count(b"\n"):
            journal.append(path, found[-1:])
            assert journal.read(path) == [*found, found[-1]]


CONTROL_TARGETS = {
    "runner_frame": runner_frame,
    "archive": archive,
    "output": output,
    "journal": journaled,
}
