"""What is done about what is found at a start."""

from collections.abc import Iterable, Mapping

import pytest

from control.plan import reconcile as plan
from control.plan.reconcile import Action, Adopt, CleanUp, Fail, Found, Refuse, Relaunch, RemoveStray, Requeue
from control.plan.session import Reason, Session, SessionState

S = SessionState
LIVE = (S.LAUNCHING, S.CONNECTED, S.RUNNING)


def reconcile(sessions: Mapping[str, Session], containers: Iterable[Found]) -> list[Action]:
    """All sessions have the policy that the containers were made under, unless a container says otherwise."""
    return plan.reconcile(sessions, dict.fromkeys(sessions, ""), containers)


@pytest.mark.parametrize("state", LIVE)
def test_a_live_session_whose_container_was_started_is_kept(state: SessionState) -> None:
    assert reconcile({"s": Session(state=state, container="c")}, [Found("c", "s", True)]) == [Adopt("s", "c")]


@pytest.mark.parametrize("state", LIVE)
def test_a_live_session_whose_container_is_gone_has_failed(state: SessionState) -> None:
    assert reconcile({"s": Session(state=state, container="c")}, []) == [Fail("s", vanished=True)]


@pytest.mark.parametrize("state", LIVE)
def test_a_container_made_under_another_policy_is_not_kept(state: SessionState) -> None:
    sessions = {"s": Session(state=state, container="c")}
    for label in ("other", ""):
        assert plan.reconcile(sessions, {"s": "mine"}, [Found("c", "s", True, label)]) == [Refuse("s", "c")]
    assert plan.reconcile(sessions, {"s": "mine"}, [Found("c", "s", True, "mine")]) == [Adopt("s", "c")]


def test_a_launch_that_never_made_a_container_begins_anew() -> None:
    assert reconcile({"s": Session(state=S.LAUNCHING)}, []) == [Relaunch("s", "")]


def test_a_container_made_in_the_moment_of_the_crash_is_found_by_its_label() -> None:
    assert reconcile({"s": Session(state=S.LAUNCHING)}, [Found("c", "s", True)]) == [Adopt("s", "c")]


@pytest.mark.parametrize("known", ["", "c"])
def test_a_container_that_was_never_started_is_made_anew(known: str) -> None:
    found = reconcile({"s": Session(state=S.LAUNCHING, container=known)}, [Found("c", "s", False)])
    assert found == [Relaunch("s", "c")]


def test_what_a_cut_launch_left_goes_before_the_next_launch_also_after_another_crash() -> None:
    assert reconcile({"s": Session(waiting=True)}, [Found("c", "s", False)]) == [Relaunch("s", "c")]


def test_a_launch_that_was_to_end_does_not_begin_anew() -> None:
    life = Session(state=S.LAUNCHING, container="c", ending=Reason.STOPPED_BY_USER)
    found = reconcile({"s": life}, [Found("c", "s", False)])
    assert found == [Fail("s", vanished=False), RemoveStray("c", "s", ran=False)]


def test_waiting_sessions_wait_again_in_their_order() -> None:
    sessions = {"b": Session(waiting=True), "a": Session(waiting=True), "idle": Session()}
    assert reconcile(sessions, []) == [Requeue("b"), Requeue("a")]


@pytest.mark.parametrize("state", [S.EXITED, S.FAILED, S.STOPPED])
def test_an_ended_session_is_cleaned_up_with_its_container(state: SessionState) -> None:
    assert reconcile({"s": Session(state=state, container="c")}, [Found("c", "s", True)]) == [CleanUp("s")]


def test_a_container_that_no_session_knows_is_stray() -> None:
    assert reconcile({}, [Found("c", "unknown", True)]) == [RemoveStray("c", "unknown", ran=True)]


def test_a_second_container_of_a_live_session_is_stray() -> None:
    sessions = {"s": Session(state=S.RUNNING, container="c1")}
    found = reconcile(sessions, [Found("c1", "s", True), Found("c2", "s", True)])
    assert found == [Adopt("s", "c1"), RemoveStray("c2", "s", ran=True)]
