"""Brings what sessions use, as the gateway reports it, to the store."""

import asyncio
import logging
from typing import Final

from control.db.database import StoreUnavailableError
from control.db.store import Store
from control.link import UsageBook

log = logging.getLogger(__name__)

# How often usage goes to the store.
USAGE_S: Final = 2.0


class UsageKeeper:
    """Stores what has changed in the book."""

    def __init__(self, store: Store, book: UsageBook) -> None:
        self._store = store
        self._book = book

    async def run(self) -> None:
        """Store usage every so often, until cancelled."""
        while True:
            await asyncio.sleep(USAGE_S)
            try:
                await self.put()
            except StoreUnavailableError as error:
                log.debug("usage waits for the database: %s", error)

    async def put(self) -> None:
        """Store now what has changed. Raises StoreUnavailableError; what was not stored is tried again with the next."""
        changed = self._book.take_unstored()
        while changed:
            session, epoch, used = changed.pop()
            try:
                await self._store.put_usage(session, epoch, used)
            except BaseException:
                for each in ((session, epoch, used), *changed):
                    self._book.not_stored(each[0], each[1])
                raise
