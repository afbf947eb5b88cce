"""What must be true after the chaos of every session and of every connection: whatever failed has a fault that explains it."""

import asyncio
import json
import time
from collections import Counter
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Final

from control.api.types import SessionView
from control.client import ControlClient, ControlError, ControlUnavailableError
from control.plan.session import Reason, SessionState
from control.spec import SandboxSpec
from tests.host.chaos_load import HOST, TUNNELS, Operation
from tests.host.chaos_windows import READY_S, Fault, Schedule, Window, World
from tests.host.lives import ended, how
from tests.support.sandbox import IMAGE

# What is killed is seen a moment later by whoever used it.
SLACK_S: Final = 2.0
# The last one: control could not open the session's logs, for want of descriptors.
_NEVER_RAN: Final = (Reason.ENGINE_ERROR, Reason.HOST_NOT_READY, Reason.GATEWAY_UNAVAILABLE, Reason.CONTROL_ERROR)
# A full disk takes no lines of the audit log: the gateway says so, and carries on.
_UNWRITTEN: Final = "disks full"
# What is open when its process is killed has no end that anyone could write down.
_KILLING: Final = ("gateway killed", "gateway out of memory")


@dataclass(frozen=True)
class Short:
    """A session that says its number and ends with an exit code of its own."""

    session: str
    number: int
    begin: float
    code: int


async def asked(control: ControlClient, spec: SandboxSpec) -> str:
    """Create and launch a session, as a caller does who tries again until it is answered."""
    key = f"{time.time_ns()}"
    while True:
        try:
            session = (await control.create(spec, idempotency_key=key)).id
            await control.launch(session)
        except ControlUnavailableError:
            await asyncio.sleep(0.2)
        except ControlError as error:
            if error.problem.reason == "wrong_state":
                # An earlier try was carried out, though not answered.
                return session
            if error.problem.status < 500:
                raise
            await asyncio.sleep(0.2)
        else:
            return session


async def begin_short(control: ControlClient) -> Short:
    """Launch a short session."""
    number, begin = time.monotonic_ns() % 1_000_000, time.time()
    code = number % 7
    command = ("sh", "-c", f"echo {number}; echo {number} > /out/number; sleep {number % 3}; exit {code}")
    return Short(await asked(control, SandboxSpec(image=IMAGE, command=command)), number, begin, code)


def _explained(windows: list[Window[World]], kind: str, begin: float, end: float) -> bool:
    return any(window.explains(kind, begin - SLACK_S, end + SLACK_S) for window in windows)


async def check_alive(world: World, fault: Fault[World], sessions: list[str]) -> None:
    """No fault ends a session that goes on."""
    for session in sessions:
        view = await world.control.get(session)
        assert not view.state.final, f"{fault.name} ended {session}: {view}\n{await world.said()}"


def check_operations(carried: list[Operation], windows: list[Window[World]]) -> None:
    """Whatever failed met something that may cut it, and nothing was other than it should be."""
    odd = [
        each
        for each in carried
        if each.wrong or (each.error and not _explained(windows, each.kind, each.begin, each.end))
    ]
    assert not odd, f"{len(odd)} operations failed by nothing that was done, or were wrong: {odd[:5]}"


async def check_shorts(
    control: ControlClient, sessions: Path, shorts: list[Short], windows: list[Window[World]]
) -> None:
    """Every short session has ended as it was to, printed what it was to, or says what kept it from that."""
    problems = [await _problem(control, sessions / each.session, each, windows) for each in shorts]
    assert not any(problems), [problem for problem in problems if problem]


async def _problem(control: ControlClient, folder: Path, short: Short, windows: list[Window[World]]) -> str:
    view = await ended(control, short.session, READY_S)
    until = (folder / "events.jsonl").stat().st_mtime

    def may_have_met(kind: str) -> bool:
        return _explained(windows, kind, short.begin, until)

    if how(view) == (SessionState.EXITED, Reason.EXIT_CODE, short.code):
        printed = (folder / "stdout.log").read_bytes()
        # What the engine itself has lost is told.
        told = "may be missing" in view.message and may_have_met("exit")
        return "" if printed == b"%d\n" % short.number or told else f"{short}: it printed {printed!r}"
    if how(view) == (SessionState.EXITED, Reason.EXIT_CODE, 255) and may_have_met("exit"):
        return ""
    if view.state.final and may_have_met("session"):
        return ""
    if view.reason in _NEVER_RAN and (may_have_met("launch") or was_busy(view)):
        return ""
    return f"{short}: {how(view)} {view.message}"


def was_busy(view: SessionView) -> bool:
    """Tell whether a launch was given up for want of an answer in time: a machine that does much besides is no fault of ours."""
    return view.reason is Reason.ENGINE_ERROR and "not answer" in view.message


def check_audit(
    log: Path, carried: list[Operation], windows: list[Window[World]], cut: Fault[World] | None = None
) -> None:
    """Hold a session's audit log against what it saw: a line for each connection that was made, and one for its end.

    `cut`: what ended the session, with connections under way, which are in no output.
    """
    lines = [line for line in map(json.loads, log.read_text().splitlines()) if line.get("host") == HOST]
    events = Counter(line["event"] for line in lines)
    tunnels = [each for each in carried if each.kind == "tunnel"]
    right = sum(not each.error for each in tunnels)
    # What a sandbox prints between the death of its engine and the next one, which ends it, is lost (docs/robustness.md).
    unsaid = 0.0 if cut is None else inf if cut.name == "engine killed" else TUNNELS
    made = len(tunnels) + unsaid
    full = [window for window in windows if window.fault.name == _UNWRITTEN]
    unwritten = sum(
        any(each.begin <= window.end + SLACK_S and each.end >= window.begin - SLACK_S for window in full)
        for each in tunnels
    )
    assert right - unwritten <= events["allow"] <= made, (
        log.stem,
        right,
        unwritten,
        events,
        made,
        cut and cut.name,
        lines,
        tunnels,
    )
    kills = sum(window.fault.name in _KILLING for window in windows)
    fewest = events["allow"] - kills * TUNNELS - unwritten
    assert fewest <= events["close"] <= events["allow"] + unwritten, (log.stem, events, kills, unwritten)


def report(schedule: Schedule[World], carried: list[Operation], shorts: int) -> None:
    """Print what met what, and what came of it."""
    print(f"seed {schedule.seed}")
    for window in schedule.windows:
        met = [each for each in carried if each.begin <= window.end and each.end >= window.begin]
        failed = Counter(each.kind for each in met if each.error)
        print(f"{window.fault.name:26} {window.end - window.begin:5.1f} s  met {len(met):4}  cut {dict(failed)}")
    kinds = Counter((each.kind, "failed" if each.error else "right") for each in carried)
    print(f"{dict(kinds)}, {shorts} short sessions")
