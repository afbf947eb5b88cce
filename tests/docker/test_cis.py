"""The container controls of the CIS Docker Benchmark (v1.6.0, section 5) on a live sandbox: one test a control."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from control.docker.seccomp import default_seccomp_profile
from tests.docker.sandboxes import SMALL
from tests.docker.snapshot import Snapshot, look
from tests.support.engine import PrivateEngine

# CIS 5.6 names these.
_SYSTEM_FOLDERS: Final = frozenset(
    {"/", "/boot", "/dev", "/etc", "/lib", "/lib64", "/proc", "/run", "/sys", "/usr", "/var"}
)


@pytest.fixture(scope="module")
def live(engine: PrivateEngine, prepared: list[str], tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    folder: Path = tmp_path_factory.mktemp("cis")
    return look(engine, folder, "print('{}')")


def _options(live: Snapshot) -> list[str]:
    found: list[str] = live.container["HostConfig"]["SecurityOpt"]
    return found


def _config(live: Snapshot, name: str) -> Any:
    return live.container["HostConfig"][name]


def _sources(live: Snapshot) -> set[str]:
    return {mount["Source"] for mount in live.container["Mounts"]}


CONTROLS: Final[dict[str, Callable[[Snapshot], bool]]] = {
    "5.1 swarm mode is not enabled": lambda live: live.engine["Swarm"]["LocalNodeState"] == "inactive",
    # Where the kernel has AppArmor the engine's own profile is in force; we never switch it off.
    "5.2 AppArmor is not switched off": lambda live: (
        "apparmor=unconfined" not in _options(live) and live.container["AppArmorProfile"] != "unconfined"
    ),
    "5.3 SELinux labels are not switched off": lambda live: not any("label" in option for option in _options(live)),
    "5.4 capabilities are dropped": lambda live: _config(live, "CapDrop") == ["ALL"] and not _config(live, "CapAdd"),
    "5.5 it is not privileged": lambda live: _config(live, "Privileged") is False,
    "5.6 no system folder of the host is mounted": lambda live: not _sources(live) & _SYSTEM_FOLDERS,
    "5.7 no sshd runs inside": lambda live: bool(live.processes) and not any("sshd" in each for each in live.processes),
    "5.8 no privileged port is mapped": lambda live: not _config(live, "PortBindings"),
    "5.9 no port is open": lambda live: (
        not live.container["NetworkSettings"]["Ports"] and not _config(live, "PublishAllPorts")
    ),
    "5.10 the host's network is not shared": lambda live: _config(live, "NetworkMode") == "opificia-sandbox",
    "5.11 memory is limited, with no swap on top": lambda live: (
        _config(live, "Memory") == _config(live, "MemorySwap") == SMALL.memory_bytes
    ),
    "5.12 CPU is limited": lambda live: _config(live, "NanoCpus") == int(SMALL.cpus * 1e9),
    "5.13 the root file system is read-only": lambda live: _config(live, "ReadonlyRootfs") is True,
    "5.14 nothing comes in through an interface of the host": lambda live: not _config(live, "PortBindings"),
    # 5.15 wants at most five restarts: ours are none, an end is an end.
    "5.15 it is not restarted": lambda live: _config(live, "RestartPolicy")["Name"] in ("", "no"),
    "5.16 the host's processes are not shared": lambda live: _config(live, "PidMode") == "",
    "5.17 the host's IPC is not shared": lambda live: _config(live, "IpcMode") == "private",
    "5.18 no device of the host is exposed": lambda live: (
        not _config(live, "Devices") and not _config(live, "DeviceRequests") and not _config(live, "DeviceCgroupRules")
    ),
    "5.19 ulimits are set": lambda live: {each["Name"] for each in _config(live, "Ulimits")} == {"core", "nofile"},
    "5.20 no mount is propagated": lambda live: (
        not any("shared" in mount["Propagation"] for mount in live.container["Mounts"])
    ),
    "5.21 the host's UTS namespace is not shared": lambda live: _config(live, "UTSMode") == "",
    "5.22 seccomp is in force, with our profile": lambda live: f"seccomp={default_seccomp_profile()}" in _options(live),
    # Commands in a sandbox are the runner's; control executes nothing there.
    "5.23 nothing was executed in it with privileges": lambda live: not live.container["ExecIDs"],
    "5.24 nothing was executed in it as root": lambda live: not live.container["ExecIDs"],
    "5.25 it is in the cgroup that the engine gives": lambda live: _config(live, "CgroupParent") == "",
    "5.26 it cannot gain privileges": lambda live: "no-new-privileges=true" in _options(live),
    # 5.27 wants a health check; ours is the runner's ping, which runs no code that an image brings.
    "5.27 the image's own health check does not run": lambda live: (
        live.container["Config"]["Healthcheck"] == {"Test": ["NONE"]}
    ),
    "5.28 its image is named by content, so no tag can move": lambda live: (
        live.container["Config"]["Image"] == live.container["Image"] and live.container["Image"].startswith("sha256:")
    ),
    "5.29 processes are limited": lambda live: _config(live, "PidsLimit") == SMALL.pids,
    "5.30 it is not on docker0": lambda live: (
        list(live.container["NetworkSettings"]["Networks"]) == ["opificia-sandbox"]
    ),
    "5.31 it does not run as a user of the host": lambda live: (
        _config(live, "UsernsMode") != "host" and live.container["Config"]["User"] == f"{SMALL.uid}:{SMALL.gid}"
    ),
    "5.32 the engine's socket is not mounted": lambda live: (
        not any(source.endswith(("docker.sock", "containerd.sock")) for source in _sources(live))
    ),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_control_holds(live: Snapshot, control: str) -> None:
    assert CONTROLS[control](live), live.container["HostConfig"]


def test_every_control_of_the_section_is_here() -> None:
    assert [name.split()[0] for name in CONTROLS] == [f"5.{number}" for number in range(1, 33)]
