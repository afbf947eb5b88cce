"""The playbook against a server of its own: deployed, used, hit, upgraded, rolled back, and taken away again.

One machine and one pass: each test goes on from what the one before it left, so after a failure the others fail at once.
What a step took is printed at the end.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.host.deploy_machine import Machine, MachineError, machine, missing_programs
from tests.support.engine import PrivateEngine
from tests.support.paths import CHECKOUT
from tests.support.processes import spawn, stop, wait_until

_BIN: Final = Path(sys.executable).parent
_PORT: Final = 8080
_INDEX: Final = f"{Machine.outside}:{_PORT}"
_IMAGE: Final = "opificia-sandbox:latest"
_NEXT: Final = "0.1.0.post1"
_KEY: Final = "sk-test-of-a-deployment"
_DAEMONS: Final = ("opificia-gateway", "opificia-control")
_NEEDED: Final = ("mmdebstrap", "docker", "ssh", "ssh-keygen", str(_BIN / "ansible-playbook"))

pytestmark = [
    pytest.mark.deploy,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        bool(missing_programs(_NEEDED)), reason=f"not installed: {', '.join(missing_programs(_NEEDED))}"
    ),
]

# Tries the same CONNECT again and again until it is told that it is enough, then says how often it was answered and what else came.
_KEEP_CONNECTING: Final = """
import base64, os, socket, sys, time
from urllib.parse import urlsplit
proxy = urlsplit(os.environ["HTTPS_PROXY"])
credentials = base64.b64encode(f"{proxy.username}:{proxy.password}".encode()).decode()
request = f"CONNECT {sys.argv[1]} HTTP/1.1\\r\\nHost: {sys.argv[1]}\\r\\nProxy-Authorization: Basic {credentials}\\r\\n\\r\\n"
print("connecting", flush=True)
answers = {}
while not os.path.exists("/work/enough"):
    try:
        with socket.create_connection((proxy.hostname, proxy.port), timeout=20) as connection:
            connection.sendall(request.encode())
            answer = connection.makefile("rb").readline().decode()[:12] or "closed"
    except OSError as error:
        answer = str(error)
    answers[answer] = answers.get(answer, 0) + 1
    time.sleep(0.02)
print(answers, flush=True)
"""

# What a sandbox finds at addresses, over TCP, UDP and the resolver.
_LOOK_AROUND: Final = """
import socket, sys
for what in sys.argv[1:]:
    kind, _, rest = what.partition(" ")
    try:
        if kind == "name":
            found = socket.gethostbyname(rest)
        else:
            host, port = rest.rsplit(" ", 1)
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            with socket.socket(family, socket.SOCK_STREAM if kind == "tcp" else socket.SOCK_DGRAM) as s:
                s.settimeout(1)
                s.connect((host, int(port)))
                if kind == "udp":
                    s.send(b"?")
                    found = s.recv(100)
        print("open", what, flush=True)
    except OSError as error:
        print("closed", what, flush=True)
"""


class Site:
    """The controller: an inventory for one machine, releases, and the plays."""

    def __init__(self, target: Machine, scratch: Path) -> None:
        self.machine: Final = target
        self.broken = False
        self._scratch = scratch
        self._bundles = scratch / "dist"
        inventory = {
            "sandbox_hosts": {
                "hosts": {
                    target.name: {
                        "ansible_host": target.address,
                        "ansible_user": "root",
                        "ansible_ssh_private_key_file": str(target.key),
                        "ansible_ssh_common_args": f"-o StrictHostKeyChecking=no -o BatchMode=yes "
                        f"-o UserKnownHostsFile={scratch}/known_hosts",
                    }
                },
                "vars": {
                    "opificia_bundles": str(self._bundles),
                    "control_operators": ["alice"],
                    "verify_connect": _INDEX,
                    # Nothing leads out of this network, and its clock is the machine's that runs the tests.
                    "verify_tolerated": ["a package registry is reached", "the model API is reached", "clock"],
                    "gateway_model_api_key": _KEY,
                    "gateway_settings": {
                        "egress.trusted": [
                            {"hosts": [target.outside], "ports": [_PORT], "network": f"{target.outside}/32"}
                        ]
                    },
                },
            }
        }
        (scratch / "inventory.json").write_text(json.dumps(inventory))

    def bundle(self, version: str = "") -> None:
        """Make a release of this checkout, under another version if one is given."""
        root = CHECKOUT
        if version:
            root = self._scratch / "next"
            for folder in ("gateway", "control", "systemd", "ansible"):
                shutil.copytree(CHECKOUT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
            shutil.copy(CHECKOUT / "README.md", root)
            project = (CHECKOUT / "pyproject.toml").read_text()
            (root / "pyproject.toml").write_text(
                re.sub(r'(?m)^version = ".*"$', f'version = "{version}"', project, count=1)
            )
        subprocess.run([root / "ansible/bundle", self._bundles], check=True, stdout=subprocess.DEVNULL)

    def play(self, playbook: str, *arguments: str, thorough: bool = False) -> dict[str, int]:
        """Run a playbook; return the recap's numbers. `thorough`: with every check there is. Raises AssertionError with what it said."""
        command = [str(_BIN / "ansible-playbook"), f"--inventory={self._scratch}/inventory.json", *arguments]
        if not thorough:
            command += ["--extra-vars", '{"verify_doctor": false}']
        done = subprocess.run(
            self.machine.engine.in_network([*command, str(CHECKOUT / "ansible" / playbook)]),
            env={
                **os.environ,
                "ANSIBLE_CONFIG": str(CHECKOUT / "ansible/ansible.cfg"),
                "ANSIBLE_HOME": str(self._scratch / "ansible"),
                # Connections are kept by address, which another run's machine has as well, in a network of its own.
                "ANSIBLE_SSH_CONTROL_PATH_DIR": str(self._scratch / "cp"),
                "ANSIBLE_NOCOLOR": "1",
                "LC_ALL": "C.UTF-8",
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=500,
        )
        assert done.returncode == 0, done.stdout[-6000:]
        assert _KEY not in done.stdout
        recap = done.stdout.rpartition("PLAY RECAP")[2]
        return {name: int(number) for name, number in re.findall(r"(\w+)=(\d+)", recap)}

    def in_order(self) -> bool:
        """Tell whether control finds everything in order: engine, host, gateway, database."""
        try:
            health = self.machine.run("opificia", "control", "status")
        except MachineError:
            return False
        return bool(json.loads(health)["status"] == "ok")

    def version(self) -> str:
        """Return the release that the machine runs."""
        return Path(self.machine.run("readlink", "-f", "/opt/opificia/current")).name

    def opificia(self, *arguments: str, user: str = "alice") -> str:
        """Run `opificia` on the machine as an operator, who is not root and not in Docker's group."""
        return self.machine.run("runuser", f"--user={user}", "--", "opificia", *arguments)

    def sessions(self) -> dict[str, str]:
        """Return the state of every session."""
        page = json.loads(self.opificia("sessions", "--json"))
        return {session["id"]: session["state"] for session in page["sessions"]}

    def in_sandbox(self, session: str, *argv: str) -> str:
        """Run a command in a running session."""
        return self.opificia("exec", session, "--", *argv)

    def start_session(self, name: str, *command: str) -> "subprocess.Popen[str]":
        """Start a session that may reach the index, and wait until its command runs."""
        arguments = ("--network=open", f"--allow={_INDEX}", f"--name={name}", "--quiet")
        process = self.machine.spawn(
            *("runuser", "--user=alice", "--", "opificia", "run", _IMAGE, *arguments, "--"), *command
        )
        wait_until(
            lambda: self.sessions().get(name) == "running",
            f"session {name}",
            timeout_s=60,
            give_up=lambda: None if process.poll() is None else process.communicate()[0],
        )
        return process

    def answers(self, name: str, session: "subprocess.Popen[str]") -> list[str]:
        """End a session that keeps connecting; return the different answers that it got, from the session's own log."""
        self.in_sandbox(name, "touch", "/work/enough")
        wait_until(lambda: self.sessions()[name] == "exited", f"end of session {name}", timeout_s=60)
        session.communicate(timeout=60)
        logged = self.opificia("logs", name)
        return re.findall(r"'([^']*)': \d+", logged)


_steps: list[tuple[str, float]] = []


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deploy")


@pytest.fixture(scope="module")
def site(engine: PrivateEngine, scratch: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    started = time.monotonic()
    with machine(engine, scratch) as target:
        target.run("useradd", "--create-home", "alice")
        made = Site(target, scratch)
        made.bundle()
        index = spawn(
            target.engine.in_network(
                [
                    sys.executable,
                    "-m",
                    "http.server",
                    str(_PORT),
                    "--bind",
                    target.outside,
                    "--directory",
                    str(_index(scratch)),
                ]
            ),
            log=subprocess.DEVNULL,
        )
        try:
            _steps.append(("machine and release", time.monotonic() - started))
            yield made
        finally:
            stop(index)
            reporter = request.config.pluginmanager.get_plugin("terminalreporter")
            if reporter is not None:
                reporter.write_line("")
                for name, seconds in _steps:
                    reporter.write_line(f"{seconds / 60:6.2f} min  {name}")


@pytest.fixture(autouse=True)
def step(request: pytest.FixtureRequest, site: Site) -> Iterator[None]:
    """Time a step; fail it at once when an earlier one failed."""
    if site.broken:
        pytest.fail("an earlier step failed")
    failed_before = request.session.testsfailed
    started = time.monotonic()
    yield
    _steps.append((request.node.name.removeprefix("test_").replace("_", " "), time.monotonic() - started))
    site.broken = request.session.testsfailed > failed_before


def _index(scratch: Path) -> Path:
    """Make a package index (PEP 503) with one package."""
    folder = scratch / "index/simple/greeting"
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / "greeting-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("greeting.py", "TEXT = 'hello from the index'\n")
        wheel.writestr("greeting-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: greeting\nVersion: 1.0\n")
        wheel.writestr(
            "greeting-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr("greeting-1.0.dist-info/RECORD", "")
    name = "greeting-1.0-py3-none-any.whl"
    (folder / "index.html").write_text(f'<a href="{name}">{name}</a>')
    return scratch / "index"


def _traces(target: Machine) -> dict[str, str]:
    """What a deployment could leave: rules, containers, images, volumes, units, accounts, folders, bridges."""
    return {
        "rules": target.run(
            "sh", "-c", "nft list tables | grep -v iptables-nft; ebtables-save 2>/dev/null | grep -v '^#' || :"
        ),
        "engine": target.run("sh", "-c", "docker ps --all --quiet; docker image ls --quiet; docker volume ls --quiet"),
        "networks": target.run("docker", "network", "ls", "--format", "{{.Name}}"),
        "units": target.run("sh", "-c", "systemctl list-unit-files 'opificia*' --no-legend --no-pager || :"),
        "accounts": target.run("sh", "-c", "getent passwd; getent group"),
        "links": target.run("sh", "-c", "ip -brief link | cut -d' ' -f1 | cut -d@ -f1 | sort"),
        "folders": target.run(
            "sh",
            "-c",
            "ls -d /opt/* /etc/opificia* /run/opificia* /var/lib/opificia* /var/log/opificia* 2>/dev/null || :",
        ),
        "databases": target.run("runuser", "--user=postgres", "--", "psql", "-tAc", "SELECT datname FROM pg_database"),
    }


_before: dict[str, str] = {}


def test_a_check_tells_what_would_be_done_and_does_nothing(site: Site) -> None:
    _before.update(_traces(site.machine))
    assert site.play("site.yml", "--check", "--diff")["changed"] > 5
    assert _traces(site.machine) == _before


def test_a_bare_server_becomes_a_sandbox_host(site: Site) -> None:
    site.play("site.yml", thorough=True)
    assert site.version() == "0.1.0"
    assert site.machine.run("cat", "/proc/sys/fs/pipe-user-pages-soft") == "131072"
    # Only the manager hands it out, and only to the gateway.
    assert site.machine.run("stat", "--format=%a %U", "/etc/credstore/opificia-model-api-key") == "600 root"
    assert _KEY not in site.machine.run("cat", "/etc/opificia/gateway.toml", "/etc/opificia/control.toml")


def test_a_second_run_changes_nothing(site: Site) -> None:
    recap = site.play("site.yml")
    assert (recap["changed"], recap["failed"]) == (0, 0)


def test_an_operator_runs_pip_in_a_sandbox_and_gets_the_results(site: Site) -> None:
    command = (
        f"pip install --quiet --target /work/lib --index-url http://{_INDEX}/simple --trusted-host {Machine.outside} greeting"
        " && PYTHONPATH=/work/lib python3 -c 'import greeting; print(greeting.TEXT)' | tee /out/said"
    )
    arguments = ("--network=open", f"--allow={_INDEX}", "--quiet", "--name=pip", "--out=/home/alice/results")
    assert "hello from the index" in site.opificia("run", _IMAGE, *arguments, "--", "sh", "-c", command)
    assert site.machine.run("cat", "/home/alice/results/said") == "hello from the index"
    events = [json.loads(line) for line in site.opificia("egress", "pip", "--json").splitlines()]
    assert {(event["event"], event["host"]) for event in events} >= {
        ("allow", Machine.outside),
        ("close", Machine.outside),
    }


def test_a_sandbox_reaches_the_forwarder_and_nothing_else(site: Site) -> None:
    target = site.machine
    first, second = (site.start_session(name, "sleep", "600") for name in ("looker", "sibling"))
    try:
        own = set(target.run("sh", "-c", "ip -4 -brief address | awk '{print $3}' | cut -d/ -f1").split()) - {
            "127.0.0.1"
        }
        sibling = json.loads(
            target.run("sh", "-c", "docker inspect $(docker ps -q --filter label=opificia.session=sibling)")
        )[0]["NetworkSettings"]["Networks"]["opificia-sandbox"]["IPAddress"]
        # sshd listens on every address of the host, also on those of bridges.
        closed = [f"tcp {address} 22" for address in sorted(own | {"10.231.0.1", "172.17.0.1"})]
        closed += [
            f"tcp {sibling} 22",
            f"tcp {Machine.outside} {_PORT}",
            "tcp 169.254.169.254 80",
            "tcp fe80::1%eth0 22",
        ]
        closed += [f"udp {Machine.outside} 53", "udp 127.0.0.11 53", "name example.com", "name localhost.example.com"]
        said = site.in_sandbox("looker", "python3", "-c", _LOOK_AROUND, "tcp opificia-gateway 8900", *closed)
        assert said.splitlines() == ["open tcp opificia-gateway 8900", *(f"closed {what}" for what in closed)]
    finally:
        for name in ("looker", "sibling"):
            site.opificia("stop", name)
        first.communicate()
        second.communicate()


def test_a_missing_rule_forbids_launches_until_it_is_back(site: Site) -> None:
    target = site.machine
    target.run("nft", "delete", "table", "bridge", "opificia0")
    wait_until(lambda: not site.in_order(), "what control finds", timeout_s=20)
    with pytest.raises(MachineError, match="host prepare"):
        site.opificia("run", _IMAGE, "--", "true")
    target.run("systemctl", "restart", "opificia-firewall")
    wait_until(site.in_order, "a host in order", timeout_s=20)
    site.opificia("run", _IMAGE, "--", "true")


def test_no_connection_fails_while_the_gateway_restarts_and_sessions_outlive_every_daemon(site: Site) -> None:
    target = site.machine
    session = site.start_session("steady", "python3", "-c", _KEEP_CONNECTING, _INDEX)
    for unit in _DAEMONS:
        before = target.await_unit(unit)
        target.run("systemctl", "restart", unit)
        target.await_unit(unit, not_pid=before)
        wait_until(site.in_order, f"a host in order after {unit}", timeout_s=30)
    assert site.answers("steady", session) == ["HTTP/1.1 200"]


def test_sessions_outlive_a_killed_daemon(site: Site) -> None:
    target = site.machine
    session = site.start_session("hardy", "sleep", "600")
    for unit in _DAEMONS:
        before = target.await_unit(unit)
        target.run("systemctl", "kill", "--signal=KILL", unit)
        target.await_unit(unit, not_pid=before)
        wait_until(site.in_order, f"a host in order after {unit}", timeout_s=30)
        assert site.in_sandbox("hardy", "echo", "alive") == "alive"
    site.opificia("stop", "hardy")
    session.communicate()


def test_a_restart_of_docker_leaves_the_host_closed_and_ready(site: Site) -> None:
    target = site.machine
    session = site.start_session("cut", "sleep", "600")
    target.run("systemctl", "restart", "docker")
    wait_until(site.in_order, "a host in order", timeout_s=60)
    wait_until(
        lambda: site.sessions()["cut"] in ("failed", "exited", "stopped"), "the end of the cut session", timeout_s=60
    )
    session.communicate()
    site.play("site.yml", "--tags=verify")


def test_a_reboot_brings_everything_back(site: Site) -> None:
    target = site.machine
    target.reboot()
    wait_until(site.in_order, "a host in order", timeout_s=90)
    assert target.run("systemctl", "list-units", "--failed", "--no-legend", "opificia*") == ""
    site.play("site.yml", "--tags=verify")


def test_an_upgrade_cuts_no_session_and_goes_back_again(site: Site) -> None:
    site.bundle(_NEXT)
    session = site.start_session("upgraded", "python3", "-c", _KEEP_CONNECTING, _INDEX)
    site.play("site.yml", "--extra-vars", f"opificia_version={_NEXT}")
    assert site.version() == _NEXT
    assert site.in_sandbox("upgraded", "echo", "alive") == "alive"
    site.play("site.yml", "--extra-vars", "opificia_version=0.1.0")
    assert site.version() == "0.1.0"
    assert site.answers("upgraded", session) == ["HTTP/1.1 200"]


def test_uninstalling_leaves_the_machine_as_it_was(site: Site) -> None:
    site.play("uninstall.yml", "--extra-vars", "opificia_remove_data=true")
    after = _traces(site.machine)
    # The operator's account is not ours, and stays.
    assert after == _before
