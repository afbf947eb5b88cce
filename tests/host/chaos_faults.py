"""What the chaos test does to a host, one thing at a time in an order that a seed decides, and what each may cut.

The clock is set by tests/host/chaos_deployed.py and tests/host/test_clock.py, for the daemons alone.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp
import docker

from control.client import ControlClient
from control.plan.firewall import rules
from control.plan.network import NetworkSettings
from gateway.net.resolve import FAILURE_TTL_S
from tests.host.chaos_load import HOST
from tests.host.chaos_windows import READY_S, Fault, no_more_descriptors
from tests.host.lives import EAT, ended, launch
from tests.support.dns_server import DnsServer, Records, Silence
from tests.support.engine import PrivateEngine
from tests.support.host import PrivateHost
from tests.support.hostside import without_rules
from tests.support.patience import until
from tests.support.postgres import Postgres

# How long a fault that has a length lasts.
LENGTH_S: Final = 2.0
TRIES_S: Final = 5.0
# A query takes its time to be given up, and its failure is remembered for a while.
NAME_S: Final = TRIES_S + FAILURE_TTL_S
FORWARDER: Final = "opificia-gateway"


@dataclass(frozen=True)
class World:
    """All that can be broken."""

    host: PrivateHost
    engine: PrivateEngine
    docker_client: docker.DockerClient
    control: ControlClient
    postgres: Postgres
    names: DnsServer
    # File systems of the test's own, with what control and the gateway write.
    disks: tuple[Path, ...]
    # Where the gateway's metrics are, host and port.
    metrics_address: str

    @property
    def proc(self) -> Path:
        """Where its processes are seen."""
        return Path("/proc")

    @property
    def sessions(self) -> Path:
        """The folder with a folder for each session."""
        return self.host.sessions

    async def run(self, *argv: str) -> str:
        """Run a command in the network of the host, with its engine."""
        command = ["env", f"DOCKER_HOST={self.engine.url}", *argv]
        done = await asyncio.to_thread(
            subprocess.run, self.engine.in_network(command), check=True, capture_output=True, text=True
        )
        return str(done.stdout)

    async def processes(self) -> dict[str, int]:
        """The main processes of the daemons."""
        return {"gateway": self.host.gateway.pid, "control": self.host.control.pid}

    async def metrics(self) -> str:
        """What the gateway tells Prometheus."""
        url = f"http://{self.metrics_address}/metrics"
        async with aiohttp.ClientSession() as client, client.get(url) as answer:
            return await answer.text()

    async def said(self) -> str:
        """What both daemons have logged last."""
        return self.host.logs()[-20_000:]


async def _in_thread(act: Callable[[], object]) -> None:
    await asyncio.to_thread(act)


async def _gateway_killed(world: World) -> None:
    world.host.gateway.kill()
    world.host.gateway.start()


async def _gateway_restarted(world: World) -> None:
    await _in_thread(world.host.gateway.stop)
    world.host.gateway.start()


async def _control_killed(world: World) -> None:
    world.host.control.kill()
    world.host.control.start()


async def _control_restarted(world: World) -> None:
    await _in_thread(world.host.control.stop)
    world.host.control.start()


async def _forwarder_killed(world: World) -> None:
    def forwarder() -> tuple[bool, int]:
        state = world.docker_client.api.inspect_container(FORWARDER)["State"]
        return bool(state["Running"]), int(state["Pid"])

    _, before = await asyncio.to_thread(forwarder)
    os.kill(before, signal.SIGKILL)

    def is_back() -> bool:
        running, pid = forwarder()
        return running and pid != before

    await until(is_back, "the forwarder's return")


async def _engine_restarted(world: World) -> None:
    await _in_thread(world.engine.stop_daemon)
    await _in_thread(world.engine.start_daemon)


async def _engine_killed(world: World) -> None:
    await _in_thread(lambda: world.engine.stop_daemon(kill=True))
    await _in_thread(world.engine.start_daemon)


async def _database_away(world: World) -> None:
    await _in_thread(world.postgres.stop)
    await asyncio.sleep(LENGTH_S)
    await _in_thread(world.postgres.start)


async def _disks_full(world: World) -> None:
    ballast = [disk / "ballast" for disk in world.disks]
    try:
        for path in ballast:
            with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(65536))
        await asyncio.sleep(LENGTH_S)
    finally:
        for path in ballast:
            path.unlink(missing_ok=True)


async def _gateways_descriptors_gone(world: World) -> None:
    await _no_more_descriptors(world.host.gateway.pid)


async def _controls_descriptors_gone(world: World) -> None:
    await _no_more_descriptors(world.host.control.pid)


async def _no_more_descriptors(pid: int) -> None:
    with no_more_descriptors(Path("/proc"), pid, lambda argv: subprocess.run(argv, check=True)):
        await asyncio.sleep(LENGTH_S)


async def _firewall_flushed(world: World) -> None:
    network = NetworkSettings()
    with without_rules(world.engine, network, list(rules(network))):
        await asyncio.sleep(LENGTH_S)


async def _names_silent(world: World) -> None:
    world.names.script(HOST, Silence())
    await asyncio.sleep(LENGTH_S)
    answering(world.names)


def answering(names: DnsServer) -> None:
    """Let the far side's name be answered, for a second at a time."""
    names.script(HOST, Records(("127.0.0.1",), ttl=1))


async def _memory_eaten(world: World) -> None:
    """A sandbox takes all memory that it may have, and is killed for it; the others must not notice."""
    view = await ended(world.control, await launch(world.control, f"exec {EAT}"), READY_S)
    # Whether the engine hears of the kill before the end is its own affair under such a load.
    assert view.exit_code == 137, view


_ALL = frozenset({"tunnel", "model", "launch"})
KILLING: Final = "engine killed"
FAULTS: Final = (
    Fault("gateway killed", _gateway_killed, _ALL),
    # Tunnels are parked with the manager; a model stream has a while to end, and then is cut.
    Fault("gateway restarted", _gateway_restarted, frozenset({"model"})),
    Fault("control killed", _control_killed),
    Fault("control restarted", _control_restarted),
    Fault("forwarder killed", _forwarder_killed, _ALL),
    Fault("engine restarted", _engine_restarted, frozenset({"launch", "exit"})),
    Fault(KILLING, _engine_killed, frozenset({"launch", "exit"})),
    Fault("database away", _database_away),
    Fault("disks full", _disks_full, frozenset({"launch"})),
    Fault("gateway out of descriptors", _gateways_descriptors_gone, _ALL, NAME_S),
    Fault("control out of descriptors", _controls_descriptors_gone, frozenset({"launch"})),
    Fault("firewall flushed", _firewall_flushed, frozenset({"launch"})),
    Fault("names silent", _names_silent, frozenset({"tunnel"}), NAME_S),
    Fault("memory eaten", _memory_eaten),
)
