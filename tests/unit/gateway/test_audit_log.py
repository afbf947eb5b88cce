"""The audit log: bounded, whole lines, one last line that says it is full, and none of it breakable by a name."""

import fcntl
import json
import os
import re
import resource
import threading
from pathlib import Path
from typing import Any

import pytest

from gateway.access import AuditLog
from gateway.core.verdict import DenyReason
from tests.support.processes import wait_until


def write(log: AuditLog, host: str = "example.com", session: str = "s1") -> None:
    log.write(session, "refuse", "connect", host, 443, "", DenyReason.HOST_NOT_LISTED, 1, 2, 3)


def lines(directory: Path, session: str = "s1") -> list[dict[str, object]]:
    return [json.loads(line) for line in (directory / f"{session}.log").read_text().splitlines()]


def test_a_line_has_every_field(tmp_path: Path) -> None:
    log = AuditLog(str(tmp_path), 10)
    write(log)
    log.close()
    (line,) = lines(tmp_path)
    assert list(line) == [
        "ts", "session", "event", "kind", "host", "port", "address", "reason", "bytes_up", "bytes_down", "ms",
    ]  # fmt: skip
    assert (line["session"], line["reason"], line["bytes_up"], line["ms"]) == ("s1", "host_not_listed", 1, 3)
    assert str(line["ts"]).endswith("Z")


def test_ends_at_its_limit_with_one_line_that_says_so(tmp_path: Path) -> None:
    log = AuditLog(str(tmp_path), 100)
    for _ in range(5000):
        write(log)
    log.close()
    written = lines(tmp_path)
    assert len(written) == 101
    assert written[-1]["event"] == "log_full"
    assert written[-1]["max_lines"] == 100


def test_a_million_refusals_queue_nothing_beyond_the_limit(tmp_path: Path) -> None:
    log = AuditLog(str(tmp_path), 10)
    for _ in range(1_000_000):
        write(log)
    assert log._waiting <= 11
    log.close()
    assert len(lines(tmp_path)) == 11


def test_the_log_thread_runs_no_python_for_each_line_so_that_it_keeps_the_interpreter_from_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the thread does is counted in lines of Python, which do not depend on how fast anything is."""
    steps = writes = 0
    real_write = os.write

    def count_steps(*_: object) -> Any:
        nonlocal steps
        steps += 1
        return count_steps

    def count_writes(fd: int, data: bytes) -> int:
        nonlocal writes
        writes += 1
        return real_write(fd, data)

    monkeypatch.setattr(os, "write", count_writes)
    threading.settrace(count_steps)
    try:
        log = AuditLog(str(tmp_path), 100_000)
    finally:
        threading.settrace(None)
    for _ in range(50_000):
        write(log)
    log.close()
    assert len(lines(tmp_path)) == 50_000
    # However many batches there were; they come a twentieth of a second apart, so they are far fewer than lines.
    assert steps <= 400 * (writes + 1)


def test_the_limit_holds_across_restarts(tmp_path: Path) -> None:
    for _ in range(3):
        log = AuditLog(str(tmp_path), 100)
        for _ in range(60):
            write(log)
        log.close()
    assert len(lines(tmp_path)) == 101


@pytest.mark.parametrize("host", ['a"\n{"event":"allow"}', "a\r\nb", "a\x00b", "x" * 100_000, "b\u2028c"])
def test_no_host_breaks_a_line_or_makes_it_long(tmp_path: Path, host: str) -> None:
    log = AuditLog(str(tmp_path), 10)
    write(log, host)
    log.close()
    (line,) = lines(tmp_path)
    assert str(line["host"]) == host.replace("\u2028", "\\u2028")[:260]
    assert (tmp_path / "s1.log").stat().st_size < 2000


def test_a_link_in_the_way_is_never_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("")
    (tmp_path / "s1.log").symlink_to(target)
    log = AuditLog(str(tmp_path), 10)
    write(log)
    log.close()
    assert target.read_text() == ""
    assert log.lost == 1


def test_more_sessions_than_files_may_be_open_are_all_written(tmp_path: Path) -> None:
    log = AuditLog(str(tmp_path), 10)
    for number in range(200):
        write(log, session=f"s{number}")
        write(log, session="s0")
    log.close()
    assert len(list(tmp_path.iterdir())) == 200
    assert len(lines(tmp_path, "s0")) == 11


def test_the_file_of_a_session_that_is_over_is_closed_behind_its_last_line(tmp_path: Path) -> None:
    def opened() -> list[str]:
        return [
            found
            for each in Path("/proc/self/fd").iterdir()
            if (found := os.path.realpath(each)).startswith(str(tmp_path))
        ]

    log = AuditLog(str(tmp_path), 10)
    for session in ("s1", "s2"):
        write(log, session=session)
    wait_until(lambda: len(opened()) == 2, "both files")
    write(log, session="s1")
    log.forget("s1")
    wait_until(lambda: opened() == [str(tmp_path / "s2.log")], "one file closed")
    assert len(lines(tmp_path, "s1")) == 2
    log.close()
    assert opened() == []


def test_a_full_disk_loses_lines_and_says_so_but_not_the_process(tmp_path: Path) -> None:
    (tmp_path / "s1.log").symlink_to("/dev/full")
    log = AuditLog(str(tmp_path), 10)
    log._files["s1"] = type(log)._open.__globals__["_File"](os.open("/dev/full", os.O_WRONLY))
    write(log)
    log.close()
    assert log.lost == 1


def test_a_disk_that_fills_in_mid_line_leaves_whole_lines_only(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    log = AuditLog(str(tmp_path), 10_000)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_001, hard))
    try:
        for _ in range(1000):
            write(log)
        log.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    written = len(lines(tmp_path))
    assert 0 < written < 1000
    assert log.lost == 1000 - written
    # The next one begins a line of its own, and only lines that are there count.
    log = AuditLog(str(tmp_path), written + 1)
    for _ in range(3):
        write(log)
    log.close()
    assert [line["event"] for line in lines(tmp_path)[written:]] == ["refuse", "log_full"]


def test_a_line_that_a_crash_cut_takes_no_other_with_it(tmp_path: Path) -> None:
    (tmp_path / "s1.log").write_text('{"ts":"2026')
    log = AuditLog(str(tmp_path), 10)
    write(log)
    log.close()
    cut, whole = (tmp_path / "s1.log").read_text().splitlines()
    assert cut == '{"ts":"2026'
    assert json.loads(whole)["event"] == "refuse"


def flushed(log: AuditLog, host: str) -> None:
    """Write a line and wait until it is in the file."""
    before = log._files["s1"].lines if "s1" in log._files else 0
    write(log, host)
    wait_until(lambda: "s1" in log._files and log._files["s1"].lines > before, "the line")


def test_two_processes_that_write_one_log_share_its_limit_and_say_once_that_it_is_full(tmp_path: Path) -> None:
    # As after a reload, while the process before still has streams.
    before, after = AuditLog(str(tmp_path), 10), AuditLog(str(tmp_path), 10)
    for number in range(4):
        flushed(before, f"before{number}.example")
        flushed(after, f"after{number}.example")
    for log in (before, after):
        for _ in range(20):
            write(log)
        log.close()
    written = lines(tmp_path)
    assert [line["event"] for line in written] == ["refuse"] * 10 + ["log_full"]
    assert [str(line["host"])[:5] for line in written[:8]] == ["befor", "after"] * 4


def test_a_line_that_another_process_has_half_written_is_not_taken_for_one_that_a_crash_cut(tmp_path: Path) -> None:
    file = os.open(tmp_path / "s1.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
    fcntl.flock(file, fcntl.LOCK_EX)
    os.write(file, b'{"half":')
    log = AuditLog(str(tmp_path), 10)
    write(log)
    waits = re.compile(rf"-> FLOCK .*:{os.fstat(file).st_ino} ")
    wait_until(
        lambda: waits.search(Path("/proc/locks").read_text()) is not None, "the other to wait for the line's end"
    )
    os.write(file, b'"whole"}\n')
    os.close(file)
    log.close()
    assert [line.get("half", line.get("event")) for line in lines(tmp_path)] == ["whole", "refuse"]


def test_without_a_directory_nothing_is_written() -> None:
    log = AuditLog("", 10)
    write(log)
    log.close()
