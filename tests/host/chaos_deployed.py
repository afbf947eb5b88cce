"""What chaos does to a host that the playbook deployed, by systemd where it can: one thing at a time, in an order of a seed.

What it does beside tests/host/chaos_faults.py, which breaks a host made by hand: systemctl restarts, reloads and kills, the
firewall is put back by its own timer, the clock is set, and without live-restore a restart of the engine ends the sandboxes.
"""

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from control.client import ControlClient
from gateway.contract.limits import MIB
from gateway.net.resolve import FAILURE_TTL_S
from tests.host.chaos_load import HOST
from tests.host.chaos_windows import READY_S, Fault, no_more_descriptors
from tests.host.deploy_machine import Machine, drop_in
from tests.host.deploy_site import KEY
from tests.host.lives import EAT, SETTINGS, ended, launch
from tests.support.clock import DAY_S, HOUR_S, faked, library, setting
from tests.support.gateway_process import toml
from tests.support.paths import CHECKOUT
from tests.support.processes import spawn, stop, wait_until

GATEWAY: Final = "opificia-gateway"
CONTROL: Final = "opificia-control"
PORT: Final = 8090
LENGTH_S: Final = 2.0
# A query takes its time to be given up (5 s), and its failure is remembered for a while.
NAME_S: Final = 5.0 + FAILURE_TTL_S
# Where the play has it listen.
_METRICS: Final = "http://127.0.0.1:8901/metrics"
_PROVIDER_PORT: Final = 8091
_FAKETIME: Final = Path("/opt/opificia-test/libfaketime.so.1")
_CLOCK: Final = Path("/run/opificia-test-clock")
# What control and the gateway write, each on a small disk for the time of the chaos: folder, owner, group, mode.
_DISKS: Final = (
    ("/var/lib/opificia/sessions", CONTROL, CONTROL, "0750"),
    ("/var/log/opificia/egress", GATEWAY, CONTROL, "2750"),
)
_TABLES: Final = ("inet opificia0", "bridge opificia0")
_OFTEN: Final = "[Timer]\nOnActiveSec=\nOnActiveSec=1s\nOnUnitInactiveSec=\nOnUnitInactiveSec=3s\n"


@dataclass(frozen=True)
class Deployed:
    """All that can be broken. `root`: the machine's files."""

    target: Machine
    root: Path
    control: ControlClient
    outside: "subprocess.Popen[bytes]"

    async def run(self, *argv: str) -> str:
        """Run a command on the machine."""
        return await asyncio.to_thread(self.target.run, *argv)

    @property
    def proc(self) -> Path:
        """Where its processes are seen."""
        return self.root / "proc"

    @property
    def sessions(self) -> Path:
        """The folder with a folder for each session."""
        return self.root / "var/lib/opificia/sessions"

    @property
    def egress_logs(self) -> Path:
        """The folder with an audit log for each session."""
        return self.root / "var/log/opificia/egress"

    async def processes(self) -> dict[str, int]:
        """The main processes of the daemons."""
        return {"gateway": int(await self.main_pid(GATEWAY)), "control": int(await self.main_pid(CONTROL))}

    async def metrics(self) -> str:
        """What the gateway tells Prometheus."""
        return await self.run("curl", "--silent", "--fail", _METRICS)

    async def said(self) -> str:
        """What our units have logged last."""
        return await self.run("journalctl", "--unit=opificia-*", "--lines=100", "--output=short-precise", "--no-pager")

    async def systemctl(self, verb: str, unit: str) -> None:
        """Have systemd do something to a unit; return when another process of it runs."""
        before = await self.main_pid(unit)
        kill = ("--signal=KILL", "--kill-who=main") if verb == "kill" else ()
        await self.run("systemctl", verb, *kill, unit)
        await self.main_pid(unit, not_pid=before)

    async def main_pid(self, unit: str, *, not_pid: str = "") -> str:
        """Wait until a unit is active, and return its main process."""
        return await asyncio.to_thread(self.target.await_unit, unit, not_pid=not_pid, timeout_s=READY_S)


def _by_systemd(verb: str, unit: str) -> Callable[[Deployed], Awaitable[None]]:
    return lambda world: world.systemctl(verb, unit)


async def _gateway_reloaded(world: Deployed) -> None:
    before, said = await world.main_pid(GATEWAY), await _journal(world)
    await world.run("systemctl", "reload", GATEWAY)
    async with asyncio.timeout(READY_S):
        while await world.main_pid(GATEWAY) == before:
            # On a machine that is too busy to start another one in time, it says so and goes on.
            if "this gateway goes on" in (await _journal(world)).removeprefix(said):
                return
            await asyncio.sleep(0.2)


async def _journal(world: Deployed) -> str:
    return await world.run("journalctl", f"--unit={GATEWAY}", "--output=cat", "--no-pager")


async def _forwarder_killed(world: Deployed) -> None:
    async def forwarder() -> list[str]:
        return (await world.run("docker", "inspect", "--format={{.State.Pid}} {{.State.Running}}", GATEWAY)).split()

    before = await forwarder()
    # Not by the engine, which would take it for an operator's wish and leave it dead.
    await world.run("kill", "-KILL", before[0])
    async with asyncio.timeout(READY_S):
        while (now := await forwarder())[0] == before[0] or now[1] != "true":
            await asyncio.sleep(0.1)


async def _database_restarted(world: Deployed) -> None:
    # PostgreSQL's own unit is one of no process, which stands for all clusters.
    await world.run("systemctl", "stop", "postgresql@15-main")
    await asyncio.sleep(LENGTH_S)
    await world.run("systemctl", "start", "postgresql@15-main")


async def _disks_full(world: Deployed) -> None:
    ballast = [world.root / folder.lstrip("/") / "ballast" for folder, *_ in _DISKS]
    try:
        for path in ballast:
            with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(65536))
        await asyncio.sleep(LENGTH_S)
    finally:
        for path in ballast:
            path.unlink(missing_ok=True)


def _out_of_descriptors(unit: str) -> Callable[[Deployed], Awaitable[None]]:
    async def act(world: Deployed) -> None:
        def run(argv: Sequence[str]) -> None:
            world.target.run(*argv)

        with no_more_descriptors(world.root / "proc", int(await world.main_pid(unit)), run):
            await asyncio.sleep(LENGTH_S)

    return act


def _out_of_memory(unit: str) -> Callable[[Deployed], Awaitable[None]]:
    """Leave a daemon less memory than it takes to start: the kernel kills it, and systemd starts it, again and again."""

    async def act(world: Deployed) -> None:
        too_little = "[Service]\nMemoryHigh=infinity\nMemoryMax=16M\n"
        with drop_in(world.target, f"{unit}.service", too_little, name="too-little"):
            # What was counted of earlier deaths is counted no more.
            await world.run("systemctl", "reset-failed", unit)
            await world.run("systemctl", "restart", "--no-block", unit)
            async with asyncio.timeout(READY_S):
                while await world.run("systemctl", "show", "--property=NRestarts", "--value", unit) in ("", "0"):
                    await asyncio.sleep(0.1)
        await world.main_pid(unit)

    return act


async def _memory_eaten(world: Deployed) -> None:
    """A sandbox takes all memory that it may have, and is killed for it; the others must not notice."""
    view = await ended(world.control, await launch(world.control, f"exec {EAT}"), READY_S)
    # Whether the engine hears of the kill before the end is its own affair under such a load.
    assert view.exit_code == 137, view


async def _firewall_flushed(world: Deployed) -> None:
    await world.run("sh", "-c", "; ".join(f"nft delete table {table}" for table in _TABLES))
    # Nobody but the timer puts it back.
    async with asyncio.timeout(READY_S):
        found: set[str] = set()
        while not found.issuperset(f"table {table}" for table in _TABLES):
            found = set((await world.run("nft", "list", "tables")).splitlines())
            await asyncio.sleep(0.2)


async def _names_silent(world: Deployed) -> None:
    world.outside.send_signal(signal.SIGUSR1)
    await asyncio.sleep(LENGTH_S)
    world.outside.send_signal(signal.SIGUSR2)


def _clock_set(offset_s: int) -> Callable[[Deployed], Awaitable[None]]:
    async def act(world: Deployed) -> None:
        await asyncio.to_thread(set_clock, world.target, offset_s)
        await asyncio.sleep(LENGTH_S)

    return act


def set_clock(target: Machine, offset_s: int) -> None:
    """Set the daemons' clock this far from the machine's."""
    target.run("sh", "-c", f"cat > {_CLOCK}.new && mv {_CLOCK}.new {_CLOCK}", stdin=setting(offset_s))


_ALL: Final = frozenset({"tunnel", "model", "launch"})
RELOADED: Final = "gateway reloaded"
# Sandboxes and forwarder end with the engine: the host has no live-restore.
_WITH_ENGINE: Final = _ALL | {"session"}
FAULTS: Final[tuple[Fault[Deployed], ...]] = (
    Fault("gateway killed", _by_systemd("kill", GATEWAY), _ALL),
    # A model stream has a while to end at a restart, and all of its time at a reload.
    Fault("gateway restarted", _by_systemd("restart", GATEWAY), frozenset({"model"})),
    Fault(RELOADED, _gateway_reloaded),
    Fault("control killed", _by_systemd("kill", CONTROL)),
    Fault("control restarted", _by_systemd("restart", CONTROL)),
    Fault("forwarder killed", _forwarder_killed, _ALL),
    Fault("engine restarted", _by_systemd("restart", "docker"), _WITH_ENGINE),
    Fault("engine killed", _by_systemd("kill", "docker"), _WITH_ENGINE),
    Fault("database away", _database_restarted),
    Fault("disks full", _disks_full, frozenset({"launch"})),
    Fault("firewall flushed", _firewall_flushed, frozenset({"launch"})),
    Fault("gateway out of descriptors", _out_of_descriptors(GATEWAY), _ALL, NAME_S),
    Fault("control out of descriptors", _out_of_descriptors(CONTROL), frozenset({"launch"})),
    Fault("gateway out of memory", _out_of_memory(GATEWAY), _ALL, NAME_S),
    Fault("control out of memory", _out_of_memory(CONTROL)),
    Fault("memory eaten", _memory_eaten),
    Fault("names silent", _names_silent, frozenset({"tunnel"}), NAME_S),
    Fault("clock an hour ahead", _clock_set(HOUR_S)),
    Fault("clock a day behind", _clock_set(-DAY_S)),
)


@contextlib.contextmanager
def breakable(target: Machine) -> Iterator["subprocess.Popen[bytes]"]:
    """Ready a deployed host for the chaos, and put it back: a clock and disks of its own, small limits, what stands outside.

    Yields the process that stands outside.
    """
    engine = target.engine
    outside = [sys.executable, "-m", "tests.host.chaos_outside", Machine.outside, str(PORT)]
    listen = f"{Machine.outside}:{_PROVIDER_PORT}"
    provider = [sys.executable, "-m", "tests.support.provider", "--listen", listen, "--key", KEY]
    with contextlib.ExitStack() as stack:
        processes = []
        for argv in (outside, provider):
            log = target.scratch / f"{argv[2]}.log"
            with log.open("wb") as output:
                process = spawn(engine.in_network(argv), log=output, cwd=CHECKOUT, ends_with_us=True)
            stack.callback(stop, process)
            wait_until(lambda log=log: bool(log.read_bytes()), argv[2])  # type: ignore[misc]
            processes.append(process)
        target.put(library(), str(_FAKETIME))
        stack.callback(target.run, "rm", "-r", str(_FAKETIME.parent), str(_CLOCK))
        set_clock(target, 0)
        environment = " ".join(f"{name}={value}" for name, value in faked(_FAKETIME, _CLOCK).items())
        # Last of all: both run again as they did.
        stack.callback(_start, target)
        for unit in (GATEWAY, CONTROL):
            stack.enter_context(drop_in(target, f"{unit}.service", f"[Service]\nEnvironment={environment}\n"))
        stack.enter_context(drop_in(target, "opificia-firewall.timer", _OFTEN))
        stack.enter_context(_settings(target, "gateway", _GATEWAY_SETTINGS))
        stack.enter_context(_settings(target, "control", _CONTROL_SETTINGS))
        stack.enter_context(_small_disks(target))
        _start(target)
        yield processes[0]
        target.run("systemctl", "stop", CONTROL, GATEWAY)


_GATEWAY_SETTINGS: Final = {
    "limits": {"drain_ms": 5_000, "max_egress_log_lines": 1_000_000},
    "model": {"upstream": f"http://{Machine.outside}:{_PROVIDER_PORT}"},
    "egress.trusted": [{"hosts": [HOST], "ports": [PORT], "network": f"{Machine.outside}/32"}],
}
_CONTROL_SETTINGS: Final = {
    **SETTINGS,
    "limits": {
        **SETTINGS["limits"],
        "log_bytes": 16 * MIB,
        "hello_timeout_ms": 60_000,
        "runner_reconnect_ms": 60_000,
    },
}


@contextlib.contextmanager
def _settings(target: Machine, daemon: str, tables: Mapping[str, Any]) -> Iterator[None]:
    """Add tables to a daemon's settings."""
    path = f"/etc/opificia/{daemon}.toml"
    before = target.run("cat", path)
    # Over the file that there is, whose owner and mode stay.
    target.run("sh", "-c", f"cat > {path}", stdin=f"{toml(dict(tables))}\n{before}\n")
    try:
        yield
    finally:
        target.run("sh", "-c", f"cat > {path}", stdin=f"{before}\n")


@contextlib.contextmanager
def _small_disks(target: Machine) -> Iterator[None]:
    target.run("systemctl", "stop", CONTROL, GATEWAY)
    mounted = []
    try:
        for folder, user, group, mode in _DISKS:
            options = f"size=128m,uid={user},gid={group},mode={mode}"
            target.run("mount", "-t", "tmpfs", "-o", options, "opificia-test", folder)
            mounted.append(folder)
        yield
    finally:
        for folder in mounted:
            target.run("umount", "--lazy", folder)


def _start(target: Machine) -> None:
    target.run("systemctl", "restart", GATEWAY, CONTROL, "opificia-firewall.timer")
