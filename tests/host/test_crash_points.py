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
from control.plan.session import Event, Reason, SessionState
from control.runner import client as reference_runner
from control.sessions import journal
from control.spec import Resources, SandboxSpec
from tests.host.crash_points import AGAIN, CUT, KEEPING, LAUNCH_CUT, ODD_IMAGE, POINTS, REPORTS, life_of
from tests.host.lives import SETTINGS, ended, how, launch, log, nothing_left
from tests.support.daemon import DaemonError
from tests.support.engine import PrivateEngine
from tests.support.host import Model, PrivateHost
from tests.support.patience import until
from tests.support.provider import INPUT_TOKENS
from tests.support.sandbox import IMAGE

_SUPPORT = Path(__file__).parents[1] / "support"
_HALTING = _SUPPORT / "halting_control.py"
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
        make_odd_image(engine)
        yield private


def make_odd_image(engine: PrivateEngine) -> None:
    """Make the image whose runner goes away, or never comes."""
    files = {
        "Dockerfile": f"FROM {IMAGE}\nLABEL opificia.runner=own\nCOPY runner /runner\n"
        'ENTRYPOINT ["python3", "/runner/odd_runner.py"]\n',
        "runner/odd_runner.py": (_SUPPORT / "odd_runner.py").read_text(),
        "runner/control/runner/client.py": Path(reference_runner.__file__).read_text(),
    }
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
    context.seek(0)
    with contextlib.closing(engine.client()) as client:
        client.images.build(fileobj=context, custom_context=True, tag=ODD_IMAGE, rm=True)


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

    def start(self, how: str) -> None:
        """Start it; `how` as the program takes it. Raises DaemonError if it dies before it is ready."""
        self._host.control.start(sys.executable, self._program, str(self.folder), how)

    async def die(self, step: str) -> None:
        """Start it, and wait until it has died at a step."""
        with contextlib.suppress(DaemonError):
            self.start(step)
        await until(lambda: not self._host.control.running, f"its death at {step}")

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
    spec = SandboxSpec(
        image=life.image,
        session_id=point,
        command=("sh", "-c", life.script),
        resources=Resources(memory_bytes=life.memory_bytes),
        time_limit_ms=life.time_limit_ms,
    )
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
    if life.runs and (life.sure or log(host, point)):
        if printed(host, point) != PRINTED:
            return f"it printed {printed(host, point)}"
        if left_in_out(host, point) != b"ran\n":
            return "its results are not those of one run"
    told = [(each.number, tag(each.event)) async for each in control.events(point, follow=False)]
    written = [
        (each.number, tag(each.event)) for each in journal.read(host.sessions / point / "events.jsonl", repair=False)
    ]
    if told != written:
        return f"the API tells of {told}, its journal of {written}"
    if (reports := tuple(name for _, name in told if name in REPORTS)) != life.reports:
        return f"its runner's reports: {reports}"
    return ""


def tag(event: Event) -> str:
    return str(event.__struct_config__.tag)


def call_back(host: PrivateHost, session: str) -> None:
    """Tell a session that what it waits for is there."""
    with contextlib.suppress(FileNotFoundError):  # it was never stored
        (host.sessions / session / "in/back").touch()


async def hold_all(host: PrivateHost, control: ControlClient, halting: Halting, points: Sequence[str]) -> None:
    """Start all sessions, wait until each is held at its point, and kill the daemon."""
    halting.start("hold")
    driving = [asyncio.create_task(drive(host, control, point)) for point in points]
    try:
        await until(lambda: halting.held() >= set(points), "all held", HELD_S)
    except AssertionError:
        missing = sorted(set(points) - halting.held())
        raise AssertionError(f"not held: {[(point, await found(control, point)) for point in missing]}") from None
    host.control.kill()
    await asyncio.gather(*driving)
    for point in points:
        call_back(host, point)


@pytest.mark.timeout(600)
async def test_control_killed_at_any_step_ends_every_session_as_if_nothing_had_happened(
    host: PrivateHost, control: ControlClient, docker_client: docker.DockerClient, halting: Halting
) -> None:
    await hold_all(host, control, halting, POINTS)
    halting.start("go")
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
            halting.start(str(writes))
        while host.control.running and not await settled(control, AGAIN):
            await asyncio.sleep(0.1)
        if host.control.running:
            # There are not so many writes left.
            host.control.kill()
            break
        died += 1
    assert died >= 3
    halting.start("go")
    await asyncio.gather(*(drive(host, control, point) for point in AGAIN))
    wrong = {point: await check(host, control, point) for point in AGAIN}
    assert {point: problem for point, problem in wrong.items() if problem} == {}
    await nothing_left(host, control, docker_client, *AGAIN)


# Asks the model again and again, and says how often it was answered.
ASKING = """
until [ -e /in/back ]; do
  curl -sSf -o /dev/null -H "x-api-key: $ANTHROPIC_AUTH_TOKEN" -H 'content-type: application/json' \\
    -d '{"model":"fake-model","max_tokens":10,"messages":[]}' "$ANTHROPIC_BASE_URL/v1/messages" && echo asked
  sleep 0.2
done
exit 6
"""


@pytest.mark.timeout(300)
async def test_control_killed_at_every_step_that_no_caller_asks_for_takes_it_again_and_only_once(
    host: PrivateHost, control: ControlClient, docker_client: docker.DockerClient, halting: Halting
) -> None:
    """Launches cut by the death before, usage booked, what has ended measured and forgotten."""
    await hold_all(host, control, halting, CUT)
    for step in LAUNCH_CUT:
        await halting.die(step)
    halting.start("go")
    asking = await launch(control, ASKING)
    assert {point: await check(host, control, point) for point in CUT} == dict.fromkeys(CUT, "")
    await until(lambda: log(host, asking).count(b"\n") > 2, "answers of the model")
    host.control.kill()
    ended_by_now = {path.name for path in host.sessions.iterdir()} - {asking}
    assert ended_by_now >= set(CUT)
    for step in KEEPING:
        await halting.die(step)
    host.control.start()
    # Folder and record went together, and what lives was not touched.
    left = {path.name for path in host.sessions.iterdir()} - {asking}
    assert left < ended_by_now
    assert {session for session in ended_by_now if await found(control, session) != "unknown"} == left
    call_back(host, asking)
    assert how(await ended(control, asking)) == (SessionState.EXITED, Reason.EXIT_CODE, 6)
    asked = log(host, asking).count(b"\n")
    assert log(host, asking) == b"asked\n" * asked
    usage = (await control.get(asking)).usage
    assert usage is not None
    assert (usage.model_requests, usage.input_tokens) == (asked, asked * INPUT_TOKENS)
    await nothing_left(host, control, docker_client, asking, *CUT)
