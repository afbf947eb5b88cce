"""What every folder shares: the private engine, one per run, and the time each folder took."""

from collections import defaultdict
from collections.abc import Iterator

import pytest

from tests.support.engine import PrivateEngine

_seconds: defaultdict[str, float] = defaultdict(float)
_tests: defaultdict[str, int] = defaultdict(int)


@pytest.fixture(scope="session")
def engine() -> Iterator[PrivateEngine]:
    """Run a Docker engine in namespaces of its own (root only); it starts in under a second."""
    with PrivateEngine.acquire() as private:
        yield private


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up set-up, call and tear-down by folder: a fixture's time is part of what a folder costs."""
    folder = "/".join(report.nodeid.split("::")[0].split("/")[:2])
    _seconds[folder] += report.duration
    _tests[folder] += report.when == "call"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the minutes of each folder before pytest's own last line."""
    if not _seconds:
        return
    terminalreporter.section("minutes by folder")
    for folder, seconds in sorted(_seconds.items(), key=lambda item: -item[1]):
        terminalreporter.line(f"{seconds / 60:6.2f} min  {_tests[folder]:5} tests  {folder}")
