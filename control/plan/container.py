"""From what a session asks to the exact body of Docker's create call. Pure: the whole hardening of a sandbox is here.

Each line of the body that closes something says what. Nothing here is taken from an image's or an engine's default that
could differ from one site to the next: defaults have changed between releases, this file has not.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from ipaddress import IPv4Address
from typing import Any, Final

import msgspec

from control.plan.network import NetworkSettings
from gateway.contract.limits import GIB, MIB, ControlLimits

LABEL_HOST: Final = "opificia.host"
LABEL_ROLE: Final = "opificia.role"
LABEL_SESSION: Final = "opificia.session"
LABEL_RUN: Final = "opificia.run"
LABEL_POLICY: Final = "opificia.policy"
# An image that brings its own runner as its entrypoint says so with this label set to "own".
LABEL_RUNNER: Final = "opificia.runner"

ROLE_SANDBOX: Final = "sandbox"

RUNNER_PATH: Final = "/opificia/runner.pyz"
CA_PATH: Final = "/opificia/ca.crt"
IN_PATH: Final = "/in"
OUT_PATH: Final = "/out"

# What runc masks by default differs between engines; this is the union up to Docker 28. Missing paths are skipped.
MASKED_PATHS: Final = (
    "/proc/acpi",
    "/proc/asound",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/sys/devices/virtual/powercap",
    "/sys/firmware",
)
READONLY_PATHS: Final = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")

_MEGABYTE_FLOOR: Final = 64 * MIB


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
        for name in ("work_bytes", "tmp_bytes", "home_bytes"):
            if getattr(self, name) < MIB:
                found.append(f"{name}: at least 1 MiB")
        if self.cpus <= 0:
            found.append("cpus: must be above 0")
        if self.pids < 16:
            found.append("pids: at least 16")
        if self.open_files < 64:
            found.append("open_files: at least 64")
        for name in ("uid", "gid"):
            if not 1_000 <= getattr(self, name) < 65_534:
                found.append(f"{name}: must be an ordinary id (1000 to 65533), never root or nobody")
        found += [f"in_roots: {root!r} is not an absolute path" for root in self.in_roots if not root.startswith("/")]
        for name in ("ca_bundle", "seccomp_profile"):
            value = getattr(self, name)
            if value and not value.startswith("/"):
                found.append(f"{name}: {value!r} is not an absolute path")
        return found


class DockerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The `[docker]` table: where the engine is and who makes the host's part.

    `manage_host` lets the daemon itself make network, forwarder and rules; otherwise it only verifies them.
    """

    socket: str = "/run/docker.sock"
    manage_host: bool = False

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
