"""Closes tunnels in which no byte passed for the idle limit. The byte path pays nothing for it: a sweep compares counts."""

import asyncio

from gateway.core.verdict import CloseReason
from gateway.net.splice import Splicer

# A tunnel is closed at most this part of the limit late.
SWEEPS_PER_LIMIT = 8


class IdleSweep:
    """Watches splicers; those that stood still for `SWEEPS_PER_LIMIT` sweeps are closed."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limit_s: float) -> None:
        self._loop = loop
        self._period = max(limit_s / SWEEPS_PER_LIMIT, 0.005)
        self._still: dict[Splicer, int] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._still)

    def add(self, splicer: Splicer, still: int = 0) -> None:
        """Watch a splicer, which has stood still for so many sweeps already."""
        self._still[splicer] = still
        if self._timer is None:
            self._timer = self._loop.call_later(self._period, self._sweep)

    def discard(self, splicer: Splicer) -> None:
        """Stop watching; it closed."""
        self._still.pop(splicer, None)

    def still(self, splicer: Splicer) -> int:
        """Return for how many sweeps a splicer has stood still."""
        if splicer.moved():
            # Asking takes note of what moved: should it go on here after all, the next sweep would not see it.
            self._still[splicer] = 0
        return self._still[splicer]

    def close(self) -> None:
        """Stop."""
        self._still.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _sweep(self) -> None:
        idle = []
        for splicer, still in self._still.items():
            if splicer.moved():
                self._still[splicer] = 0
            elif still >= SWEEPS_PER_LIMIT:
                idle.append(splicer)
            else:
                self._still[splicer] = still + 1
        for splicer in idle:
            splicer.close(CloseReason.IDLE)
        self._timer = self._loop.call_later(self._period, self._sweep) if self._still else None
