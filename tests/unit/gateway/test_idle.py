"""The idle sweep by itself: what it is asked before a hand-over changes nothing for a tunnel that stays."""

import asyncio
from typing import cast

from gateway.core.verdict import CloseReason
from gateway.net.idle import SWEEPS_PER_LIMIT, IdleSweep
from gateway.net.splice import Splicer


class Moving:
    """Stands for a splicer: `moved` tells once of each movement."""

    def __init__(self) -> None:
        self.has_moved = False
        self.closed: CloseReason | None = None

    def moved(self) -> bool:
        moved, self.has_moved = self.has_moved, False
        return moved

    def close(self, reason: CloseReason) -> None:
        self.closed = reason


async def test_a_byte_that_was_seen_when_a_hand_over_was_prepared_still_counts_if_it_fails() -> None:
    sweep = IdleSweep(asyncio.get_running_loop(), 3600.0)
    splicer = Moving()
    # One sweep more without a byte, and it would be closed.
    sweep.add(cast("Splicer", splicer), SWEEPS_PER_LIMIT)
    splicer.has_moved = True
    assert sweep.still(cast("Splicer", splicer)) == 0
    sweep._sweep()
    assert splicer.closed is None
    assert sweep.still(cast("Splicer", splicer)) == 1
    sweep.close()
