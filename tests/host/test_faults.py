"""A bad wire between the parts of a host, each kind of fault in turn, while sessions live on it.

Whatever the wire does: the API answers, the session that runs keeps its output whole and in order and its end true, grants
stay, no transition is lost, and when the wire is well again new sessions run and nothing is left of any.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import docker
import pytest

from control.api.types import RunCompleted, RunOutput, RunRequest
from control.client import ControlClient, ControlError
from control.db.store import Store
from control.plan.session import Reason, SessionState
from control.sessions import journal
from control.spec import SandboxSpec
from tests.host.lives import (
    COUNT,
    PATIENCE_S,
    SETTINGS,
    connected,
    counted,
    ended,
    execute,
    how,
    launch,
    log,
    nothing_left,
    ready,
)
from tests.support.engine import PrivateEngine
from tests.support.faults import Fault, FaultProxy, Kind
from tests.support.host import Model, PrivateHost
from tests.support.patience import until
from tests.support.postgres import Postgres
from tests.support.sandbox import IMAGE

FAULTS = (
    Fault(Kind.DELAY, seconds=0.05),
    Fault(Kind.SPLIT, size=11),
    Fault(Kind.BANDWIDTH, rate=64 * 1024),
    Fault(Kind.STALL),
    Fault(Kind.HALF_CLOSE, after=100),
    Fault(Kind.TRUNCATE, after=100),
    Fault(Kind.RESET, after=100),
)
# Seconds in production: a stall must end within a test's patience.
ENGINE_TIMEOUT_MS = 5_000


@dataclass(frozen=True)
class Wires:
    """A proxy in each place where parts of a host speak."""

    engine: FaultProxy
    contract: FaultProxy
    runner: FaultProxy
    database: FaultProxy
    postgres: Postgres


@pytest.fixture(scope="module")
def engine() -> Iterator[PrivateEngine]:
    with PrivateEngine.acquire() as private:
        yield private


@pytest.fixture(scope="module")
def wires(engine: PrivateEngine) -> Iterator[Wires]:
    folder = engine.scratch / "wires"
    folder.mkdir()
    folder.chmod(0o755)
    run = engine.scratch / "host/run/opificia"
    with contextlib.ExitStack() as stack:
        postgres = stack.enter_context(Postgres())

        def wire(to: Path, name: str) -> FaultProxy:
            return stack.enter_context(FaultProxy(to, folder / name))

        yield Wires(
            wire(engine.socket, "docker.sock"),
            wire(run / "contract/gateway.sock", "gateway.sock"),
            wire(run / "runner/control.sock", "control.sock"),
            wire(postgres.root / ".s.PGSQL.5432", ".s.PGSQL.5432"),
            postgres,
        )


@pytest.fixture(scope="module")
def host(engine: PrivateEngine, model: Model, wires: Wires) -> Iterator[PrivateHost]:
    folder = engine.scratch / "wires"
    control = {
        **SETTINGS,
        "docker": {"socket": str(folder / "docker.sock")},
        "gateway": {"contract": f"unix:{folder}/gateway.sock"},
        "store": {"url": f"postgresql://opificia@/postgres?host={folder}"},
        "limits": {**SETTINGS["limits"], "engine_timeout_ms": ENGINE_TIMEOUT_MS, "runner_reconnect_ms": 60_000},
    }
    gateway = {"runner": {"upstream": f"unix:{folder}/control.sock"}}
    with PrivateHost(engine, model, control=control, gateway=gateway) as private:
        yield private


@pytest.fixture(autouse=True)
def logs(host: PrivateHost) -> Iterator[None]:
    """What the daemons said, for whoever reads of a failure."""
    yield
    print(host.logs())


async def follow(control: ControlClient, session: str, seen: bytearray) -> int:
    async for line in control.run(session, RunRequest(argv=("sh", "-c", COUNT))):
        if isinstance(line, RunOutput):
            seen.extend(line.data.encode())
        elif isinstance(line, RunCompleted):
            return line.exit_code
    raise AssertionError("the end of the command is not known")


async def asked_for_under_the_fault(control: ControlClient, session: str) -> str:
    """Ask for a session, and for what is answered from memory; return the session if there is one."""
    async with asyncio.timeout(PATIENCE_S):
        assert (await control.get(session)).state is SessionState.RUNNING
        with contextlib.suppress(ControlError):
            view = await control.create(SandboxSpec(image=IMAGE, command=("sh", "-c", "echo made; exit 3")))
            with contextlib.suppress(ControlError):
                await control.launch(view.id)
            return view.id
    return ""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["engine", "contract", "runner", "database"])
async def test_a_session_outlives_every_fault_of_a_wire_with_its_output_whole_and_its_end_true(
    host: PrivateHost, wires: Wires, control: ControlClient, docker_client: docker.DockerClient, name: str
) -> None:
    wire: FaultProxy = getattr(wires, name)
    session = await launch(control)
    await connected(control, session)
    seen = bytearray()
    following = asyncio.create_task(follow(control, session, seen))
    await until(lambda: seen.count(b"\n") > 2, "output")
    asked = []
    for fault in FAULTS:
        wire.set(fault)
        try:
            made = await asked_for_under_the_fault(control, session)
            before = counted(log(host, session))
            # The session prints on, whether anyone can hear it or not; and the fault was met.
            await until(lambda: bool(wire.acted), f"{fault.kind} on the wire to {name}")
        finally:
            wire.clear()
        await ready(control)
        await connected(control, session)
        await until(lambda before=before: counted(log(host, session)) > before, f"output after {fault.kind}")  # type: ignore[misc]
        assert (await execute(control, session, "sh", "-c", "exit 7")) == (7, b"")
        if made and (await control.get(made)).state is SessionState.CREATED:
            with contextlib.suppress(ControlError):
                await control.launch(made)
        asked += [made] if made else []
    assert session in {each.id for each in (await control.gateway()).sessions}
    assert (await execute(control, session, "touch", "/work/end"))[0] == 0
    async with asyncio.timeout(PATIENCE_S):
        assert await following == 6
    assert counted(bytes(seen)) == counted(log(host, session)) > 10
    await control.stop(session, 0)
    assert how(await ended(control, session))[:2] == (SessionState.STOPPED, Reason.STOPPED_BY_USER)
    # A launch under the fault may have failed, and then says by what; a run is whole.
    for each in asked:
        view = await ended(control, each)
        if view.state is SessionState.EXITED:
            assert how(view) == (SessionState.EXITED, Reason.EXIT_CODE, 3)
            assert log(host, each) == b"made\n"
        else:
            assert view.reason in (Reason.ENGINE_ERROR, Reason.GATEWAY_UNAVAILABLE, Reason.HOST_NOT_READY), view
    await nothing_left(host, control, docker_client, session, *asked)
    await stored_as_journaled(host, wires, session, *asked)
    assert how(await ended(control, await launch(control, "exit 5"))) == (SessionState.EXITED, Reason.EXIT_CODE, 5)


async def stored_as_journaled(host: PrivateHost, wires: Wires, *sessions: str) -> None:
    """Check that the database has every event of the journals, once and in order."""
    store = Store(wires.postgres.url())
    try:
        for session in sessions:
            on_disk = journal.read(host.sessions / session / "events.jsonl", repair=False)
            assert await store.events(session) == on_disk
    finally:
        await store.close()
