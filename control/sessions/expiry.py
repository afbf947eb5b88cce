"""Ends sessions that were created and never launched: whoever made them has gone."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from control.plan.session import SessionState
from control.sessions.record import Record

LOOK_S: Final = 60.0


class Expiry:
    """Finds them. `allowed_ms` 0: they may wait for ever."""

    def __init__(
        self, records: Callable[[], Iterable[Record]], end: Callable[[Record, str], Awaitable[None]], allowed_ms: int
    ) -> None:
        self._records = records
        self._end = end
        self._allowed_ms = allowed_ms

    async def run(self) -> None:
        """Look every so often, until cancelled."""
        while self._allowed_ms:
            for record in list(self._records()):
                if self._is_over(record):
                    allowed_h = self._allowed_ms / 3_600_000
                    await self._end(record, f"it was not launched within {allowed_h:g} h of its creation")
            await asyncio.sleep(LOOK_S)

    def _is_over(self, record: Record) -> bool:
        life = record.life
        # With the lock free the end is recorded before anybody else's step: nothing is awaited in between.
        return (
            life.state is SessionState.CREATED
            and not life.waiting
            and not record.lock.locked()
            and record.age_ms >= self._allowed_ms
        )
