"""Forgets sessions that ended: their folder, then their record. A live session is never touched.

The folder goes first: a record without a folder is forgotten at the next try, a folder without a record would stay for ever.
"""

import asyncio
import logging
import time
from pathlib import Path
from typing import Final

from control.db.database import StoreUnavailableError
from control.db.store import Store
from control.plan.retention import Calendar, Keep, to_forget
from control.sessions import folders
from control.sessions.record import now_ms

log = logging.getLogger(__name__)

# How much a burst of sessions may leave beyond the limits before it is noticed.
SWEEP_S: Final = 60.0
# So many are read and forgotten at once; the database serves others in between.
BATCH: Final = 100


class Retention:
    """Keeps ended sessions within what is allowed."""

    def __init__(self, store: Store, sessions_folder: Path, keep: Keep) -> None:
        self._store = store
        self._folder = sessions_folder
        self._keep = keep

    async def sweep(self) -> None:
        """Forget what is too old or too much, every so often, until cancelled."""
        calendar = Calendar()
        while True:
            try:
                count = await self.enforce(calendar.now_ms(now_ms(), time.monotonic_ns() // 1_000_000))
            except (StoreUnavailableError, OSError) as error:
                log.warning("old sessions cannot be forgotten now: %s", error)
            else:
                if count:
                    log.info("%d sessions that ended are forgotten", count)
            await asyncio.sleep(SWEEP_S)

    async def enforce(self, at_ms: int) -> int:
        """Forget what is too old or too much at a time; return how many. Raises StoreUnavailableError, OSError."""
        if self._keep.bytes:
            await self._measure()
        forgotten = 0
        while True:
            count, size = await self._store.kept()
            oldest = await self._store.oldest_kept(BATCH)
            if not (old := to_forget(oldest, count, size, self._keep, at_ms)):
                return forgotten
            await self._forget(old)
            forgotten += len(old)

    async def _measure(self) -> None:
        """Note what the folders of those take that ended since the last look; a folder does not change after the end."""
        while unmeasured := await self._store.unmeasured(BATCH):
            sizes = {each: await asyncio.to_thread(folders.size, self._folder / each) for each in unmeasured}
            await self._store.put_sizes(sizes)

    async def _forget(self, old: list[str]) -> None:
        for session in old:
            folder = self._folder / session
            await asyncio.to_thread(folders.remove, folder)
            if await asyncio.to_thread(folder.exists):
                # Its record is all that still says whose files these are.
                raise OSError(f"{folder} cannot be removed")
        await self._store.forget(old)
