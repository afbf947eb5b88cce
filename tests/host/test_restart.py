"""systemd itself restarts, reloads, stops and kills the gateway under load, with the units as they are shipped."""

import json
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.host.deploy_machine import Machine, machine, missing_programs
from tests.host.restart_load import DOOR, ENOUGH, PROVIDER_PORT, TOKEN
from tests.support.code import readable_code
from tests.support.engine import PrivateEngine
from tests.support.gateway_process import toml
from tests.support.paths import CHECKOUT
from tests.support.processes import wait_until

_GATEWAY: Final = "opificia-gateway"
_LIBRARIES: Final = "/opt/opificia/current/lib"
_PROGRAM: Final = f"""#!/usr/bin/python3
import sys
sys.path.insert(0, "{_LIBRARIES}")
from gateway.__main__ import main
sys.exit(main())
"""
# What the gateway imports; the rest of the environment is large.
_PACKAGES: Final = (
    *("aiohappyeyeballs", "aiohttp", "aiosignal", "attr", "attrs", "dns", "frozenlist", "httptools", "idna", "msgspec"),
    *("multidict", "orjson", "prometheus_client", "propcache", "typing_extensions.py", "uvloop", "yarl"),
)
_NEEDED: Final = ("mmdebstrap", "docker", "ssh-keygen")

pytestmark = [
    pytest.mark.deploy,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        bool(missing_programs(_NEEDED)), reason=f"not installed: {', '.join(missing_programs(_NEEDED))}"
    ),
]


class Host:
    """The stand-in with a gateway on it that systemd runs."""

    def __init__(self, target: Machine) -> None:
        self.target = target

    def install(self, scratch: Path) -> None:
        """Put the gateway on the machine by hand: what the playbook does is tested there."""
        tree = scratch / "tree"
        libraries = tree / _LIBRARIES.removeprefix("/")
        site = Path(sysconfig.get_path("purelib"))
        libraries.mkdir(parents=True)
        for name in _PACKAGES:
            source = site / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, libraries / name)
        shutil.copytree(readable_code() / "gateway", libraries / "gateway")
        program = tree / "opt/opificia/current/bin/opificia-gateway"
        program.parent.mkdir()
        program.write_text(_PROGRAM)
        program.chmod(0o755)
        shutil.copy(Path(__file__).with_name("restart_load.py"), tree / "opt/load.py")
        units = tree / "etc/systemd/system"
        units.mkdir(parents=True)
        for name in (
            f"{_GATEWAY}.service",
            f"{_GATEWAY}-sandbox.socket",
            f"{_GATEWAY}-contract.socket",
            "opificia.slice",
        ):
            shutil.copy(CHECKOUT / "systemd" / name, units / name)
        for kind in ("sysusers", "tmpfiles"):
            shutil.copytree(CHECKOUT / "systemd" / kind, tree / f"usr/lib/{kind}.d")
        settings = tree / "etc/opificia"
        settings.mkdir(parents=True)
        config = {
            "listen": {"sandbox": f"unix:{DOOR}", "contract": "unix:/run/opificia/contract/gateway.sock"},
            "sessions": {"file": "/etc/opificia/sessions.toml"},
            "egress": {"allow_loopback": True},
            "audit": {"dir": "/var/log/opificia/egress"},
            "model": {"upstream": f"http://127.0.0.1:{PROVIDER_PORT}"},
        }
        (settings / "gateway.toml").write_text(toml(config))
        session = {"id": "s1", "token": TOKEN, "network": "open", "egress_budget": {"bytes": 0, "connections": 500}}
        (settings / "sessions.toml").write_text(toml({"session": [session]}))
        archive = shutil.make_archive(str(scratch / "tree"), "tar", tree, owner="root", group="root")
        with Path(archive).open("rb") as file:
            command = ["docker", "--host", self.target.engine.url, "exec", "--interactive", self.target.name]
            subprocess.run([*command, "tar", "--extract", "--directory=/"], stdin=file, check=True)
        for enable in (
            ("systemd-sysusers",),
            ("systemd-tmpfiles", "--create", "opificia.conf"),
            ("systemctl", "daemon-reload"),
            ("systemctl", "enable", "--now", f"{_GATEWAY}-sandbox.socket", f"{_GATEWAY}-contract.socket", _GATEWAY),
        ):
            self.target.run(*enable)

    def main_pid(self) -> str:
        """Return the gateway's main process."""
        return self.target.await_unit(_GATEWAY)

    def show(self, name: str) -> str:
        """Return a property of the gateway's unit."""
        return self.target.run("systemctl", "show", f"--property={name}", "--value", _GATEWAY)

    def journal(self) -> str:
        """Return what the gateway has logged."""
        return self.target.run("journalctl", "--unit", _GATEWAY, "--output=cat", "--no-pager")

    def processes(self) -> int:
        """Return how many processes the gateway has."""
        return len(self.target.run("pgrep", "--uid", _GATEWAY, "--full", "bin/opificia-gateway").split())

    def ends(self) -> list[dict[str, Any]]:
        """Return the audit lines of tunnels that ended."""
        lines = self.target.run("cat", "/var/log/opificia/egress/s1.log").splitlines()
        return [line for line in map(json.loads, lines) if line["event"] == "close" and line["kind"] == "connect"]

    def loaded(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a load; on return it runs."""
        self.target.run("rm", "-f", ENOUGH)
        load = self.target.spawn("python3", "/opt/load.py", *arguments)
        assert load.stdout is not None
        first = load.stdout.readline()
        assert first == "running\n", first + load.communicate()[0] + self.journal()
        return load

    def result(self, load: subprocess.Popen[str]) -> dict[str, Any]:
        """End a load and return what it says."""
        self.target.run("touch", ENOUGH)
        said = load.communicate(timeout=180)[0]
        assert load.returncode == 0, said + self.journal()
        result: dict[str, Any] = json.loads(said)
        return result


@pytest.fixture(scope="module")
def host(engine: PrivateEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    scratch = tmp_path_factory.mktemp("restart")
    with machine(engine, scratch) as target:
        made = Host(target)
        made.install(scratch)
        yield made


def test_restarts_in_the_middle_of_transfers_lose_nothing(host: Host) -> None:
    load = host.loaded("tunnels", "50")
    pids = {host.main_pid()}
    for _ in range(5):
        host.target.run("systemctl", "restart", _GATEWAY)
        pids.add(host.main_pid())
    result = host.result(load)
    assert result["errors"] == [], host.journal()
    assert len(pids) == 6
    assert host.journal().count("took up 50 connections") == 5
    # Only the sign that a gateway runs is left in the store.
    assert host.show("NFileDescriptorStore") == "1"
    ends = host.ends()
    assert len(ends) == 50
    assert sum(line["bytes_up"] for line in ends) == sum(line["bytes_down"] for line in ends) == result["bytes"]


def test_a_reload_does_not_even_cut_a_stream(host: Host) -> None:
    stream = host.loaded("stream")
    tunnels = host.loaded("tunnels", "20")
    before = host.main_pid()
    host.target.run("systemctl", "reload", _GATEWAY)
    after = host.target.await_unit(_GATEWAY, not_pid=before)
    assert host.processes() == 2
    result = host.result(tunnels)
    assert result["errors"] == [], host.journal()
    said = json.loads(stream.communicate(timeout=180)[0])
    assert said["in_order"], said
    wait_until(lambda: host.processes() == 1, "the end of the process before")
    assert host.main_pid() == after
    # systemd has the new process as its own: it notices its end.
    host.target.run("systemctl", "kill", "--signal=KILL", _GATEWAY)
    host.target.await_unit(_GATEWAY, not_pid=after)
    assert "ended without handing over" in host.journal()


def test_a_reload_with_a_wrong_configuration_is_refused_and_changes_nothing(host: Host) -> None:
    load = host.loaded("tunnels", "5")
    before = host.main_pid()
    host.target.run("sed", "-i", "s/^.egress.$/[egres]/", "/etc/opificia/gateway.toml")
    assert not host.target.succeeds("systemctl", "reload", _GATEWAY)
    host.target.run("sed", "-i", "s/^.egres.$/[egress]/", "/etc/opificia/gateway.toml")
    assert host.main_pid() == before
    assert host.result(load)["errors"] == []


def test_a_stop_cuts_the_tunnels_and_they_are_logged_at_the_next_start(host: Host) -> None:
    already = len(host.ends())
    load = host.loaded("tunnels", "5")
    host.target.run("systemctl", "stop", _GATEWAY, f"{_GATEWAY}-sandbox.socket")
    errors = host.result(load)["errors"]
    assert len(errors) == 5
    host.target.run("systemctl", "start", f"{_GATEWAY}-sandbox.socket", _GATEWAY)
    wait_until(lambda: len(host.ends()) == already + 5, "the last lines of the tunnels")
    assert {line["reason"] for line in host.ends()[already:]} == {"shutdown"}


def test_a_stream_may_be_drained_for_longer_than_the_unit_allows_for_a_stop(host: Host) -> None:
    drop_in = f"/run/systemd/system/{_GATEWAY}.service.d/short.conf"
    host.target.run("mkdir", "-p", drop_in.rpartition("/")[0])
    host.target.run("sh", "-c", f"printf '[Service]\\nTimeoutStopSec=1\\n' > {drop_in}")
    host.target.run("sh", "-c", "printf '[limits]\\ndrain_ms = 4000\\n' >> /etc/opificia/gateway.toml")
    host.target.run("systemctl", "daemon-reload")
    host.target.run("systemctl", "restart", _GATEWAY)
    already = host.journal().count("took up 5 connections")
    stream, tunnels = host.loaded("stream"), host.loaded("tunnels", "5")
    host.target.run("systemctl", "restart", _GATEWAY)
    # The one is cut when its time is over, the others go on: nothing was killed before it had parked.
    stream.communicate(timeout=180)
    assert stream.returncode
    assert host.result(tunnels)["errors"] == [], host.journal()
    assert host.journal().count("took up 5 connections") == already + 1
    assert host.show("Result") == "success"
