"""The whole life of sessions on the daemon, with processes for containers."""

import asyncio
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from control.db.rows import StoredEvent
from control.docker.types import EngineError, EngineUnavailableError, NotFoundError
from control.plan.container import LABEL_SESSION
from control.plan.session import EndRequested, Exit, Reason, SessionState
from control.runner.channel import NotAllowedError, RunFailedError
from control.runner.messages import Completed, Run
from control.sessions import journal, launch, life, manager, strays, usage
from control.sessions.refusals import NoSuchSessionError, WrongStateError
from gateway.contract.policy import Usage
from tests.control.conftest import Host
from tests.support.patience import PATIENCE_S, until

S = SessionState


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries again at once."""
    monkeypatch.setattr(life, "RETRY_S", 0.02)
    monkeypatch.setattr(manager, "RETRY_S", 0.05)
    monkeypatch.setattr(usage, "USAGE_S", 0.05)


@pytest.fixture(params=["sqlite", "postgresql"])
def store_url(request: pytest.FixtureRequest) -> str:
    """All of it on both databases."""
    if request.param == "sqlite":
        return ""
    url: str = request.getfixturevalue("postgres_url")
    return url


async def nothing_left(host: Host, session: str) -> None:
    """Check that neither container nor volume, grant, address or place is left of a session."""
    await host.cleaned(session)
    assert not [each for each in host.engine.containers.values() if each.labels[LABEL_SESSION] == session]
    assert session not in host.engine.volumes
    assert session not in host.gateway.grants
    assert host.manager.addresses_held == sum(bool(each.life.address) for each in host.manager.records())
    stored = await host.manager.store.get(session)
    assert stored is not None
    assert (stored.cleaned, stored.life.state.final) == (True, True)
    assert await host.manager.store.held_addresses() == {}


async def test_a_session_runs_its_command_and_ends_with_its_exit_code(host: Host) -> None:
    session = await host.launch("sh", "-c", "echo out; echo err >&2; exit 7")
    ended = await host.ended(session)
    assert (ended.life.state, ended.life.reason) == (S.EXITED, Reason.EXIT_CODE)
    assert ended.life.exit is not None
    assert ended.life.exit.code == 7
    assert host.log(session) == b"out\n"
    assert host.log(session, "stderr") == b"err\n"
    await nothing_left(host, session)


async def test_every_step_is_on_disk_in_order(host: Host) -> None:
    session = await host.launch("true")
    await host.ended(session)
    events = journal.read(host.root / "sessions" / session / "events.jsonl")
    assert [str(stored.event.__struct_config__.tag) for stored in events] == [
        "launch_requested",
        "launch_started",
        "container_created",
        "runner_connected",
        "command_sent",
        "command_completed",
        *(["runner_disconnected"] if len(events) == 9 else []),
        "container_exited",
        "ended",
    ]
    assert [stored.number for stored in events] == list(range(1, len(events) + 1))


async def test_the_grant_is_in_force_before_the_start_and_gone_before_the_end_is_told(host: Host) -> None:
    host.engine.hold["start"] = asyncio.Event()
    session = await host.launch("true")
    await until(lambda: "start" in host.engine.calls, "the start")
    grant = host.gateway.grants[session]
    assert grant.address == "10.231.0.16"
    container = next(iter(host.engine.containers.values()))
    assert container.environment["OPIFICIA_RUNNER_TOKEN"] not in str(host.manager.record(session).__dict__)
    host.engine.hold["start"].set()
    await host.ended(session)
    await host.cleaned(session)
    assert ("revoke", session) in host.gateway.log


async def test_no_token_is_kept_anywhere(host: Host) -> None:
    host.engine.hold["stop"] = asyncio.Event()
    session = await host.launch("sleep", "1000")
    await host.state(session, S.RUNNING)
    token = next(iter(host.engine.containers.values())).environment["OPIFICIA_RUNNER_TOKEN"]
    await host.manager.stop(session)
    host.engine.hold["stop"].set()
    await host.ended(session)
    await host.stop()
    for path in host.root.rglob("*"):
        if path.is_file():
            assert token.encode() not in path.read_bytes(), path


async def test_a_stop_ends_a_session_with_grace(host: Host) -> None:
    session = await host.launch("sh", "-c", "trap 'echo bye; exit 9' TERM; echo up; while :; do sleep 0.05; done")
    await host.state(session, S.RUNNING)
    await until(lambda: host.log(session) == b"up\n", "its output")
    await host.manager.stop(session)
    ended = await host.ended(session)
    assert (ended.life.state, ended.life.reason) == (S.STOPPED, Reason.STOPPED_BY_USER)
    assert host.log(session) == b"up\nbye\n"
    await nothing_left(host, session)


async def test_stopping_twice_or_after_the_end_is_harmless(host: Host) -> None:
    session = await host.launch("sleep", "1000")
    await host.state(session, S.RUNNING)
    await asyncio.gather(host.manager.stop(session), host.manager.stop(session, 0))
    await host.ended(session)
    await host.cleaned(session)
    assert (await host.manager.stop(session)).life.state is S.STOPPED
    with pytest.raises(NoSuchSessionError):
        await host.manager.stop("unknown")


async def test_a_sandbox_that_never_says_hello_is_ended_at_the_deadline(stopped_host: Host) -> None:
    stopped_host.settings["limits"]["hello_timeout_ms"] = 2_500
    stopped_host.engine.images["silent"] = ["sh", "-c", "echo here; exec sleep 1000"]
    await stopped_host.start()
    session = await stopped_host.launch("true", image="silent")
    ended = await stopped_host.ended(session)
    assert (ended.life.state, ended.life.reason) == (S.FAILED, Reason.HELLO_TIMEOUT)
    assert stopped_host.log(session) == b"here\n"
    await nothing_left(stopped_host, session)


async def test_the_time_limit_ends_a_session(host: Host) -> None:
    session = await host.launch("sleep", "1000", time_limit_ms=1500)
    ended = await host.ended(session)
    assert (ended.life.state, ended.life.reason) == (S.FAILED, Reason.TIME_LIMIT)
    await nothing_left(host, session)


async def test_a_session_whose_folder_is_gone_does_not_keep_the_daemon_from_starting(host: Host) -> None:
    session = await host.launch("sleep", "1000")
    await host.state(session, S.RUNNING)
    await host.stop()
    shutil.rmtree(host.root / "sessions" / session)
    await host.start()
    await host.manager.stop(session)
    assert (await host.ended(session)).life.reason is Reason.STOPPED_BY_USER
    await nothing_left(host, session)


async def test_a_clock_that_is_set_changes_nothing_about_the_time_limit(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await host.launch("sleep", "1000", time_limit_ms=1500)
    await host.state(session, S.RUNNING, S.FAILED)
    real = life.now_ms
    # Set back by a day, also for the process that takes the session up: it is not to run for a day longer.
    monkeypatch.setattr(life, "now_ms", lambda: real() - 86_400_000)
    await host.stop()
    await host.start()
    ended = await host.ended(session)
    assert (ended.life.state, ended.life.reason) == (S.FAILED, Reason.TIME_LIMIT)
    other = await host.launch("sleep", "1000", time_limit_ms=1500)
    await host.state(other, S.RUNNING, S.FAILED)
    monkeypatch.setattr(life, "now_ms", lambda: real() - 2 * 86_400_000)
    assert (await host.ended(other)).life.reason is Reason.TIME_LIMIT


async def test_a_clock_set_forward_during_a_launch_takes_nothing_of_the_time_limit(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.engine.hold["start"] = asyncio.Event()
    session = await host.launch("sleep", "1000", time_limit_ms=3_600_000)
    await until(lambda: "start" in host.engine.calls, "the start")
    real = life.now_ms
    monkeypatch.setattr(life, "now_ms", lambda: real() + 86_400_000)
    host.engine.hold["start"].set()
    assert (await host.state(session, S.RUNNING, S.FAILED)).life.state is S.RUNNING
    await host.manager.stop(session, 0)
    assert (await host.ended(session)).life.reason is Reason.STOPPED_BY_USER


async def test_four_ends_have_four_reasons(host: Host) -> None:
    async def end(act: Any, *command: str) -> Reason | None:
        before = set(host.engine.containers)
        session = await host.launch(*(command or ("sleep", "1000")))
        await host.state(session, S.RUNNING)
        (container,) = set(host.engine.containers) - before
        await act(session, container)
        ended = await host.ended(session)
        await nothing_left(host, session)
        return ended.life.reason

    async def out_of_memory(_session: str, container: str) -> None:
        host.engine.containers[container].oom = True
        host.engine.signal(container, signal.SIGKILL)

    async def kill(_session: str, container: str) -> None:
        host.engine.signal(container, signal.SIGKILL)

    async def docker_stop(_session: str, container: str) -> None:
        host.engine.signal(container, signal.SIGTERM)

    async def our_stop(session: str, _container: str) -> None:
        await host.manager.stop(session, 0)

    async def vanish(_session: str, container: str) -> None:
        await host.engine.vanish(container)

    assert await end(out_of_memory) is Reason.OOM_KILLED
    assert await end(kill) is Reason.KILLED_OUTSIDE
    assert await end(docker_stop) is Reason.STOPPED_OUTSIDE
    assert await end(our_stop) is Reason.STOPPED_BY_USER
    assert await end(vanish) is Reason.CONTAINER_VANISHED


async def test_a_command_that_kills_itself_has_not_been_killed(host: Host) -> None:
    session = await host.launch("sh", "-c", "kill -9 $$")
    ended = await host.ended(session)
    assert (ended.life.reason, ended.life.exit and ended.life.exit.code) == (Reason.EXIT_CODE, 137)


async def test_no_time_to_say_hello_passes_while_the_gateway_is_away(
    stopped_host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped_host.settings["limits"]["hello_timeout_ms"] = 50
    stopped_host.engine.images["silent"] = ["sh", "-c", "exec sleep 1000"]
    await stopped_host.start()
    link = stopped_host.control.link
    away = iter(range(10))

    def is_connected(self: object) -> bool:
        # Until the container runs it is needed.
        return "start" not in stopped_host.engine.calls or next(away, None) is None

    monkeypatch.setattr(type(link), "connected", property(is_connected))
    session = await stopped_host.launch("true", image="silent")
    assert (await stopped_host.ended(session)).life.reason is Reason.HELLO_TIMEOUT
    assert next(away, None) is None


async def test_a_runner_that_stays_away_ends_the_session(stopped_host: Host) -> None:
    stopped_host.settings["limits"]["runner_reconnect_ms"] = 200
    await stopped_host.start()
    session = await stopped_host.launch("sleep", "1000")
    await stopped_host.state(session, S.RUNNING)
    container = next(iter(stopped_host.engine.containers.values()))
    assert container.process is not None
    os.kill(container.process.pid, signal.SIGSTOP)
    stopped_host.gateway.cut_runners()
    await until(lambda: "stop" in stopped_host.engine.calls, "the stop")
    os.kill(container.process.pid, signal.SIGCONT)
    assert (await stopped_host.ended(session)).life.reason is Reason.RUNNER_LOST


async def test_a_runner_that_will_not_end_is_ended(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(life, "SHUTDOWN_GRACE_S", 0.1)
    # Says hello and that the command has ended, and stays.
    script = (
        "import json,os,sys; sys.path.insert(0, os.environ['LIB']); from control.runner.client import WebSocket;"
        "w = WebSocket(os.environ['OPIFICIA_RUNNER_URL'], os.environ['OPIFICIA_RUNNER_TOKEN']);"
        "w.send(json.dumps({'type':'hello','version':1,'instance':'i'}));"
        "[w.send(json.dumps({'type':'completed','seq':1,'run':'main','exit_code':0}))"
        " for _ in iter(int, 1) if json.loads(w.receive())['type'] == 'run']"
    )
    host.engine.images["stuck"] = ["python3", "-c", script]
    session = await host.launch("true", image="stuck", env={"LIB": str(Path.cwd())})
    ended = await host.ended(session)
    assert (ended.life.state, ended.life.reason) == (S.FAILED, Reason.SHUTDOWN_TIMEOUT)
    await nothing_left(host, session)


async def test_a_runner_whose_connection_is_lost_with_the_word_to_end_is_told_again(host: Host) -> None:
    # Hears of the end on its first connection, as if it had not; ends with the code that it hears on the second.
    script = (
        "import json,os,sys; sys.path.insert(0, os.environ['LIB']); from control.runner.client import WebSocket\n"
        "def connect(runs):\n"
        "    line = WebSocket(os.environ['OPIFICIA_RUNNER_URL'], os.environ['OPIFICIA_RUNNER_TOKEN'])\n"
        "    line.send(json.dumps({'type':'hello','version':1,'instance':'i','runs':runs}))\n"
        "    return line\n"
        "def hear(line, wanted):\n"
        "    while (message := json.loads(line.receive()))['type'] != wanted: pass\n"
        "    return message\n"
        "line = connect([])\n"
        "hear(line, 'run')\n"
        "line.send(json.dumps({'type':'completed','seq':1,'run':'main','exit_code':5}))\n"
        "hear(line, 'shutdown')\n"
        "line.close()\n"
        "sys.exit(hear(connect(['main']), 'shutdown')['exit_code'])\n"
    )
    host.engine.images["deaf"] = ["python3", "-c", script]
    session = await host.launch("true", image="deaf", env={"LIB": str(Path.cwd())})
    ended = await host.ended(session)
    assert (ended.life.state, ended.life.reason, ended.life.exit) == (S.EXITED, Reason.EXIT_CODE, Exit(5))
    await nothing_left(host, session)


# Launches that fail.


async def refused(host: Host, **fields: Any) -> tuple[Reason | None, str]:
    session = await host.launch("true", **fields)
    ended = await host.ended(session)
    assert ended.life.state is S.FAILED
    await nothing_left(host, session)
    return ended.life.reason, ended.life.message


async def test_a_missing_image_is_told_at_once(host: Host) -> None:
    reason, message = await refused(host, image="missing")
    assert reason is Reason.IMAGE_MISSING
    assert "opificia images" in message


async def test_an_image_that_can_run_no_runner_is_refused(host: Host) -> None:
    host.engine.images["without-python"] = []
    assert (await refused(host, image="without-python"))[0] is Reason.IMAGE_UNUSABLE


async def test_nothing_starts_on_a_host_that_is_not_ready(stopped_host: Host) -> None:
    stopped_host.host_problems = ["the firewall's chain is missing. Run `opificia host prepare`."]
    await stopped_host.start()
    assert await refused(stopped_host) == (Reason.HOST_NOT_READY, stopped_host.host_problems[0])


async def test_a_container_is_started_only_when_the_host_is_looked_at_and_the_grant_acknowledged(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = asyncio.Event()

    async def problems() -> list[str]:
        await looked.wait()
        return []

    monkeypatch.setattr(host.control._host, "_verify", problems)
    monkeypatch.setattr(host.control._host, "_until", 0.0)
    host.gateway.answering.clear()
    session = await host.launch("true")
    record = host.manager.record(session)
    assert record is not None
    for step in (looked, host.gateway.answering):
        await until(lambda: bool(record.life.container) and not record.unstored, "the container")
        # Turns enough for a start that waits for nothing.
        for _ in range(100):
            await asyncio.sleep(0)
        assert "start" not in host.engine.calls
        step.set()
    assert (await host.ended(session)).life.reason is Reason.EXIT_CODE


async def test_a_grant_that_the_gateway_refuses_ends_the_launch(host: Host) -> None:
    host.gateway.refuse["*"] = ("allow: 'x:y' is not a rule",)
    assert await refused(host) == (Reason.GRANT_REFUSED, "allow: 'x:y' is not a rule")


async def test_without_the_gateway_nothing_starts(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "GRANT_TIMEOUT_S", 0.2)
    await host.gateway.stop()
    session = await host.launch("true")
    ended = await host.ended(session)
    assert ended.life.reason is Reason.GATEWAY_UNAVAILABLE
    # Its address is held until the gateway has confirmed that nobody has it.
    assert host.manager.addresses_held == 1
    await host.gateway.start()
    await nothing_left(host, session)


@pytest.mark.parametrize("call", ["image", "declare_out_volume", "create_out_volume", "create", "start"])
async def test_an_engine_that_fails_is_told(host: Host, call: str) -> None:
    host.engine.fail[call] = EngineError("the engine is out of sorts", "mend it")
    reason, message = await refused(host)
    assert (reason, message) == (Reason.ENGINE_ERROR, "the engine is out of sorts mend it")


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("remove", EngineUnavailableError("the engine is away")),
        ("remove_out_volume", EngineUnavailableError("the engine is away")),
        # The engine has forgotten the volume by then, and nobody else would ever look for its loop device and file.
        ("remove_out_volume", NotFoundError("the volumes helper does not run")),
    ],
)
async def test_what_cannot_be_removed_is_tried_again(host: Host, call: str, error: EngineError) -> None:
    host.engine.fail[call] = error
    session = await host.launch("true")
    await host.ended(session)
    await nothing_left(host, session)


async def test_a_volume_that_will_not_go_keeps_nobody_waiting(stopped_host: Host) -> None:
    host = stopped_host
    host.settings["limits"]["max_running"] = 1
    await host.start()
    held = host.engine.hold["remove_out_volume"] = asyncio.Event()
    first = await host.launch("true")
    second = await host.launch("true")
    await host.ended(first)
    assert (await host.ended(second)).life.state is S.EXITED
    assert {first, second} <= set(host.engine.volumes)
    held.set()
    await nothing_left(host, first)
    await nothing_left(host, second)


async def test_a_stop_that_fails_is_tried_again(host: Host) -> None:
    session = await host.launch("sleep", "1000")
    await host.state(session, S.RUNNING)
    host.engine.fail["stop"] = EngineUnavailableError("the engine is away")
    await host.manager.stop(session)
    assert (await host.ended(session)).life.state is S.STOPPED
    await nothing_left(host, session)


async def test_a_container_whose_making_was_never_answered_is_not_left(host: Host) -> None:
    host.engine.unanswered["create"] = EngineUnavailableError("the connection to the engine was cut")
    session = await host.launch("true")
    ended = await host.ended(session)
    assert (ended.life.state, ended.life.reason, ended.life.container) == (S.FAILED, Reason.ENGINE_ERROR, "")
    await nothing_left(host, session)


async def test_an_engine_that_is_away_at_the_end_keeps_no_results_from_being_kept(host: Host) -> None:
    host.engine.fail["archive_out"] = EngineUnavailableError("the engine is away")
    session = await host.launch("true")
    ended = await host.ended(session)
    assert (ended.life.state, ended.life.reason, ended.life.message) == (S.EXITED, Reason.EXIT_CODE, "")
    assert host.engine.calls.count("archive_out") == 2
    assert (host.root / "sessions" / session / "out.tar").exists()
    await nothing_left(host, session)


async def test_results_that_cannot_be_kept_are_told(host: Host) -> None:
    host.engine.fail["archive_out"] = EngineError("the disk is full")
    session = await host.launch("true")
    ended = await host.ended(session)
    assert (ended.life.state, ended.life.message) == (S.EXITED, "the results could not be kept: the disk is full")


# Stops at every step.


@pytest.mark.parametrize("call", ["image", "declare_out_volume", "create_out_volume", "create", "start"])
async def test_a_stop_during_the_launch_leaves_nothing(host: Host, call: str) -> None:
    held = host.engine.hold[call] = asyncio.Event()
    session = await host.launch("sleep", "1000")
    await until(lambda: call in host.engine.calls, call)
    await host.manager.stop(session, 500)
    held.set()
    ended = await host.ended(session)
    assert (ended.life.state, ended.life.reason) == (S.STOPPED, Reason.STOPPED_BY_USER)
    await nothing_left(host, session)


async def test_a_stop_while_the_grant_is_on_its_way_leaves_nothing(host: Host) -> None:
    host.gateway.answering.clear()
    session = await host.launch("sleep", "1000")
    await until(lambda: "image" in host.engine.calls, "the launch")
    await host.manager.stop(session)
    host.gateway.answering.set()
    assert (await host.ended(session)).life.state is S.STOPPED
    await nothing_left(host, session)


async def test_a_stop_before_the_launch_or_in_the_queue_ends_it_at_once(stopped_host: Host) -> None:
    stopped_host.settings["limits"]["max_running"] = 1
    host = stopped_host
    await host.start()
    running = await host.launch("sleep", "1000")
    await host.state(running, S.RUNNING)
    waiting = await host.launch("true")
    assert host.manager.admission.position(waiting) == 1
    assert (await host.manager.stop(waiting)).life.state is S.STOPPED
    assert host.manager.admission.position(waiting) is None
    await host.cleaned(waiting)
    await host.manager.stop(running, 0)
    await host.ended(running)


# The queue.


async def test_twelve_at_once_with_room_for_three_all_run_in_order(stopped_host: Host) -> None:
    host = stopped_host
    host.settings["limits"]["max_running"] = 3
    await host.start()
    held = host.engine.hold["image"] = asyncio.Event()
    sessions = [await host.launch("true") for _ in range(12)]
    held.set()
    assert [host.manager.admission.position(each) for each in sessions][3:] == list(range(1, 10))
    for session in sessions:
        assert (await host.ended(session)).life.state is S.EXITED
        await host.cleaned(session)
    launched = [await host.manager.get(session) for session in sessions]
    times = [each.life.launched_at or 0 for each in launched]
    assert times == sorted(times)
    assert host.manager.admission.admitted == 0
    assert not host.engine.containers
    assert not host.engine.volumes


async def test_without_a_free_address_the_next_waits(stopped_host: Host) -> None:
    host = stopped_host
    # A /27 has fifteen.
    host.settings["network"] = {"subnet": "10.231.0.0/27"}
    host.settings["sandbox"] = {
        "memory_bytes": 64 << 20,
        "work_bytes": 1 << 20,
        "tmp_bytes": 1 << 20,
        "home_bytes": 1 << 20,
    }
    host.settings["admission"] = {"cpus": 100.0}
    host.engine.images["idle"] = ["sleep", "1000"]
    await host.start()
    sessions = [await host.launch("true", image="idle") for _ in range(17)]
    await until(lambda: len(host.engine.containers) == 15, "fifteen containers")
    assert host.manager.admission.positions() == {sessions[15]: 1, sessions[16]: 2}
    addresses = {grant.address for grant in host.gateway.grants.values()}
    assert len(addresses) == 15
    await host.manager.stop(sessions[3], 0)
    await until(lambda: host.manager.admission.position(sessions[16]) == 1, "the next")
    await asyncio.gather(*(host.manager.stop(session, 0) for session in sessions))
    for session in sessions:
        await host.ended(session)


# Commands in a running session.


async def test_commands_run_beside_the_sessions_own(host: Host) -> None:
    session = await host.launch()
    await host.state(session, S.CONNECTED)
    handle = await host.manager.run_command(session, Run(run="r1", argv=("sh", "-c", "exit 3"), cwd="/tmp"))
    assert (await asyncio.wait_for(handle.completed, PATIENCE_S)).exit_code == 3
    assert (await host.manager.get(session)).life.state is S.RUNNING
    await host.manager.stop(session, 0)
    assert (await host.ended(session)).life.state is S.STOPPED
    with pytest.raises(WrongStateError):
        await host.manager.run_command(session, Run(run="r2", argv=("true",)))


async def test_a_command_needs_a_connected_runner(host: Host) -> None:
    host.engine.hold["start"] = asyncio.Event()
    session = await host.launch()
    await until(lambda: "start" in host.engine.calls, "the start")
    with pytest.raises(NotAllowedError):
        await host.manager.run_command(session, Run(run="r1", argv=("true",)))
    host.engine.hold["start"].set()
    await host.state(session, S.CONNECTED)
    await host.manager.stop(session, 0)
    await host.ended(session)


async def test_the_follower_of_a_command_is_told_that_the_session_is_over(host: Host) -> None:
    session = await host.launch()
    await host.state(session, S.CONNECTED)
    handle = await host.manager.run_command(session, Run(run="r1", argv=("sleep", "1000"), cwd="/tmp"))
    await host.manager.stop(session, 0)

    async def follow() -> None:
        while not isinstance(await handle.next(), Completed):
            pass

    with pytest.raises(RunFailedError, match="over"):
        await follow()
    await host.ended(session)


# The gateway goes and comes.


async def test_a_gateway_that_restarts_gets_all_grants_and_sessions_go_on(host: Host) -> None:
    session = await host.launch("sh", "-c", "read x < /dev/zero & sleep 1000")
    await host.state(session, S.RUNNING)
    await host.gateway.report(session, Usage(egress_bytes_up=100))
    await until(lambda: host.manager.used(session).egress_bytes_up == 100, "the report")
    await host.gateway.stop()
    await host.gateway.start()
    await until(lambda: session in host.gateway.grants, "the snapshot")
    # What was used in the old epoch comes with the grant.
    assert host.gateway.grants[session].used == Usage(egress_bytes_up=100)
    await host.gateway.report(session, Usage(egress_bytes_up=5))
    await until(lambda: host.manager.used(session).egress_bytes_up == 105, "the report")
    record = host.manager.record(session)
    assert record is not None
    await until(lambda: record.life.connected, "the runner's return")
    await host.manager.stop(session, 0)
    await host.ended(session)
    await host.cleaned(session)
    assert (await host.manager.store.usage_of([session]))[session].popitem()[1]


# Control goes and comes.


async def test_a_live_session_is_kept_across_a_restart_of_control(host: Host) -> None:
    session = await host.launch(
        "sh", "-c", "echo one; while [ ! -e /tmp/go-$OPIFICIA_SESSION_ID ]; do sleep 0.05; done; echo two; exit 6"
    )
    await host.state(session, S.RUNNING)
    await until(lambda: host.log(session) == b"one\n", "its output")
    await host.stop()
    assert len(host.engine.containers) == 1
    await host.start()
    assert (await host.manager.get(session)).life.state is S.RUNNING
    go = Path(f"/tmp/go-{session}")
    go.touch()
    try:
        ended = await host.ended(session)
    finally:
        go.unlink()
    assert (ended.life.state, ended.life.reason) == (S.EXITED, Reason.EXIT_CODE)
    assert ended.life.exit is not None
    assert ended.life.exit.code == 6
    assert host.log(session) == b"one\ntwo\n"
    await nothing_left(host, session)


async def test_a_session_that_ended_while_control_was_away_is_told_truly(host: Host) -> None:
    session = await host.launch("sleep", "1000")
    await host.state(session, S.RUNNING)
    container = next(iter(host.engine.containers.values()))
    await host.stop()
    # Nobody is there to say shutdown: the engine ends it.
    host.engine.signal(container.id, signal.SIGKILL)
    await container.ended.wait()
    await host.start()
    ended = await host.ended(session)
    assert (ended.life.state, ended.life.reason) == (S.FAILED, Reason.KILLED_OUTSIDE)
    await nothing_left(host, session)


async def test_a_container_removed_while_control_was_away_has_vanished(host: Host) -> None:
    session = await host.launch("sleep", "1000")
    await host.state(session, S.RUNNING)
    await host.stop()
    await host.engine.vanish(next(iter(host.engine.containers)))
    await host.start()
    assert (await host.ended(session)).life.reason is Reason.CONTAINER_VANISHED
    await nothing_left(host, session)


async def test_a_launch_cut_by_a_restart_begins_anew_and_ends_as_if_nothing_had_happened(host: Host) -> None:
    held = host.engine.hold["start"] = asyncio.Event()
    session = await host.launch("true")
    await until(lambda: "start" in host.engine.calls, "the start")
    stopping = asyncio.create_task(host.stop())
    host.engine.hold.clear()
    host.engine.fail["start"] = EngineError("the daemon died before")
    held.set()
    await stopping
    before = host.engine.calls.count("create")
    await host.start()
    ended = await host.ended(session)
    assert (ended.life.state, ended.life.reason) == (S.EXITED, Reason.EXIT_CODE)
    assert host.engine.calls.count("create") == before + 1
    await nothing_left(host, session)


async def test_a_session_that_waited_and_can_never_start_any_more_ends_with_the_reason(stopped_host: Host) -> None:
    host = stopped_host
    host.settings["limits"]["max_running"] = 1
    await host.start()
    first = await host.launch("sleep", "1000")
    await host.state(first, S.RUNNING)
    waiting = await host.launch("true")
    await host.stop()
    # Less than one sandbox takes: no start of the daemon may fail by it.
    host.settings["admission"] = {"cpus": 0.5}
    await host.start()
    ended = await host.ended(waiting)
    assert (ended.life.state, ended.life.reason) == (S.FAILED, Reason.HOST_NOT_READY)
    assert "ask for less" in ended.life.message
    assert (await host.manager.get(first)).life.state is S.RUNNING
    await host.manager.stop(first, 0)
    await host.ended(first)


async def test_more_than_may_wait_are_taken_up_after_a_restart(stopped_host: Host) -> None:
    host = stopped_host
    host.settings["limits"] |= {"max_running": 1, "max_waiting": 3}
    await host.start()
    first = await host.launch("sleep", "1000")
    await host.state(first, S.RUNNING)
    others = [await host.launch("true") for _ in range(3)]
    await host.stop()
    host.settings["limits"]["max_waiting"] = 1
    await host.start()
    assert list(host.manager.admission.positions()) == others
    await host.manager.stop(first, 0)
    for session in others:
        assert (await host.ended(session)).life.reason is Reason.EXIT_CODE


async def test_waiting_sessions_wait_again_after_a_restart(stopped_host: Host) -> None:
    host = stopped_host
    host.settings["limits"]["max_running"] = 1
    await host.start()
    first = await host.launch("sleep", "1000")
    await host.state(first, S.RUNNING)
    others = [await host.launch("true") for _ in range(3)]
    await host.stop()
    await host.start()
    assert host.manager.admission.positions() == {each: place for place, each in enumerate(others, 1)}
    await host.manager.stop(first, 0)
    for session in others:
        assert (await host.ended(session)).life.state is S.EXITED


async def test_an_ended_session_whose_clean_up_was_cut_is_cleaned_up(host: Host) -> None:
    held = host.engine.hold["remove"] = asyncio.Event()
    session = await host.launch("true")
    await host.ended(session)
    await until(lambda: "remove" in host.engine.calls, "the removal")
    await host.stop()
    host.engine.hold.clear()
    held.set()
    await host.start()
    await nothing_left(host, session)


async def test_what_belongs_to_no_session_is_removed_with_its_logs_kept(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strays, "SWEEP_S", 0.05)
    await host.stop()
    await host.start()
    session = await host.launch("sh", "-c", "echo here; exec sleep 1000")
    await host.state(session, S.RUNNING)
    await until(lambda: host.log(session) == b"here\n", "its output")
    # A database that was set back knows nothing of it.
    await host.stop()
    await host.forget()
    (host.root / "sessions" / session / "stdout.log").unlink()
    await host.start()
    await until(lambda: not host.engine.containers and not host.engine.volumes, "the removal")
    assert host.log(session) == b"here\n"


async def test_a_stray_that_will_not_go_keeps_the_sweep_from_no_other(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strays, "SWEEP_S", 0.05)
    await host.stop()
    await host.start()
    sessions = [await host.launch("sleep", "1000") for _ in range(2)]
    for session in sessions:
        await host.state(session, S.RUNNING)
    stuck = next(iter(host.engine.containers))
    remove = host.engine.remove

    async def remove_others(container: str) -> None:
        if container == stuck:
            raise EngineError("it is stuck")
        await remove(container)

    with monkeypatch.context() as patch:
        patch.setattr(host.engine, "remove", remove_others)
        # As if the database had lost them: nobody knows them any more.
        for session in sessions:
            host.manager._records.pop(session)
        await until(lambda: list(host.engine.containers) == [stuck] and not host.engine.volumes, "the removal")
    await until(lambda: not host.engine.containers, "the removal")


async def test_another_live_session_is_left_alone_by_the_sweep(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strays, "SWEEP_S", 0.01)
    await host.stop()
    await host.start()
    session = await host.launch("sh", "-c", "sleep 0.5; exit 3")
    ended = await host.ended(session)
    assert (ended.life.reason, ended.life.exit and ended.life.exit.code) == (Reason.EXIT_CODE, 3)


async def test_a_stop_asked_for_just_before_the_crash_is_carried_out(host: Host) -> None:
    session = await host.launch("sleep", "1000")
    await host.state(session, S.RUNNING)
    await host.stop()
    # What a daemon writes before it acts on a stop.
    path = host.root / "sessions" / session / "events.jsonl"
    last = journal.read(path)[-1].number
    journal.append(path, [StoredEvent(last + 1, 1, EndRequested(Reason.STOPPED_BY_USER))])
    await host.start()
    ended = await host.ended(session)
    assert (ended.life.state, ended.life.reason) == (S.STOPPED, Reason.STOPPED_BY_USER)
    await nothing_left(host, session)
