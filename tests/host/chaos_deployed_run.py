"""The load on a deployed host under chaos, and what must be true of it in the end (tests/host/chaos_deployed.py breaks it)."""

import asyncio
from dataclasses import dataclass, field
from typing import Final

from control.plan.session import Reason, SessionState
from control.spec import SandboxSpec
from gateway.contract.policy import NetworkLevel
from tests.host.chaos_deployed import FAULTS, PORT, RELOADED, Deployed
from tests.host.chaos_holdings import as_before, given_back, grown, known_sessions, look, resident
from tests.host.chaos_load import END, ENDED, LEAVE, WORKER, WORKER_EXIT, operations
from tests.host.chaos_verdict import (
    Short,
    asked,
    begin_short,
    check_alive,
    check_audit,
    check_operations,
    check_shorts,
    report,
    was_busy,
)
from tests.host.chaos_windows import READY_S, Fault, Schedule
from tests.host.lives import ended, execute, how
from tests.support.sandbox import IMAGE

# One: its tunnels and streams, and the short sessions beside it, are as much as two cores can carry.
WORKERS: Final = 1
LAUNCHERS: Final = 2


@dataclass
class Load:
    """The sandboxes that carry tunnels and streams: those that run, and those that ended with the engine."""

    world: Deployed
    seed: int
    running: list[str] = field(default_factory=list)
    # Each with what the engine was done.
    cut: dict[str, Fault[Deployed]] = field(default_factory=dict)

    @property
    def all(self) -> list[str]:
        """Every one that there was."""
        return [*self.cut, *self.running]

    async def begin(self) -> None:
        """Launch them, and wait until each has carried something."""
        command = ("python3", "-c", WORKER, str(PORT), str(self.seed))
        spec = SandboxSpec(image=IMAGE, network=NetworkLevel.OPEN, command=command)
        self.running = [await self._one(spec) for _ in range(WORKERS)]

    async def _one(self, spec: SandboxSpec) -> str:
        async with asyncio.timeout(READY_S):
            while True:
                session = await asked(self.world.control, spec)
                while not (view := await self.world.control.get(session)).state.final:
                    if self.output(session):
                        return session
                    await asyncio.sleep(0.1)
                assert was_busy(view), f"{view}\n{await self.world.said()}"

    async def again(self, fault: Fault[Deployed]) -> None:
        """The engine took them along: they must have ended, and others begin."""
        for session in self.running:
            view = await ended(self.world.control, session, READY_S)
            assert view.state in (SessionState.EXITED, SessionState.FAILED), view
        self.cut |= dict.fromkeys(self.running, fault)
        await self.begin()

    async def end(self) -> None:
        """End them: all that they had is given back, and each says itself that it has ended."""
        for session in self.running:
            assert (await execute(self.world.control, session, "touch", END))[0] == 0
        async with asyncio.timeout(READY_S):
            while not all(self.output(session).endswith(ENDED) for session in self.running):
                await asyncio.sleep(0.1)
        await given_back(self.world)
        for session in self.running:
            assert (await execute(self.world.control, session, "touch", LEAVE))[0] == 0
        for session in self.running:
            view = await ended(self.world.control, session, READY_S)
            assert how(view) == (SessionState.EXITED, Reason.EXIT_CODE, WORKER_EXIT), f"{view}"

    def output(self, session: str) -> bytes:
        """What one has printed."""
        path = self.world.sessions / session / "stdout.log"
        return path.read_bytes() if path.exists() else b""


async def chaos(world: Deployed, seconds: float, seed: int, few: int) -> None:
    """Break a host under load in the order of a seed, each thing once, `few` things or for so long; hold the end against it."""
    load = Load(world, seed)
    memory: list[dict[str, int]] = []

    async def after(fault: Fault[Deployed]) -> None:
        if "session" in fault.cuts:
            await load.again(fault)
        await check_alive(world, fault, load.running)
        memory.append(await resident(world))

    schedule = Schedule(world, FAULTS, RELOADED, seed, few, after)
    over = asyncio.Event()
    await load.begin()
    before = await look(world)
    shorts: list[Short] = []
    launching = [asyncio.create_task(_one_after_the_other(world, over, shorts)) for _ in range(LAUNCHERS)]
    try:
        await schedule.run(seconds)
        over.set()
        await asyncio.gather(*launching)
    finally:
        for each in launching:
            each.cancel()
        await asyncio.gather(*launching, return_exceptions=True)
    await load.end()
    carried = {session: operations(load.output(session), whole=session in load.running) for session in load.all}
    windows = schedule.windows
    report(schedule, [each for one in carried.values() for each in one], len(shorts))
    for one in carried.values():
        check_operations(one, windows)
    await check_shorts(world.control, world.sessions, shorts, windows)
    assert all((await known_sessions(world.control)).values()), "a session goes on that nobody has launched"
    await as_before(world, before, {*load.all, *(each.session for each in shorts)})
    assert not grown(memory, len(FAULTS)), (grown(memory, len(FAULTS)), memory)
    for session, one in carried.items():
        check_audit(world.egress_logs / f"{session}.log", one, windows, load.cut.get(session))


async def _one_after_the_other(world: Deployed, over: asyncio.Event, made: list[Short]) -> None:
    """Run short sessions, each to its end before the next: as many as a busy machine can carry."""
    while not over.is_set():
        made.append(await begin_short(world.control))
        await ended(world.control, made[-1].session, READY_S)
