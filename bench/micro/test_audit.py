"""What each connection leaves behind: its audit lines and counts."""

from pathlib import Path

from pytest_benchmark.fixture import BenchmarkFixture

from gateway.access import AuditLog
from gateway.metrics import Count, Distribution


def test_write_an_audit_line(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    # What the event loop spends on it, beside the log's thread that brings it to the disk.
    log = AuditLog(str(tmp_path), max_lines=10**9)
    values = ("files.packages.example", 443, "192.0.2.23", "registries:pypi", 0, 0, 12)
    benchmark(log.write, "a-session-0123", "allow", "connect", *values)
    log.close()
    # A line that finds no room is lost sooner than it is written.
    assert log.lost == 0
    file = tmp_path / "a-session-0123.log"
    with file.open() as lines:
        assert '"event":"allow"' in next(lines)
    # Hundreds of thousands of lines.
    file.unlink()


def test_count(benchmark: BenchmarkFixture) -> None:
    count = Count()
    benchmark(count.inc)
    assert count.value


def test_observe_a_duration(benchmark: BenchmarkFixture) -> None:
    benchmark(Distribution().observe, 0.012)
