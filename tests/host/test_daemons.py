"""The daemons as they run in production: unprivileged, apart, and each able to go away and come back."""

import fcntl
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from control.spec import SandboxSpec
from gateway.contract.policy import NetworkLevel
from tests.support import identities
from tests.support.daemon import Daemon
from tests.support.engine import PrivateEngine
from tests.support.host import PrivateHost
from tests.support.processes import wait_until
from tests.support.sandbox import IMAGE


@pytest.mark.parametrize(
    ("name", "uid", "groups"),
    [
        ("gateway", identities.GATEWAY, {identities.FORWARDER, identities.RUNNER_GROUP}),
        ("control", identities.CONTROL, {identities.CONTRACT_GROUP, identities.ENGINE_GROUP}),
    ],
)
def test_each_daemon_runs_as_its_own_user_without_a_capability(
    host: PrivateHost, name: str, uid: int, groups: set[int]
) -> None:
    daemon: Daemon = getattr(host, name)
    lines = Path(f"/proc/{daemon.pid}/status").read_text().splitlines()
    status = {key: value.split() for key, _, value in (line.partition(":") for line in lines)}
    assert status["Uid"] == status["Gid"] == [str(uid)] * 4
    assert {int(group) for group in status["Groups"]} == groups
    assert status["CapEff"] == status["CapBnd"] == ["0" * 16]


def test_the_gateway_cannot_use_the_engine_and_control_cannot_read_the_model_key(host: PrivateHost) -> None:
    for path, uid, groups in (
        (host.engine.socket, identities.GATEWAY, (identities.FORWARDER, identities.RUNNER_GROUP)),
        (host.root / "etc/model-api-key", identities.CONTROL, (identities.CONTRACT_GROUP, identities.ENGINE_GROUP)),
    ):
        assert not host.may_read(path, uid, groups)
    assert host.may_read(host.engine.socket, identities.CONTROL, (identities.ENGINE_GROUP,))


def test_the_forwarder_is_a_member_of_the_internal_network_and_of_nothing_else(
    engine: PrivateEngine, host: PrivateHost
) -> None:
    client = engine.client()
    try:
        found = client.api.inspect_container("opificia-gateway")
        network = client.api.inspect_network("opificia-sandbox")
    finally:
        client.close()
    assert set(found["NetworkSettings"]["Networks"]) == {"opificia-sandbox"}
    assert network["Internal"] is True
    assert found["Config"]["User"] == f"{identities.FORWARDER}:{identities.FORWARDER}"
    assert found["HostConfig"]["CapDrop"] == ["ALL"]
    assert found["HostConfig"]["ReadonlyRootfs"] is True
    assert [(mount["Destination"], mount["RW"]) for mount in found["Mounts"]] == [("/door", False)]


def test_preparing_a_prepared_host_changes_nothing(host: PrivateHost) -> None:
    assert host.prepare() == []


def test_two_who_prepare_a_host_wait_for_each_other(host: PrivateHost) -> None:
    held = os.open(host.root / "var/lib/opificia", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    config = ("--config", str(host._settings("control")))
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(host.cli, "host", "prepare", "--quiet", *config)
        try:
            # Where a process waits for a lock stands in /proc/locks, marked by an arrow.
            inode = f":{os.fstat(held).st_ino} "
            wait_until(
                lambda: any("->" in line and inode in line for line in Path("/proc/locks").read_text().splitlines()),
                "the second to wait",
                give_up=lambda: "it did not wait" if second.done() else None,
            )
        finally:
            os.close(held)
        assert second.result().stdout == ""


def test_a_sandbox_outlives_a_crash_of_either_daemon(host: PrivateHost) -> None:
    sandbox = host.sandbox(SandboxSpec(image=IMAGE, network=NetworkLevel.REGISTRIES))
    for daemon in (host.control, host.gateway):
        daemon.kill()
        daemon.start()
        sandbox.wait_connected()
        assert sandbox.run("echo", "still here").stdout == "still here\n"
        assert sandbox.run("curl", "-sS", "-o", "/dev/null", "https://pypi.org/simple/six/").code == 0
    assert sandbox.stop().state == "stopped"


def test_what_is_written_to_out_is_there_when_the_session_has_ended(host: PrivateHost) -> None:
    sandbox = host.sandbox(SandboxSpec(image=IMAGE))
    assert sandbox.run("sh", "-c", "echo 42 > /out/answer.txt").code == 0
    sandbox.stop()
    assert sandbox.out() == {"answer.txt": b"42\n"}


def test_one_command_runs_a_session_from_image_to_results(host: PrivateHost, tmp_path: Path) -> None:
    program = "cat /in/question; id > /out/id; echo to stderr >&2; exit 3"
    (tmp_path / "in").mkdir()
    (tmp_path / "in/question").write_text("what is the answer?\n")
    done = host.cli(
        *("run", IMAGE, "--in", str(tmp_path / "in"), "--out", str(tmp_path / "out"), "--", "sh", "-c", program),
        check=False,
    )
    assert done.returncode == 3, done.stderr
    assert done.stdout == "what is the answer?\n"
    assert "to stderr" in done.stderr
    assert (tmp_path / "out/id").read_text().startswith("uid=60610(node)")


def test_doctor_names_a_gateway_that_is_away(host: PrivateHost) -> None:
    host.gateway.stop()
    try:
        found = host.cli("doctor", check=False)
        assert found.returncode == 1
        assert "gateway" in found.stdout
    finally:
        host.gateway.start()
