"""A mixed load while everything is killed, cut off and filled up around it, in an order that a seed decides.

At the end: every byte was right, and whatever failed failed while something that may cut it was under way; every session is in
a true final state with its whole output; nothing is left of any; the audit log has the connections that were made.

A few faults in every run of the tests; every fault once, which takes a minute or two, with `OPIFICIA_CHAOS_SECONDS=1`. Longer, or
the same again: `OPIFICIA_CHAOS_SECONDS=3600 OPIFICIA_CHAOS_SEED=7 pytest -rP tests/host/test_chaos.py`.
"""

import asyncio
import contextlib
import os
import random
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import docker
import pytest

from control.client import ControlClient
from control.plan.container import LABEL_ROLE, ROLE_FIREWALL
from control.plan.session import Reason, SessionState
from control.spec import SandboxSpec
from gateway.contract.limits import MIB
from gateway.contract.policy import NetworkLevel
from gateway.net.pipes import MAX_PIPES
from tests.host.chaos_faults import FAULTS, KILLING, World, answering
from tests.host.chaos_holdings import (
    Holdings,
    as_before,
    given_back,
    grown,
    known_sessions,
    left_of,
    look,
    piled_up,
    resident,
)
from tests.host.chaos_load import END, ENDED, LEAVE, WORKER, WORKER_EXIT, far_side, operations
from tests.host.chaos_verdict import (
    Short,
    asked,
    begin_short,
    check_alive,
    check_audit,
    check_operations,
    check_shorts,
    report,
)
from tests.host.chaos_windows import READY_S, Fault, Schedule
from tests.host.lives import SETTINGS, ended, execute, how, log, ready
from tests.support import identities
from tests.support.dns_server import DnsServer
from tests.support.engine import PrivateEngine
from tests.support.gateway_process import free_port
from tests.support.host import Model, PrivateHost
from tests.support.manager import Manager
from tests.support.patience import until
from tests.support.postgres import Postgres
from tests.support.sandbox import IMAGE

SECONDS = float(os.environ.get("OPIFICIA_CHAOS_SECONDS", "0"))
# One order by default, so that two runs of all tests ask the same; 0 draws one.
SEED = int(os.environ.get("OPIFICIA_CHAOS_SEED", "12")) or random.SystemRandom().randrange(1, 1 << 31)
FEW = 0 if SECONDS else 3
WORKERS = 2


@pytest.fixture(scope="module")
def disks() -> Iterator[tuple[Path, Path]]:
    """Two small file systems: for what control keeps, and for the gateway's audit log. Made before the engine's namespaces."""
    base = Path(tempfile.mkdtemp(prefix="opificia-chaos-"))
    base.chmod(0o755)
    made = (base / "data", base / "egress")
    owners = ((identities.CONTROL, identities.CONTROL, "0750"), (identities.GATEWAY, identities.CONTROL, "2750"))
    try:
        for path, (uid, gid, mode) in zip(made, owners, strict=True):
            path.mkdir()
            options = f"size=128m,uid={uid},gid={gid},mode={mode}"
            subprocess.run(["mount", "-t", "tmpfs", "-o", options, "opificia-chaos", str(path)], check=True)
        yield made
    finally:
        for path in made:
            subprocess.run(["umount", "--lazy", str(path)], check=False)
        shutil.rmtree(base, ignore_errors=True)


@pytest.fixture(scope="module")
def engine(disks: tuple[Path, Path]) -> Iterator[PrivateEngine]:
    with PrivateEngine.acquire(live_restore=True) as private:
        yield private


class ChaosHost(PrivateHost):
    """A host whose gateway has a manager that keeps descriptors for it, and whose files lie on small disks."""

    gateway: Manager  # type: ignore[misc,assignment]

    def __init__(
        self, engine: PrivateEngine, model: Model, disks: tuple[Path, Path], url: str, names: str, metrics: str
    ) -> None:
        self._disks = disks
        # For hours, and for a machine that does other things too.
        limits = {"log_bytes": 16 * MIB, "hello_timeout_ms": 60_000, "runner_reconnect_ms": 60_000}
        control = {
            **SETTINGS,
            "limits": {**SETTINGS["limits"], **limits},
            "paths": {"data": str(disks[0])},
            "store": {"url": url},
        }
        gateway: dict[str, dict[str, Any]] = {
            "listen": {"metrics": metrics},
            "egress": {"allow_loopback": True, "nameservers": [names]},
            "limits": {"drain_ms": 5_000, "max_egress_log_lines": 1_000_000},
        }
        super().__init__(engine, model, control=control, gateway=gateway)
        self.gateway = Manager(  # type: ignore[misc]
            self.gateway._argv,
            uid=identities.GATEWAY,
            groups=(identities.RUNNER_GROUP, identities.FORWARDER),
            environment=self._environment(self._code),
            log=self.root / "log/managed.log",
            folder=self.root / "run/notify",
        )

    @property
    def sessions(self) -> Path:
        return self._disks[0] / "sessions"

    @property
    def egress_logs(self) -> Path:
        return self._disks[1]

    def stop(self) -> None:
        self.control.stop()
        self.gateway.close()
        super().stop()


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with Postgres() as server:
        # Control's user connects to it.
        server.root.chmod(0o711)
        yield server


@pytest.fixture(scope="module")
def names_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def metrics() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def host(
    engine: PrivateEngine, model: Model, disks: tuple[Path, Path], postgres: Postgres, names_port: int, metrics: str
) -> Iterator[PrivateHost]:
    with ChaosHost(engine, model, disks, postgres.url(), f"127.0.0.1:{names_port}", metrics) as private:
        yield private
        print(private.logs())


@pytest.fixture
async def world(
    host: PrivateHost,
    engine: PrivateEngine,
    docker_client: docker.DockerClient,
    control: ControlClient,
    postgres: Postgres,
    disks: tuple[Path, Path],
    names_port: int,
    metrics: str,
) -> AsyncIterator[World]:
    async with DnsServer(port=names_port) as names:
        answering(names)
        await ready(control)
        yield World(host, engine, docker_client, control, postgres, names, disks, metrics)


async def short_sessions(control: ControlClient, over: asyncio.Event, made: list[Short]) -> None:
    """Launch one short session after the other until it is over."""
    while not over.is_set():
        made.append(await begin_short(control))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), 1.0)


async def check_sight(world: World, before: Holdings) -> None:
    """One thing too many of a kind is seen."""
    folder = world.sessions / "nobodys"
    folder.mkdir()
    await world.run("docker", "volume", "create", "one-too-many")
    one = ["table", "inet", "one_too_many"]
    helper = await world.run("docker", "ps", "--quiet", "--filter", f"label={LABEL_ROLE}={ROLE_FIREWALL}")
    nft = ("docker", "exec", helper.strip(), "nft")
    await world.run(*nft, "add", *one)
    told = {*piled_up(before, await look(world)), *await left_of(world, (), ())}
    assert told >= {"volume too many: one-too-many", "rule too many: table inet one_too_many {", "folder nobodys"}
    folder.rmdir()
    await world.run("docker", "volume", "rm", "one-too-many")
    await world.run(*nft, "delete", *one)


@pytest.mark.timeout(SECONDS + 900)
async def test_nothing_is_lost_whatever_dies(world: World) -> None:
    print(f"OPIFICIA_CHAOS_SEED={SEED}")
    memory: list[dict[str, int]] = []

    async def after(fault: Fault[World]) -> None:
        await check_alive(world, fault, workers)
        memory.append(await resident(world))

    schedule = Schedule(world, FAULTS, KILLING, SEED, FEW, after)
    over = asyncio.Event()
    shorts: list[Short] = []
    async with far_side() as port:
        spec = SandboxSpec(
            image=IMAGE,
            network=NetworkLevel.OPEN,
            command=("python3", "-c", WORKER, str(port), str(SEED)),
        )
        workers = [await asked(world.control, spec) for _ in range(WORKERS)]
        await until(lambda: all(log(world.host, each) for each in workers), "the first operation of each", READY_S)
        before = await look(world)
        launching = asyncio.create_task(short_sessions(world.control, over, shorts))
        await schedule.run(SECONDS)
        over.set()
        await launching
        for session in workers:
            assert (await execute(world.control, session, "touch", END))[0] == 0
        await until(
            lambda: all(log(world.host, each).endswith(ENDED) for each in workers), "the end of the load", READY_S
        )
        await given_back(world)
        for session in workers:
            assert (await execute(world.control, session, "touch", LEAVE))[0] == 0
        for session in workers:
            view = await ended(world.control, session, READY_S)
            assert how(view) == (SessionState.EXITED, Reason.EXIT_CODE, WORKER_EXIT), f"{view}"
    carried = {session: operations(log(world.host, session)) for session in workers}
    windows = schedule.windows
    report(schedule, [each for one in carried.values() for each in one], len(shorts))
    for one in carried.values():
        check_operations(one, windows)
    await check_shorts(world.control, world.sessions, shorts, windows)
    assert all((await known_sessions(world.control)).values()), "a session goes on that nobody has launched"
    for session, one in carried.items():
        check_audit(world.host.egress_logs / f"{session}.log", one, windows)
    # The engine counts a mount too many of what outlived its restart (docs/operations.md), and keeps the volume.
    last = max(window.end for window in windows if window.fault.name.startswith("engine"))
    kept = {*workers, *(each.session for each in shorts if each.begin <= last)}
    await as_before(world, before, {*workers, *(each.session for each in shorts)}, kept)
    await check_sight(world, before)
    assert not grown(memory, len(FAULTS)), (grown(memory, len(FAULTS)), memory)


def test_what_has_piled_up_is_told_and_what_is_kept_for_the_next_use_is_not() -> None:
    rules = Counter({"chain a {": 1, "drop": 2})
    before = Holdings({"gateway": Counter(socket=20, pipe=0)}, {"rule": rules})
    assert piled_up(before, Holdings({"gateway": Counter(socket=28, pipe=2 * MAX_PIPES)}, {"rule": rules})) == []
    more = Holdings({"gateway": Counter(socket=29, eventfd=3)}, {"rule": Counter({"chain a {": 1, "drop": 1, "x": 1})})
    told = ["gateway: 9 more sockets", "gateway: 3 more eventfds", "rule too many: x", "rule missing: drop"]
    assert piled_up(before, more) == told


def test_memory_that_grows_after_the_first_round_is_told_and_what_has_settled_is_not() -> None:
    settled = [{"gateway": size * MIB, "control": 90 * MIB} for size in (60, 120, 100, 130, 110, 180)]
    assert grown(settled, 2) == []
    leaking = [*settled, {"gateway": 220 * MIB, "control": 90 * MIB}]
    assert grown(leaking, 2) == ["gateway: 120 MiB at first, 220 MiB later"]
    # Fewer faults than there are: the second half against the first.
    assert grown(leaking[-2:], 20) == []
