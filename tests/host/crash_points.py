"""Every step at which control can die in a session's life, and what must have become of the session when it is back.

A point is a session's name: `<life>--<step>--<when>`, as `tests/support/halting_control.py` reads it.
"""

from dataclasses import dataclass
from typing import Final

from control.plan.session import Reason, SessionState
from tests.support.sandbox import IMAGE

# What a session's command prints and leaves: twice, if it ran twice.
_RUN: Final = "echo ran >> /out/runs; echo noted >&2; echo ran; "


@dataclass(frozen=True)
class Life:
    """A way to live, and its steps. `launched`, `stopped`: what the caller asks for; `code`: None when it does not matter."""

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

    @property
    def runs(self) -> bool:
        """Whether its command comes to run."""
        return self.launched and self.image == IMAGE


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
        calls=("store-mark-cleaned",),
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
    ),
}


def _points(name: str, life: Life) -> list[str]:
    journaled = [f"journal-{event}--{when}" for event in life.events for when in ("before", "torn", "after")]
    stored = [f"stored-{event}--{when}" for event in life.events for when in ("before", "after")]
    called = [f"{call}--{when}" for call in life.calls for when in ("before", "after")]
    return [f"{name}--{step}" for step in (*journaled, *stored, *called)]


POINTS: Final = tuple(point for name, life in LIVES.items() for point in _points(name, life))


# For a daemon that is killed again while it takes up what it left; other names for other sessions at some of the points.
AGAIN: Final = tuple(f"again--{point}" for point in POINTS[::7])


def life_of(point: str) -> Life:
    """Return the life that a point is in."""
    return LIVES[point.removeprefix("again--").split("--", 1)[0]]
