"""The table of a session's life: every pair of state and event, and every way to end."""

import itertools
from pathlib import Path

import msgspec
import pytest

from control.plan.session import (
    FINAL_STATES,
    TRANSITIONS,
    CommandCompleted,
    CommandSent,
    ContainerCreated,
    ContainerExited,
    Ended,
    EndRequested,
    Event,
    Exit,
    LaunchCut,
    LaunchRequested,
    LaunchStarted,
    NotAllowed,
    Reason,
    RunnerConnected,
    RunnerDisconnected,
    RunnerStatus,
    Session,
    SessionState,
    ToolCalled,
    ToolReturned,
    advance,
    finding,
    transition_table,
)
from control.sessions.uptime import boot_id, gone_ms

EVENTS: list[Event] = [
    LaunchRequested(),
    LaunchStarted("10.0.0.16", "a" * 64),
    LaunchCut(),
    ContainerCreated("c1", "sha256:1"),
    RunnerConnected("i1", "test"),
    RunnerDisconnected(),
    CommandSent("main", True, ("true",)),
    CommandCompleted(1, "main", True, 0),
    EndRequested(Reason.STOPPED_BY_USER),
    ContainerExited(Exit(0)),
    Ended(),
    RunnerStatus(1, "busy"),
    ToolCalled(1, "c", "n"),
    ToolReturned(1, "c", True),
]
S = SessionState

# Written out once more, by hand: the table under test must not be what it is compared with.
ALLOWED = {
    S.CREATED: {"launch_requested", "launch_started", "end_requested"},
    S.LAUNCHING: {"launch_cut", "container_created", "runner_connected", "end_requested", "container_exited", "ended"},
    S.CONNECTED: {
        "runner_connected",
        "runner_disconnected",
        "command_sent",
        "end_requested",
        "container_exited",
        "ended",
        "runner_status",
        "tool_called",
        "tool_returned",
    },
    S.RUNNING: {
        "runner_connected",
        "runner_disconnected",
        "command_sent",
        "command_completed",
        "end_requested",
        "container_exited",
        "ended",
        "runner_status",
        "tool_called",
        "tool_returned",
    },
    S.EXITED: set(),
    S.FAILED: set(),
    S.STOPPED: set(),
}


def live(*events: Event) -> Session:
    session = Session()
    for now, event in enumerate(events, 1):
        following = advance(session, event, now)
        assert isinstance(following, Session), following
        session = following
    return session


def tag(event: Event) -> str:
    return str(event.__struct_config__.tag)


def test_a_launch_that_was_cut_waits_again_and_forgets_its_container_but_not_its_address() -> None:
    cut = live(LaunchRequested(), LaunchStarted("10.0.0.16", "a" * 64), ContainerCreated("c1", "i"), LaunchCut())
    assert cut == Session(waiting=True, address="10.0.0.16", token_sha256="a" * 64)


def test_every_kind_of_event_is_looked_at() -> None:
    assert {type(event) for event in EVENTS} == set(Event.__args__)


@pytest.mark.parametrize(
    ("state", "event"), list(itertools.product(SessionState, EVENTS)), ids=lambda value: str(value)[:40]
)
def test_an_event_is_allowed_exactly_where_the_table_has_it(state: SessionState, event: Event) -> None:
    result = advance(Session(state=state), event, 5)
    if tag(event) in ALLOWED[state]:
        assert isinstance(result, Session)
    else:
        assert result == NotAllowed(state, tag(event))


def test_final_states_are_left_by_nothing() -> None:
    assert not [state for state, _event in TRANSITIONS if state in FINAL_STATES]
    assert {state for state in SessionState if state.final} == FINAL_STATES


def test_the_straight_path() -> None:
    session = live(
        LaunchRequested(),
        LaunchStarted("10.0.0.16", "hash"),
        ContainerCreated("c1", "sha256:1"),
        RunnerConnected("i1"),
        CommandSent("main", True, ("true",)),
        CommandCompleted(3, "main", True, 4),
        RunnerDisconnected(),
        ContainerExited(Exit(4)),
        Ended(),
    )
    assert session == Session(
        state=S.EXITED,
        reason=Reason.EXIT_CODE,
        exit=Exit(4),
        main_run="main",
        claimed_code=4,
        runner_seq=3,
        address="10.0.0.16",
        token_sha256="hash",
        container="c1",
        image_id="sha256:1",
        instance="i1",
        launched_at=2,
        connected_at=4,
        running_at=5,
        ended_at=9,
    )


def test_a_session_that_waits_is_still_created() -> None:
    assert live(LaunchRequested()).waiting
    assert live(LaunchRequested()).state is S.CREATED
    assert not live(LaunchRequested(), LaunchStarted("10.0.0.16", "")).waiting


def test_a_session_that_never_ran_is_stopped_at_once() -> None:
    for events in ((), (LaunchRequested(),)):
        session = live(*events, EndRequested(Reason.STOPPED_BY_USER))
        assert (session.state, session.reason, session.waiting) == (S.STOPPED, Reason.STOPPED_BY_USER, False)


def test_who_ends_a_session_first_is_the_reason() -> None:
    session = live(
        LaunchStarted("10.0.0.16", ""),
        EndRequested(Reason.TIME_LIMIT, "too long"),
        EndRequested(Reason.STOPPED_BY_USER, "impatient"),
        ContainerExited(Exit(137, oom_killed=True)),
        Ended(),
    )
    assert (session.state, session.reason, session.message) == (S.FAILED, Reason.TIME_LIMIT, "too long")


def test_an_exit_is_not_turned_into_a_stop_that_came_too_late() -> None:
    session = live(
        LaunchStarted("10.0.0.16", ""),
        ContainerExited(Exit(3)),
        EndRequested(Reason.STOPPED_BY_USER),
        Ended(),
    )
    assert (session.state, session.reason) == (S.EXITED, Reason.EXIT_CODE)


def test_a_second_exit_changes_nothing() -> None:
    session = live(LaunchStarted("10.0.0.16", ""), ContainerExited(Exit(3)), ContainerExited(Exit(None)))
    assert session.exit == Exit(3)


@pytest.mark.parametrize(
    ("exit_", "claimed", "state", "reason"),
    [
        (Exit(0), 0, S.EXITED, Reason.EXIT_CODE),
        (Exit(0), None, S.EXITED, Reason.EXIT_CODE),
        (Exit(1), 0, S.EXITED, Reason.EXIT_CODE),
        (Exit(137, oom_killed=True), None, S.FAILED, Reason.OOM_KILLED),
        (Exit(137, oom_killed=True), 137, S.FAILED, Reason.OOM_KILLED),
        (Exit(1, oom_killed=True), 1, S.EXITED, Reason.CHILD_OOM_KILLED),
        (Exit(0, oom_killed=True), 0, S.EXITED, Reason.CHILD_OOM_KILLED),
        (Exit(137), None, S.FAILED, Reason.KILLED_OUTSIDE),
        (Exit(137), 0, S.FAILED, Reason.KILLED_OUTSIDE),
        # The command itself was killed, by itself: it says so, and the container ended with its code.
        (Exit(137), 137, S.EXITED, Reason.EXIT_CODE),
        (Exit(143), None, S.FAILED, Reason.STOPPED_OUTSIDE),
        (Exit(143), 143, S.EXITED, Reason.EXIT_CODE),
        (Exit(None), None, S.FAILED, Reason.CONTAINER_VANISHED),
        (None, None, S.FAILED, Reason.CONTAINER_VANISHED),
    ],
)
def test_the_cause_of_an_exit_is_told_truly(
    exit_: Exit | None, claimed: int | None, state: SessionState, reason: Reason
) -> None:
    assert finding(Session(exit=exit_, claimed_code=claimed)) == (state, reason)


@pytest.mark.parametrize("reason", list(Reason))
def test_only_a_users_stop_is_stopped(reason: Reason) -> None:
    state, told = finding(Session(ending=reason, exit=Exit(0)))
    assert told is reason
    assert state is (S.STOPPED if reason is Reason.STOPPED_BY_USER else S.FAILED)


def test_runs_are_open_between_command_and_completion() -> None:
    events: list[Event] = [
        LaunchStarted("10.0.0.16", ""),
        RunnerConnected("i1"),
        CommandSent("main", True, ("a",)),
        CommandSent("run-1", False, ("b",)),
    ]
    assert live(*events).open_runs == ("main", "run-1")
    session = live(*events, CommandCompleted(1, "run-1", False, 9))
    assert session.open_runs == ("main",)
    assert session.claimed_code is None


@pytest.mark.parametrize("event", EVENTS, ids=tag)
def test_an_event_survives_the_journal(event: Event) -> None:
    decoded = msgspec.json.decode(msgspec.json.encode(event), type=Event)
    assert msgspec.json.encode(decoded) == msgspec.json.encode(event)


def test_the_documentation_shows_every_transition() -> None:
    assert len(transition_table()) == len(TRANSITIONS) + 2


def test_how_long_ago_a_launch_was_is_told_by_the_uptime_and_across_boots_by_the_time_of_day() -> None:
    session = live(LaunchRequested(), LaunchStarted("10.0.0.16", "", "boot", 1_000))
    assert gone_ms(session, "boot", 61_000, now=10**12) == gone_ms(session, "boot", 61_000, now=0) == 60_000
    for unknown in ("other", ""):
        assert gone_ms(session, unknown, 61_000, now=5_002) == 5_000
        # The clock was set back behind the launch.
        assert gone_ms(session, unknown, 61_000, now=1) == 0
    older = live(LaunchRequested(), LaunchStarted("10.0.0.16", ""))
    assert gone_ms(older, "boot", 61_000, now=5_002) == gone_ms(older, "", 61_000, now=5_002) == 5_000


def test_a_boot_is_told_by_the_unit_or_the_kernel_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "boot_id"
    assert boot_id({}, file) == ""
    file.write_text("12345678-9abc-4def-8123-456789abcdef\n")
    assert boot_id({}, file) == "123456789abc4def8123456789abcdef"
    assert boot_id({"OPIFICIA_BOOT_ID": "told"}, file) == "told"
