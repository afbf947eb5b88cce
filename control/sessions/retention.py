"""Forgets sessions that ended long ago: their folder first, then their record, so that a crash in between leaves nothing behind.

The gateway's egress logs are the gateway's files; systemd-tmpfiles ages them (systemd/tmpfiles).
"""

import asyncio
import logging
from pathlib import Path
from typing import Final

from control.db.store import Store, StoreUnavailableError
from control.sessions import folders
from control.sessions.record import now_ms

log = logging.getLogger(__name__)

# Ages are days: hourly is often enough.
SWEEP_S: Final = 3600.0
# So many are read and forgotten at once; the database serves others in between.
BATCH: Final = 100


class Retention:
    """Keeps ended sessions for `keep_ms`; 0 keeps them for ever."""

    def __init__(self, store: Store, sessions_folder: Path, keep_ms: int) -> None:
        self._store = store
        self._folder = sessions_folder
        self._keep_ms = keep_ms

    async def sweep(self) -> None:
        """Forget what is old enough, every so often, until cancelled."""
        while self._keep_ms:
            try:
                count = await self.forget(now_ms() - self._keep_ms)
            except (StoreUnavailableError, OSError) as error:
                log.warning("old sessions cannot be forgotten now: %s", error)
            else:
                if count:
                    log.info("%d sessions that ended long ago are forgotten", count)
            await asyncio.sleep(SWEEP_S)

    async def forget(self, before_ms: int) -> int:
        """Forget all sessions that ended before a time; return how many. Raises StoreUnavailableError, OSError."""
        count = 0
        while old := await self._store.ended_before(before_ms, BATCH):
            for session in old:
                folder = self._folder / session
                await asyncio.to_thread(folders.remove, folder)
                if await asyncio.to_thread(folder.exists):
                    # Its record is all that still says whose files these are.
                    raise OSError(f"{folder} cannot be removed")
            await self._store.forget(old)
            count += len(old)
        return count
