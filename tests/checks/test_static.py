"""Style and types, as tests: one summary at the end tells everything that is wrong."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import CHECKOUT

TOOLS = Path(sys.executable).parent


@pytest.mark.timeout(600)  # mypy on a new, loaded machine
@pytest.mark.parametrize(
    "command",
    [
        ("ruff", "check", "--quiet", "."),
        ("ruff", "format", "--quiet", "--diff", "."),
        ("mypy",),
        ("mypy", "tests/conftest.py", "tests/support", "tests/host", "bench", "tests/bench", "scripts/demo.py"),
    ],
    ids=" ".join,
)
def test_finds_nothing(command: tuple[str, ...]) -> None:
    done = subprocess.run([TOOLS / command[0], *command[1:]], cwd=CHECKOUT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
