"""The playbook against a server of its own: deployed, used, hit, upgraded, rolled back, and taken away again.

One machine and one pass: each test goes on from what the one before it left, so after a failure the others fail at once.
What a step took is printed at the end. Chaos alone, for an hour, in an order of one's own:
`OPIFICIA_CHAOS_SECONDS=3600 OPIFICIA_CHAOS_SEED=7 scripts/test -m deploy -rP tests/host/test_deploy.py -k "becomes or whatever"`.
"""

import contextlib
import json
import re
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from control.client import ControlClient
from control.plan.network import NetworkSettings
from tests.host.chaos_deployed import Deployed, breakable
from tests.host.chaos_deployed_run import chaos
from tests.host.deploy_machine import Machine, MachineError, drop_in, machine, missing_programs
from tests.host.deploy_paths import SERVE, ways_of_packets
from tests.host.deploy_site import BIN, ECHO_PORT, IMAGE, INDEX, KEY, PORT, WELL, Site
from tests.host.test_chaos import FEW, SECONDS, SEED
from tests.support.engine import PrivateEngine
from tests.support.hostside import listening
from tests.support.processes import spawn, stop, wait_until
from tests.support.programs import RESOLVE

_NEXT: Final = "0.1.0.post1"
_DAEMONS: Final = ("opificia-gateway", "opificia-control")
_RELEASES: Final = "/opt/opificia/releases"
_CURRENT: Final = "/opt/opificia/current"
_IMAGES: Final = "/opt/opificia/images"
_NEEDED: Final = ("mmdebstrap", "docker", "ssh", "ssh-keygen", str(BIN / "ansible-playbook"))

pytestmark = [
    pytest.mark.deploy,
    # Minutes when the machine does much besides.
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        bool(missing_programs(_NEEDED)), reason=f"not installed: {', '.join(missing_programs(_NEEDED))}"
    ),
]

_steps: list[tuple[str, float]] = []


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deploy")


@pytest.fixture(scope="module")
def site(engine: PrivateEngine, scratch: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    started = time.monotonic()
    try:
        with machine(engine, scratch) as target, _outside(engine, scratch):
            target.run("useradd", "--create-home", "alice")
            made = Site(target, scratch)
            made.bundle()
            _steps.append(("machine and release", time.monotonic() - started))
            yield made
    finally:
        plugins = request.config.pluginmanager
        reporter, capture = plugins.get_plugin("terminalreporter"), plugins.get_plugin("capturemanager")
        if reporter is not None and capture is not None:
            # What a passing test prints is kept back.
            with capture.global_and_fixture_disabled():
                reporter.write_line("")
                for name, seconds in _steps:
                    reporter.write_line(f"{seconds / 60:6.2f} min  {name}")


@contextlib.contextmanager
def _outside(engine: PrivateEngine, scratch: Path) -> Iterator[None]:
    """Run what sandboxes may reach: a package index, and what gives back every byte."""
    serve = ["-m", "http.server", str(PORT), "--bind", Machine.outside, f"--directory={_index(scratch)}"]
    index = spawn(engine.in_network([sys.executable, *serve]), log=subprocess.DEVNULL)
    try:
        with listening(engine, "echo", ECHO_PORT):
            yield
    finally:
        stop(index)


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
    site.play("site.yml", verify_doctor=True)
    assert site.version() == "0.1.0"
    assert site.machine.run("cat", "/proc/sys/fs/pipe-user-pages-soft") == "131072"
    # Only the manager hands it out, and only to the gateway.
    assert site.machine.run("stat", "--format=%a %U", "/etc/credstore/opificia-model-api-key") == "600 root"
    assert KEY not in site.machine.run("cat", "/etc/opificia/gateway.toml", "/etc/opificia/control.toml")


def test_a_second_run_changes_nothing(site: Site) -> None:
    recap = site.play("site.yml")
    assert (recap["changed"], recap["failed"]) == (0, 0)


def test_hosts_come_one_after_the_other_and_none_after_one_that_fails(site: Site) -> None:
    before = site.machine.run("cat", "/etc/opificia/gateway.toml")
    broken = {"listen": {"sandbox": "nonsense"}}
    done = site.attempt("site.yml", "--tags=gateway", variables={"gateway_settings": broken}, inventory="pair")
    assert done.returncode != 0
    # The program itself found it, before the file was put in place.
    assert "listen.sandbox" in done.stdout
    assert "first " in done.stdout.rpartition("PLAY RECAP")[2]
    assert "second" not in done.stdout
    assert site.machine.run("cat", "/etc/opificia/gateway.toml") == before


def test_what_a_failed_run_changed_is_put_in_force_by_the_next(site: Site) -> None:
    target = site.machine
    done = site.attempt("site.yml", "--tags=control", variables={"control_operators": ["alice", "alcie"]})
    assert done.returncode != 0
    assert "no such user" in done.stdout
    assert not target.succeeds("getent", "passwd", "alcie")
    other = f"{_RELEASES}/0.0.9"
    target.run("sh", "-c", f"cp -al {_RELEASES}/0.1.0 {other} && ln -sfn {other} {_CURRENT}")
    before = target.await_unit("opificia-gateway")
    key = {"gateway_model_api_key": "sk-another"}
    broken = {**key, "control_operators": [], "opificia_command": ["false"]}
    done = site.attempt("site.yml", "--tags=gateway,control,host", variables=broken)
    assert done.returncode != 0
    # What it does before it fails: it has the release that runs look away, and takes its right from who is no operator.
    target.await_unit("opificia-firewall.timer")
    assert "opificia" not in target.run("id", "--groups", "--name", "alice").split()
    assert target.await_unit("opificia-gateway") == before
    target.run(
        "sh", "-c", f"ln -sfn {_RELEASES}/0.1.0 {_CURRENT} && touch -h -d 2020-01-01 {_CURRENT} && rm -r {other}"
    )
    # The key is the same as in the run before, and the gateway has not read it.
    site.play("site.yml", "--tags=gateway,control", **key)
    target.await_unit("opificia-gateway", not_pid=before)
    assert "opificia" in target.run("id", "--groups", "--name", "alice").split()


def test_an_operator_runs_pip_in_a_sandbox_and_gets_the_results(site: Site) -> None:
    command = (
        f"pip install --quiet --target /work/lib --index-url http://{INDEX}/simple --trusted-host {Machine.outside} greeting"
        " && PYTHONPATH=/work/lib python3 -c 'import greeting; print(greeting.TEXT)' | tee /out/said"
    )
    arguments = ("--network=open", f"--allow={INDEX}", "--quiet", "--name=pip", "--out=/home/alice/results")
    assert "hello from the index" in site.opificia("run", IMAGE, *arguments, "--", "sh", "-c", command)
    assert site.machine.run("cat", "/home/alice/results/said") == "hello from the index"
    events = [json.loads(line) for line in site.opificia("egress", "pip", "--json").splitlines()]
    assert {(event["event"], event["host"]) for event in events} >= {
        ("allow", Machine.outside),
        ("close", Machine.outside),
    }


def test_a_user_without_rights_reaches_nothing_of_ours(site: Site) -> None:
    folders = "/run/opificia /etc/opificia /etc/credstore /var/lib/opificia /var/log/opificia"
    what = r"\( -type f -readable -o -type s -writable -o -type d -writable \)"
    find = f"find {folders} {what} -print 2>/dev/null || :"
    # How the gateway is set, without a secret: whoever may use the door can find it out.
    assert site.machine.run("runuser", "--user=nobody", "--", "sh", "-c", find) == "/etc/opificia/gateway.toml"
    # The same look with rights finds what there is.
    found = site.machine.run("sh", "-c", find).split()
    assert {"/run/opificia/api/control.sock", "/run/opificia/door/sandbox.sock"} <= set(found)
    assert "/etc/credstore/opificia-model-api-key" in found


def test_every_way_of_a_packet_is_open_without_its_rule_and_closed_by_it(site: Site) -> None:
    looker = site.start_session("looker", "sleep", "600")
    sibling = site.start_session("sibling", "python3", "-c", SERVE)
    try:
        with ways_of_packets(site, "looker", "sibling") as ways:
            ways.assert_only_the_door_is_open()
            ways.assert_each_is_open_without_its_rules()
            ways.assert_only_the_door_is_open()
            with ways.without_bridge_netfilter():
                ways.assert_only_the_door_is_open()
        _names_do_not_leave(site, "looker")
    finally:
        for name in ("looker", "sibling"):
            site.opificia("stop", name)
        looker.communicate()
        sibling.communicate()


def _names_do_not_leave(site: Site, session: str) -> None:
    """The engine's own resolver leads out of a plain container on the same network, and not out of a sandbox."""
    network = f"--network={NetworkSettings().name}"
    with listening(site.machine.engine, "dns", 53) as queries:
        site.machine.run("docker", "run", "--rm", network, IMAGE, "python3", "-c", RESOLVE, "plain.example")
        before = queries.read_text()
        assert "plain.example" in before
        assert "unresolved" in site.in_sandbox(session, "python3", "-c", RESOLVE, "sandboxed.example")
        assert queries.read_text() == before


def test_flushed_rules_forbid_launches_and_come_back_by_themselves(site: Site) -> None:
    target = site.machine
    shorter = "[Timer]\nOnActiveSec=\nOnActiveSec=1s\nOnUnitInactiveSec=\nOnUnitInactiveSec=5s\n"
    with drop_in(target, "opificia-firewall.timer", shorter):
        # Held while it is looked at what control makes of it.
        target.run("systemctl", "stop", "opificia-firewall.timer", "opificia-firewall.service")
        for family in ("inet", "bridge"):
            target.run("nft", "delete", "table", family, "opificia0")
        wait_until(lambda: not site.in_order(), "what control finds", timeout_s=180)
        with pytest.raises(MachineError, match="host prepare"):
            site.opificia("run", IMAGE, "--", "true")
        target.run("systemctl", "start", "opificia-firewall.timer")
        wait_until(site.in_order, "a host in order", timeout_s=180)
        site.opificia("run", IMAGE, "--", "true")
    assert "loaded the firewall rules" in target.run("journalctl", "--unit=opificia-firewall", "--no-pager")


def test_neither_a_reload_nor_a_restart_refuses_a_connection_or_cuts_tunnel_or_session(site: Site) -> None:
    target = site.machine
    session = site.start_connecting("steady")
    for verb, unit in (("reload", "opificia-gateway"), *(("restart", unit) for unit in _DAEMONS)):
        before = target.await_unit(unit)
        target.run("systemctl", verb, unit)
        target.await_unit(unit, not_pid=before)
        wait_until(site.in_order, f"a host in order after {verb} of {unit}", timeout_s=180)
    target.run("systemctl", "restart", "opificia-firewall.service", "opificia-firewall.timer")
    assert site.found("steady", session) == WELL


def test_sessions_outlive_a_killed_daemon_and_no_request_after_it_is_refused(site: Site) -> None:
    target = site.machine
    session = site.start_connecting("hardy")
    for unit in _DAEMONS:
        before = target.await_unit(unit)
        target.run("systemctl", "kill", "--signal=KILL", unit)
        target.await_unit(unit, not_pid=before)
        wait_until(site.in_order, f"a host in order after {unit}", timeout_s=180)
        assert site.in_sandbox("hardy", "echo", "alive") == "alive"
    # What was open is cut, and tells so; what came later waited for the grants.
    outcomes = site.found("hardy", session)
    assert [each for each in outcomes if each.startswith("HTTP/") and each != WELL[0]] == []
    entries = [
        json.loads(line)
        for line in target.run("journalctl", "--unit=opificia-gateway", "--output=json", "--no-pager").splitlines()
    ]
    died = max(n for n, each in enumerate(entries) if "code=killed" in each["MESSAGE"])
    since = {
        said: next(each for each in entries[died:] if said in each["MESSAGE"])
        for said in ("ended without handing over", "serving sandboxes", "control brought")
    }
    for said, entry in since.items():
        after_us = int(entry["__MONOTONIC_TIMESTAMP"]) - int(entries[died]["__MONOTONIC_TIMESTAMP"])
        print(f"{after_us / 1e6:.3f} s after the gateway was killed: {said}")


def test_a_daemon_that_finds_no_memory_comes_back_when_there_is_some_and_sessions_live_on(site: Site) -> None:
    target = site.machine
    session = site.start_session("thrifty", "sleep", "600")
    for unit in _DAEMONS:
        # Less than it takes to start: the kernel kills it again and again.
        with drop_in(target, f"{unit}.service", "[Service]\nMemoryHigh=infinity\nMemoryMax=16M\n"):
            target.run("systemctl", "restart", "--no-block", unit)
            wait_until(
                lambda: target.run("systemctl", "show", "--property=NRestarts", "--value", unit) not in ("", "0"),  # noqa: B023
                f"the end of {unit} for want of memory",
                timeout_s=180,
            )
        wait_until(site.in_order, f"a host in order after {unit}", timeout_s=180)
        assert site.in_sandbox("thrifty", "echo", "alive") == "alive"
    site.opificia("stop", "thrifty")
    session.communicate()


def test_a_restart_of_docker_leaves_the_host_closed_and_ready(site: Site) -> None:
    target = site.machine
    session = site.start_session("cut", "sleep", "600")
    target.run("systemctl", "restart", "docker")
    wait_until(site.in_order, "a host in order", timeout_s=180)
    wait_until(
        lambda: site.sessions()["cut"] in ("failed", "exited", "stopped"), "the end of the cut session", timeout_s=180
    )
    session.communicate()
    target.await_unit("opificia-firewall.timer")
    site.prove()


def test_a_reboot_brings_everything_back(site: Site) -> None:
    target = site.machine
    target.reboot()
    wait_until(site.in_order, "a host in order", timeout_s=180)
    assert target.run("systemctl", "list-units", "--failed", "--no-legend", "opificia*") == ""
    target.await_unit("opificia-firewall.timer")
    site.prove()


def test_an_external_database_is_used_by_its_url_alone(site: Site) -> None:
    target = site.machine
    password = "not-to-be-shown"
    target.run("pg_createcluster", "15", "second", "--port=5433", "--start")
    try:
        for statement in (f"CREATE ROLE remote LOGIN PASSWORD '{password}'", "CREATE DATABASE remote OWNER remote"):
            target.run("runuser", "--user=postgres", "--", "psql", "--port=5433", "--quiet", f"--command={statement}")
        url = f"postgresql://remote:{password}@127.0.0.1:5433/remote"
        external = {"opificia_database_url": url}
        told = site.attempt("site.yml", "--check", "--diff", "--tags=postgres,control", variables=external)
        assert told.returncode == 0, told.stdout
        assert password not in told.stdout
        done = site.attempt("site.yml", "--diff", "--tags=postgres,control,verify", variables=external)
        assert done.returncode == 0, done.stdout
        assert password not in done.stdout
        assert target.run("stat", "--format=%a %U %G", "/etc/opificia/control.toml") == "640 root opificia-control"
        site.opificia("run", IMAGE, "--name=elsewhere", "--", "true")
        count = "SELECT count(*) FROM sessions WHERE id = 'elsewhere'"
        assert target.run("psql", "--tuples-only", "--no-align", f"--command={count}", url) == "1"
        # The way back is the inventory as it was.
        site.play("site.yml", "--tags=control")
        assert "elsewhere" not in site.sessions()
        assert "pip" in site.sessions()
    finally:
        target.run("pg_dropcluster", "--stop", "15", "second")


def test_an_upgrade_and_the_way_back_cut_neither_tunnel_nor_session(site: Site) -> None:
    target = site.machine
    # What earlier upgrades left: more releases than are kept, and the images of one that goes.
    for old in ("0.0.1", "0.0.2", "0.0.3"):
        target.run("sh", "-c", f"mkdir {_RELEASES}/{old} && touch -d 2020-01-0{old[-1]} {_RELEASES}/{old}")
    target.run("sh", "-c", f"touch {_IMAGES}/sandbox-0123456789abcdef.tar")
    images = set(target.run("ls", _IMAGES).split()) - {"sandbox-0123456789abcdef.tar"}
    site.bundle(_NEXT)
    session = site.start_connecting("upgraded")
    site.play("site.yml", opificia_version=_NEXT)
    assert site.version() == _gateway_version(target) == _NEXT
    assert site.in_sandbox("upgraded", "echo", "alive") == "alive"
    assert set(target.run("ls", _RELEASES).split()) == {"0.0.3", "0.1.0", _NEXT}
    assert set(target.run("ls", _IMAGES).split()) == images
    # The way back with a gateway that stays as it is when it is asked to reload: the play finds that out.
    with drop_in(target, "opificia-gateway.service", "[Service]\nExecReload=\nExecReload=/bin/true\n"):
        site.play("site.yml", opificia_version="0.1.0", gateway_reload_wait_s=1)
    assert site.version() == _gateway_version(target) == "0.1.0"
    target.await_unit("opificia-firewall.timer")
    assert site.found("upgraded", session) == WELL


def _gateway_version(target: Machine) -> str:
    """Return the release whose code the gateway's main process has loaded, whatever the link says by now."""
    maps = target.run("cat", f"/proc/{target.await_unit('opificia-gateway')}/maps")
    loaded: set[str] = set(re.findall(f"{_RELEASES}/([^/]+)/", maps))
    return "+".join(sorted(loaded))


# A few faults in every run; every one takes minutes, and all tests have a quarter of an hour together.
@pytest.mark.timeout(SECONDS + 1800)
async def test_nothing_is_lost_whatever_happens_to_the_host(site: Site) -> None:
    print(f"OPIFICIA_CHAOS_SEED={SEED}")
    target = site.machine
    with breakable(target) as outside:
        root = target.root
        async with ControlClient(f"unix:{root}/run/opificia/api/control.sock") as control:
            await chaos(Deployed(target, root, control, outside), SECONDS, SEED, FEW)


def test_uninstalling_leaves_the_machine_as_it_was(site: Site) -> None:
    # As after a deployment that failed before the switch, which is all the harder.
    site.machine.run("rm", _CURRENT)
    site.play("uninstall.yml", opificia_remove_data=True)
    after = _traces(site.machine)
    # The operator's account is not ours, and stays.
    assert after == _before
