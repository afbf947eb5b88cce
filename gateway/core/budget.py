"""Connection slots of one session: exact, first come first served, without a clock or a task of its own."""

from collections import OrderedDict
from collections.abc import Callable

Waiter = Callable[[], None]


class Slots:
    """A number of slots that connections hold, and the queue of those that wait for one.

    Who gets `True` from `acquire`, or is called as a waiter, holds one slot and must give it back by
    `release`, once. Who waits and no longer wants a slot says so by `cancel`.
    """

    __slots__ = ("_capacity", "_elsewhere", "_granting", "_held", "_max_waiters", "_waiters")

    def __init__(self, capacity: int, max_waiters: int) -> None:
        self._capacity = capacity
        self._max_waiters = max_waiters
        self._held = 0
        self._elsewhere = 0
        self._waiters: OrderedDict[Waiter, None] = OrderedDict()
        self._granting = False

    @property
    def capacity(self) -> int:
        """How many slots there are."""
        return self._capacity

    @property
    def held(self) -> int:
        """How many slots are held here; above `capacity` only after `resize` made it smaller."""
        return self._held

    @property
    def elsewhere(self) -> int:
        """How many of them are held in other processes."""
        return self._elsewhere

    @elsewhere.setter
    def elsewhere(self, number: int) -> None:
        self._elsewhere = number
        self._grant()

    @property
    def waiting(self) -> int:
        """How many wait for a slot."""
        return len(self._waiters)

    @property
    def crowded(self) -> bool:
        """Whether another waiter would be one too many; whoever needs a slot is then refused, not queued."""
        return len(self._waiters) >= self._max_waiters and not self._has_free()

    def acquire(self, waiter: Waiter) -> bool:
        """Take a slot and return True, or queue `waiter` to be called once it holds one and return False.

        `waiter` is called from within `release` or `resize`; it must not raise. Raises ValueError if it waits
        already, and OverflowError when `crowded`.
        """
        if waiter in self._waiters:
            raise ValueError("this waiter is in the queue already")
        if self._has_free():
            self._held += 1
            return True
        if len(self._waiters) >= self._max_waiters:
            raise OverflowError("no more waiters")
        self._waiters[waiter] = None
        return False

    def hold(self) -> None:
        """Count a slot as held, whatever the number: its holder had it before this queue was made."""
        self._held += 1

    def cancel(self, waiter: Waiter) -> bool:
        """Leave the queue. False if `waiter` is not in it: it holds a slot by now, or never waited."""
        return self._waiters.pop(waiter, self) is None

    def release(self) -> None:
        """Give one slot back; it goes to the first in the queue."""
        if self._held <= 0:
            raise ValueError("released a slot that nobody holds")
        self._held -= 1
        self._grant()

    def resize(self, capacity: int) -> None:
        """Change the number of slots. Those held stay held, whatever the number."""
        self._capacity = capacity
        self._grant()

    def _has_free(self) -> bool:
        # While others wait nobody passes them, not even in the moment between a release and their turn.
        return self._held + self._elsewhere < self._capacity and not self._waiters

    def _grant(self) -> None:
        # A waiter may release or acquire in its call. It finds this loop running and leaves the granting to
        # it, so that the order holds and a thousand waiters that give up at once do not nest a thousand
        # calls.
        if self._granting:
            return
        self._granting = True
        try:
            while self._waiters and self._held + self._elsewhere < self._capacity:
                waiter, _ = self._waiters.popitem(last=False)
                self._held += 1
                waiter()
        finally:
            self._granting = False
