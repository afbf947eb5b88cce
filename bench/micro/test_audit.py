"""What each connection leaves behind: its audit lines and counts."""

from datetime import UTC, datetime

import msgspec
from pytest_benchmark.fixture import BenchmarkFixture

from gateway.access import AuditLine
from gateway.metrics import Count, Distribution


def test_encode_an_audit_line(benchmark: BenchmarkFixture) -> None:
    encode = msgspec.json.Encoder().encode

    def line() -> bytes:
        at = datetime.fromtimestamp(1_750_000_000.123456, UTC)
        values = ("files.packages.example", 443, "192.0.2.23", "registries:pypi", 0, 0, 12)
        return encode(AuditLine(at, "a-session-0123", "allow", "connect", *values))

    assert b'"event":"allow"' in benchmark(line)


def test_count(benchmark: BenchmarkFixture) -> None:
    count = Count()
    benchmark(count.inc)
    assert count.value


def test_observe_a_duration(benchmark: BenchmarkFixture) -> None:
    benchmark(Distribution().observe, 0.012)
