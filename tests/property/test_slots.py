"""Slots as a state machine: never more held than there are, everyone served in order, all back at the end."""

from collections.abc import Callable

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from gateway.core.budget import Slots


class SlotsMachine(RuleBasedStateMachine):
    """Compares Slots with a list of holders and a list of waiters."""

    people = Bundle("people")

    def __init__(self) -> None:
        super().__init__()
        self.capacity = 2
        self.max_waiters = 4
        self.slots = Slots(self.capacity, self.max_waiters)
        self.waiters: dict[int, Callable[[], None]] = {}
        self.holders: list[int] = []
        self.queue: list[int] = []
        self.served: list[int] = []
        self.numbers = 0

    def _serve_queue(self) -> None:
        """Let the model grant what the real one should have granted, and compare the order."""
        expected = []
        while self.queue and len(self.holders) < self.capacity:
            number = self.queue.pop(0)
            self.holders.append(number)
            expected.append(number)
        assert self.served == expected
        self.served.clear()

    @rule(target=people)
    def acquire(self) -> int:
        self.numbers += 1
        number = self.numbers
        waiter = self.waiters[number] = lambda: self.served.append(number)
        free = len(self.holders) < self.capacity and not self.queue
        assert self.slots.crowded is (not free and len(self.queue) >= self.max_waiters)
        if self.slots.crowded:
            return number
        assert self.slots.acquire(waiter) is free
        (self.holders if free else self.queue).append(number)
        return number

    @rule(number=people)
    def cancel(self, number: int) -> None:
        assert self.slots.cancel(self.waiters[number]) is (number in self.queue)
        if number in self.queue:
            self.queue.remove(number)

    @precondition(lambda self: self.holders)
    @rule()
    def release(self) -> None:
        self.holders.pop()
        self.slots.release()
        self._serve_queue()

    @rule(capacity=st.integers(0, 4))
    def resize(self, capacity: int) -> None:
        self.capacity = capacity
        self.slots.resize(capacity)
        self._serve_queue()

    @invariant()
    def counts_are_exact(self) -> None:
        assert self.slots.held == len(self.holders)
        assert self.slots.waiting == len(self.queue)
        assert not (self.queue and len(self.holders) < self.capacity)

    def teardown(self) -> None:
        while self.holders or self.queue:
            if not self.holders:
                self.capacity = 1
                self.slots.resize(1)
                self._serve_queue()
            self.holders.pop()
            self.slots.release()
            self._serve_queue()
        assert self.slots.held == 0


TestSlots = SlotsMachine.TestCase
