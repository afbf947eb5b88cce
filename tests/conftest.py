"""What every folder shares: Hypothesis' settings, the images, the time each folder took, the place of the longest tests."""

import fcntl
import os
import time
from collections import defaultdict
from typing import Final

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from control.images.build import build
from control.images.recipes import IMAGES as RECIPES
from control.images.recipes import recipe
from tests.support.paths import IMAGES

# How many examples each property is tried with; a night's run sets it to a million.
_EXAMPLES: Final = int(os.environ.get("OPIFICIA_EXAMPLES", "100"))

# No deadline: how long an example takes says more about the machine's other work than about the code. No database: a
# failure prints its example, which belongs into a unit test.
settings.register_profile(
    "opificia",
    max_examples=_EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile("opificia")

# All tests are to be done in 25 minutes, wherever they run: the deployment to a server of its own needs eight of them.
DEPLOY_BEGINS_WITHIN_S: Final = 16 * 60.0

_DEPLOYMENT: Final = ("tests/host/test_deploy.py", "tests/host/test_restart.py")
# Folders that start engines and make networks.
_WITH_ENGINE: Final = ("tests/clients/", "tests/docker/", "tests/host/", "tests/net/")

_begun = time.monotonic()
_deploys: bool | None = None
_seconds: defaultdict[str, float] = defaultdict(float)
_tests: defaultdict[str, int] = defaultdict(int)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build the images that tests with an engine need: minutes on a new machine, which no test's time limit has."""
    if session.config.option.collectonly or os.geteuid() != 0:
        return
    if any("engine" in getattr(item, "fixturenames", ()) for item in session.items):
        IMAGES.mkdir(parents=True, exist_ok=True)
        with (IMAGES / ".building").open("w") as lock:
            # Processes that run side by side each collect all tests.
            fcntl.flock(lock, fcntl.LOCK_EX)
            for name in RECIPES:
                build(recipe(name), IMAGES)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the deployment last."""
    items.sort(key=lambda item: item.get_closest_marker("deploy") is not None)


class SideBySide(LoadScopeScheduling):  # type: ignore[misc]  # it has no types
    """What each of several processes runs (`-n 2`): what shares an engine or watches the whole machine is run by one."""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(_DEPLOYMENT):
            return "deployment"
        return "engine" if nodeid.startswith(_WITH_ENGINE) else "others"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> SideBySide:
    """Tests wait more than they compute, for limits that pass and for engines that start."""
    return SideBySide(config, log)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave the deployment out where the others took too long, as on a machine that had to build every image first."""
    global _deploys
    if item.get_closest_marker("deploy") is None:
        return
    if _deploys is None:
        _deploys = time.monotonic() - _begun < DEPLOY_BEGINS_WITHIN_S
    if not _deploys:
        pytest.skip("no time is left for the deployment to a server of its own: scripts/test -m deploy")


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
