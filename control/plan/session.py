"""The life of a session: states, events, and the table of what may follow what. Pure.

Rules, in prose:

1. A session is in one state: `created → launching → connected → running → exited | failed | stopped`. The last three are
   final; nothing follows them.
2. Waiting for admission is no state of its own: a session asked to launch stays `created` until there is room.
3. Whoever first asks a session to end is remembered as its `ending`; what the container then does cannot change the reason.
   Without an ending the container's own exit is the reason. What the runner claims (`completed`) never is: it is the word of
   untrusted code, and only tells a command's exit from a kill that looks the same.
4. A launch that was cut before its container was started has done nothing yet: the session waits again, and is launched anew.
5. Every step is an event. An event that the table does not allow in a state is refused as a value; the state stays.

Times are milliseconds since the epoch, handed in.
"""

import enum
from collections.abc import Mapping
from typing import Final, assert_never

import msgspec

# A process ended by signal N shows as 128 + N (bash(1), docker-run(1)).
EXIT_SIGKILL: Final = 137
EXIT_SIGTERM: Final = 143


class SessionState(enum.StrEnum):
    """Where a session is in its life."""

    CREATED = "created"
    LAUNCHING = "launching"
    CONNECTED = "connected"
    RUNNING = "running"
    EXITED = "exited"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def final(self) -> bool:
        """Tell whether nothing follows this state."""
        return self in FINAL_STATES


FINAL_STATES: Final = frozenset({SessionState.EXITED, SessionState.FAILED, SessionState.STOPPED})


class Reason(enum.StrEnum):
    """Why a session ended. The spelling is a contract with the API, the CLI and metrics."""

    # The container's own exit.
    EXIT_CODE = "exit_code"
    OOM_KILLED = "oom_killed"
    CHILD_OOM_KILLED = "child_oom_killed"
    KILLED_OUTSIDE = "killed_outside"
    STOPPED_OUTSIDE = "stopped_outside"
    CONTAINER_VANISHED = "container_vanished"
    # Asked for.
    STOPPED_BY_USER = "stopped_by_user"
    TIME_LIMIT = "time_limit"
    HELLO_TIMEOUT = "hello_timeout"
    RUNNER_LOST = "runner_lost"
    SHUTDOWN_TIMEOUT = "shutdown_timeout"
    ORPHANED = "orphaned"
    POLICY_MISMATCH = "policy_mismatch"
    # Never came to run.
    NEVER_LAUNCHED = "never_launched"
    IMAGE_MISSING = "image_missing"
    IMAGE_UNUSABLE = "image_unusable"
    GRANT_REFUSED = "grant_refused"
    GATEWAY_UNAVAILABLE = "gateway_unavailable"
    HOST_NOT_READY = "host_not_ready"
    IN_DIR_REFUSED = "in_dir_refused"
    ENGINE_ERROR = "engine_error"
    CONTROL_ERROR = "control_error"


# Reasons that someone wanted: the session is `stopped`. All other endings are failures.
_WANTED: Final = frozenset({Reason.STOPPED_BY_USER})


class Exit(msgspec.Struct, frozen=True):
    """How the container ended, as the engine says. `code` is None when the engine no longer knows."""

    code: int | None
    oom_killed: bool = False
    error: str = ""


def _null() -> msgspec.Raw:
    return msgspec.Raw(b"null")


class LaunchRequested(msgspec.Struct, frozen=True, tag="launch_requested"):
    """The caller wants it to run; it waits for room."""


class LaunchStarted(msgspec.Struct, frozen=True, tag="launch_started"):
    """There is room: address and token are assigned. `uptime_ms`: since which `boot`, for a time of day may be set meanwhile."""

    address: str
    token_sha256: str
    boot: str = ""
    uptime_ms: int = 0


class LaunchCut(msgspec.Struct, frozen=True, tag="launch_cut"):
    """The daemon ended before the container was started: the session waits for room again."""


class ContainerCreated(msgspec.Struct, frozen=True, tag="container_created"):
    """The engine made the container; it is not started yet."""

    container: str
    image_id: str


class RunnerConnected(msgspec.Struct, frozen=True, tag="runner_connected"):
    """The runner said hello, the first time or again."""

    instance: str
    runner: str = ""


class RunnerDisconnected(msgspec.Struct, frozen=True, tag="runner_disconnected"):
    """The runner's connection ended; it has a while to come back."""


class CommandSent(msgspec.Struct, frozen=True, tag="command_sent"):
    """A command goes to the runner. `main`: it is the one the session is for."""

    run: str
    main: bool
    argv: tuple[str, ...]


class CommandCompleted(msgspec.Struct, frozen=True, tag="command_completed"):
    """The runner claims that a command ended."""

    seq: int
    run: str
    main: bool
    exit_code: int
    timed_out: bool = False
    error: str = ""


class EndRequested(msgspec.Struct, frozen=True, tag="end_requested"):
    """Someone or a limit ends the session."""

    reason: Reason
    message: str = ""


class ContainerExited(msgspec.Struct, frozen=True, tag="container_exited"):
    """The container is over; its logs and results are collected next."""

    exit: Exit


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """Everything is collected: the session takes its final state. `note` says what could not be saved, if anything."""

    note: str = ""


class RunnerStatus(msgspec.Struct, frozen=True, tag="runner_status"):
    """The runner tells how it is doing."""

    seq: int
    status: str
    detail: str = ""


class ToolCalled(msgspec.Struct, frozen=True, tag="tool_called"):
    """The agent called a tool (as the runner reports)."""

    seq: int
    call: str
    name: str
    arguments: msgspec.Raw = msgspec.field(default_factory=_null)


class ToolReturned(msgspec.Struct, frozen=True, tag="tool_returned"):
    """A tool answered (as the runner reports)."""

    seq: int
    call: str
    ok: bool
    content: msgspec.Raw = msgspec.field(default_factory=_null)


Event = (
    LaunchRequested
    | LaunchStarted
    | LaunchCut
    | ContainerCreated
    | RunnerConnected
    | RunnerDisconnected
    | CommandSent
    | CommandCompleted
    | EndRequested
    | ContainerExited
    | Ended
    | RunnerStatus
    | ToolCalled
    | ToolReturned
)


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """All that the life of one session has come to. Built from its events alone."""

    state: SessionState = SessionState.CREATED
    reason: Reason | None = None
    message: str = ""
    ending: Reason | None = None
    exit: Exit | None = None
    # The session's own command, and what the runner claimed of its end.
    main_run: str = ""
    claimed_code: int | None = None
    open_runs: tuple[str, ...] = ()
    # The last of the runner's own numbers among what is recorded.
    runner_seq: int = 0
    waiting: bool = False
    connected: bool = False
    address: str = ""
    token_sha256: str = ""
    container: str = ""
    image_id: str = ""
    instance: str = ""
    launched_at: int | None = None
    # The same by the machine's uptime; empty and 0 where that was not known.
    launched_boot: str = ""
    launched_uptime_ms: int = 0
    connected_at: int | None = None
    running_at: int | None = None
    ended_at: int | None = None


class NotAllowed(msgspec.Struct, frozen=True):
    """The event cannot happen in this state."""

    state: SessionState
    event: str

    def __str__(self) -> str:
        return f"{self.event} cannot happen to a session that is {self.state}"


class _End(enum.Enum):
    """The event ends the session; the finding decides which final state."""

    END = "end"


Next = SessionState | _End
_S = SessionState
_LIVE: Final = (_S.LAUNCHING, _S.CONNECTED, _S.RUNNING)

# The table. What is not in it is not allowed.
TRANSITIONS: Final[Mapping[tuple[SessionState, type[msgspec.Struct]], Next]] = {
    (_S.CREATED, LaunchRequested): _S.CREATED,
    (_S.CREATED, EndRequested): _End.END,
    (_S.CREATED, LaunchStarted): _S.LAUNCHING,
    (_S.LAUNCHING, LaunchCut): _S.CREATED,
    (_S.LAUNCHING, ContainerCreated): _S.LAUNCHING,
    (_S.LAUNCHING, RunnerConnected): _S.CONNECTED,
    (_S.CONNECTED, RunnerConnected): _S.CONNECTED,
    (_S.RUNNING, RunnerConnected): _S.RUNNING,
    (_S.CONNECTED, RunnerDisconnected): _S.CONNECTED,
    (_S.RUNNING, RunnerDisconnected): _S.RUNNING,
    (_S.CONNECTED, CommandSent): _S.RUNNING,
    (_S.RUNNING, CommandSent): _S.RUNNING,
    (_S.RUNNING, CommandCompleted): _S.RUNNING,
    **{(state, EndRequested): state for state in _LIVE},
    **{(state, ContainerExited): state for state in _LIVE},
    **{(state, Ended): _End.END for state in _LIVE},
    **{
        (state, event): state
        for state in (_S.CONNECTED, _S.RUNNING)
        for event in (RunnerStatus, ToolCalled, ToolReturned)
    },
}


def advance(session: Session, event: Event, now_ms: int) -> Session | NotAllowed:
    """Return the session after `event`, or NotAllowed."""
    following = TRANSITIONS.get((session.state, type(event)))
    if following is None:
        return NotAllowed(session.state, str(event.__struct_config__.tag))
    if following is _End.END:
        return _end(_note(session, event, now_ms), now_ms)
    return msgspec.structs.replace(_note(session, event, now_ms), state=following)


def _note(session: Session, event: Event, now_ms: int) -> Session:
    """Keep what the event says, apart from the state."""
    replace = msgspec.structs.replace
    match event:
        case LaunchRequested():
            return replace(session, waiting=True)
        case LaunchCut():
            # The address stays held: the next launch takes it again.
            return replace(
                session,
                waiting=True,
                container="",
                image_id="",
                launched_at=None,
                launched_boot="",
                launched_uptime_ms=0,
            )
        case LaunchStarted(address, token_sha256, boot, uptime_ms):
            return replace(
                session,
                waiting=False,
                address=address,
                token_sha256=token_sha256,
                launched_at=now_ms,
                launched_boot=boot,
                launched_uptime_ms=uptime_ms,
            )
        case ContainerCreated(container, image_id):
            return replace(session, container=container, image_id=image_id)
        case RunnerConnected(instance):
            first = session.connected_at or now_ms
            return replace(session, connected=True, instance=instance, connected_at=first)
        case RunnerDisconnected():
            return replace(session, connected=False)
        case CommandSent(run, main):
            return replace(
                session,
                running_at=session.running_at or now_ms,
                main_run=run if main else session.main_run,
                open_runs=(*session.open_runs, run),
            )
        case CommandCompleted(seq, run):
            return replace(
                session,
                claimed_code=event.exit_code if event.main else session.claimed_code,
                open_runs=tuple(open_run for open_run in session.open_runs if open_run != run),
                runner_seq=max(seq, session.runner_seq),
            )
        case EndRequested(reason, message):
            # The first who asks is the reason: a user's stop is not turned into a time limit by a slow exit, nor an
            # exit into a stop that came too late.
            if session.ending is not None or session.exit is not None:
                return session
            return replace(session, ending=reason, message=message)
        case ContainerExited(exit_):
            return replace(session, exit=exit_, connected=False) if session.exit is None else session
        case Ended(note):
            return replace(session, message=session.message or note)
        case RunnerStatus(seq) | ToolCalled(seq) | ToolReturned(seq):
            return replace(session, runner_seq=max(seq, session.runner_seq))
        case _ as never:
            assert_never(never)


def _end(session: Session, now_ms: int) -> Session:
    state, reason = finding(session)
    return msgspec.structs.replace(session, state=state, reason=reason, waiting=False, connected=False, ended_at=now_ms)


def finding(session: Session) -> tuple[SessionState, Reason]:
    """Say how a session ended: who ended it first, then what the engine says of the container.

    `OOMKilled` does not mean that the first process died of it, and 137 is not always memory: the first process out of
    memory is 137 with the mark, a child's end is any other code with the mark, a kill is 137 without it.
    """
    if session.ending is not None:
        return (SessionState.STOPPED if session.ending in _WANTED else SessionState.FAILED), session.ending
    exit_ = session.exit
    if exit_ is None or exit_.code is None:
        return SessionState.FAILED, Reason.CONTAINER_VANISHED
    if exit_.oom_killed:
        if exit_.code == EXIT_SIGKILL:
            return SessionState.FAILED, Reason.OOM_KILLED
        return SessionState.EXITED, Reason.CHILD_OOM_KILLED
    if exit_.code != session.claimed_code:
        if exit_.code == EXIT_SIGKILL:
            return SessionState.FAILED, Reason.KILLED_OUTSIDE
        if exit_.code == EXIT_SIGTERM:
            return SessionState.FAILED, Reason.STOPPED_OUTSIDE
    return SessionState.EXITED, Reason.EXIT_CODE


def transition_table() -> list[str]:
    """Return the table as lines of Markdown, for the documentation."""
    lines = ["| state | event | next |", "|---|---|---|"]
    for (state, event), following in TRANSITIONS.items():
        tag = event.__struct_config__.tag
        last = "exited, failed or stopped" if following is _End.END else following.value
        lines.append(f"| {state} | {tag} | {last} |")
    return lines
