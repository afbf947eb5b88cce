"""Whole sessions on a real engine behind the real gateway, and what happens to them when something dies meanwhile."""

import asyncio
import contextlib
import io
import itertools
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import docker
import pytest

from control.api.types import RunCompleted, RunOutput, RunRequest
from control.client import ControlClient
from control.plan.firewall import rules
from control.plan.network import NetworkSettings
from control.plan.session import Reason, SessionState
from gateway.contract.limits import MIB
from tests.host.lives import (
    COUNT,
    EAT,
    LOG_BYTES,
    PATIENCE_S,
    ROOM,
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
    running,
)
from tests.support.engine import PrivateEngine
from tests.support.host import Model, PrivateHost
from tests.support.hostside import without_rules
from tests.support.patience import until, within
from tests.support.sandbox import IMAGE


@pytest.fixture(scope="module")
def engine() -> Iterator[PrivateEngine]:
    """An engine of this module's own: it is restarted."""
    with PrivateEngine.acquire() as private:
        yield private


@pytest.fixture(scope="module")
def host(engine: PrivateEngine, model: Model) -> Iterator[PrivateHost]:
    with PrivateHost(engine, model, control=SETTINGS) as private:
        yield private


# Endings, told apart.


async def test_out_of_memory_killed_removed_and_stopped_have_four_reasons_and_keep_their_logs(
    host: PrivateHost, control: ControlClient, docker_client: docker.DockerClient
) -> None:
    eater = await launch(control, f"echo here; exec {EAT}")
    child = await launch(control, f"echo here; {EAT}; exit 9")
    killed, removed, stopped = [await launch(control, "echo here; sleep 1000") for _ in range(3)]
    polite = await launch(control, "trap 'echo bye; exit 9' TERM; echo here; while :; do sleep 0.1; done")
    for session in (killed, removed, stopped, polite):
        await running(control, session)
        await until(lambda session=session: log(host, session) == b"here\n", "its output")  # type: ignore[misc]
    docker_client.containers.get(f"opificia-{killed}").kill()
    docker_client.containers.get(f"opificia-{removed}").remove(force=True)
    await control.stop(stopped, 0)
    await control.stop(polite, 10_000)
    assert how(await ended(control, eater)) == (SessionState.FAILED, Reason.OOM_KILLED, 137)
    assert how(await ended(control, child)) == (SessionState.EXITED, Reason.CHILD_OOM_KILLED, 9)
    assert how(await ended(control, killed)) == (SessionState.FAILED, Reason.KILLED_OUTSIDE, 137)
    assert how(await ended(control, removed)) == (SessionState.FAILED, Reason.CONTAINER_VANISHED, None)
    assert how(await ended(control, stopped))[:2] == (SessionState.STOPPED, Reason.STOPPED_BY_USER)
    assert how(await ended(control, polite))[:2] == (SessionState.STOPPED, Reason.STOPPED_BY_USER)
    assert log(host, polite) == b"here\nbye\n"
    for session in (eater, child, killed, removed, stopped):
        assert log(host, session) == b"here\n"
    await nothing_left(host, control, docker_client, eater, child, killed, removed, stopped, polite)


async def test_limits_of_time_hello_and_output_end_or_cut_and_say_so(
    host: PrivateHost, control: ControlClient, docker_client: docker.DockerClient
) -> None:
    base = docker_client.images.get(IMAGE).id
    # Its entrypoint is said to be a runner, and sleeps.
    docker_client.images.build(
        fileobj=io.BytesIO(
            f'FROM {base}\nLABEL opificia.runner=own\nENTRYPOINT ["sh", "-c", "echo here; exec sleep 1000"]\n'.encode()
        ),
        tag="silent:latest",
        rm=True,
    )
    try:
        silent = await launch(control, image="silent:latest")
        slow = await launch(control, "echo here; sleep 1000", time_limit_ms=15_000)
        loud = await launch(control, f"yes | head -c {8 * MIB}; echo end >&2; exit 4")
        assert how(await ended(control, slow))[:2] == (SessionState.FAILED, Reason.TIME_LIMIT)
        assert how(await ended(control, loud)) == (SessionState.EXITED, Reason.EXIT_CODE, 4)
        assert how(await ended(control, silent))[:2] == (SessionState.FAILED, Reason.HELLO_TIMEOUT)
        await nothing_left(host, control, docker_client, silent, slow, loud)
    finally:
        docker_client.images.remove("silent:latest", force=True)
    assert log(host, silent) == log(host, slow) == b"here\n"
    assert log(host, loud, "stderr") == b"end\n"
    kept = log(host, loud)
    assert kept[:LOG_BYTES] == b"y\n" * (LOG_BYTES // 2)
    assert b"is not kept" in kept[LOG_BYTES:]
    assert len(kept) < LOG_BYTES + 200


async def test_an_image_that_is_missing_is_told_at_once_and_nothing_is_pulled(control: ControlClient) -> None:
    async with within(10):
        view = await ended(control, await launch(control, "true", image="registry.invalid/no/such:1"))
    assert how(view)[:2] == (SessionState.FAILED, Reason.IMAGE_MISSING)


async def test_without_the_firewalls_chains_nothing_is_launched(
    host: PrivateHost, control: ControlClient, engine: PrivateEngine
) -> None:
    network = NetworkSettings()
    with without_rules(engine, network, list(rules(network))):
        # The daemon asks every few seconds.
        async with asyncio.timeout(PATIENCE_S):
            while (await control.health()).status == "ok":
                await asyncio.sleep(0.2)
        view = await ended(control, await launch(control, "true"))
        assert how(view)[:2] == (SessionState.FAILED, Reason.HOST_NOT_READY)
        assert "firewall" in view.message
    await ready(control)


# Deaths of the daemons.


async def test_control_killed_in_mid_session_takes_it_up_again_with_all_its_output_and_its_true_exit_code(
    host: PrivateHost, control: ControlClient, docker_client: docker.DockerClient
) -> None:
    # Another installation's sandbox on the same engine is nobody's business.
    foreign = docker_client.containers.run(
        IMAGE,
        ["sleep", "1000"],
        detach=True,
        network_mode="none",
        labels={"opificia.host": "another", "opificia.role": "sandbox"},
    )
    try:
        session = await launch(control, COUNT)
        await running(control, session)
        await until(lambda: counted(log(host, session)) > 5, "output")
        host.control.kill()
        before = counted(log(host, session))
        # What is printed meanwhile is with the engine only.
        container = docker_client.containers.get(f"opificia-{session}")
        await until(lambda: counted(container.logs(stderr=False)) > before + 20, "output while control is away")
        host.control.start()
        await running(control, session)
        assert (await execute(control, session, "touch", "/work/end"))[0] == 0
        view = await ended(control, session)
        assert how(view) == (SessionState.EXITED, Reason.EXIT_CODE, 6)
        assert counted(log(host, session)) > before + 20
        await nothing_left(host, control, docker_client, session)
        foreign.reload()
        assert foreign.status == "running"
    finally:
        foreign.remove(force=True)


async def test_an_operator_who_follows_a_session_sees_all_of_it_once_while_control_dies_and_restarts(
    host: PrivateHost, control: ControlClient, tmp_path: Path
) -> None:
    ask = "curl -s -o /dev/null http://refused.invalid/; " + COUNT
    session = await launch(control, ask)
    await running(control, session)
    followers = {
        "logs": ("logs", session, "-f"),
        "lines": ("logs", session, "-f", "--json"),
        "egress": ("egress", session, "-f", "--json"),
        "events": ("events", session, "-f", "--json"),
        "sessions": ("sessions", "--watch", "--json"),
    }
    with contextlib.ExitStack() as stack:
        processes = {
            name: stack.enter_context(host.cli_running(*arguments, out=tmp_path / name))
            for name, arguments in followers.items()
        }

        def said(name: str) -> bytes:
            return (tmp_path / name).read_bytes()

        await until(lambda: all(map(said, followers)), "something from each")
        host.control.kill()
        host.control.start()
        await until(lambda: len(said("logs").splitlines()) > 5, "output")
        await asyncio.to_thread(host.control.stop)
        host.control.start()
        await running(control, session)
        assert (await execute(control, session, "touch", "/work/end"))[0] == 0
        assert how(await ended(control, session)) == (SessionState.EXITED, Reason.EXIT_CODE, 6)
        await until(lambda: b'"exited"' in said("sessions"), "the end in the table")
        assert processes["sessions"].poll() is None, said("sessions")
        for name in ("logs", "lines", "egress", "events"):
            assert await asyncio.to_thread(processes[name].wait, PATIENCE_S) == 0, said(name)
    assert counted(said("logs")) > 5
    for name in ("lines", "egress", "events"):
        # As it is told at once, without a restart in between.
        assert said(name).decode() == host.cli(*(word for word in followers[name] if word != "-f")).stdout
    assert said("egress").count(b"refused.invalid") == 1


async def test_a_sandbox_that_ends_while_control_is_dead_is_told_truly(
    host: PrivateHost, control: ControlClient, docker_client: docker.DockerClient
) -> None:
    session = await launch(control, "echo here; sleep 1000")
    await running(control, session)
    container = docker_client.containers.get(f"opificia-{session}")
    # A command is recorded before it is sent: only its output shows that it has begun.
    await until(lambda: container.logs(stderr=False) == b"here\n", "its output")
    host.control.kill()
    container.kill()
    container.wait()
    host.control.start()
    assert how(await ended(control, session)) == (SessionState.FAILED, Reason.KILLED_OUTSIDE, 137)
    assert log(host, session) == b"here\n"
    await nothing_left(host, control, docker_client, session)


async def test_a_runner_cut_off_for_ten_seconds_resumes_without_loss_or_duplicate(
    host: PrivateHost, control: ControlClient, docker_client: docker.DockerClient
) -> None:
    session = await launch(control)
    await connected(control, session)
    seen = bytearray()

    async def follow() -> int:
        async for line in control.run(session, RunRequest(argv=("sh", "-c", COUNT))):
            if isinstance(line, RunOutput):
                seen.extend(line.data.encode())
            elif isinstance(line, RunCompleted):
                return line.exit_code
        raise AssertionError("the end of the command is not known")

    following = asyncio.create_task(follow())
    await until(lambda: seen.count(b"\n") > 5, "output")
    host.gateway.kill()
    before = counted(log(host, session))
    # At most twenty numbers a second.
    await until(lambda: counted(log(host, session)) > before + 200, "ten seconds of output")
    assert seen.count(b"\n") < before + 100
    host.gateway.start()
    await connected(control, session)
    assert (await execute(control, session, "touch", "/work/end"))[0] == 0
    async with asyncio.timeout(PATIENCE_S):
        assert await following == 6
    assert counted(bytes(seen)) > before + 200
    await control.stop(session, 0)
    await ended(control, session)
    await nothing_left(host, control, docker_client, session)


async def test_a_runner_cut_off_for_longer_than_it_may_be_ends_its_session_with_the_reason(
    host: PrivateHost, control: ControlClient, docker_client: docker.DockerClient
) -> None:
    # The runner is the command's parent: stopped, it cannot come back.
    session = await launch(control, "kill -STOP $PPID; sleep 1000")
    await running(control, session)
    container = docker_client.containers.get(f"opificia-{session}")
    await until(
        lambda: any(line[1].startswith("T") for line in container.top(ps_args="-o pid,stat")["Processes"]),
        "the stop of the runner",
    )
    host.gateway.kill()
    host.gateway.start()
    view = await ended(control, session)
    assert how(view)[:2] == (SessionState.FAILED, Reason.RUNNER_LOST)
    await nothing_left(host, control, docker_client, session)


# Many at once.


async def test_fifty_asked_for_at_once_run_eight_at_a_time_in_order_and_leave_nothing(
    host: PrivateHost, control: ControlClient, docker_client: docker.DockerClient
) -> None:
    sessions = [await launch(control, f"echo {number}; exit 3") for number in range(50)]
    assert [(await control.get(session)).queue_position for session in sessions[-3:]] != [None] * 3
    async with asyncio.timeout(240):
        views = [await ended(control, session) for session in sessions]
    assert {how(view) for view in views} == {(SessionState.EXITED, Reason.EXIT_CODE, 3)}
    assert [log(host, session) for session in sessions] == [b"%d\n" % number for number in range(50)]
    starts = [datetime.fromisoformat(view.launched_at or "") for view in views]
    assert starts == sorted(starts)
    ends = [datetime.fromisoformat(view.ended_at or "") for view in views]
    # Of two changes in one millisecond the end came first: it made room.
    changes = sorted([(at, 1) for at in starts] + [(at, -1) for at in ends])
    assert max(itertools.accumulate(change for _, change in changes)) <= ROOM
    await nothing_left(host, control, docker_client, *sessions)
    health = await control.health()
    assert (health.status, health.running, health.waiting) == ("ok", 0, 0)


# The engine goes away. Last, because all that runs goes with it.


async def test_an_engines_restart_ends_its_sandboxes_with_logs_kept_and_the_next_one_runs(
    host: PrivateHost, control: ControlClient, engine: PrivateEngine, docker_client: docker.DockerClient
) -> None:
    session = await launch(control, "echo here; exec sleep 1000")
    await running(control, session)
    await until(lambda: log(host, session) == b"here\n", "its output")
    await asyncio.to_thread(engine.restart)
    view = await ended(control, session)
    assert how(view)[0] is SessionState.FAILED
    assert view.reason in (Reason.STOPPED_OUTSIDE, Reason.KILLED_OUTSIDE)
    assert log(host, session) == b"here\n"
    await nothing_left(host, control, docker_client, session)
    await ready(control)
    assert how(await ended(control, await launch(control, "exit 5"))) == (SessionState.EXITED, Reason.EXIT_CODE, 5)


def test_the_folder_of_an_ended_session_holds_its_journal_logs_and_results(host: PrivateHost) -> None:
    done = [path for path in host.sessions.iterdir() if (path / "out.tar").exists()]
    assert done
    for path in done:
        assert {"events.jsonl", "in", "out.tar"} <= {each.name for each in path.iterdir()}
