"""The queue: first come first served, never more than the host has."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control.plan.admission import Admission, AdmissionError, Capacity, Demand

SMALL = Demand(1, 1)


def queue(memory: int = 8, cpus: float = 8, sessions: int = 0, waiting: int = 100) -> Admission:
    return Admission(Capacity(memory, cpus, sessions, waiting))


def test_fifty_at_once_on_a_host_with_room_for_eight() -> None:
    admission = queue()
    names = [f"s{number}" for number in range(50)]
    for name in names:
        admission.enqueue(name, SMALL)
    assert admission.admit() == names[:8]
    assert admission.position("s8") == 1
    assert admission.position("s49") == 42
    started = names[:8]
    for name in names:
        admission.leave(name)
        started += admission.admit()
    assert started == names
    assert admission.admitted == 0


def test_a_large_one_is_not_overtaken() -> None:
    admission = queue()
    admission.enqueue("first", Demand(6, 1))
    admission.enqueue("large", Demand(8, 1))
    admission.enqueue("small", SMALL)
    assert admission.admit() == ["first"]
    admission.leave("first")
    assert admission.admit() == ["large"]


def test_cpus_and_count_limit_as_well() -> None:
    admission = queue(cpus=0.3)
    for number in range(4):
        admission.enqueue(f"s{number}", Demand(1, 0.1))
    assert len(admission.admit()) == 3
    counted = queue(sessions=2)
    for number in range(4):
        counted.enqueue(f"s{number}", SMALL)
    assert len(counted.admit()) == 2


def test_what_can_never_start_is_refused_at_once() -> None:
    with pytest.raises(AdmissionError) as refused:
        queue().enqueue("s", Demand(9, 1))
    assert not refused.value.later


def test_a_full_queue_says_try_later() -> None:
    admission = queue(waiting=1)
    admission.enqueue("a", Demand(8, 1))
    with pytest.raises(AdmissionError) as refused:
        admission.enqueue("b", SMALL)
    assert refused.value.later


def test_who_cannot_start_yet_goes_back_to_the_head() -> None:
    admission = queue()
    for name in "abc":
        admission.enqueue(name, SMALL)
    admitted = admission.admit()
    for name in reversed(admitted[1:]):
        admission.put_back(name)
    assert admission.positions() == {"b": 1, "c": 2}


def test_sessions_found_after_a_restart_may_exceed_the_capacity() -> None:
    admission = queue(memory=1)
    admission.hold("old", Demand(5, 1))
    admission.enqueue("new", SMALL)
    assert admission.admit() == []
    admission.leave("old")
    assert admission.admit() == ["new"]


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(1, 8), st.booleans()), max_size=60))
def test_order_and_capacity_hold_whatever_comes_and_goes(steps: list[tuple[int, int, bool]]) -> None:
    admission = queue()
    demands: dict[str, Demand] = {}
    arrived: list[str] = []
    started: list[str] = []
    running: list[str] = []
    for number, (memory, cpus, leaves) in enumerate(steps):
        if leaves and running:
            admission.leave(running.pop(0))
        else:
            name = f"s{number}"
            demands[name] = Demand(memory, cpus)
            arrived.append(name)
            admission.enqueue(name, demands[name])
        now = admission.admit()
        started += now
        running += now
        assert sum(demands[name].memory_bytes for name in running) <= 8
        assert sum(demands[name].cpus for name in running) <= 8
    assert started == arrived[: len(started)]
