"""What a host under chaos holds, compared from before the first fault to after the last: nothing may pile up.

Descriptors and memory of the daemons and the forwarder, the engine's containers, networks and volumes, the firewall's rules,
links, folders of sessions, slots and pipes of the gateway. A host of the tests and one that was deployed are looked at the same way.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from control.client import ControlClient
from control.docker.volumes import volume_name
from control.plan.container import LABEL_ROLE, ROLE_FIREWALL, ROLE_SANDBOX
from gateway.contract.limits import MIB
from gateway.net.pipes import MAX_PIPES
from tests.host.chaos_windows import READY_S

FORWARDER: Final = "opificia-gateway"
LIST_RULES: Final = ("nft", "--stateless", "list", "ruleset")
# What stays open for the next use: connections to the model API; to the engine (a thread each) and the database.
_POOLED: Final = {
    ("gateway", "socket"): 8,
    ("gateway", "pipe"): 2 * MAX_PIPES,
    ("control", "socket"): 40,
    ("forwarder", "socket"): 2,
}
_A_FEW: Final = 2
_HELD: Final = ("tunnels", "slots_held", "pipes_held")


class Place(Protocol):
    """Where a host is looked at."""

    @property
    def control(self) -> ControlClient:
        """Its API."""

    @property
    def proc(self) -> Path:
        """Where its processes are seen."""

    @property
    def sessions(self) -> Path:
        """The folder with a folder for each session."""

    async def run(self, *argv: str) -> str:
        """Run a command on it; return what it says."""

    async def processes(self) -> dict[str, int]:
        """The main processes of the daemons."""

    async def metrics(self) -> str:
        """What the gateway tells Prometheus."""


@dataclass(frozen=True)
class Holdings:
    """What is there when no session is: descriptors by process and kind, and lines by what they tell of."""

    descriptors: Mapping[str, Counter[str]]
    lines: Mapping[str, Counter[str]]


async def look(place: Place) -> Holdings:
    """Look at a host; what is a session's own is left out, but for descriptors."""
    processes = {name: [pid] for name, pid in (await place.processes()).items()}
    top = await place.run("docker", "top", FORWARDER, "-eo", "pid")
    processes["forwarder"] = [int(pid) for pid in top.split()[1:]]
    found = {name: Counter[str]() for name in processes}
    for name, pids in processes.items():
        for pid in pids:
            found[name] += Counter(
                "file" if path.startswith("/") else path.partition(":")[0] for path in _open(place, pid)
            )
    role = f'{{{{.Label "{LABEL_ROLE}"}}}}'
    asked = {
        "container": ("docker", "ps", "--all", "--format", role),
        "network": ("docker", "network", "ls", "--format", "{{.Name}}"),
        "volume": ("docker", "volume", "ls", "--format", "{{.Name}}"),
        "link": ("sh", "-c", "ip -brief link | cut -d' ' -f1 | sed 's/^veth.*/veth/'"),
        # By the helper that loads ours: not every host has the program.
        "rule": ("docker", "exec", await _helper(place), *LIST_RULES),
        # Docker's, where iptables keeps them elsewhere.
        "iptables rule": ("iptables-save",),
    }
    lines = {}
    for name, argv in asked.items():
        told = [line.strip() for line in (await place.run(*argv)).splitlines()]
        lines[name] = Counter(
            line for line in told if line and not line.startswith(("#", ":")) and not _is_a_sessions(line)
        )
    lines["link"]["veth"] -= len(await _sandboxes(place))
    return Holdings(found, lines)


async def _helper(place: Place) -> str:
    """Return the container that has nft and the host's network; the engine may be about to start it."""
    async with asyncio.timeout(READY_S):
        while True:
            found = await place.run("docker", "ps", "--quiet", "--filter", f"label={LABEL_ROLE}={ROLE_FIREWALL}")
            if found.strip():
                return found.split()[0]
            await asyncio.sleep(0.1)


async def _sandboxes(place: Place) -> list[str]:
    listed = await place.run("docker", "ps", "--all", "--quiet", "--filter", f"label={LABEL_ROLE}={ROLE_SANDBOX}")
    return listed.split()


def _is_a_sessions(line: str) -> bool:
    return line == ROLE_SANDBOX or line.startswith(volume_name(""))


def _open(place: Place, pid: int) -> list[str]:
    found = []
    for entry in (place.proc / f"{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(str(entry.readlink()))
    return found


def piled_up(before: Holdings, now: Holdings) -> list[str]:
    """Return what there is more of than at first, beyond what is kept for the next use, and which lines are others."""
    found = []
    for name, kinds in now.descriptors.items():
        more = {kind: count - before.descriptors[name][kind] for kind, count in kinds.items()}
        found += [f"{name}: {n} more {kind}s" for kind, n in more.items() if n > _POOLED.get((name, kind), _A_FEW)]
    for what, lines in now.lines.items():
        found += [f"{what} too many: {line}" for line in lines - before.lines[what]]
        found += [f"{what} missing: {line}" for line in before.lines[what] - lines]
    return found


async def as_before(place: Place, before: Holdings, sessions: Collection[str], kept: Collection[str] = ()) -> None:
    """Wait until a host holds what it held, and nothing of sessions that have ended. Of `kept` the engine keeps the volumes."""
    left: list[str] = []
    try:
        async with asyncio.timeout(READY_S):
            while left := [*piled_up(before, await look(place)), *await left_of(place, sessions, kept)]:
                await asyncio.sleep(0.5)
    except TimeoutError:
        raise AssertionError(f"not as before: {left}") from None


async def left_of(place: Place, sessions: Collection[str], kept: Collection[str]) -> list[str]:
    """Return whose container, volume, loop device, grant or open file there still is, and folders of nobody's."""
    volumes = await place.run("docker", "volume", "ls", "--format", "{{.Name}}")
    # The loop devices of all engines of the machine are listed.
    loops = await place.run("losetup", "--list", "--noheadings", "--output", "BACK-FILE")
    found = [f"container {each}" for each in await _sandboxes(place)]
    for session in sessions:
        found += [f"volume of {session}"] * (volume_name(session) in volumes.split() and session not in kept)
        found += [f"loop device of {session}"] * (session in loops and session not in kept)
    found += [f"grant of {each.id}" for each in (await place.control.gateway()).sessions]
    for name, pid in (await place.processes()).items():
        found += [f"{name}: {path}" for path in _open(place, pid) if any(session in path for session in sessions)]
    known = await known_sessions(place.control)
    return found + [f"folder {path.name}" for path in place.sessions.iterdir() if path.name not in known]


async def known_sessions(control: ControlClient) -> dict[str, bool]:
    """Return every session that control knows, and whether it has ended."""
    known: dict[str, bool] = {}
    cursor = ""
    while True:
        page = await control.list(cursor=cursor)
        known |= {each.id: each.state.final for each in page.sessions}
        if not (cursor := page.next or ""):
            return known


async def given_back(place: Place) -> None:
    """Wait until the gateway holds nothing for sessions that are there and do nothing more."""
    left: dict[str, float] = {}
    try:
        async with asyncio.timeout(READY_S):
            while any((left := _gauges(await place.metrics())).values()):
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise AssertionError(f"the gateway still holds {left}") from None


def _gauges(text: str) -> dict[str, float]:
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(values[f"opificia_gateway_{name}"]) for name in _HELD}


async def resident(place: Place) -> dict[str, int]:
    """Return the memory of the daemons, in bytes."""
    found = {}
    for name, pid in (await place.processes()).items():
        status = (place.proc / f"{pid}/status").read_text()
        found[name] = int(status.partition("VmRSS:")[2].split()[0]) * 1024
    return found


def grown(readings: Sequence[Mapping[str, int]], first: int) -> list[str]:
    """Return which daemon's memory grew after the `first` readings, in which every fault was met (of few, after half of them).

    A daemon that keeps what it was given has more each time; one that has settled has not, but for what the allocator does.
    """
    first = max(1, min(first, len(readings) // 2))
    found = []
    for name in readings[0]:
        settled, later = (max(each[name] for each in part) for part in (readings[:first], readings[first:] or readings))
        if later > settled * 1.5 + 32 * MIB:
            found.append(f"{name}: {settled / MIB:.0f} MiB at first, {later / MIB:.0f} MiB later")
    return found
