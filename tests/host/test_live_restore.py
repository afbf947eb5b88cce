"""Sessions on an engine whose containers outlive its restarts (`live-restore`), as a site may have set it."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import docker
import pytest

from control.client import ControlClient
from control.plan.session import Reason, SessionState
from tests.host.lives import COUNT, SETTINGS, counted, ended, execute, how, launch, log, nothing_left, ready, running
from tests.support.engine import PrivateEngine
from tests.support.host import Model, PrivateHost
from tests.support.patience import until


@pytest.fixture(scope="module")
def engine() -> Iterator[PrivateEngine]:
    with PrivateEngine.acquire(live_restore=True) as private:
        yield private


@pytest.fixture(scope="module")
def host(engine: PrivateEngine, model: Model) -> Iterator[PrivateHost]:
    with PrivateHost(engine, model, control=SETTINGS) as private:
        yield private


@pytest.mark.parametrize("kill", [False, True], ids=["restarted", "crashed"])
async def test_a_session_outlives_the_engine_with_all_its_output_and_its_true_exit_code(
    host: PrivateHost,
    control: ControlClient,
    engine: PrivateEngine,
    docker_client: docker.DockerClient,
    kill: bool,
) -> None:
    session = await launch(control, COUNT)
    await running(control, session)
    await until(lambda: counted(log(host, session)) > 5, "output")
    await asyncio.to_thread(engine.stop_daemon, kill=kill)
    before = counted(log(host, session))
    await asyncio.to_thread(engine.start_daemon)
    await until(lambda: counted(log(host, session)) > before + 20, "output after the restart")
    await ready(control)
    assert (await control.get(session)).state is SessionState.RUNNING
    assert (await execute(control, session, "touch", "/work/end"))[0] == 0
    assert how(await ended(control, session)) == (SessionState.EXITED, Reason.EXIT_CODE, 6)
    # After such a restart the engine counts a mount too many, and gives the volume up only at its next start.
    await nothing_left(host, control, docker_client, session, volumes=False)
    # The next launch finds an engine that works.
    assert how(await ended(control, await launch(control, "exit 5")))[1:] == (Reason.EXIT_CODE, 5)


def _restarted(engine: PrivateEngine) -> None:
    engine.stop_daemon()


def _crashed(engine: PrivateEngine) -> None:
    engine.stop_daemon(kill=True)


def _hung(engine: PrivateEngine) -> None:
    engine.freeze_daemon()


@pytest.mark.parametrize("away", [_restarted, _crashed, _hung])
async def test_output_that_the_engine_loses_is_told(
    host: PrivateHost, control: ControlClient, engine: PrivateEngine, away: Callable[[PrivateEngine], None]
) -> None:
    """What a container prints while the engine is away is lost if it ends before the engine is back (Docker 20.10).

    An engine that hangs and is killed then has seen as little of the end, which lies before its own.
    """
    session = await launch(control, COUNT)
    await running(control, session)
    await until(lambda: counted(log(host, session)) > 5, "output")
    await asyncio.to_thread(away, engine)
    # The way to the runner does not go through the engine; the runner ends soon after the session's command.
    assert (await execute(control, session, "touch", "/work/end"))[0] == 0
    runners = f"OPIFICIA_SESSION_ID={session}".encode()
    await until(lambda: not processes_with(runners), "the end of the container")
    await asyncio.to_thread(engine.stop_daemon, kill=True)
    await asyncio.to_thread(engine.start_daemon)
    await ready(control)
    view = await ended(control, session)
    # 255: the engine does not know.
    assert (view.state, view.reason) == (SessionState.EXITED, Reason.EXIT_CODE)
    assert view.exit_code in (6, 255)
    assert "may be missing" in view.message
    counted(log(host, session))


def processes_with(variable: bytes) -> list[str]:
    """Return the processes that have this in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and variable in (entry / "environ").read_bytes().split(b"\0"):
                found.append(entry.name)
    return found
