"""The file with the ends of tunnels that nobody took up: what could not be a line of ours is none, and names no file."""

from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from gateway import unfinished
from gateway.access import AuditLine, AuditLog
from gateway.unfinished import Unfinished

LINE = AuditLine(
    datetime(2026, 5, 1, tzinfo=UTC), "s1", "close", "connect", "a.example", 443, "::1", "shutdown", 1, 2, 3
)


def test_what_was_written_comes_back() -> None:
    assert unfinished.decode(msgspec.json.encode([LINE])) == [LINE]


@pytest.mark.parametrize("session", ["", "..", "../../etc/cron.d/x", "/tmp/x", "S1", "a\n"])
def test_a_line_is_written_into_no_other_file_than_a_sessions(tmp_path: Path, session: str) -> None:
    folder = tmp_path / "egress"
    folder.mkdir()
    (folder / ".unfinished").write_bytes(msgspec.json.encode([msgspec.structs.replace(LINE, session=session)]))
    audit = AuditLog(str(folder), 10)
    Unfinished(str(folder)).settle(audit, taken_up=False)
    audit.close()
    assert [path.name for path in tmp_path.rglob("*")] == ["egress"]


@pytest.mark.parametrize("at", ["0001-01-01T00:00:00", "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"])
def test_a_time_that_is_no_number_of_seconds_keeps_no_gateway_from_starting(tmp_path: Path, at: str) -> None:
    (tmp_path / ".unfinished").write_bytes(msgspec.json.encode([{**msgspec.to_builtins(LINE), "ts": at}]))
    audit = AuditLog(str(tmp_path), 10)
    Unfinished(str(tmp_path)).settle(audit, taken_up=False)
    audit.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("taken_up", [True, False])
def test_a_file_that_a_full_disk_cut_is_told_of_only_if_its_lines_are_missed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, taken_up: bool
) -> None:
    (tmp_path / ".unfinished").write_bytes(msgspec.json.encode([LINE])[:-20])
    audit = AuditLog(str(tmp_path), 10)
    Unfinished(str(tmp_path)).settle(audit, taken_up=taken_up)
    audit.close()
    assert list(tmp_path.iterdir()) == []
    assert bool(caplog.records) is not taken_up
