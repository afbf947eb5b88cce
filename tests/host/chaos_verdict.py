"""The load on a deployed host under chaos, and what must be true of it in the end (tests/host/chaos_deployed.py breaks it)."""

import asyncio
import contextlib
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from control.api.types import SessionView
from control.plan.session import Reason, SessionState
from control.spec import SandboxSpec
from gateway.contract.policy import NetworkLevel
from tests.host.chaos_deployed import GATEWAY, PORT, READY_S, Deployed, Schedule
from tests.host.chaos_load import END, HOST, LEAVE, TUNNELS, WORKER, WORKER_EXIT, Operation
from tests.host.chaos_windows import Window
from tests.host.lives import ended, execute, how
from tests.host.test_chaos import NEVER_RAN, SLACK_S, Short, asked
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
    cut: list[str] = field(default_factory=list)

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
                    if self._output(session):
                        return session
                    await asyncio.sleep(0.1)
                assert _was_busy(view), view

    async def again(self) -> None:
        """The engine took them along: they must have ended, and others begin."""
        for session in self.running:
            view = await ended(self.world.control, session, READY_S)
            assert view.state in (SessionState.EXITED, SessionState.FAILED), view
        self.cut += self.running
        await self.begin()

    async def end(self) -> None:
        """End them; each must say so itself."""
        for session in self.running:
            assert (await execute(self.world.control, session, "touch", END, LEAVE))[0] == 0
        for session in self.running:
            view = await ended(self.world.control, session, READY_S)
            assert how(view) == (SessionState.EXITED, Reason.EXIT_CODE, WORKER_EXIT), f"{view}"

    def operations(self, session: str) -> list[Operation]:
        """What one has carried. Raises AssertionError when a line is missing, doubled or spoilt."""
        *whole, rest = self._output(session).split(b"\n")
        lines = [json.loads(line) for line in whole]
        assert [line["number"] for line in lines] == list(range(1, len(lines) + 1)), "lines of the output are missing"
        if session in self.running:
            assert (lines.pop()["kind"], rest) == ("end", b"")
        return [Operation(line["kind"], line["begin"], line["end"], line["error"], line["wrong"]) for line in lines]

    def _output(self, session: str) -> bytes:
        path = self.world.root / f"var/lib/opificia/sessions/{session}/stdout.log"
        return path.read_bytes() if path.exists() else b""


async def chaos(world: Deployed, seconds: float, seed: int, few: int) -> None:
    """Break a host under load in the order of a seed, each thing once, `few` things or for so long; hold the end against it."""
    load = Load(world, seed)
    schedule = Schedule(world, seed, few, load.again)
    before = await _sockets(world)
    over = asyncio.Event()
    await load.begin()
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
    carried = {session: load.operations(session) for session in load.all}
    windows = schedule.windows
    _report(schedule, [each for operations in carried.values() for each in operations], len(shorts))
    odd = [each for operations in carried.values() for each in operations if not _is_right(each, windows)]
    assert not odd, f"{len(odd)} operations failed by nothing that was done, or were wrong: {odd[:5]}"
    problems = [problem for each in shorts if (problem := await _problem(world, each, windows))]
    assert not problems, problems
    await _nothing_left(world, {*load.all, *(each.session for each in shorts)})
    for session, operations in carried.items():
        _check_audit(world, session, operations, windows, cut=session in load.cut)
    async with asyncio.timeout(READY_S):
        # No socket of a connection that is over.
        while await _sockets(world) > before + 8:
            await asyncio.sleep(0.2)


async def _one_after_the_other(world: Deployed, over: asyncio.Event, made: list[Short]) -> None:
    """Run short sessions, each to its end before the next: as many as a busy machine can carry."""
    while not over.is_set():
        number = time.monotonic_ns() % 1_000_000
        code, begin = number % 7, time.time()
        command = ("sh", "-c", f"echo {number}; echo {number} > /out/number; sleep {number % 3}; exit {code}")
        session = await asked(world.control, SandboxSpec(image=IMAGE, command=command))
        made.append(Short(session, number, begin, code))
        await ended(world.control, session, READY_S)


def _explained(windows: list[Window[Deployed]], kind: str, begin: float, end: float) -> bool:
    return any(window.explains(kind, begin - SLACK_S, end + SLACK_S) for window in windows)


def _is_right(each: Operation, windows: list[Window[Deployed]]) -> bool:
    return not each.wrong and (not each.error or _explained(windows, each.kind, each.begin, each.end))


async def _problem(world: Deployed, short: Short, windows: list[Window[Deployed]]) -> str:
    """Wait for the end of a short session; return what is not as it should be, empty if nothing."""
    view = await ended(world.control, short.session, READY_S)
    until = (world.root / f"var/lib/opificia/sessions/{short.session}/events.jsonl").stat().st_mtime
    if how(view) == (SessionState.EXITED, Reason.EXIT_CODE, short.code):
        printed = (world.root / f"var/lib/opificia/sessions/{short.session}/stdout.log").read_bytes()
        return "" if printed == b"%d\n" % short.number else f"{short}: it printed {printed!r}"
    if view.state.final and _explained(windows, "session", short.begin, until):
        return ""
    if view.reason in NEVER_RAN and (_explained(windows, "launch", short.begin, until) or _was_busy(view)):
        return ""
    return f"{short}: {how(view)} {view.message}"


def _was_busy(view: SessionView) -> bool:
    """Tell whether a launch was given up for want of an answer in time: a machine that does much besides is no fault of ours."""
    return view.reason is Reason.ENGINE_ERROR and "not answer" in view.message


async def _nothing_left(world: Deployed, sessions: set[str]) -> None:
    left = sessions
    try:
        async with asyncio.timeout(READY_S):
            while left := await _left(world, sessions):
                await asyncio.sleep(0.5)
    except TimeoutError:
        raise AssertionError(f"something is left of {left}") from None


async def _left(world: Deployed, sessions: set[str]) -> set[str]:
    """Return whose container, volume, loop device or grant there still is."""
    named = await world.run(
        *("sh", "-c"),
        "docker ps --all --format '{{.Label \"opificia.session\"}}'; docker volume ls --format '{{.Name}}';"
        " losetup --list --noheadings --output BACK-FILE",
    )
    granted = {each.id for each in (await world.control.gateway()).sessions}
    return {session for session in sessions if session in named or session in granted}


async def _sockets(world: Deployed) -> int:
    pid = await world.main_pid(GATEWAY)
    found = 0
    for entry in (world.root / f"proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += str(entry.readlink()).startswith("socket:")
    return found


def _check_audit(
    world: Deployed, session: str, operations: list[Operation], windows: list[Window[Deployed]], *, cut: bool
) -> None:
    """Hold the audit log against what a sandbox saw: a line for each connection that was made, and one for its end."""
    path = world.root / f"var/log/opificia/egress/{session}.log"
    lines: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    events = Counter(line["event"] for line in lines if line.get("host") == HOST)
    tunnels = [each for each in operations if each.kind == "tunnel"]
    right = sum(not each.error for each in tunnels)
    # Those under way when the engine ended the sandbox are in no output.
    made = len(tunnels) + TUNNELS * cut
    # A full disk takes no lines: the gateway says so, and carries on.
    full = [window for window in windows if window.fault.name == "disks full"]
    unwritten = sum(
        any(each.begin <= window.end + SLACK_S and each.end >= window.begin - SLACK_S for window in full)
        for each in tunnels
    )
    assert right - unwritten <= events["allow"] <= made, (session, right, unwritten, events, made)
    # What is open when the process is killed has no end that anyone could write down.
    kills = sum(window.fault.name == "gateway killed" for window in windows)
    fewest = events["allow"] - kills * TUNNELS - unwritten
    assert fewest <= events["close"] <= events["allow"] + unwritten, (session, events, unwritten)


def _report(schedule: Schedule, load: list[Operation], shorts: int) -> None:
    print(f"seed {schedule.seed}")
    for window in schedule.windows:
        met = [each for each in load if each.begin <= window.end and each.end >= window.begin]
        failed = Counter(each.kind for each in met if each.error)
        print(f"{window.fault.name:22} {window.end - window.begin:5.1f} s  met {len(met):4}  cut {dict(failed)}")
    kinds = Counter((each.kind, "failed" if each.error else "right") for each in load)
    print(f"{dict(kinds)}, {shorts} short sessions")
