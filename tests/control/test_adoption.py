"""What a start finds and may not simply take up: another policy, an end that was asked for, containers of nobody."""

import asyncio
import signal
from pathlib import Path

import pytest

from control.api.types import Health
from control.client import ControlClient
from control.db.rows import StoredEvent
from control.docker.types import LogStream
from control.plan.container import LABEL_POLICY
from control.plan.session import EndRequested, Reason, SessionState
from control.sessions import journal, strays
from tests.control.conftest import Host
from tests.support.patience import until

S = SessionState


def journal_of(host: Host, session: str) -> Path:
    return host.root / "sessions" / session / "events.jsonl"


async def talking(host: Host) -> str:
    """Launch a session that says one thing now and another when control is away."""
    go = host.root / "go"
    session = await host.launch(
        "sh", "-c", f"echo one; until [ -e {go} ]; do sleep 0.02; done; echo two; exec sleep 1000"
    )
    await host.state(session, S.RUNNING)
    await until(lambda: host.log(session) == b"one\n", "its first words")
    return session


async def talk(host: Host) -> None:
    (host.root / "go").touch()
    container = next(iter(host.engine.containers.values()))
    await until(lambda: b"two\n" in container.output[LogStream.STDOUT], "words that nobody heard")


async def test_a_container_made_under_another_policy_is_stopped_with_its_logs_kept(host: Host) -> None:
    session = await talking(host)
    await host.stop()
    await talk(host)
    next(iter(host.engine.containers.values())).labels[LABEL_POLICY] = "another"
    await host.start()
    ended = await host.ended(session)
    assert (ended.life.state, ended.life.reason) == (S.FAILED, Reason.POLICY_MISMATCH)
    assert "another policy" in ended.life.message
    assert host.log(session) == b"one\ntwo\n"
    await host.cleaned(session)
    assert not host.engine.containers
    assert session not in host.gateway.grants


async def test_what_a_session_said_before_a_stop_is_carried_out_after_a_crash_is_kept(host: Host) -> None:
    session = await talking(host)
    await host.stop()
    await talk(host)
    last = journal.read(journal_of(host, session))[-1].number
    journal.append(journal_of(host, session), [StoredEvent(last + 1, 1, EndRequested(Reason.STOPPED_BY_USER))])
    await host.start()
    ended = await host.ended(session)
    assert (ended.life.state, ended.life.reason) == (S.STOPPED, Reason.STOPPED_BY_USER)
    assert host.log(session) == b"one\ntwo\n"


@pytest.mark.parametrize("detect_only", [True, False])
async def test_what_belongs_to_no_session_is_only_told_of_when_the_operator_says_so(
    stopped_host: Host, monkeypatch: pytest.MonkeyPatch, detect_only: bool
) -> None:
    monkeypatch.setattr(strays, "SWEEP_S", 0.05)
    host = stopped_host
    host.settings["docker"] = {"detect_only": detect_only}
    await host.start()
    session = await talking(host)
    container = next(iter(host.engine.containers.values()))
    # A database that was set back knows nothing of it.
    await host.stop()
    await host.forget()
    await host.start()
    if not detect_only:
        await until(lambda: not host.engine.containers and not host.engine.volumes, "the removal")
        assert host.manager.strays == ()
        return
    # At the start, and at every look: its container, and its volume.
    await until(lambda: len(host.manager.strays) == 2, "the sweep")
    assert all(session in each for each in host.manager.strays)
    assert not container.ended.is_set()
    assert session in host.engine.volumes
    async with ControlClient(f"unix:{host.api}") as client:
        told: Health = await client.health()
    assert told.status == "degraded"
    assert set(host.manager.strays) <= set(told.problems)
    # What goes away by itself is not told of any more.
    host.engine.signal(container.id, signal.SIGKILL)
    await host.engine.remove(container.id)
    await host.engine.remove_out_volume(session)
    await until(lambda: not host.manager.strays, "the next look")


async def test_a_launch_that_loses_against_a_stop_holds_no_place(host: Host) -> None:
    host.settings["limits"]["max_running"] = 1
    await host.stop()
    await host.start()
    busy = await host.launch("sleep", "1000")
    await host.state(busy, S.RUNNING)
    session = (await host.make("true")).id
    record = host.manager.record(session)
    assert record is not None
    async with record.lock:
        stopping = asyncio.create_task(host.manager.stop(session))
        launching = asyncio.create_task(host.manager.launch(session))
        await until(lambda: host.manager.admission.position(session) == 1, "the queue")
    await asyncio.wait([stopping, launching])
    assert launching.exception() is not None
    assert (await host.ended(session)).life.reason is Reason.STOPPED_BY_USER
    assert host.manager.admission.positions() == {}
