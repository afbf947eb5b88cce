"""The demo, as far as it goes without a host."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path


def test_a_second_demo_at_once_says_so_and_touches_nothing(tmp_path: Path) -> None:
    kept = tmp_path / "demo" / "of-the-first"
    kept.parent.mkdir()
    kept.touch()
    with (tmp_path / "demo.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(
            [sys.executable, "-m", "scripts.demo"],
            env={**os.environ, "OPIFICIA_CACHE": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    assert "another demo is running" in done.stdout
    assert "OPIFICIA_CACHE" in done.stdout
    assert kept.exists()
