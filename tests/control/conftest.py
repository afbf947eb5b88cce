"""A control daemon on real sockets, with an engine and a gateway of the test."""

import asyncio
import itertools
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from control.app import Control
from control.client import ControlClient
from control.config import ControlConfig
from control.db.rows import StoredSession
from control.db.store import Store
from control.db.tables import metadata
from control.plan.session import SessionState
from control.sessions.manager import SessionManager
from control.spec import SandboxSpec
from gateway.runtime.settings import parse
from tests.support.fake_engine import FakeEngine
from tests.support.fake_gateway import FakeGateway
from tests.support.patience import PATIENCE_S, until
from tests.support.postgres import Postgres

_databases = itertools.count(1)


class Host:
    """One installation of control, which can be stopped and started again."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.gateway = FakeGateway(root / "gateway.sock", root / "runner.sock")
        self.engine = FakeEngine()
        self.settings: dict[str, dict[str, object]] = {
            "limits": {"hello_timeout_ms": 60_000, "stop_grace_ms": 10_000, "runner_reconnect_ms": 60_000}
        }
        self.store_url = f"sqlite:///{root}/control.db"
        self.host_problems: list[str] = []
        self.manager: SessionManager
        self.control: Control
        self._stack: AsyncExitStack | None = None

    @property
    def config(self) -> ControlConfig:
        root = self.root
        lines = [
            f'store.url = "{self.store_url}"',
            f'paths = {{ data = "{root}", egress_logs = "{root}/egress", door = "{root}/door" }}',
            f'listen.api = "unix:{root}/api.sock"',
            f'listen.runner = "unix:{root}/runner.sock"',
            f'gateway.contract = "unix:{root}/gateway.sock"',
        ]
        for section, values in self.settings.items():
            lines += [f"{section}.{name} = {msgspec.json.encode(value).decode()}" for name, value in values.items()]
        return parse("\n".join(lines), ControlConfig)

    async def start(self) -> SessionManager:
        async def verify() -> list[str]:
            return self.host_problems

        (self.root / "egress").mkdir(exist_ok=True)
        self._stack = AsyncExitStack()
        self.control = Control(self.config, self.engine, "host-1", verify)
        self.manager = await self._stack.enter_async_context(self.control.running())
        return self.manager

    async def stop(self) -> None:
        if self._stack is not None:
            stack, self._stack = self._stack, None
            await stack.aclose()

    async def forget(self) -> None:
        """Set the database back to nothing, as one that is restored from before."""
        engine = create_async_engine(Store(self.store_url).engine.url)
        async with engine.begin() as connection:
            for table in reversed(metadata.sorted_tables):
                await connection.execute(table.delete())
        await engine.dispose()

    @property
    def api(self) -> Path:
        return self.root / "api.sock"

    async def make(self, *command: str, **fields: object) -> StoredSession:
        """Create a session that is to run `command`."""
        spec = msgspec.convert({"image": "sandbox", "cwd": "/tmp", "command": command, **fields}, SandboxSpec)
        return await self.manager.create(spec)

    async def launch(self, *command: str, **fields: object) -> str:
        """Create and launch a session that runs `command`; return its id."""
        stored = await self.make(*command, **fields)
        await self.manager.launch(stored.id)
        return stored.id

    async def state(self, session: str, *states: SessionState) -> StoredSession:
        """Wait until a session is in one of `states` and return it."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                record = self.manager.record(session)
                ticket = None if record is None else record.changed.ticket()
                stored = await self.manager.get(session)
                if stored.life.state in states:
                    return stored
                assert not stored.life.state.final, f"{stored.life.state} {stored.life.reason} {stored.life.message}"
                assert ticket is not None
                await ticket.wait()

    async def ended(self, session: str) -> StoredSession:
        """Wait until a session has ended and return it."""
        return await self.state(session, SessionState.EXITED, SessionState.FAILED, SessionState.STOPPED)

    async def cleaned(self, session: str) -> None:
        """Wait until nothing of a session is left but its record."""
        await until(lambda: self.manager.record(session) is None, f"the clean-up of {session}")

    def log(self, session: str, stream: str = "stdout") -> bytes:
        return (self.root / "sessions" / session / f"{stream}.log").read_bytes()


@pytest.fixture(scope="package")
def postgres() -> Iterator[Postgres]:
    """A PostgreSQL server for the folder."""
    with Postgres() as server:
        yield server


@pytest.fixture
def store_url() -> str:
    """The database of a host; empty: SQLite in its own folder. A module that runs on both has a fixture of its own."""
    return ""


@pytest.fixture
def postgres_url(postgres: Postgres) -> str:
    """An empty database of the server."""
    return postgres.create(f"test{next(_databases)}")


@pytest.fixture
async def stopped_host(store_url: str) -> AsyncIterator[Host]:
    """A host whose control is not started yet."""
    # Not pytest's folder: a unix socket's path has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="opificia-") as folder:
        host = Host(Path(folder))
        host.store_url = store_url or host.store_url
        await host.gateway.start()
        host.engine.runner_url = host.gateway.runner_url
        try:
            yield host
        finally:
            await host.stop()
            await host.engine.close()
            await host.gateway.stop()


@pytest.fixture
async def host(stopped_host: Host) -> Host:
    """A host with a running control."""
    await stopped_host.start()
    return stopped_host


@pytest.fixture
async def client(host: Host) -> AsyncIterator[ControlClient]:
    """A client of the host's API."""
    async with ControlClient(f"unix:{host.api}") as client:
        yield client
