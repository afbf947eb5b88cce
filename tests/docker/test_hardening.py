"""A sandbox as it looks from inside, and as the CIS Docker Benchmark (v1.6, section 5) wants containers to be."""

import json
from typing import Any

import pytest

from control.docker.seccomp import default_seccomp_profile
from control.docker.service import DockerService
from control.plan.container import SandboxSettings
from gateway.contract.limits import MIB
from tests.docker.sandboxes import SMALL, Sandboxes
from tests.support.engine import PrivateEngine

# Tries what a program may try, and prints for each whether it was let.
_PROBES = r"""
import ctypes, json, os, socket, struct

libc = ctypes.CDLL(None, use_errno=True)

def call(number, *arguments):
    ctypes.set_errno(0)
    result = libc.syscall(number, *arguments)
    return "allowed" if result >= 0 else os.strerror(ctypes.get_errno())

def attempt(action):
    try:
        action()
    except OSError as error:
        return error.strerror
    return "allowed"

def family(number, kind=socket.SOCK_STREAM):
    return attempt(lambda: socket.socket(number, kind).close())

params = ctypes.create_string_buffer(120)
found = {
    "io_uring_setup": call(425, 4, params),
    "AF_VSOCK": family(40),
    "AF_ALG": family(38, socket.SOCK_SEQPACKET),
    "AF_PACKET": family(17, socket.SOCK_RAW),
    "AF_UNIX": family(1),
    "AF_INET": family(2),
    "AF_INET6": family(10),
    "AF_NETLINK": family(16, socket.SOCK_RAW),
    "raw socket": attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)),
    "clone3": call(435, 0, 0),
    "unshare user": call(272, 0x10000000),
    "unshare mount": call(272, 0x00020000),
    "keyctl": call(250, 0, 0, 0),
    "add_key": call(248, b"user", b"x", b"y", 1, ctypes.c_long(-3)),
    "bpf": call(321, 0, 0, 0),
    "perf_event_open": call(298, 0, 0, -1, -1, 0),
    "mount": call(165, b"none", b"/work", b"tmpfs", 0, 0),
    "userfaultfd": call(323, 0),
    "mknod": attempt(lambda: os.mknod("/work/kmem", 0o20600, os.makedev(1, 2))),
    "setuid": attempt(lambda: os.setuid(0)),
    "chroot": attempt(lambda: os.chroot("/work")),
    "write /": attempt(lambda: open("/probe", "w").close()),
    "write /etc/hosts": attempt(lambda: open("/etc/hosts", "a").close()),
    "write /etc/resolv.conf": attempt(lambda: open("/etc/resolv.conf", "a").close()),
    "write /in": attempt(lambda: open("/in/probe", "w").close()),
    "write /proc/sys": attempt(lambda: open("/proc/sys/kernel/core_pattern", "w").close()),
    "write sysrq": attempt(lambda: open("/proc/sysrq-trigger", "w").close()),
    "read kcore": "allowed" if attempt(lambda: open("/proc/kcore", "rb").read(1)) == "allowed" and open("/proc/kcore", "rb").read(1) else "empty",
    "read keys": open("/proc/keys").read() if os.path.exists("/proc/keys") else "",
    "write cgroup": attempt(lambda: os.mkdir("/sys/fs/cgroup/memory/probe" if os.path.isdir("/sys/fs/cgroup/memory") else "/sys/fs/cgroup/probe")),
    "docker socket": os.path.exists("/var/run/docker.sock") or os.path.exists("/run/docker.sock"),
    "devices": sorted(os.listdir("/dev")),
    "status": dict(line.split(":\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\t" in line),
    "cgroup": open("/proc/self/cgroup").read(),
    "init": open("/proc/1/comm").read().strip(),
    "hostname": socket.gethostname(),
    "ids": [os.getuid(), os.getgid(), os.getgroups()],
    "limits": open("/proc/self/limits").read(),
    "mounts": {line.split()[1]: line.split()[2:4] for line in open("/proc/mounts")},
    "ipv6": os.path.exists("/proc/net/if_inet6") and open("/proc/net/if_inet6").read(),
    "resolv": open("/etc/resolv.conf").read(),
    "setuid programs gain": os.popen("su -c id 2>&1 </dev/null").read(),
    "environment": dict(os.environ),
}
print(json.dumps(found))
"""

_NOT_PERMITTED = "Operation not permitted"


@pytest.fixture
async def inside(sandboxes: Sandboxes) -> dict[str, Any]:
    """What the probes found."""
    ended = await sandboxes.run(f"cat > /tmp/probe.py <<'PROBE'\n{_PROBES}\nPROBE\npython3 /tmp/probe.py")
    assert ended.exit.exit_code == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


async def test_nothing_that_leads_out_is_permitted_inside(inside: dict[str, Any]) -> None:
    denied = {
        "AF_VSOCK": _NOT_PERMITTED,
        "AF_ALG": _NOT_PERMITTED,
        "AF_PACKET": _NOT_PERMITTED,
        "raw socket": _NOT_PERMITTED,
        "io_uring_setup": "Function not implemented",
        "clone3": "Function not implemented",
        "unshare user": _NOT_PERMITTED,
        "unshare mount": _NOT_PERMITTED,
        "keyctl": _NOT_PERMITTED,
        "add_key": _NOT_PERMITTED,
        "bpf": _NOT_PERMITTED,
        "perf_event_open": _NOT_PERMITTED,
        "mount": _NOT_PERMITTED,
        "userfaultfd": _NOT_PERMITTED,
        "mknod": _NOT_PERMITTED,
        "setuid": _NOT_PERMITTED,
        "chroot": _NOT_PERMITTED,
        "write /": "Read-only file system",
        "write /in": "Read-only file system",
        "write /proc/sys": "Read-only file system",
        "write cgroup": "Read-only file system",
        "read kcore": "empty",
        "read keys": "",
    }
    assert {name: inside[name] for name in denied} == denied
    # Not every kernel has it.
    assert inside["write sysrq"] in ("Read-only file system", "No such file or directory")
    assert inside["write /etc/hosts"] in ("Read-only file system", "Permission denied")
    assert inside["write /etc/resolv.conf"] in ("Read-only file system", "Permission denied")


async def test_ordinary_programs_have_what_they_need(inside: dict[str, Any]) -> None:
    assert {inside[name] for name in ("AF_UNIX", "AF_INET", "AF_INET6", "AF_NETLINK")} == {"allowed"}
    assert inside["ids"] == [60610, 60610, [60610]]
    assert inside["environment"]["HOME"] == "/home/node"


async def test_processes_have_no_capability_and_a_filter_of_system_calls(inside: dict[str, Any]) -> None:
    status = inside["status"]
    for kind in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(status[kind], 16) == 0
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"
    assert "uid=0" not in inside["setuid programs gain"]


async def test_mounts_are_what_was_planned(inside: dict[str, Any]) -> None:
    mounts = inside["mounts"]
    assert "ro" in mounts["/"][1].split(",")
    assert "ro" in mounts["/in"][1].split(",")
    assert mounts["/out"][0] == "ext4"
    assert {"rw", "nosuid", "nodev"} <= set(mounts["/out"][1].split(","))
    for path in ("/work", "/home/node", "/tmp"):
        assert mounts[path][0] == "tmpfs"
        assert {"nosuid", "nodev"} <= set(mounts[path][1].split(","))
    assert "noexec" in mounts["/tmp"][1].split(",")
    assert f"size={SMALL.work_bytes // 1024}k" in mounts["/work"][1]
    for path in ("/etc/hosts", "/etc/hostname", "/etc/resolv.conf"):
        assert "ro" in mounts[path][1].split(",")


async def test_only_the_plain_devices_are_there(inside: dict[str, Any]) -> None:
    plain = {"core", "fd", "full", "mqueue", "null", "ptmx", "pts", "random", "shm", "stderr", "stdin", "stdout"}
    assert set(inside["devices"]) <= plain | {"tty", "urandom", "zero", "console"}
    assert inside["docker socket"] is False


async def test_namespaces_are_its_own(inside: dict[str, Any]) -> None:
    # In a cgroup namespace of its own every path is the root.
    assert all(line.endswith(":/") for line in inside["cgroup"].splitlines())
    assert inside["init"] in ("docker-init", "tini")
    assert inside["hostname"] == "sandbox"


async def test_limits_hold_inside(inside: dict[str, Any]) -> None:
    limits = {line[:26].strip(): line[26:].split() for line in inside["limits"].splitlines()}
    assert limits["Max open files"][:2] == ["16384", "16384"]
    assert limits["Max core file size"][:2] == ["0", "0"]


async def test_there_is_no_ipv6_and_no_resolver(inside: dict[str, Any]) -> None:
    assert not inside["ipv6"]
    servers = [line for line in inside["resolv"].splitlines() if line.startswith("nameserver")]
    # 127.0.0.11 is the engine's own, which has only 127.0.0.1 in the sandbox to ask.
    assert servers == ["nameserver 127.0.0.11"]
    assert "timeout:1" in inside["resolv"]
    assert "attempts:1" in inside["resolv"]


async def test_io_uring_and_vsock_are_open_under_the_engines_own_profile(sandboxes: Sandboxes) -> None:
    """What the tests above found closed is closed by our profile, not by this kernel."""
    probe = (
        "import ctypes, socket; libc = ctypes.CDLL(None, use_errno=True); "
        "print(libc.syscall(425, 4, ctypes.create_string_buffer(120)) >= 0); "
        "print(socket.socket(40, socket.SOCK_STREAM).fileno() >= 0)"
    )
    ended = await sandboxes.run(
        f'python3 -c "{probe}"', change={"SecurityOpt": ["no-new-privileges=true", "seccomp=unconfined"]}
    )
    opened = ended.stdout.split()
    if ended.exit.exit_code != 0:
        # A kernel without one of them cannot show it; the error names which.
        assert "not supported" in ended.stderr or "not implemented" in ended.stderr
    else:
        assert opened == ["True", "True"]


async def test_python_node_npm_git_and_a_compiler_work(sandboxes: Sandboxes) -> None:
    script = """
set -e
cd /work
python3 -m venv --without-pip venv && venv/bin/python -c 'import ssl, sqlite3, multiprocessing as m; print(m.Pool(2).map(abs, [-1]))'
python3 -m pip --version >/dev/null
node -e 'require("worker_threads"); setTimeout(() => console.log("node"), 1)'
npm --version >/dev/null && npm init -y >/dev/null && echo npm
git init -q repo && cd repo && git -c user.name=a -c user.email=a@b commit -q --allow-empty -m x && git log --format=%s
printf 'int main(void){return 0;}' > a.c && gcc a.c -o a && ./a && echo compiled
bash -c 'sleep 0 & wait' && curl --version | head -c 4
"""
    ended = await sandboxes.run(
        script, SandboxSettings(memory_bytes=1024 * MIB, work_bytes=256 * MIB, tmp_bytes=64 * MIB)
    )
    assert ended.stdout.split() == ["[1]", "node", "npm", "x", "compiled", "curl"], ended.stderr


@pytest.fixture
async def inspected(sandboxes: Sandboxes, engine: PrivateEngine) -> dict[str, Any]:
    """A running sandbox as the engine shows it."""
    sandbox = await sandboxes.launch("echo up; sleep 60")
    await sandbox.said("up")
    client = engine.client()
    try:
        found: dict[str, Any] = client.api.inspect_container(sandbox.container)
        return found
    finally:
        client.close()


async def test_cis_5_1_no_swarm_and_5_2_apparmor_when_the_kernel_has_it(inspected: dict[str, Any]) -> None:
    # 5.2: the engine's own profile is in force wherever the kernel has AppArmor; we never switch it off.
    assert "apparmor=unconfined" not in inspected["HostConfig"]["SecurityOpt"]


async def test_cis_5_4_to_5_6_no_capabilities_not_privileged_no_system_folders(inspected: dict[str, Any]) -> None:
    assert inspected["HostConfig"]["CapDrop"] == ["ALL"]
    assert not inspected["HostConfig"]["CapAdd"]
    assert inspected["HostConfig"]["Privileged"] is False
    system = ("/", "/boot", "/dev", "/etc", "/lib", "/proc", "/sys", "/usr")
    assert not [mount for mount in inspected["Mounts"] if mount["Source"] in system]


async def test_cis_5_8_to_5_10_no_ports_no_host_network(inspected: dict[str, Any]) -> None:
    assert not inspected["NetworkSettings"]["Ports"]
    assert not inspected["HostConfig"]["PortBindings"]
    assert inspected["HostConfig"]["NetworkMode"] == "opificia-sandbox"
    assert list(inspected["NetworkSettings"]["Networks"]) == ["opificia-sandbox"]


async def test_cis_5_11_to_5_13_memory_cpu_and_read_only_root(inspected: dict[str, Any]) -> None:
    config = inspected["HostConfig"]
    assert config["Memory"] == config["MemorySwap"] == SMALL.memory_bytes
    assert config["NanoCpus"] == 2_000_000_000
    assert config["ReadonlyRootfs"] is True


async def test_cis_5_15_to_5_18_restarts_namespaces_devices(inspected: dict[str, Any]) -> None:
    config = inspected["HostConfig"]
    assert config["RestartPolicy"]["Name"] in ("", "no")
    assert config["PidMode"] != "host"
    assert config["IpcMode"] == "private"
    assert not config["Devices"]


async def test_cis_5_19_to_5_22_ulimits_propagation_uts_and_seccomp(inspected: dict[str, Any]) -> None:
    config = inspected["HostConfig"]
    assert {limit["Name"] for limit in config["Ulimits"]} == {"core", "nofile"}
    assert not [mount for mount in inspected["Mounts"] if mount["Propagation"] == "shared"]
    assert config["UTSMode"] != "host"
    assert f"seccomp={default_seccomp_profile()}" in config["SecurityOpt"]


async def test_cis_5_25_to_5_29_cgroup_privileges_health_pids_bridge(inspected: dict[str, Any]) -> None:
    config = inspected["HostConfig"]
    assert config["CgroupParent"] == ""
    assert "no-new-privileges=true" in config["SecurityOpt"]
    # 5.27 wants a health check; ours is the runner's ping, which an image cannot fake or run code by.
    assert inspected["Config"]["Healthcheck"] == {"Test": ["NONE"]}
    assert config["PidsLimit"] == SMALL.pids
    assert "bridge" not in inspected["NetworkSettings"]["Networks"]


async def test_cis_5_31_and_5_32_no_host_users_and_no_engine_socket(inspected: dict[str, Any]) -> None:
    assert inspected["HostConfig"]["UsernsMode"] != "host"
    assert not [mount for mount in inspected["Mounts"] if mount["Source"].endswith("docker.sock")]


async def test_a_volume_that_an_image_declares_never_reaches_the_disk(
    sandboxes: Sandboxes, engine: PrivateEngine, service: DockerService
) -> None:
    client = engine.client()
    try:
        before = {volume.name for volume in client.volumes.list()}
        container = client.api.create_container("opificia-sandbox:latest")["Id"]
        image = client.api.commit(container, changes=["VOLUME /data"])["Id"]
        client.api.remove_container(container)
        facts = await service.image(image)
        assert facts is not None
        assert facts.volumes == ("/data",)
        ended = await sandboxes.run(
            "stat -f -c %T /data; echo x > /data/x", image=facts.id, image_volumes=facts.volumes
        )
        assert ended.stdout == "tmpfs\n"
        assert ended.exit.exit_code == 0
        made = {volume.name for volume in client.volumes.list()} - before
        assert all(name.startswith("opificia-out-") for name in made)
        for sandbox in sandboxes.launched:
            await service.remove(sandbox.container)
        client.api.remove_image(image)
    finally:
        client.close()
