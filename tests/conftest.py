"""What every folder shares: the images, and the time each folder took."""

import os
from collections import defaultdict

import pytest

from control.images.build import build
from control.images.recipes import IMAGES as RECIPES
from control.images.recipes import recipe
from tests.support.paths import IMAGES

_seconds: defaultdict[str, float] = defaultdict(float)
_tests: defaultdict[str, int] = defaultdict(int)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build the images that tests with an engine need: minutes on a new machine, which no test's time limit has."""
    if session.config.option.collectonly or os.geteuid() != 0:
        return
    if any("engine" in getattr(item, "fixturenames", ()) for item in session.items):
        for name in RECIPES:
            build(recipe(name), IMAGES)


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
