"""Reads and writes the store. One set of queries for SQLite and PostgreSQL.

It knows rows, not what they mean for a container. Every call is bounded in time; a database that is away or hangs is
StoreUnavailableError, and the caller decides what goes on without it. One process writes.
"""

import asyncio
import contextlib
import hashlib
import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import alembic.command
import alembic.config
import msgspec
import sqlalchemy as sa
from sqlalchemy import event as sa_event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from control.db.tables import events, idempotency_keys, sessions, usage
from control.plan.session import Event, LaunchStarted, Session, SessionState
from control.spec import SandboxSpec
from gateway.contract.policy import Usage

T = TypeVar("T")

# Longer than a busy database takes for one small transaction, short enough that an operator's request gets its 503.
CALL_TIMEOUT_S: Final = 10.0
MIGRATION_TIMEOUT_S: Final = 600.0
# A call that hangs is given up for good after so many times its timeout.
HANGING_FACTOR: Final = 6
READERS: Final = 4
_DRIVERS: Final = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg"}
_MIGRATIONS: Final = Path(__file__).with_name("migrations")


class StoreUnavailableError(Exception):
    """The database does not answer; the message says what it said."""


class SessionExistsError(Exception):
    """There is a session with this id."""


class KeyReusedError(Exception):
    """The idempotency key was used for another request."""


class StoredEvent(msgspec.Struct, frozen=True):
    """One event of a session, as the journal and the database keep it."""

    number: int
    at: int
    event: Event


class StoredSession(msgspec.Struct, frozen=True, kw_only=True):
    """One session's row."""

    id: str
    run_id: str
    position: int
    created_at: int
    memory_bytes: int
    cpus: float
    spec: SandboxSpec
    life: Session
    last_event: int = 0
    cleaned: bool = False


_encode: Final = msgspec.json.Encoder().encode
_life_decoder: Final = msgspec.json.Decoder(Session)
_spec_decoder: Final = msgspec.json.Decoder(SandboxSpec)
_event_decoder: Final[msgspec.json.Decoder[Event]] = msgspec.json.Decoder(Event)
_usage_decoder: Final = msgspec.json.Decoder(Usage)


def request_digest(body: bytes) -> str:
    """Return what identifies a request under its idempotency key."""
    return hashlib.sha256(body).hexdigest()


class Store:
    """The database of one control daemon."""

    def __init__(self, url: str, *, call_timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Prepare access to `sqlite:///path` or `postgresql://…`. Raises ValueError for any other kind."""
        parsed = make_url(url)
        driver = _DRIVERS.get(parsed.drivername)
        if driver is None:
            raise ValueError("must begin with sqlite:/// or postgresql://")
        self._timeout = call_timeout_s
        # One writer at a time: SQLite refuses a second one, and one process has no need of two.
        self._writing = asyncio.Semaphore(1)
        self._reading = asyncio.Semaphore(READERS)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False
        options: dict[str, Any] = {}
        if driver == _DRIVERS["postgresql"]:
            # Ask before each use whether a pooled connection still lives: the database may have been restarted.
            options = {"pool_pre_ping": True, "connect_args": {"connect_timeout": max(2, int(call_timeout_s))}}
        self._engine: AsyncEngine = create_async_engine(parsed.set(drivername=driver), **options)
        if driver == _DRIVERS["sqlite"]:
            sa_event.listen(self._engine.sync_engine, "connect", _prepare_sqlite)

    async def close(self) -> None:
        """Wait for what is under way, and close all connections. Later calls find the store unavailable."""
        self._closed = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._timeout)
        for task in self._tasks:
            task.cancel()
        await self._engine.dispose()

    async def migrate(self) -> None:
        """Bring the tables to this version's form. Raises StoreUnavailableError."""
        config = alembic.config.Config()
        config.set_main_option("script_location", str(_MIGRATIONS))

        def upgrade(connection: sa.Connection) -> None:
            config.attributes["connection"] = connection
            alembic.command.upgrade(config, "head")

        async def work(connection: AsyncConnection) -> None:
            await connection.run_sync(upgrade)

        await asyncio.to_thread(self._try_sqlite)
        await self._write(work, MIGRATION_TIMEOUT_S)

    def _try_sqlite(self) -> None:
        """Open the file once by hand: aiosqlite leaves a thread behind for each file that cannot be opened."""
        path = self._engine.url.database
        if self._engine.dialect.name != "sqlite" or not path:
            return
        try:
            with contextlib.closing(sqlite3.connect(path)) as connection:
                connection.execute("PRAGMA user_version")
        except sqlite3.Error as error:
            raise StoreUnavailableError(f"the database {path} is not available: {error}") from error

    async def ping(self) -> None:
        """Ask the database for a sign of life. Raises StoreUnavailableError."""
        await self._read(sa.select(1))

    async def insert(self, new: StoredSession, key: str = "", digest: str = "") -> StoredSession:
        """Store a new session, or return the one that the same key and request made before.

        Raises SessionExistsError, KeyReusedError, StoreUnavailableError.
        """

        async def work(connection: AsyncConnection) -> StoredSession:
            if key:
                query = sa.select(idempotency_keys).where(idempotency_keys.c.key == key)
                known = (await connection.execute(query)).one_or_none()
                if known is not None:
                    if known.request_sha256 != digest:
                        raise KeyReusedError
                    row = await connection.execute(sa.select(sessions).where(sessions.c.id == known.session))
                    return _session(row.one())
            try:
                await connection.execute(sa.insert(sessions).values(_row(new)))
            except IntegrityError as error:
                raise SessionExistsError from error
            if key:
                values = {"key": key, "request_sha256": digest, "session": new.id}
                await connection.execute(sa.insert(idempotency_keys).values(values))
            return new

        return await self._write(work)

    async def append(self, session: str, new: Sequence[StoredEvent], life: Session) -> None:
        """Store events and what the session has come to by them, together or not at all.

        Repeating a call that may have succeeded is harmless: events that are stored already are left out.
        """
        given = list(new)

        async def work(connection: AsyncConnection) -> None:
            last = await connection.scalar(sa.select(sessions.c.last_event).where(sessions.c.id == session))
            missing = [each for each in given if each.number > (last or 0)]
            if last is None or not missing:
                return
            await connection.execute(sa.insert(events), [_event_row(session, each) for each in missing])
            values = {**_life_columns(life), "last_event": missing[-1].number}
            # Only with the event that assigns it: a later one must not take back an address that was released.
            if any(isinstance(each.event, LaunchStarted) for each in missing):
                values["address"] = life.address
            await connection.execute(sa.update(sessions).where(sessions.c.id == session).values(values))

        await self._write(work)

    async def release_address(self, session: str) -> None:
        """Note that the gateway grants the session's address to nobody any more."""
        await self._update(session, address=None)

    async def mark_cleaned(self, session: str) -> None:
        """Note that the session's container and volume are gone."""
        await self._update(session, cleaned=True)

    async def _update(self, session: str, **values: object) -> None:
        async def work(connection: AsyncConnection) -> None:
            await connection.execute(sa.update(sessions).where(sessions.c.id == session).values(values))

        await self._write(work)

    async def get(self, session: str) -> StoredSession | None:
        """Return one session."""
        rows = await self._read(sa.select(sessions).where(sessions.c.id == session))
        return _session(rows[0]) if rows else None

    async def page(
        self, *, states: Sequence[SessionState] = (), before: int | None = None, limit: int = 100
    ) -> list[StoredSession]:
        """Return sessions from the newest to the oldest; `before` is the position of the last one seen."""
        query = sa.select(sessions).order_by(sessions.c.position.desc()).limit(limit)
        if states:
            query = query.where(sessions.c.state.in_([state.value for state in states]))
        if before is not None:
            query = query.where(sessions.c.position < before)
        return [_session(row) for row in await self._read(query)]

    async def count_by_state(self) -> dict[str, int]:
        """Return how many sessions are in each state."""
        query = sa.select(sessions.c.state, sa.func.count().label("number")).group_by(sessions.c.state)
        return {row.state: row.number for row in await self._read(query)}

    async def unfinished(self) -> list[StoredSession]:
        """Return the sessions that are not cleaned up, oldest first."""
        query = sa.select(sessions).where(sessions.c.cleaned.is_(False)).order_by(sessions.c.position)
        return [_session(row) for row in await self._read(query)]

    async def held_addresses(self) -> dict[str, str]:
        """Return the addresses that may still be granted, by session."""
        query = sa.select(sessions.c.id, sessions.c.address).where(sessions.c.address.is_not(None))
        return {row.id: row.address for row in await self._read(query)}

    async def last_position(self) -> int:
        """Return the position of the newest session, 0 if there is none."""
        return (await self._read(sa.select(sa.func.max(sessions.c.position))))[0][0] or 0

    async def events(self, session: str, after: int = 0, limit: int = 1_000) -> list[StoredEvent]:
        """Return events of a session with numbers above `after`, in order."""
        mine = (events.c.session == session) & (events.c.number > after)
        rows = await self._read(sa.select(events).where(mine).order_by(events.c.number).limit(limit))
        return [StoredEvent(row.number, row.at, _event_decoder.decode(row.data)) for row in rows]

    async def ended_before(self, at_ms: int, limit: int) -> list[str]:
        """Return up to `limit` sessions that ended before a time and are cleaned up, the oldest first."""
        # Whoever ended before it was created before it; the time of the end lies in the document.
        query = (
            sa.select(sessions)
            .where(sessions.c.cleaned.is_(True), sessions.c.created_at < at_ms)
            .order_by(sessions.c.position)
        )
        found: list[str] = []
        after = 0
        while len(found) < limit:
            rows = await self._read(query.where(sessions.c.position > after).limit(limit))
            if not rows:
                break
            after = rows[-1].position
            ends = ((row.id, _life_decoder.decode(row.life).ended_at) for row in rows)
            found += [name for name, ended_at in ends if ended_at is not None and ended_at < at_ms]
        return found[:limit]

    async def forget(self, ids: Sequence[str]) -> None:
        """Delete sessions with their events, usage and idempotency keys."""

        async def work(connection: AsyncConnection) -> None:
            await connection.execute(sa.delete(sessions).where(sessions.c.id.in_(ids)))

        await self._write(work)

    async def put_usage(self, session: str, epoch: str, used: Usage) -> None:
        """Store what a session has used in one epoch of the gateway, in place of what was known."""
        text = _encode(used).decode()

        async def work(connection: AsyncConnection) -> None:
            mine = (usage.c.session == session) & (usage.c.epoch == epoch)
            changed = await connection.execute(sa.update(usage).where(mine).values(usage=text))
            if changed.rowcount == 0:
                exists = await connection.scalar(sa.select(sessions.c.id).where(sessions.c.id == session))
                if exists is not None:
                    await connection.execute(sa.insert(usage).values(session=session, epoch=epoch, usage=text))

        await self._write(work)

    async def usage_of(self, ids: Sequence[str]) -> dict[str, dict[str, Usage]]:
        """Return what sessions have used, by session and epoch."""
        found: dict[str, dict[str, Usage]] = {}
        for row in await self._read(sa.select(usage).where(usage.c.session.in_(ids))):
            found.setdefault(row.session, {})[row.epoch] = _usage_decoder.decode(row.usage)
        return found

    async def _read(self, query: sa.Select[Any]) -> Sequence[Any]:
        async def work() -> Sequence[Any]:
            async with self._engine.connect() as connection:
                rows: Sequence[Any] = (await connection.execute(query)).all()
                return rows

        return await self._bounded(self._reading, work, self._timeout)

    async def _write(self, act: Callable[[AsyncConnection], Awaitable[T]], timeout_s: float | None = None) -> T:
        async def work() -> T:
            async with self._engine.begin() as connection:
                return await act(connection)

        return await self._bounded(self._writing, work, timeout_s or self._timeout)

    async def _bounded(self, gate: asyncio.Semaphore, work: Callable[[], Awaitable[T]], timeout_s: float) -> T:
        """Do `work` in a task of its own, and wait for it for a while.

        A caller that is cancelled, or has waited long enough, leaves the task to its end: a connection that is torn out of a
        call is lost to the pool. So at most as many calls hang as the gate lets in; the others time out before it.
        """
        if self._closed:
            raise StoreUnavailableError("the store is closed")
        try:
            async with asyncio.timeout(timeout_s):
                await gate.acquire()
        except TimeoutError as error:
            raise StoreUnavailableError("the database does not answer: earlier calls still wait for it") from error
        task = asyncio.create_task(self._through(gate, work, timeout_s), name="store")
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        done, _ = await asyncio.wait([task], timeout=timeout_s)
        if not done:
            raise StoreUnavailableError(f"the database did not answer within {timeout_s:g} s")
        return task.result()

    async def _through(self, gate: asyncio.Semaphore, work: Callable[[], Awaitable[T]], timeout_s: float) -> T:
        try:
            async with asyncio.timeout(HANGING_FACTOR * timeout_s):
                return await work()
        except TimeoutError as error:
            raise StoreUnavailableError("the database did not answer") from error
        except (DBAPIError, OSError) as error:
            cause = error.orig if isinstance(error, DBAPIError) else error
            raise StoreUnavailableError(f"the database is not available: {_first_line(cause)}") from error
        except SQLAlchemyError as error:
            raise StoreUnavailableError(f"the database is not available: {_first_line(error)}") from error
        finally:
            gate.release()

    def _forget(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            # Whoever asked may have stopped waiting; the failure is then nobody's.
            task.exception()


def _first_line(error: BaseException | None) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    cursor = connection.cursor()
    # WAL: readers do not wait for the writer. NORMAL: a power cut may take the last transactions, and the sessions'
    # journals, which are synced first, bring them back.
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON", "busy_timeout=5000"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _event_row(session: str, stored: StoredEvent) -> dict[str, object]:
    return {
        "session": session,
        "number": stored.number,
        "at": stored.at,
        "type": stored.event.__struct_config__.tag,
        "data": _encode(stored.event).decode(),
    }


def _life_columns(life: Session) -> dict[str, object]:
    return {
        "state": life.state.value,
        "reason": None if life.reason is None else life.reason.value,
        "life": _encode(life).decode(),
    }


def _row(new: StoredSession) -> dict[str, object]:
    return {
        "id": new.id,
        "run_id": new.run_id,
        "position": new.position,
        "created_at": new.created_at,
        "image": new.spec.image,
        "network": new.spec.network.value,
        "memory_bytes": new.memory_bytes,
        "cpus": new.cpus,
        "spec": _encode(new.spec).decode(),
        "address": None,
        "last_event": new.last_event,
        "cleaned": new.cleaned,
        **_life_columns(new.life),
    }


def _session(row: Any) -> StoredSession:
    return StoredSession(
        id=row.id,
        run_id=row.run_id,
        position=row.position,
        created_at=row.created_at,
        memory_bytes=row.memory_bytes,
        cpus=row.cpus,
        spec=_spec_decoder.decode(row.spec),
        life=_life_decoder.decode(row.life),
        last_event=row.last_event,
        cleaned=row.cleaned,
    )
