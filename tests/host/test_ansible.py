"""The playbooks as files: ansible-lint's strictest profile finds nothing, and settings come out as they go in."""

import json
import os
import subprocess
import sys
import tomllib
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


@pytest.mark.skipif(not _LINT.exists(), reason="Ansible is not installed: run scripts/setup")
def test_settings_are_written_as_they_are_however_deep(tmp_path: Path) -> None:
    trusted = [{"hosts": ["*.corp.example", 'odd "name"'], "ports": [443], "network": "10.20.0.0/16"}]
    settings = {
        "listen": {"sandbox": "unix:/run/door", "proxy_protocol": True},
        "egress": {"denied_networks": [], "trusted": trusted},
        "model.provider": [{"name": "one"}, {"name": "two", "headers": {"x-a.b": "é"}}],
        "limits": {"drain_ms": 30000, "share": 0.5},
    }
    written = tmp_path / "settings.toml"
    template = CHECKOUT / "ansible/roles/opificia/templates/settings.toml.j2"
    done = subprocess.run(
        [
            *(_LINT.with_name("ansible"), "--inventory=localhost,", "--connection=local", "localhost"),
            *("--module-name=ansible.builtin.template", f"--args=src={template} dest={written}"),
            f"--extra-vars={json.dumps({'opificia_settings': settings, 'ansible_python_interpreter': sys.executable})}",
        ],
        env={**os.environ, "ANSIBLE_HOME": str(tmp_path), "LC_ALL": "C.UTF-8"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    model = {"provider": settings.pop("model.provider")}
    assert tomllib.loads(written.read_text()) == {**settings, "model": model}
