"""One database, SQLite or PostgreSQL: its connections, its migrations, and calls that are bounded in time.

It knows no table. A database that is away or hangs is StoreUnavailableError, and the caller decides what goes on without it.
"""

import asyncio
import contextlib
import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import alembic.command
import alembic.config
import sqlalchemy as sa
from sqlalchemy import event as sa_event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

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


class Database:
    """The database of one process, which is the only one that writes. Calls raise StoreUnavailableError."""

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
            # A cluster made without a locale has databases in SQL_ASCII, of which the driver would bring bytes for text.
            arguments = {"connect_timeout": max(2, int(call_timeout_s)), "client_encoding": "utf8"}
            options = {"pool_pre_ping": True, "connect_args": arguments}
        self.engine: Final[AsyncEngine] = create_async_engine(parsed.set(drivername=driver), **options)
        self._reader = self.engine
        if driver == _DRIVERS["postgresql"]:
            # One query sees one state of the database anyway; a transaction around it would be two more round trips.
            self._reader = self.engine.execution_options(isolation_level="AUTOCOMMIT")
        if driver == _DRIVERS["sqlite"]:
            sa_event.listen(self.engine.sync_engine, "connect", _prepare_sqlite)

    async def close(self) -> None:
        """Wait for what is under way, and close all connections. Later calls find the database unavailable."""
        self._closed = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._timeout)
        for task in self._tasks:
            task.cancel()
        await self.engine.dispose()

    async def migrate(self, revision: str = "head") -> None:
        """Bring the tables to this version's form, or to that of an earlier `revision`."""
        config = alembic.config.Config()
        config.set_main_option("script_location", str(_MIGRATIONS))

        def upgrade(connection: sa.Connection) -> None:
            config.attributes["connection"] = connection
            alembic.command.upgrade(config, revision)

        async def work(connection: AsyncConnection) -> None:
            await connection.run_sync(upgrade)

        await asyncio.to_thread(self._try_sqlite)
        await self.write(work, MIGRATION_TIMEOUT_S)

    def _try_sqlite(self) -> None:
        """Open the file once by hand: aiosqlite leaves a thread behind for each file that cannot be opened."""
        path = self.engine.url.database
        if self.engine.dialect.name != "sqlite" or not path:
            return
        try:
            with contextlib.closing(sqlite3.connect(path)) as connection:
                connection.execute("PRAGMA user_version")
        except sqlite3.Error as error:
            raise StoreUnavailableError(f"the database {path} is not available: {error}") from error

    async def ping(self) -> None:
        """Ask the database for a sign of life."""
        await self.read(sa.select(1))

    async def read(self, query: sa.Executable) -> Sequence[Any]:
        """Return the rows of a query."""

        async def work() -> Sequence[Any]:
            async with self._reader.connect() as connection:
                rows: Sequence[Any] = (await connection.execute(query)).all()
                return rows

        return await self._bounded(self._reading, work, self._timeout)

    async def write(self, act: Callable[[AsyncConnection], Awaitable[T]], timeout_s: float | None = None) -> T:
        """Do `act` in one transaction and return what it returns. Raises also what `act` raises of its own."""

        async def work() -> T:
            async with self.engine.begin() as connection:
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
