"""The host's part as Docker is asked for it: the network, the forwarder, the helpers. Pure."""

import hashlib
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from control.plan import firewall
from control.plan.container import (
    LABEL_HOST,
    LABEL_ROLE,
    MASKED_PATHS,
    READONLY_PATHS,
    ROLE_FIREWALL,
    ROLE_FORWARDER,
    ROLE_PREFLIGHT,
    ROLE_VOLUMES,
    ContainerPlan,
    ImageSettings,
    log_config,
    membership,
)
from control.plan.network import NetworkSettings
from gateway.contract.limits import MIB

# A hash over all a container was made from, so that a changed setting is seen.
LABEL_PLAN: Final = "opificia.plan"

_USER: Final = re.compile(r"[a-z_][a-z0-9_-]{0,31}|[0-9]{1,10}:[0-9]{1,10}", re.ASCII)
_BRIDGE_OPTION: Final = "com.docker.network.bridge"


class ForwarderSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The `[forwarder]` table. `user`: an account of the host, or UID:GID; its group is the door's.

    The uid is the forwarder's alone: the kernel's limit on pipe memory counts per uid.
    """

    user: str = "opificia-forwarder"
    # Each takes two files; with the pipes that is 17,124, below an engine's limit of 20,000.
    connections: int = 8_000
    # npm opens hundreds at once; the gateway grants a session 64 and lets the others wait.
    connections_per_source: int = 512
    pipes: int = 512
    # Above every idle limit of the gateway and the longest session, so that never the forwarder ends a connection.
    idle_timeout_s: int = 25 * 3600
    memory_bytes: int = 256 * MIB
    # HAProxy runs a thread for each CPU, at most 64.
    pids: int = 256

    def problems(self) -> list[str]:
        """Return every problem as a sentence that begins with the field."""
        found = []
        if not _USER.fullmatch(self.user):
            found.append(f"user: {self.user!r} is neither the name of an account nor UID:GID")
        numbers = ("connections", "connections_per_source", "pipes", "idle_timeout_s", "pids")
        found += [f"{name}: must be above 0" for name in numbers if getattr(self, name) <= 0]
        if self.memory_bytes < 64 * MIB:
            found.append("memory_bytes: the forwarder needs at least 64 MiB")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlan:
    """What the host is to have. `door`: the folder with the gateway's socket, on the engine's host."""

    network: NetworkSettings
    images: ImageSettings
    forwarder: ForwarderSettings
    door: str


def helper_name(plan: HostPlan, role: str) -> str:
    """Return the name of one of the helper containers."""
    return f"{plan.network.name}-{role}"


def forwarder_container(plan: HostPlan, host_id: str, image: str, user: tuple[int, int]) -> ContainerPlan:
    """Return the forwarder: a member of the internal network and of no other, whose only way on is the door."""
    settings, network = plan.forwarder, plan.network
    environment = {
        "OPIFICIA_CONNECTIONS": settings.connections,
        "OPIFICIA_CONNECTIONS_PER_SOURCE": settings.connections_per_source,
        "OPIFICIA_IDLE_TIMEOUT": f"{settings.idle_timeout_s}s",
        "OPIFICIA_LISTEN": f"0.0.0.0:{network.gateway_port}",
        "OPIFICIA_PIPES": settings.pipes,
    }
    files = 2 * settings.connections + 2 * settings.pipes + 100
    return _container(
        network.gateway_name,
        ROLE_FORWARDER,
        host_id,
        image,
        {
            "User": f"{user[0]}:{user[1]}",
            "Env": [f"{name}={value}" for name, value in environment.items()],
            **membership(network, network.forwarder),
        },
        {
            "NetworkMode": network.name,
            "Memory": settings.memory_bytes,
            "MemorySwap": settings.memory_bytes,
            "PidsLimit": settings.pids,
            "Ulimits": [{"Name": "nofile", "Soft": files, "Hard": files}],
            "Dns": ["127.0.0.1"],
            "Sysctls": {"net.ipv6.conf.all.disable_ipv6": "1", "net.ipv6.conf.default.disable_ipv6": "1"},
            # The folder, not the socket: a mounted socket goes stale for good when the gateway makes it anew.
            "Mounts": [_bind(plan.door, "/door", read_only=True)],
        },
    )


def volumes_container(plan: HostPlan, host_id: str, image: str) -> ContainerPlan:
    """Return the helper that makes file systems of limited size: loop devices, no capability, no network."""
    return _helper(
        plan,
        ROLE_VOLUMES,
        host_id,
        image,
        ["opificia-serve"],
        {
            "NetworkMode": "none",
            # Of all devices only loop devices and their control.
            "DeviceCgroupRules": ["b 7:* rw", "c 10:237 rw"],
            "Mounts": [
                _bind("/dev", "/dev"),
                {"Type": "volume", "Source": f"opificia-volumes-{host_id}", "Target": "/volumes"},
            ],
        },
    )


def firewall_container(plan: HostPlan, host_id: str, image: str) -> ContainerPlan:
    """Return the helper that loads and reads firewall rules: the host's network and CAP_NET_ADMIN, nothing to read.

    Through it control, which has no privilege but the engine's socket, sees the rules of the very network namespace in
    which the engine makes bridges. It loads them whenever the engine starts it, so that they are there after a reboot.
    """
    load = shlex.join(firewall.load_command(plan.network, firewall.rules(plan.network)))
    command = ["sh", "-c", f"{load} && exec opificia-serve"]
    return _helper(plan, ROLE_FIREWALL, host_id, image, command, {"NetworkMode": "host", "CapAdd": ["NET_ADMIN"]})


def preflight_container(plan: HostPlan, host_id: str, image: str) -> ContainerPlan:
    """Return a helper that lives for the look at the host's routes, before anything is made or changed."""
    config = {"NetworkMode": "host", "RestartPolicy": {"Name": "no"}}
    return _helper(plan, ROLE_PREFLIGHT, host_id, image, ["opificia-serve"], config)


def network_arguments(plan: HostPlan, host_id: str) -> dict[str, Any]:
    """Return docker-py's arguments for creating the network."""
    network = plan.network
    return {
        "name": network.name,
        "driver": "bridge",
        "internal": True,
        "enable_ipv6": False,
        "ipam": {
            "Driver": "default",
            "Config": [{"Subnet": str(network.network), "Gateway": str(network.bridge_address)}],
        },
        "options": _network_options(network),
        "labels": {LABEL_HOST: host_id},
    }


def network_problems(found: Mapping[str, Any], plan: HostPlan, host_id: str) -> list[str]:
    """Return a sentence for each way in which the inspected network is not the planned one."""
    network = plan.network
    name = f"the network {network.name}"
    config = (found.get("IPAM") or {}).get("Config") or []
    problems = []
    if (found.get("Labels") or {}).get(LABEL_HOST) != host_id:
        problems.append(f"{name} was not made by this installation")
    if found.get("Driver") != "bridge":
        problems.append(f"{name} has the driver {found.get('Driver')}, not bridge")
    if found.get("Internal") is not True:
        problems.append(f"{name} is not internal")
    if found.get("EnableIPv6"):
        problems.append(f"{name} has IPv6")
    if [entry.get("Subnet") for entry in config] != [str(network.network)]:
        subnets = ", ".join(str(entry.get("Subnet")) for entry in config)
        problems.append(f"{name} has the subnet {subnets or 'none'}, not {network.network}")
    options = found.get("Options") or {}
    problems += [
        f"{name} has {key}={options.get(key, '')}, not {value}"
        for key, value in _network_options(network).items()
        if options.get(key) != value
    ]
    return problems


def _network_options(network: NetworkSettings) -> dict[str, str]:
    return {
        f"{_BRIDGE_OPTION}.name": network.bridge,  # firewall rules name it
        # The bridge has no address, so that nothing of the host answers there even without a rule.
        f"{_BRIDGE_OPTION}.inhibit_ipv4": "true",
        f"{_BRIDGE_OPTION}.enable_ip_masquerade": "false",
    }


def _helper(
    plan: HostPlan, role: str, host_id: str, image: str, command: list[str], host_config: Mapping[str, Any]
) -> ContainerPlan:
    return _container(
        helper_name(plan, role),
        role,
        host_id,
        image,
        {
            "User": "0:0",
            "Cmd": command,
            # It is asked on its input, by whoever attaches, again and again.
            "OpenStdin": True,
            "StdinOnce": False,
        },
        {
            "Memory": 256 * MIB,
            "MemorySwap": 256 * MIB,
            "PidsLimit": 64,
            "Tmpfs": {"/run": "rw,nosuid,nodev,noexec,size=1m,mode=0700"},
            # Its output is answers, heard by whoever asked.
            "LogConfig": {"Type": "none"},
            **host_config,
        },
    )


def _container(
    name: str, role: str, host_id: str, image: str, body: Mapping[str, Any], host_config: Mapping[str, Any]
) -> ContainerPlan:
    whole: dict[str, Any] = {
        "Image": image,
        "Hostname": role,
        "Healthcheck": {"Test": ["NONE"]},
        **body,
        "HostConfig": {
            "RestartPolicy": {"Name": "always"},
            "Init": True,
            "Privileged": False,
            "CapDrop": ["ALL"],
            "SecurityOpt": ["no-new-privileges=true"],
            "ReadonlyRootfs": True,
            "MaskedPaths": list(MASKED_PATHS),
            "ReadonlyPaths": list(READONLY_PATHS),
            "CgroupnsMode": "private",
            "IpcMode": "private",
            # Helpers keep the host's user ids also when the engine maps those of others.
            "UsernsMode": "host",
            "LogConfig": log_config(MIB),
            **host_config,
        },
    }
    digest = hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()
    labels = {LABEL_HOST: host_id, LABEL_ROLE: role, LABEL_PLAN: digest}
    return ContainerPlan(name, whole | {"Labels": labels})


def _bind(source: str, target: str, *, read_only: bool = False) -> dict[str, Any]:
    return {
        "Type": "bind",
        "Source": source,
        "Target": target,
        "ReadOnly": read_only,
        "BindOptions": {"Propagation": "rprivate"},
    }
