"""A sandbox as it looks from inside: what a program has there, and what is closed by our settings and not by this kernel."""

import json
from typing import Any

import pytest

from control.docker.service import DockerService
from control.plan.container import SandboxSettings
from gateway.contract.limits import MIB
from tests.docker.sandboxes import SMALL, Sandboxes
from tests.support.engine import PrivateEngine

# Prints what a program finds.
_PROBES = r"""
import json, os, socket

def attempt(action):
    try:
        action()
    except OSError as error:
        return error.strerror
    return "allowed"

def family(number, kind=socket.SOCK_STREAM):
    return attempt(lambda: socket.socket(number, kind).close())

found = {
    "AF_UNIX": family(1),
    "AF_INET": family(2),
    "AF_INET6": family(10),
    "AF_NETLINK": family(16, socket.SOCK_RAW),
    "write /": attempt(lambda: open("/probe", "w").close()),
    "write /etc/hosts": attempt(lambda: open("/etc/hosts", "a").close()),
    "write /etc/resolv.conf": attempt(lambda: open("/etc/resolv.conf", "a").close()),
    "write /in": attempt(lambda: open("/in/probe", "w").close()),
    "cgroup": open("/proc/self/cgroup").read(),
    "init": open("/proc/1/comm").read().strip(),
    "hostname": socket.gethostname(),
    "ids": [os.getuid(), os.getgid(), os.getgroups()],
    "limits": open("/proc/self/limits").read(),
    "mounts": {line.split()[1]: line.split()[2:4] for line in open("/proc/mounts")},
    "ipv6": os.path.exists("/proc/net/if_inet6") and open("/proc/net/if_inet6").read(),
    "resolv": open("/etc/resolv.conf").read(),
    "environment": dict(os.environ),
}
print(json.dumps(found))
"""


@pytest.fixture
async def inside(sandboxes: Sandboxes) -> dict[str, Any]:
    """What the probes found."""
    ended = await sandboxes.run(f"cat > /tmp/probe.py <<'PROBE'\n{_PROBES}\nPROBE\npython3 /tmp/probe.py")
    assert ended.exit.exit_code == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


async def test_only_its_own_folders_are_writable(inside: dict[str, Any]) -> None:
    assert inside["write /"] == inside["write /in"] == "Read-only file system"
    for name in ("write /etc/hosts", "write /etc/resolv.conf"):
        assert inside[name] in ("Read-only file system", "Permission denied")


async def test_ordinary_programs_have_what_they_need(inside: dict[str, Any]) -> None:
    assert {inside[name] for name in ("AF_UNIX", "AF_INET", "AF_INET6", "AF_NETLINK")} == {"allowed"}
    assert inside["ids"] == [60610, 60610, [60610]]
    assert inside["environment"]["HOME"] == "/home/node"


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
