"""What a result was measured on, and how busy the machine was with other things meanwhile."""

import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_SETTINGS: Final = (
    "fs/pipe-user-pages-soft",
    "net/core/somaxconn",
    "net/ipv4/ip_local_port_range",
    "net/ipv4/tcp_rmem",
    "net/ipv4/tcp_wmem",
    "net/ipv4/tcp_congestion_control",
)


def describe() -> dict[str, Any]:
    """Return the machine's description as JSON can hold it; no names or addresses."""
    cpu = memory = ""
    virtual = False
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
        elif line.startswith("flags"):
            virtual = "hypervisor" in line.split()
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal"):
            memory = line.partition(":")[2].strip()
    return {
        "cpu": cpu,
        "virtual": virtual,
        "cores": len(os.sched_getaffinity(0)),
        "memory": memory,
        "kernel": platform.release(),
        "system": _system_name(),
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
        "settings": {name: _setting(name) for name in _SETTINGS},
    }


def _system_name() -> str:
    return platform.freedesktop_os_release().get("PRETTY_NAME", "")


def _setting(name: str) -> str:
    try:
        return " ".join(Path("/proc/sys", name).read_text().split())
    except OSError:
        return ""


def version_of(*command: str) -> str:
    """Return the first line that a program says about its version."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return done.stdout.splitlines()[0].strip() if done.stdout else ""


@dataclass(frozen=True, slots=True)
class Busy:
    """CPU seconds that the whole machine has spent working, and idling, since boot."""

    busy: float
    idle: float

    @classmethod
    def now(cls) -> "Busy":
        """Read /proc/stat (proc_stat(5))."""
        fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        tick = os.sysconf("SC_CLK_TCK")
        idle = fields[3] + fields[4]
        return cls((sum(fields) - idle) / tick, idle / tick)
