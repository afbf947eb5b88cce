"""Control killed at every step of a session's life: what becomes of the session is what would have become of it anyway.

All sessions live at once in one daemon, each held at a step of its own; then the daemon is killed, and started again.
Prints a table: `pytest -rP tests/host/test_crash_points.py`.
"""

import asyncio
import contextlib
import io
import shutil
import sys
import tarfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import docker
import pytest

from control.api.types import SessionView
from control.client import ControlClient, ControlError, ControlUnavailableError
from control.spec import SandboxSpec
from tests.host.crash_points import AGAIN, POINTS, life_of
from tests.host.lives import SETTINGS, ended, how, log, nothing_left, until
from tests.support.daemon import DaemonError
from tests.support.engine import PrivateEngine
from tests.support.host import Model, PrivateHost

_HALTING = Path(__file__).parents[1] / "support/halting_control.py"
PRINTED = (b"ran\n", [b"noted"])
# Many sandboxes at once on a machine that does other things too.
HELD_S = 300.0


@pytest.fixture(scope="module")
def engine() -> Iterator[PrivateEngine]:
    with PrivateEngine.acquire() as private:
        yield private


@pytest.fixture(scope="module")
def host(engine: PrivateEngine, model: Model) -> Iterator[PrivateHost]:
    settings = {
        **SETTINGS,
        "admission": {"cpus": 1024.0, "memory_bytes": 1 << 40},
        "limits": {**SETTINGS["limits"], "max_running": 0, "hello_timeout_ms": 120_000, "runner_reconnect_ms": 120_000},
    }
    with PrivateHost(engine, model, control=settings) as private:
        yield private


class Halting:
    """Starts the control daemon so that it stops at steps."""

    def __init__(self, host: PrivateHost) -> None:
        self._host = host
        # Where control may write, and its own user may read the program.
        self.folder = host.root / "held"
        self.folder.mkdir(exist_ok=True)
        self.folder.chmod(0o777)
        self._program = str(shutil.copy(_HALTING, host.root / "halting_control.py"))
        Path(self._program).chmod(0o644)

    def start(self, *, writes: int = 0) -> None:
        """Start it; with `writes` it kills itself at that write. Raises DaemonError if that is before it is ready."""
        self._host.control.start(sys.executable, self._program, str(self.folder), str(writes))

    def held(self) -> set[str]:
        """Return the sessions that are held."""
        return {path.name for path in self.folder.iterdir()}


@pytest.fixture
def halting(host: PrivateHost) -> Iterator[Halting]:
    host.control.stop()
    yield Halting(host)
    if not host.control.running:
        host.control.start()


async def drive(host: PrivateHost, control: ControlClient, point: str) -> None:
    """Do what the session's caller does, up to when the daemon dies; again, when an earlier try was not answered."""
    life = life_of(point)
    spec = SandboxSpec(image=life.image, session_id=point, command=("sh", "-c", life.script))
    with contextlib.suppress(ControlUnavailableError):  # the daemon died before it answered
        await persist(lambda: control.create(spec, idempotency_key=point))
        if life.launched:
            await persist(lambda: control.launch(point))
        if life.stopped:
            if life.runs:
                await until(lambda: printed(host, point) == PRINTED, f"the output of {point}", HELD_S)
            await persist(lambda: control.stop(point, 0))


async def persist(call: Callable[[], Awaitable[SessionView]]) -> None:
    """Call until it is answered; that it was done already is an answer. Raises ControlUnavailableError."""
    tries_left = 3
    while True:
        try:
            await call()
        except ControlUnavailableError:
            # On a connection from before the daemon's death.
            if tries_left == 0:
                raise
            tries_left -= 1
            continue
        except ControlError as error:
            if error.problem.status == 503:
                await asyncio.sleep(0.5)
                continue
            if error.problem.reason != "wrong_state":
                raise
        return


async def found(control: ControlClient, point: str) -> str:
    """Return what the daemon says of a session. Raises ControlUnavailableError."""
    for last in (False, True):
        try:
            view = await control.get(point)
            return f"{view.state} ({view.reason}: {view.message})" if view.state.final else str(view.state)
        except ControlUnavailableError:
            # The first may have gone to a connection from before the daemon's death.
            if last:
                raise
        except ControlError:
            break
    return "unknown"


def printed(host: PrivateHost, session: str) -> tuple[bytes, list[bytes]]:
    """Return what the command printed, without what the runner notes when it could not reach control for a while."""
    noted = log(host, session, "stderr").splitlines()
    return log(host, session), [line for line in noted if not line.startswith(b"opificia-runner: ")]


def left_in_out(host: PrivateHost, session: str) -> bytes:
    with tarfile.open(fileobj=io.BytesIO((host.sessions / session / "out.tar").read_bytes())) as tar:
        reader = tar.extractfile("./runs")
        assert reader is not None
        return reader.read()


async def check(host: PrivateHost, control: ControlClient, point: str) -> str:
    """Wait for the end of a session; return what is wrong with it, empty if nothing is."""
    life = life_of(point)
    try:
        view = await ended(control, point)
    except TimeoutError:
        view = await control.get(point)
        return f"did not end: {view.state} {view.reason}"
    state, reason, code = how(view)
    if (state, reason) != (life.state, life.reason) or life.code not in (None, code):
        return f"{state} {reason} {code}: {view.message}"
    if life.runs:
        if printed(host, point) != PRINTED:
            return f"it printed {printed(host, point)}"
        if left_in_out(host, point) != b"ran\n":
            return "its results are not those of one run"
    return ""


async def hold_all(host: PrivateHost, control: ControlClient, halting: Halting, points: Sequence[str]) -> None:
    """Start all sessions, wait until each is held at its point, and kill the daemon."""
    halting.start()
    driving = [asyncio.create_task(drive(host, control, point)) for point in points]
    try:
        await until(lambda: halting.held() >= set(points), "all held", HELD_S)
    except AssertionError:
        missing = sorted(set(points) - halting.held())
        raise AssertionError(f"not held: {[(point, await found(control, point)) for point in missing]}") from None
    host.control.kill()
    await asyncio.gather(*driving)


@pytest.mark.timeout(600)
async def test_control_killed_at_any_step_ends_every_session_as_if_nothing_had_happened(
    host: PrivateHost, control: ControlClient, docker_client: docker.DockerClient, halting: Halting
) -> None:
    await hold_all(host, control, halting, POINTS)
    host.control.start()
    after = dict(zip(POINTS, await asyncio.gather(*(found(control, point) for point in POINTS)), strict=True))
    await asyncio.gather(*(drive(host, control, point) for point in POINTS))
    wrong = dict(zip(POINTS, await asyncio.gather(*(check(host, control, point) for point in POINTS)), strict=True))
    for point in POINTS:
        life = life_of(point)
        print(f"{point:44} {after[point].split()[0]:10} {wrong[point] or f'{life.state} ({life.reason})'}")
    assert {point: problem for point, problem in wrong.items() if problem} == {}
    await nothing_left(host, control, docker_client, *POINTS)


async def settled(control: ControlClient, points: Sequence[str]) -> bool:
    """Tell whether nothing more happens to any of the sessions by itself, as far as the daemon can be asked."""
    try:
        states = {point: await found(control, point) for point in points}
    except ControlUnavailableError:
        return False
    # One that is to be stopped runs on until its caller asks again.
    still = {point: state for point, state in states.items() if not (state == "running" and life_of(point).stopped)}
    return all(state.split()[0] in ("unknown", "created", "exited", "failed", "stopped") for state in still.values())


@pytest.mark.timeout(600)
async def test_control_killed_again_and_again_while_it_takes_up_what_it_left_loses_nothing_either(
    host: PrivateHost, control: ControlClient, docker_client: docker.DockerClient, halting: Halting
) -> None:
    await hold_all(host, control, halting, AGAIN)
    died = 0
    for writes in (1, 3, 8, 21, 55):
        with contextlib.suppress(DaemonError):
            halting.start(writes=writes)
        while host.control.running and not await settled(control, AGAIN):
            await asyncio.sleep(0.1)
        if host.control.running:
            # There are not so many writes left.
            host.control.kill()
            break
        died += 1
    assert died >= 3
    host.control.start()
    await asyncio.gather(*(drive(host, control, point) for point in AGAIN))
    wrong = {point: await check(host, control, point) for point in AGAIN}
    assert {point: problem for point, problem in wrong.items() if problem} == {}
    await nothing_left(host, control, docker_client, *AGAIN)
