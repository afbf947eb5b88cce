"""Slots: exact, in order, and all back at the end."""

from collections.abc import Callable

import pytest

from gateway.core.budget import Slots


class Line:
    """Waiters that write down when their turn came."""

    def __init__(self) -> None:
        self.served: list[str] = []

    def waiter(self, name: str) -> Callable[[], None]:
        return lambda: self.served.append(name)


def test_gives_as_many_slots_as_there_are() -> None:
    line = Line()
    slots = Slots(2, max_waiters=8)
    assert slots.acquire(line.waiter("a"))
    assert slots.acquire(line.waiter("b"))
    assert not slots.acquire(line.waiter("c"))
    assert (slots.held, slots.waiting, line.served) == (2, 1, [])


def test_a_returned_slot_goes_to_who_waits_longest() -> None:
    line = Line()
    slots = Slots(1, max_waiters=8)
    assert slots.acquire(line.waiter("a"))
    for name in "bcd":
        assert not slots.acquire(line.waiter(name))
    slots.release()
    slots.release()
    assert (line.served, slots.held, slots.waiting) == (["b", "c"], 1, 1)


def test_who_leaves_the_queue_is_passed_over() -> None:
    line = Line()
    slots = Slots(1, max_waiters=8)
    slots.acquire(line.waiter("a"))
    gone, stays = line.waiter("gone"), line.waiter("stays")
    slots.acquire(gone)
    slots.acquire(stays)
    assert slots.cancel(gone)
    slots.release()
    assert line.served == ["stays"]


def test_leaving_says_whether_a_slot_is_held_by_now() -> None:
    line = Line()
    slots = Slots(1, max_waiters=8)
    holder, waiter = line.waiter("a"), line.waiter("b")
    slots.acquire(holder)
    slots.acquire(waiter)
    assert not slots.cancel(holder)
    slots.release()
    assert not slots.cancel(waiter)
    assert slots.held == 1


def test_is_crowded_when_another_waiter_would_be_one_too_many() -> None:
    line = Line()
    slots = Slots(1, max_waiters=1)
    assert not slots.crowded
    slots.acquire(line.waiter("a"))
    assert not slots.crowded
    slots.acquire(line.waiter("b"))
    assert slots.crowded
    with pytest.raises(OverflowError):
        slots.acquire(line.waiter("c"))
    slots.release()
    assert not slots.crowded


def test_without_room_to_wait_a_free_slot_is_still_given() -> None:
    slots = Slots(1, max_waiters=0)
    assert not slots.crowded
    assert slots.acquire(lambda: None)
    assert slots.crowded


def test_a_session_without_slots_gives_none() -> None:
    slots = Slots(0, max_waiters=1)
    assert not slots.acquire(lambda: None)
    assert slots.held == 0


def test_more_slots_serve_who_waits() -> None:
    line = Line()
    slots = Slots(0, max_waiters=8)
    for name in "abc":
        slots.acquire(line.waiter(name))
    slots.resize(2)
    assert (line.served, slots.held, slots.capacity) == (["a", "b"], 2, 2)


def test_fewer_slots_let_who_holds_one_finish() -> None:
    line = Line()
    slots = Slots(3, max_waiters=8)
    for name in "abcd":
        slots.acquire(line.waiter(name))
    slots.resize(1)
    slots.release()
    slots.release()
    assert (line.served, slots.held) == ([], 1)
    slots.release()
    assert (line.served, slots.held) == (["d"], 1)


def test_refuses_to_take_back_what_nobody_holds() -> None:
    slots = Slots(1, max_waiters=1)
    with pytest.raises(ValueError, match="nobody holds"):
        slots.release()


def test_nobody_waits_twice() -> None:
    slots = Slots(0, max_waiters=8)
    waiter = lambda: None  # noqa: E731
    slots.acquire(waiter)
    with pytest.raises(ValueError, match="already"):
        slots.acquire(waiter)


def test_a_thousand_waiters_that_give_up_in_their_turn_do_not_nest() -> None:
    slots = Slots(1, max_waiters=10_000)
    depth = 0
    served = 0

    def waiter() -> None:
        nonlocal depth, served
        depth += 1
        assert depth == 1
        served += 1
        slots.release()
        depth -= 1

    assert slots.acquire(lambda: None)
    for _ in range(10_000):
        slots.acquire(lambda: waiter())
    slots.release()
    assert (served, slots.held, slots.waiting) == (10_000, 0, 0)


def test_who_asks_while_slots_are_given_out_passes_nobody() -> None:
    line = Line()
    slots = Slots(0, max_waiters=8)

    def first() -> None:
        line.served.append("first")
        assert not slots.acquire(line.waiter("late"))

    slots.acquire(first)
    slots.acquire(line.waiter("second"))
    slots.resize(2)
    assert line.served == ["first", "second"]


def test_who_asks_during_a_turn_waits_behind_the_queue() -> None:
    line = Line()
    slots = Slots(1, max_waiters=8)

    def first() -> None:
        line.served.append("first")
        assert not slots.acquire(line.waiter("late"))
        slots.release()

    slots.acquire(lambda: None)
    slots.acquire(first)
    slots.acquire(line.waiter("second"))
    slots.release()
    assert line.served == ["first", "second"]
    slots.release()
    assert line.served == ["first", "second", "late"]


def test_slots_that_are_held_elsewhere_are_not_there() -> None:
    line = Line()
    slots = Slots(3, max_waiters=8)
    slots.elsewhere = 2
    assert slots.acquire(line.waiter("a"))
    assert not slots.acquire(line.waiter("b"))
    assert not slots.acquire(line.waiter("c"))
    slots.elsewhere = 1
    assert (line.served, slots.held, slots.elsewhere) == (["b"], 2, 1)
    slots.release()
    slots.elsewhere = 3
    slots.release()
    assert line.served == ["b", "c"]
    slots.elsewhere = 0
    assert (slots.held, slots.waiting) == (1, 0)
