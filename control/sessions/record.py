"""Records what happens to sessions: first the journal, then the database, then whoever waits for it.

While the database is away a session's events stay in its journal, and go to the database, in order, when it is back.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import msgspec

from control.db.database import StoreUnavailableError
from control.db.rows import StoredEvent, StoredSession
from control.db.store import Store
from control.plan.session import Event, NotAllowed, Session, advance
from control.sessions import folders, journal

log = logging.getLogger(__name__)

# How soon the database is asked again after it failed.
RETRY_S: Final = 1.0
# Syncs of different sessions wait for the disk side by side.
_SYNC_THREADS: Final = 4


def now_ms() -> int:
    """Return the time in milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


async def see_through(work: asyncio.Future[Any]) -> bool:
    """Wait for `work` to end even when cancelled meanwhile; return whether that happened. Raises what `work` raised."""
    cancelled = False
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            cancelled = True
    work.result()
    return cancelled


class Signal:
    """Wakes all who wait, each time it is raised."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def raise_(self) -> None:
        """Wake the present waiters."""
        self._event.set()
        self._event = asyncio.Event()

    def ticket(self) -> asyncio.Event:
        """Return what is set at the next raise. Taken before looking, so that nothing that comes meanwhile is missed."""
        return self._event


class Record:
    """One live session in memory: its row, what it has come to, and what the database has yet to learn."""

    def __init__(self, stored: StoredSession, folder: Path) -> None:
        self.stored: Final = stored
        self.id: Final = stored.id
        self.spec: Final = stored.spec
        self.folder: Final = folder
        self._known_since = time.monotonic()
        self._age_ms = max(0, now_ms() - stored.created_at)
        self.life: Session = stored.life
        self.number = stored.last_event
        self.unstored: list[StoredEvent] = []
        # An event was recorded; output was kept.
        self.changed: Final = Signal()
        self.logged: Final = Signal()
        self.lock: Final = asyncio.Lock()

    @property
    def age_ms(self) -> int:
        """How long ago the session was created; a clock that is set meanwhile changes nothing about it."""
        return self._age_ms + int((time.monotonic() - self._known_since) * 1000)

    @property
    def journal(self) -> Path:
        """The path of the session's journal."""
        return self.folder / "events.jsonl"

    def view(self) -> StoredSession:
        """Return the session as it is now, whether or not the database knows."""
        return msgspec.structs.replace(self.stored, life=self.life, last_event=self.number)


def replay(life: Session, number: int, journaled: Sequence[StoredEvent]) -> tuple[Session, list[StoredEvent]]:
    """Return what a session has come to by the events of its journal after `number`, and those that can have happened."""
    known: list[StoredEvent] = []
    for stored in journaled:
        following = advance(life, stored.event, stored.at)
        if stored.number != number + 1 or isinstance(following, NotAllowed):
            break
        life, number = following, stored.number
        known.append(stored)
    return life, known


class Recorder:
    """Writes events. `run` must be running for the database to catch up after it was away."""

    def __init__(self, store: Store, clock: Callable[[], int] = now_ms) -> None:
        self._store = store
        self._clock = clock
        self._threads = ThreadPoolExecutor(_SYNC_THREADS, "journal")
        self._behind: dict[str, Record] = {}
        # Whether the database's last answer was a failure.
        self._is_away = False
        self._wake = asyncio.Event()

    async def record(self, record: Record, event: Event, *, patient: bool = True) -> Session | NotAllowed:
        """Store `event` and return what the session has come to, or NotAllowed when it cannot happen now.

        On return the event is on disk. A journal that cannot be written (a full disk) is tried again until it can, or,
        unless `patient`, raises OSError: the event then has not happened.
        """
        async with record.lock:
            # Read once: the journal must say what the session came to, to the millisecond.
            at = self._clock()
            life = advance(record.life, event, at)
            if isinstance(life, NotAllowed):
                return life
            await self._write(record, [(event, life)], at, patient)
        return life

    async def record_all(self, record: Record, events: Sequence[Event]) -> None:
        """Store several events with one sync; those that cannot happen now are left out."""
        async with record.lock:
            at = self._clock()
            life, allowed = record.life, []
            for event in events:
                following = advance(life, event, at)
                if not isinstance(following, NotAllowed):
                    life = following
                    allowed.append((event, life))
            if allowed:
                await self._write(record, allowed, at, patient=True)

    async def restore(self, record: Record) -> None:
        """Bring a record found in the database up to its journal.

        A folder that is gone (removed by hand, a disk that was not mounted) is made anew: nothing could be recorded otherwise.
        """
        if not await asyncio.to_thread(record.folder.exists):
            log.error("session %s: its folder is gone, and with it its journal and output so far", record.id)
            await asyncio.to_thread(folders.make, record.folder)
        missing = await asyncio.to_thread(journal.read, record.journal, record.number)
        async with record.lock:
            record.life, known = replay(record.life, record.number, missing)
            record.number += len(known)
            record.unstored += known
            await self._flush(record)

    def is_stored(self, record: Record) -> bool:
        """Tell whether the database knows all of a session's events."""
        return not record.unstored

    def behind(self) -> int:
        """Return for how many sessions the database has yet to catch up."""
        return len(self._behind)

    async def run(self) -> None:
        """Bring the database up to the journals whenever it had failed."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._behind:
                await asyncio.sleep(RETRY_S)
                for record in list(self._behind.values()):
                    if not await self._catch_up(record):
                        break

    async def close(self) -> None:
        """Write what can still be written, and end."""
        for record in list(self._behind.values()):
            async with record.lock:
                if not await self._flush(record):
                    break
        self._threads.shutdown()

    async def _write(self, record: Record, events: Sequence[tuple[Event, Session]], at: int, patient: bool) -> None:
        lines = [StoredEvent(record.number + n, at, event) for n, (event, _life) in enumerate(events, 1)]
        loop = asyncio.get_running_loop()
        while True:
            writing = loop.run_in_executor(self._threads, journal.append, record.journal, lines)
            try:
                # Once begun, a write is seen through: memory must not stay behind the disk.
                cancelled = await see_through(writing)
            except OSError as error:
                if not patient:
                    raise
                log.error("session %s: its journal cannot be written, trying again: %s", record.id, error)
                await asyncio.sleep(RETRY_S)
            else:
                break
        record.life, record.number = events[-1][1], lines[-1].number
        record.unstored.extend(lines)
        if cancelled:
            self._fall_behind(record)
            raise asyncio.CancelledError
        if self._is_away or record.id in self._behind:
            # A database that hangs takes its time to fail each time, and what runs does not wait for it: `run` asks again.
            self._fall_behind(record)
        else:
            await self._flush(record)

    async def _catch_up(self, record: Record) -> bool:
        # Without its lock: events go on to the journal while the database is asked. Nobody else sends it this session's.
        if not await self._append(record):
            return False
        if not record.unstored:
            return await self._flush(record)
        # More came meanwhile. Now that the database answers they may wait for it, so that this comes to an end.
        async with record.lock:
            return await self._flush(record)

    async def _append(self, record: Record) -> bool:
        known = list(record.unstored)
        if not known:
            return True
        try:
            await self._store.append(record.id, known, record.life)
        except StoreUnavailableError as error:
            self._is_away = True
            if record.id not in self._behind:
                log.warning("session %s: its journal is ahead of the database: %s", record.id, error)
            self._fall_behind(record)
            return False
        except asyncio.CancelledError:
            self._fall_behind(record)
            raise
        self._is_away = False
        del record.unstored[: len(known)]
        return True

    async def _flush(self, record: Record) -> bool:
        """Send all that the database has yet to learn of a session whose lock is held."""
        if not await self._append(record):
            return False
        self._behind.pop(record.id, None)
        record.changed.raise_()
        return True

    def _fall_behind(self, record: Record) -> None:
        self._behind[record.id] = record
        self._wake.set()
        record.changed.raise_()
