"""From what a session asks to the exact body of Docker's create call. Pure: the whole hardening of a sandbox is here.

Each line of the body that closes something says what. Nothing here is taken from an image's or an engine's default that
could differ from one site to the next: defaults have changed between releases, this file has not.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address
from typing import Any, Final

import msgspec

from control.plan.network import NetworkSettings
from gateway.contract.limits import GIB, MIB, ControlLimits
from gateway.contract.policy import MAX_NUMBER

LABEL_HOST: Final = "opificia.host"
LABEL_ROLE: Final = "opificia.role"
LABEL_SESSION: Final = "opificia.session"
LABEL_RUN: Final = "opificia.run"
LABEL_POLICY: Final = "opificia.policy"
# An image that brings its own runner as its entrypoint says so with this label set to "own".
LABEL_RUNNER: Final = "opificia.runner"

ROLE_SANDBOX: Final = "sandbox"
ROLE_FORWARDER: Final = "forwarder"
ROLE_VOLUMES: Final = "volumes"
ROLE_FIREWALL: Final = "firewall"
ROLE_PREFLIGHT: Final = "preflight"
ROLE_OUT: Final = "out"

RUNNER_PATH: Final = "/opificia/runner.pyz"
CA_PATH: Final = "/opificia/ca.crt"
IN_PATH: Final = "/in"
OUT_PATH: Final = "/out"

# The resolver of a sandbox: nothing listens there. Docker's embedded DNS otherwise forwards any name to the host's
# resolver, from the host's side, past every rule on the bridge (CVE-2024-29018).
NO_RESOLVER: Final = "127.0.0.1"

# What runc masks by default differs between engines; this is the union up to Docker 28, and /proc/pressure, which any user may
# open for writing and make the kernel watch (Documentation/accounting/psi.rst). Missing paths are skipped.
MASKED_PATHS: Final = (
    "/proc/acpi",
    "/proc/asound",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/pressure",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/sys/devices/virtual/powercap",
    "/sys/firmware",
)
READONLY_PATHS: Final = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")

# Linux counts processes and a process's files in 32 bits, and its CPUs up to 8,192 (NR_CPUS).
_MAX_CPUS: Final = 8_192
_MAX_COUNT: Final = 2**31 - 1
_MEGABYTE_FLOOR: Final = 64 * MIB
_PROVIDER: Final = re.compile(r"[a-z0-9-]{1,32}", re.ASCII)


class SandboxSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The `[sandbox]` table: the hardening numbers. Sizes of `/out` and of logs are limits (`ControlLimits`)."""

    memory_bytes: int = 4 * GIB
    cpus: float = 2.0
    pids: int = 1024
    # npm opens a file a package; the engine cannot give more than its own limit, often 1,048,576, here and there 20,000.
    open_files: int = 16_384
    work_bytes: int = 2 * GIB
    tmp_bytes: int = 512 * MIB
    home_bytes: int = 256 * MIB
    # The user `node` of the images. High, and outside every range from which systemd or adduser give out ids
    # (UIDS-GIDS, systemd: 60578-60705 is unassigned), so that no account of the host has it.
    uid: int = 60610
    gid: int = 60610
    # An OCI runtime registered with the engine, such as "runsc"; empty: the engine's default.
    runtime: str = ""
    # Runtimes that a session may ask for besides.
    runtimes: tuple[str, ...] = ()
    # Host folders under which a session's `in_dir` may lie; none by default.
    in_roots: tuple[str, ...] = ()
    # A PEM file for sandboxes behind a company's own certificate authority; mounted read-only.
    ca_bundle: str = ""
    # The gateway's provider, by its name under [[model.provider]], for sandboxes' OPENAI_BASE_URL; empty: none.
    openai_provider: str = ""
    # A seccomp profile in place of ours; empty: control/docker/seccomp.json.
    seccomp_profile: str = ""

    def problems(self) -> list[str]:
        """Return every problem as a sentence that begins with the field."""
        found = []
        if self.memory_bytes < _MEGABYTE_FLOOR:
            found.append("memory_bytes: a sandbox needs at least 64 MiB")
        scratch = self.work_bytes + self.tmp_bytes + self.home_bytes
        if scratch >= self.memory_bytes:
            # They are charged to the sandbox's memory: files could otherwise take all of it and kill the agent.
            found.append(
                f"work_bytes, tmp_bytes, home_bytes: together {scratch} bytes, must lie below memory_bytes "
                f"({self.memory_bytes})"
            )
        sizes = ("work_bytes", "tmp_bytes", "home_bytes")
        found += [f"{name}: at least 1 MiB" for name in sizes if getattr(self, name) < MIB]
        # TOML has inf and nan; the engine's own limit is what the host has.
        if not 0 < self.cpus <= _MAX_CPUS:
            found.append(f"cpus: must be above 0 and at most {_MAX_CPUS}")
        for name, least in (("pids", 16), ("open_files", 64)):
            if not least <= getattr(self, name) <= _MAX_COUNT:
                found.append(f"{name}: must be between {least} and {_MAX_COUNT}")
        if self.memory_bytes > MAX_NUMBER:
            found.append("memory_bytes: must be at most 2^53")
        found += [
            f"{name}: must be an ordinary id (1000 to 65533), never root or nobody"
            for name in ("uid", "gid")
            if not 1_000 <= getattr(self, name) < 65_534
        ]
        if self.openai_provider and not _PROVIDER.fullmatch(self.openai_provider):
            found.append(f"openai_provider: {self.openai_provider!r} is not 1 to 32 of a-z, 0-9 and -")
        paths = [("in_roots", root) for root in self.in_roots]
        paths += [(name, value) for name in ("ca_bundle", "seccomp_profile") if (value := getattr(self, name))]
        found += [f"{name}: {path!r} is not an absolute path" for name, path in paths if not path.startswith("/")]
        return found


class DockerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The `[docker]` table: where the engine is and who makes the host's part.

    `manage_host` lets the daemon itself make network, forwarder and rules; otherwise it only verifies them. With
    `detect_only` containers and volumes that belong to no session are told of and left as they are.
    """

    socket: str = "/run/docker.sock"
    manage_host: bool = False
    detect_only: bool = False

    def problems(self) -> list[str]:
        """Return every problem as a sentence that begins with the field."""
        return [] if self.socket.startswith("/") else [f"socket: {self.socket!r} is not an absolute path"]


class ImageSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The `[images]` table: the images of our own containers, and the one for sessions that name none."""

    sandbox: str = "opificia-sandbox:latest"
    forwarder: str = "opificia-forwarder:latest"
    helper: str = "opificia-helper:latest"


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxPlan:
    """What is decided about one sandbox before Docker is asked for anything.

    `image` is an image id, so that a tag moved between check and create changes nothing. `image_volumes` are the
    volumes that the image declares. `in_dir` and `runner` are paths on the engine's host; `runner` None means that the
    image brings its own as its entrypoint. `memory_bytes`, `cpus`, `pids` 0 and `runtime` empty mean the settings'.
    """

    session: str
    run: str
    policy_digest: str
    image: str
    address: IPv4Address
    environment: Mapping[str, str]
    in_dir: str
    out_volume: str
    runner: str | None
    image_volumes: tuple[str, ...] = ()
    memory_bytes: int = 0
    cpus: float = 0
    pids: int = 0
    runtime: str = ""


@dataclass(frozen=True, slots=True)
class ContainerPlan:
    """A container as Docker is asked for it: its name, and the JSON body of `POST /containers/create`."""

    name: str
    body: Mapping[str, Any]


def sandbox_container(
    plan: SandboxPlan,
    settings: SandboxSettings,
    network: NetworkSettings,
    limits: ControlLimits,
    host_id: str,
    seccomp_profile: str,
) -> ContainerPlan:
    """Return the create call of a sandbox. `seccomp_profile` is the profile itself, as JSON."""
    body: dict[str, Any] = {
        "Image": plan.image,
        "Hostname": "sandbox",
        # By number: an image's own /etc/passwd must not decide who `node` is.
        "User": f"{settings.uid}:{settings.gid}",
        "WorkingDir": "/work",
        "Env": [f"{name}={value}" for name, value in sorted(plan.environment.items())],
        "Labels": {
            LABEL_HOST: host_id,
            LABEL_ROLE: ROLE_SANDBOX,
            LABEL_SESSION: plan.session,
            LABEL_RUN: plan.run,
            LABEL_POLICY: plan.policy_digest,
        },
        # An image's health check would run beside the agent, unseen.
        "Healthcheck": {"Test": ["NONE"]},
        "Tty": False,
        "OpenStdin": False,
        "StopSignal": "SIGTERM",
        "HostConfig": _host_config(plan, settings, network, limits, seccomp_profile),
        **membership(network, plan.address),
    }
    if plan.runner is not None:
        # -I: neither PYTHON* variables nor a folder the agent can write to may change what the runner is.
        body |= {"Entrypoint": ["python3", "-I", RUNNER_PATH], "Cmd": []}
    return ContainerPlan(name=f"opificia-{plan.session}", body=body)


def membership(network: NetworkSettings, address: IPv4Address) -> dict[str, Any]:
    """Return the part of a create call that makes the container a member of the sandbox network, at `address`.

    The hardware address follows from the IPv4 address, so that bridge rules know a member's frames of any kind.
    """
    hardware = hardware_address(address)
    return {
        "NetworkingConfig": {
            "EndpointsConfig": {
                network.name: {"IPAMConfig": {"IPv4Address": str(address)}, "MacAddress": hardware},
            },
        },
        # Engines before API 1.44 read it here.
        "MacAddress": hardware,
    }


def hardware_address(address: IPv4Address) -> str:
    """Return the locally administered MAC address of a member: 02:42 and the four bytes of its IPv4 address."""
    return ":".join(f"{byte:02x}" for byte in (0x02, 0x42, *address.packed))


def log_config(max_bytes: int) -> dict[str, Any]:
    """Return a log configuration whose files together stay below twice `max_bytes`."""
    return {"Type": "json-file", "Config": {"max-size": str(max_bytes), "max-file": "2"}}


def _host_config(
    plan: SandboxPlan,
    settings: SandboxSettings,
    network: NetworkSettings,
    limits: ControlLimits,
    seccomp_profile: str,
) -> dict[str, Any]:
    memory = plan.memory_bytes or settings.memory_bytes
    return {
        "AutoRemove": False,  # its exit and its last output are read after it has ended
        "RestartPolicy": {"Name": "no"},
        "Init": True,
        "Runtime": plan.runtime or settings.runtime,
        # Privileges
        "Privileged": False,
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges=true", f"seccomp={seccomp_profile}"],
        "ReadonlyRootfs": True,
        "MaskedPaths": list(MASKED_PATHS),
        "ReadonlyPaths": list(READONLY_PATHS),
        "Devices": [],
        # Namespaces of its own
        "CgroupnsMode": "private",
        "IpcMode": "private",
        "PidMode": "",
        "UTSMode": "",
        # Resources
        "Memory": memory,
        "MemorySwap": memory,  # equal: no swap. Left out, it would be twice the memory
        "NanoCpus": round((plan.cpus or settings.cpus) * 1e9),
        "PidsLimit": plan.pids or settings.pids,
        "OomScoreAdj": 500,  # when the host itself runs short, a sandbox dies before a daemon does
        "ShmSize": 64 * MIB,
        "Ulimits": [
            {"Name": "core", "Soft": 0, "Hard": 0},
            {"Name": "nofile", "Soft": settings.open_files, "Hard": settings.open_files},
        ],
        "LogConfig": log_config(limits.log_bytes),
        # Files
        "Mounts": _mounts(plan, settings),
        "Tmpfs": _tmpfs(settings),
        # Network
        "NetworkMode": network.name,
        "Dns": [NO_RESOLVER],
        "DnsOptions": ["timeout:1", "attempts:1"],
        "DnsSearch": ["."],  # the host's search domain is nobody's business
        "ExtraHosts": [f"{network.gateway_name}:{network.forwarder}"],
        "Sysctls": {"net.ipv6.conf.all.disable_ipv6": "1", "net.ipv6.conf.default.disable_ipv6": "1"},
        "PublishAllPorts": False,
    }


def _mounts(plan: SandboxPlan, settings: SandboxSettings) -> list[dict[str, Any]]:
    # Mounts, never Binds: a bind whose source is missing would be made, as root's folder.
    mounts = [
        _read_only(plan.in_dir, IN_PATH),
        {"Type": "volume", "Source": plan.out_volume, "Target": OUT_PATH, "VolumeOptions": {"NoCopy": True}},
    ]
    if plan.runner is not None:
        mounts.append(_read_only(plan.runner, RUNNER_PATH))
    if settings.ca_bundle:
        mounts.append(_read_only(settings.ca_bundle, CA_PATH))
    taken = {IN_PATH, OUT_PATH, *_tmpfs(settings)}
    # A volume that an image declares would be a folder on the host's disk, writable and without any limit.
    mounts += [
        {"Type": "tmpfs", "Target": path, "TmpfsOptions": {"SizeBytes": settings.tmp_bytes, "Mode": 0o1777}}
        for path in plan.image_volumes
        if path.rstrip("/") not in taken
    ]
    return mounts


def _read_only(source: str, target: str) -> dict[str, Any]:
    return {
        "Type": "bind",
        "Source": source,
        "Target": target,
        "ReadOnly": True,
        # Read-only holds for the mount itself; what is mounted below it would stay writable, so it stays out.
        "BindOptions": {"NonRecursive": True, "Propagation": "rprivate"},
    }


def _tmpfs(settings: SandboxSettings) -> dict[str, str]:
    # Sizes, because half of the host's memory is the default; exec where agents build and install.
    def options(size: int, mode: str, *flags: str) -> str:
        return ",".join(("rw", "nosuid", "nodev", *flags, f"size={size}", f"mode={mode}"))

    owner = f"uid={settings.uid},gid={settings.gid}"
    return {
        "/home/node": f"{options(settings.home_bytes, '0700', 'exec')},{owner}",
        "/tmp": options(settings.tmp_bytes, "1777", "noexec"),  # noqa: S108 - the sandbox's own
        "/work": f"{options(settings.work_bytes, '0755', 'exec')},{owner}",
    }
