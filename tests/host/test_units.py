"""The systemd units as files: systemd's own tools find nothing wrong with them, and they are as closed as we say."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from control.doctor.host import SYSCTLS
from control.plan.host import ForwarderSettings
from tests.support.paths import CHECKOUT

UNITS = CHECKOUT / "systemd"
SERVICES = sorted(UNITS.glob("*.service"))
# What systemd-analyze counts, in tenths; a bare unit has 96. The gateway needs the internet.
MOST_EXPOSED = {"opificia-gateway": 15, "opificia-control": 10, "opificia-firewall": 10}

pytestmark = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed: apt-get install systemd"
)


def _analyze(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True, timeout=280)


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The units with programs that exist: that no release is installed here is not their fault."""
    for unit in UNITS.glob("opificia*"):
        text = re.sub(r"/opt/opificia/current/bin/[a-z-]+", "/bin/true", unit.read_text())
        (tmp_path / unit.name).write_text(text)
    return tmp_path


def test_systemd_understands_every_line(installed: Path) -> None:
    # It exits with 0 on a key that it does not know, and only says so.
    done = _analyze("verify", "--man=no", *sorted(installed.iterdir()))
    assert done.stdout + done.stderr == ""
    assert done.returncode == 0


def test_the_check_finds_a_misspelt_key(installed: Path) -> None:
    unit = installed / "opificia-gateway.service"
    unit.write_text(unit.read_text().replace("ProtectHome=", "ProtectHoem="))
    assert "ProtectHoem" in _analyze("verify", "--man=no", unit).stderr


@pytest.mark.parametrize("unit", SERVICES, ids=lambda path: path.stem)
def test_a_service_is_no_more_exposed_than_it_must_be(unit: Path) -> None:
    done = _analyze("security", "--offline=true", "--no-pager", f"--threshold={MOST_EXPOSED[unit.stem]}", unit)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("unit", SERVICES, ids=lambda path: path.stem)
def test_the_hardening_block_is_sorted(unit: Path) -> None:
    block = unit.read_text().partition("# Hardening, sorted")[2].partition("\n\n")[0]
    keys = re.findall(r"^([A-Z]\w+)=", block, re.MULTILINE)
    assert len(keys) > 25
    assert keys == sorted(keys, key=str.lower)


def test_the_gateway_has_neither_docker_nor_controls_groups() -> None:
    text = (UNITS / "opificia-gateway.service").read_text()
    (groups,) = re.findall(r"^SupplementaryGroups=(.*)$", text, re.MULTILINE)
    assert groups.split() == ["opificia-runner"]


def test_every_account_that_units_and_folders_name_is_made() -> None:
    made = set(re.findall(r"^[ug]\s+(\S+)", (UNITS / "sysusers/opificia.conf").read_text(), re.MULTILINE))
    named = set(
        re.findall(r"\b(?:User|SocketUser|SocketGroup)=(\S+)", "".join(u.read_text() for u in UNITS.glob("*.s*")))
    )
    for line in (UNITS / "tmpfiles/opificia.conf").read_text().splitlines():
        if line.startswith("d "):
            named |= set(line.split()[3:5])
    assert named - {"root"} == {name for name in named if name in made}


def test_folders_are_made_with_the_modes_that_keep_the_daemons_apart(tmp_path: Path) -> None:
    accounts = {
        name: number
        for number, name in enumerate(
            (
                "opificia-forwarder",
                "opificia-gateway",
                "opificia-control",
                "opificia-contract",
                "opificia-runner",
                "opificia",
            ),
            60600,
        )
    }
    (tmp_path / "etc").mkdir()
    lines = [f"{name}:x:{number}:{number}::/:/usr/sbin/nologin" for name, number in accounts.items()]
    (tmp_path / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\n" + "\n".join(lines) + "\n")
    (tmp_path / "etc/group").write_text(
        "root:x:0:\n" + "\n".join(f"{name}:x:{number}:" for name, number in accounts.items()) + "\n"
    )
    done = subprocess.run(
        ["systemd-tmpfiles", "--create", f"--root={tmp_path}", UNITS / "tmpfiles/opificia.conf"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    door = (tmp_path / "run/opificia/door").stat()
    assert (door.st_uid, door.st_gid, door.st_mode & 0o7777) == (60601, 60600, 0o2750)
    contract = (tmp_path / "run/opificia/contract").stat()
    assert (contract.st_uid, contract.st_gid, contract.st_mode & 0o7777) == (60601, 60603, 0o2750)
    runner = (tmp_path / "run/opificia/runner").stat()
    assert (runner.st_uid, runner.st_gid, runner.st_mode & 0o7777) == (60602, 60604, 0o2750)


def test_the_doors_queue_holds_all_that_the_forwarder_may_have_while_the_gateway_restarts() -> None:
    backlog = re.search(r"^Backlog=(\d+)$", (UNITS / "opificia-gateway-sandbox.socket").read_text(), re.MULTILINE)
    limit = re.search(r"^net.core.somaxconn = (\d+)$", (UNITS / "sysctl/60-opificia.conf").read_text(), re.MULTILINE)
    assert backlog
    assert limit
    # Connecting to a unix socket whose queue is full fails at once (connect(2), EAGAIN), and HAProxy does not try again.
    assert min(int(backlog[1]), int(limit[1])) >= ForwarderSettings().connections
    assert SYSCTLS["net.core.somaxconn"] == int(limit[1])
