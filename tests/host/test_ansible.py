"""The playbooks as files: ansible-lint's strictest profile finds nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import CHECKOUT

_LINT = Path(sys.executable).with_name("ansible-lint")


@pytest.mark.skipif(not _LINT.exists(), reason="ansible-lint is not installed: run scripts/setup")
def test_playbooks_and_roles_pass_the_production_profile(tmp_path: Path) -> None:
    done = subprocess.run(
        [_LINT, "--offline", "-q", "--nocolor", "--profile=production"],
        cwd=CHECKOUT / "ansible",
        # It looks for ansible-playbook beside others of its kind, and keeps what it knows under the home folder.
        env={
            **os.environ,
            "PATH": f"{_LINT.parent}:{os.environ['PATH']}",
            "ANSIBLE_HOME": str(tmp_path),
            "XDG_CACHE_HOME": str(tmp_path),
            "LC_ALL": "C.UTF-8",
        },
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
