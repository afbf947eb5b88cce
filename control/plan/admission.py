"""Who may start: first come first served by memory, CPUs and count. Pure and exact.

The first in the queue is never overtaken, however small the next one is: a large sandbox would otherwise wait for ever.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Demand:
    """What one sandbox takes of the host."""

    memory_bytes: int
    cpus: float


@dataclass(frozen=True, slots=True)
class Capacity:
    """What all sandboxes together may take; `sessions` 0 means no limit by count."""

    memory_bytes: int
    cpus: float
    sessions: int
    waiting: int


class AdmissionError(Exception):
    """The session cannot be queued; the message says why and what would help. `later`: trying again may succeed."""

    def __init__(self, message: str, *, later: bool) -> None:
        super().__init__(message)
        self.later = later


class Admission:
    """The queue and what is taken. No call waits; `admit` says who starts now."""

    def __init__(self, capacity: Capacity) -> None:
        self.capacity: Final = capacity
        self._waiting: dict[str, Demand] = {}
        self._admitted: dict[str, Demand] = {}

    def enqueue(self, session: str, demand: Demand) -> None:
        """Put a session at the end of the queue. Raises AdmissionError if it could never start, or the queue is full."""
        self._require_possible(demand)
        waiting = self.capacity.waiting
        if len(self._waiting) >= waiting:
            raise AdmissionError(f"{waiting} sessions are waiting already; try again later", later=True)
        self._waiting[session] = demand

    def restore(self, session: str, demand: Demand) -> None:
        """Put a session that waited before a restart at the end of the queue, however long that is.

        Raises AdmissionError if it could never start.
        """
        self._require_possible(demand)
        self._waiting[session] = demand

    def _require_possible(self, demand: Demand) -> None:
        limit = self.capacity
        if demand.memory_bytes > limit.memory_bytes or demand.cpus > limit.cpus:
            raise AdmissionError(
                f"the sandbox wants {demand.memory_bytes} bytes of memory and {demand.cpus:g} CPUs, "
                f"all sandboxes together may take {limit.memory_bytes} and {limit.cpus:g}; ask for less",
                later=False,
            )

    def hold(self, session: str, demand: Demand) -> None:
        """Count a session that runs already, found again after a restart. It may exceed the capacity."""
        self._admitted[session] = demand

    def admit(self) -> list[str]:
        """Take the sessions from the head of the queue that have room now, in order."""
        started = []
        while self._waiting:
            session, demand = next(iter(self._waiting.items()))
            if not self._fits(demand):
                break
            del self._waiting[session]
            self._admitted[session] = demand
            started.append(session)
        return started

    def put_back(self, session: str) -> None:
        """Put a session that was admitted but cannot start yet at the head of the queue again."""
        self._waiting = {session: self._admitted.pop(session), **self._waiting}

    def leave(self, session: str) -> None:
        """Forget a session: it waits no longer, or its container is gone."""
        self._waiting.pop(session, None)
        self._admitted.pop(session, None)

    def position(self, session: str) -> int | None:
        """Return the place in the queue, from 1; None if it does not wait."""
        for place, waiting in enumerate(self._waiting, 1):
            if waiting == session:
                return place
        return None

    def positions(self) -> dict[str, int]:
        """Return the place of every waiting session, from 1."""
        return {session: place for place, session in enumerate(self._waiting, 1)}

    @property
    def admitted(self) -> int:
        """How many sessions hold room."""
        return len(self._admitted)

    def _fits(self, demand: Demand) -> bool:
        limit, held = self.capacity, self._admitted.values()
        if limit.sessions and len(held) >= limit.sessions:
            return False
        memory = sum(each.memory_bytes for each in held) + demand.memory_bytes
        # CPUs are fractions; compare in thousandths, or 0.1 + 0.2 would exceed 0.3.
        cpus = sum(round(each.cpus * 1_000) for each in held) + round(demand.cpus * 1_000)
        return memory <= limit.memory_bytes and cpus <= round(limit.cpus * 1_000)
