"""An operator who follows a session while the control daemon comes and goes at the wrong moments: nothing is lost."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from control.api.types import Problem
from control.client import ControlClient, ControlError, ControlUnavailableError
from control.exchange import Answer
from control.plan.session import SessionState
from tests.control.conftest import Host
from tests.support.patience import until

PATIENCE_S = 30.0


class CountingClient(ControlClient):
    """Tells how many answers have begun."""

    answered = 0

    @asynccontextmanager
    async def _request(self, *arguments: Any, **options: Any) -> AsyncIterator[Answer]:
        async with super()._request(*arguments, **options) as answer:
            self.answered += 1
            yield answer


@pytest.fixture
async def counting(host: Host) -> AsyncIterator[CountingClient]:
    async with CountingClient(f"unix:{host.api}") as client:
        yield client


async def silent_session(host: Host, go: Path) -> str:
    """Launch a session that says nothing until the file `go` is there, then one word."""
    session = await host.launch("sh", "-c", "until [ -e $0 ]; do sleep 0.05; done; echo last", str(go))
    await host.state(session, SessionState.RUNNING)
    return session


async def restart_while(host: Host, client: CountingClient, following: "asyncio.Task[Any]", answers: int) -> None:
    """Restart the daemon once the client has had that many answers, which are its streams."""
    await until(lambda: client.answered == answers or following.done(), f"{answers} answers")
    await host.stop()
    await host.start()


async def test_the_last_word_of_a_silent_session_comes_through_two_restarts_far_apart(
    host: Host, counting: CountingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The patience is for each restart: time that the daemon was there in between does not use it up."""
    ahead = 0.0
    monkeypatch.setattr("control.client.monotonic", lambda: time.monotonic() + ahead)
    go = host.root / "go"
    session = await silent_session(host, go)

    async def follow() -> bytes:
        return b"".join([data async for data in counting.follow_log(session, "stdout", PATIENCE_S)])

    following = asyncio.create_task(follow())
    for restart in (1, 2):
        await restart_while(host, counting, following, restart)
        ahead += 2 * PATIENCE_S
    go.touch()
    assert await following == b"last\n"


async def test_the_end_of_a_silent_session_is_told_through_two_restarts_far_apart(
    host: Host, counting: CountingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = 0.0
    monkeypatch.setattr("control.client.monotonic", lambda: time.monotonic() + ahead)
    go = host.root / "go"
    session = await silent_session(host, go)

    async def follow() -> list[int]:
        return [event.number async for event in counting.follow_events(session, PATIENCE_S)]

    following = asyncio.create_task(follow())
    for restart in (1, 2):
        await restart_while(host, counting, following, restart)
        ahead += 2 * PATIENCE_S
    go.touch()
    numbers = await following
    # Each once, and to the end.
    assert numbers == [event.number async for event in counting.events(session, follow=False)]


async def test_lines_of_both_outputs_come_once_each_through_a_restart(host: Host, counting: CountingClient) -> None:
    go = host.root / "go"
    script = "echo one; echo two >&2; until [ -e $0 ]; do sleep 0.05; done; echo three; echo four >&2"
    session = await host.launch("sh", "-c", script, str(go))
    seen: list[str] = []

    async def follow() -> None:
        async for line in counting.follow_logs(session, PATIENCE_S):
            seen.append(line.data)  # noqa: PERF401 - looked at while it grows

    following = asyncio.create_task(follow())
    await until(lambda: len(seen) == 2, "what it says at first")
    await restart_while(host, counting, following, 1)
    go.touch()
    await following
    assert sorted(seen) == sorted(["one\n", "two\n", "three\n", "four\n"])
    assert [line.data async for line in counting.logs(session)] == seen


async def test_lines_of_the_egress_log_come_once_each_through_a_restart(host: Host, counting: CountingClient) -> None:
    session = await silent_session(host, host.root / "go")
    path = host.root / "egress" / f"{session}.log"
    seen: list[str] = []

    async def follow() -> None:
        async for entry in counting.follow_egress(session, PATIENCE_S):
            seen.append(entry["host"])  # noqa: PERF401 - looked at while it grows

    following = asyncio.create_task(follow())
    path.write_text('{"host": "one"}\n{"host": "t')
    await until(lambda: len(seen) == 1, "the first line")
    await restart_while(host, counting, following, 1)
    with path.open("a") as file:
        file.write('wo"}\n')
    await until(lambda: len(seen) == 2, "the second line")
    (host.root / "go").touch()
    await following
    assert seen == ["one", "two"]


class NotReadyClient(CountingClient):
    """Finds the daemon there twice, and not ready, as when its database is away."""

    refusals = 2

    @asynccontextmanager
    async def _request(self, *arguments: Any, **options: Any) -> AsyncIterator[Answer]:
        if self.refusals:
            self.refusals -= 1
            problem = Problem(
                type="", title="", status=503, detail="the database is away", reason="database_unavailable"
            )
            raise ControlError(problem)
        async with super()._request(*arguments, **options) as answer:
            yield answer


async def test_a_daemon_that_is_not_ready_is_waited_for_as_one_that_is_away(host: Host) -> None:
    session = await host.launch("true")
    await host.ended(session)
    async with NotReadyClient(f"unix:{host.api}") as client:
        assert (await client.get(session, PATIENCE_S)).id == session
        client.refusals = 2
        assert [event.number async for event in client.follow_events(session, PATIENCE_S)]
        client.refusals = 1
        with pytest.raises(ControlError):
            await client.get(session)


async def test_a_daemon_that_stays_away_is_not_waited_for_longer_than_said(
    host: Host, counting: CountingClient
) -> None:
    session = await silent_session(host, host.root / "go")

    async def follow() -> None:
        async for _ in counting.follow_log(session, "stdout", 0.5):
            pass

    following = asyncio.create_task(follow())
    await until(lambda: counting.answered == 1, "the answer")
    await host.stop()
    with pytest.raises(ControlUnavailableError):
        await following
    with pytest.raises(ControlUnavailableError):
        await counting.get(session, 0.5)


async def test_one_session_is_asked_for_until_the_daemon_is_back(host: Host, counting: CountingClient) -> None:
    session = await silent_session(host, host.root / "go")
    await host.stop()
    asking = asyncio.create_task(counting.get(session, PATIENCE_S))
    await host.start()
    assert (await asking).id == session


async def test_what_a_session_says_while_it_is_stopped_is_kept_when_the_daemon_restarts_meanwhile(host: Host) -> None:
    """It is taken up as one that is to be ended, and says its last word only then."""
    host.engine.images["slow"] = [
        "sh",
        "-c",
        "trap 'until [ -e $0 ]; do sleep 0.05; done; echo last; exit 0' TERM; echo first; while :; do sleep 0.05; done",
        str(host.root / "go"),
    ]
    session = await host.launch("true", image="slow")
    await until(lambda: "start" in host.engine.calls, "the start")
    await until(lambda: host.log(session) == b"first\n", "its output")
    await host.manager.stop(session, 20_000)
    await until(lambda: "stop" in host.engine.calls, "the stop")
    await host.stop()
    await host.start()
    (host.root / "go").touch()
    assert (await host.ended(session)).life.state is SessionState.STOPPED
    assert host.log(session) == b"first\nlast\n"


async def test_a_session_begins_with_nothing_of_one_that_the_database_has_forgotten(host: Host) -> None:
    """A database restored from before a session: its name is free again, and its folder is still there."""
    session = await host.launch("echo", "old", session_id="mine")
    await host.ended(session)
    await host.cleaned(session)
    await host.stop()
    await host.forget()
    await host.start()
    go = host.root / "go"
    await host.launch("sh", "-c", "echo new; until [ -e $0 ]; do sleep 0.05; done", str(go), session_id="mine")
    await host.state(session, SessionState.RUNNING)
    await until(lambda: host.log(session) == b"new\n", "its output, and nothing before it")
    # The journal of the one before would end it here.
    await host.stop()
    await host.start()
    go.touch()
    assert (await host.ended(session)).life.state is SessionState.EXITED
    assert host.log(session) == b"new\n"
    (aside,) = (host.root / "sessions").glob("mine.until-*")
    assert (aside / "stdout.log").read_bytes() == b"old\n"
