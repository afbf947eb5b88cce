"""Every step at which control can die in a session's life, and what must have become of the session when it is back.

A point is a session's name: `<life>--<step>--<when>`, as `tests/support/halting_control.py` reads it.
"""

from dataclasses import dataclass
from typing import Final

from control.plan.session import Reason, SessionState
from gateway.contract.limits import MIB
from tests.host.lives import EAT
from tests.support.sandbox import IMAGE

# What a session's command prints and leaves: twice, if it ran twice.
_RUN: Final = "echo ran >> /out/runs; echo noted >&2; echo ran; "
# Made of IMAGE, with `tests/support/odd_runner.py` for its runner.
ODD_IMAGE: Final = "odd:latest"
# What that runner reports of itself.
REPORTS: Final = ("runner_status", "tool_called", "tool_returned")


@dataclass(frozen=True)
class Life:
    """A way to live, and its steps. `launched`, `stopped`: what the caller asks for; `code`: None when it does not matter.

    `runs`: its command comes to run; `sure`: and says all that it has to say before its end.
    """

    script: str
    state: SessionState
    reason: Reason
    code: int | None
    # Events that are recorded: each is a write to the journal, then one to the database.
    events: tuple[str, ...]
    # Other writes, and calls to engine and gateway.
    calls: tuple[str, ...] = ()
    image: str = IMAGE
    launched: bool = True
    stopped: bool = False
    runs: bool = True
    sure: bool = True
    reports: tuple[str, ...] = ()
    time_limit_ms: int = 0
    memory_bytes: int = 0


LIVES: Final = {
    "exit": Life(
        script=f"{_RUN}exit 6",
        state=SessionState.EXITED,
        reason=Reason.EXIT_CODE,
        code=6,
        events=(
            "launch-requested",
            "launch-started",
            "container-created",
            "runner-connected",
            "command-sent",
            "command-completed",
            "container-exited",
            "ended",
        ),
        calls=(
            "store-insert",
            "link-put",
            "engine-declare-out-volume",
            "engine-create-out-volume",
            "engine-create",
            "engine-start",
            "engine-archive-out",
            "engine-remove",
            "engine-remove-out-volume",
            "link-revoke",
            "store-release-address",
            "store-mark-cleaned",
        ),
    ),
    "stop": Life(
        script=f"{_RUN}exec sleep 1000",
        state=SessionState.STOPPED,
        reason=Reason.STOPPED_BY_USER,
        code=None,
        events=("end-requested", "container-exited", "ended"),
        calls=("engine-stop", "engine-archive-out"),
        stopped=True,
    ),
    "missing": Life(
        script="true",
        image="registry.invalid/no/such:1",
        state=SessionState.FAILED,
        reason=Reason.IMAGE_MISSING,
        code=None,
        events=("launch-started", "end-requested", "ended"),
        calls=("engine-remove-made-for", "store-mark-cleaned"),
        runs=False,
    ),
    "unlaunched": Life(
        script="true",
        state=SessionState.STOPPED,
        reason=Reason.STOPPED_BY_USER,
        code=None,
        events=("end-requested",),
        calls=("store-mark-cleaned",),
        launched=False,
        stopped=True,
        runs=False,
    ),
    "late": Life(
        script=f"{_RUN}exec sleep 1000",
        state=SessionState.FAILED,
        reason=Reason.TIME_LIMIT,
        code=None,
        events=("end-requested",),
        # Among so many it may come before the runner does.
        sure=False,
        time_limit_ms=10_000,
    ),
    "silent": Life(
        script="true",
        image=ODD_IMAGE,
        state=SessionState.FAILED,
        reason=Reason.HELLO_TIMEOUT,
        code=None,
        events=("end-requested",),
        runs=False,
    ),
    "lost": Life(
        script=f"{_RUN}exec sleep 1000",
        image=ODD_IMAGE,
        state=SessionState.FAILED,
        reason=Reason.RUNNER_LOST,
        code=None,
        events=("end-requested",),
    ),
    "eaten": Life(
        script=f"{_RUN}exec {EAT}",
        state=SessionState.FAILED,
        reason=Reason.OOM_KILLED,
        code=137,
        events=("container-exited",),
        memory_bytes=128 * MIB,
    ),
    "reports": Life(
        script=f"{_RUN}until [ -e /in/back ]; do sleep 0.1; done; exit 6",
        image=ODD_IMAGE,
        state=SessionState.EXITED,
        reason=Reason.EXIT_CODE,
        code=6,
        events=("runner-status", "tool-called", "tool-returned", "runner-disconnected"),
        reports=REPORTS,
    ),
}


def _points(name: str, life: Life) -> list[str]:
    # One torn line of a kind is enough.
    earlier = {event for other in list(LIVES.values())[: list(LIVES).index(name)] for event in other.events}
    journaled = [
        f"journal-{event}--{when}"
        for event in life.events
        for when in ("before", "torn", "after")
        if when != "torn" or event not in earlier
    ]
    stored = [f"stored-{event}--{when}" for event in life.events for when in ("before", "after")]
    called = [f"{call}--{when}" for call in life.calls for when in ("before", "after")]
    return [f"{name}--{step}" for step in (*journaled, *stored, *called)]


POINTS: Final = tuple(point for name, life in LIVES.items() for point in _points(name, life))


# For a daemon that is killed again while it takes up what it left; other names for other sessions at some of the points.
AGAIN: Final = tuple(f"again--{point}" for point in POINTS[::13])

# What the daemon does for no caller and for many sessions in a row: it dies at one of them after the other.
LAUNCH_CUT: Final = (
    *(f"stored-launch-cut--{when}" for when in ("before", "after")),
    *(f"journal-launch-cut--{when}" for when in ("before", "torn", "after")),
)
KEEPING: Final = tuple(
    f"store-{call}--{when}" for call in ("put-sizes", "put-usage", "forget") for when in ("before", "after")
)
# Sessions whose launch is cut by the first death.
CUT: Final = tuple(
    f"cut--exit--{step}" for step in ("engine-create--before", "engine-create--after", "link-put--after")
)


def life_of(point: str) -> Life:
    """Return the life that a point is in."""
    return LIVES[point.removeprefix("again--").removeprefix("cut--").split("--", 1)[0]]
