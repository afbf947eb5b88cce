"""The host around the sandboxes: addresses and ports that the probe must not reach, units, kernel, disk, clock, versions.

It reads /proc and asks systemd; it changes nothing and needs no privilege, though it sees more as root.
"""

import ctypes
import ipaddress
import itertools
import shutil
import socket
import struct
import subprocess
import tomllib
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Final

from control import VERSION
from control.api.types import Health
from control.doctor.findings import Finding

UNITS: Final = ("opificia-gateway.service", "opificia-control.service", "opificia-firewall.timer", "docker.service")
# /out of a dozen sessions; below it new ones fail in the middle of their work.
MIN_FREE_BYTES: Final = 10 * 1024**3
_PROC: Final = Path("/proc")
# States of /proc/net (include/net/tcp_states.h). A UDP socket that has no peer is "closed", and takes what comes.
_TCP_LISTEN: Final = "0A"
_UDP_BOUND: Final = "07"
# As systemd/sysctl sets them, where the reasons stand.
SYSCTLS: Final = {"fs.pipe-user-pages-soft": 131_072, "net.core.somaxconn": 8_192}
MAX_IMAGE_DAYS: Final = 60
# adjtimex(2): the clock is not synchronized.
_TIME_ERROR: Final = 5


def host_findings(health: Health, data: Path | None) -> list[Finding]:
    """Look at everything beside the daemon's own answer."""
    return [*daemon_findings(health), *_units(), *_sysctls(), *_disk(data), _clock()]


def daemon_findings(health: Health) -> list[Finding]:
    """Return what the daemon says of itself, the engine, the host's part, the gateway and the database."""
    detail = f"version {health.version}, host {health.host_id}, {health.running} running, {health.waiting} waiting"
    same = health.version == VERSION
    findings = [
        Finding("host", "control daemon", True, detail),
        Finding(
            "host",
            "versions",
            same,
            f"daemon {health.version}, command line {VERSION}",
            "" if same else "restart opificia-control after an upgrade",
        ),
    ]
    for problem in health.problems:
        what, _, remedy = problem.partition("; ")
        findings.append(Finding("host", "host", False, what, remedy or "opificia host prepare"))
    if not health.problems:
        ready = "engine, network, firewall, forwarder, gateway and database are there"
        findings.append(Finding("host", "host", True, ready))
    return findings


def addresses() -> tuple[str, ...]:
    """Return the addresses of this host's interfaces, loopback and link-local ones left out: they lead into the sandbox itself."""
    found = set()
    # fib_trie lists each prefix and, below it, its kind: the line before "/32 host LOCAL" is an address of ours.
    lines = _text(_PROC / "net/fib_trie").splitlines()
    for before, line in itertools.pairwise(lines):
        if line.strip() == "/32 host LOCAL":
            found.add(before.split()[-1])
    for line in _text(_PROC / "net/if_inet6").splitlines():
        found.add(str(ipaddress.IPv6Address(bytes.fromhex(line.split()[0]))))
    kept = (ipaddress.ip_address(text) for text in found)
    return tuple(sorted(str(each) for each in kept if not each.is_loopback and not each.is_link_local))


def listening_ports() -> tuple[int, ...]:
    """Return the TCP ports on which this host listens."""
    return _ports(("tcp", "tcp6"), _TCP_LISTEN)


def datagram_ports() -> tuple[int, ...]:
    """Return the UDP ports at which this host takes what comes."""
    return _ports(("udp", "udp6"), _UDP_BOUND)


def _ports(names: Iterable[str], state: str) -> tuple[int, ...]:
    ports = set()
    for name in names:
        for line in _text(_PROC / "net" / name).splitlines()[1:]:
            fields = line.split()
            if len(fields) > 3 and fields[3] == state:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return tuple(sorted(ports))


def model_key(gateway_toml: Path) -> str:
    """Return the operator's key where this user may read it, or an empty text: it is then searched for by its shape."""
    try:
        model = tomllib.loads(gateway_toml.read_text()).get("model", {})
        return Path(model["api_key_file"]).read_text().strip()
    except (OSError, KeyError, TypeError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return ""


def registry(gateway_toml: Path) -> str:
    """Return a host that level `registries` allows, by the operator's list where this user may read it, else by the built-in one."""
    try:
        file = tomllib.loads(gateway_toml.read_text())["egress"]["registries_file"]
        listed = tomllib.loads(Path(file).read_text())
    except (OSError, KeyError, TypeError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        listed = tomllib.loads((resources.files("gateway") / "data/registries.toml").read_text())
    hosts = (host for each in listed["registry"] if 443 in each["ports"] for host in each["hosts"])
    return str(next(host for host in hosts if not host.startswith("*")))


def listener() -> socket.socket:
    """Open a port on all addresses, so that at least one is there to be tried."""
    return socket.create_server(("", 0))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _units() -> list[Finding]:
    if not Path("/run/systemd/system").is_dir():
        return [Finding("host", "units", True, "no systemd here: not looked at")]
    findings = []
    for unit in UNITS:
        try:
            done = subprocess.run(  # noqa: S603 - our own words, no shell
                ["systemctl", "is-active", unit],  # noqa: S607 - systemd's, by PATH as in every unit
                capture_output=True,
                text=True,
                timeout=5,
            )
            state = done.stdout.strip() or done.stderr.strip()
        except (OSError, subprocess.TimeoutExpired) as error:
            state = str(error)
        ok = state == "active"
        remedy = "" if ok else f"systemctl status {unit}; journalctl -u {unit}"
        findings.append(Finding("host", f"unit {unit}", ok, state, remedy))
    return findings


def _sysctls() -> list[Finding]:
    findings = []
    for name, least in SYSCTLS.items():
        text = _text(_PROC / "sys" / name.replace(".", "/")).strip()
        ok = text.isdigit() and int(text) >= least
        remedy = "" if ok else f"sysctl -w {name}={least}, and in /etc/sysctl.d for the next start"
        findings.append(Finding("host", f"sysctl {name}", ok, f"{text or 'missing'}, {least} or more is well", remedy))
    return findings


def image_findings(images: Iterable[tuple[str, int]], now_s: float) -> list[Finding]:
    """Look at the age of images, given as name and seconds since the epoch at which they were made."""
    findings = []
    for name, created_at in images:
        days = int(now_s - created_at) // 86_400
        ok = days <= MAX_IMAGE_DAYS
        # Debian mends what is found in its packages; an image has what there was when it was made.
        remedy = "" if ok else "opificia images build --force, for the security updates since"
        findings.append(Finding("host", f"image {name}", ok, f"{days} days old", remedy))
    return findings


def _disk(data: Path | None) -> list[Finding]:
    if data is None:
        return []
    try:
        free = shutil.disk_usage(data).free
    except OSError as error:
        return [Finding("host", "disk", False, f"{data}: {error.strerror}", "check [paths] data in control.toml")]
    ok = free >= MIN_FREE_BYTES
    remedy = "" if ok else "make room: old sessions' folders under [paths] data, images that nobody uses"
    return [Finding("host", "disk", ok, f"{free // 1024**3} GiB free at {data}", remedy)]


def _clock() -> Finding:
    # struct timex is 208 bytes on 64-bit Linux; `modes` 0 reads only.
    buffer = ctypes.create_string_buffer(struct.pack("I", 0) + bytes(252), 256)
    state = ctypes.CDLL(None).adjtimex(buffer)
    ok = 0 <= state != _TIME_ERROR
    # A clock that runs off spoils TLS and the order of logs, but opens nothing.
    detail = "synchronized" if ok else "not synchronized"
    return Finding("host", "clock", ok, detail, "" if ok else "run an NTP client, such as systemd-timesyncd or chrony")
