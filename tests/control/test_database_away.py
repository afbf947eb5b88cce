"""A database that goes away in mid-session: what runs goes on, what is new waits, and no transition is lost."""

import msgspec
import pytest

from control.db.database import StoreUnavailableError
from control.plan.session import Reason, SessionState
from control.sessions import journal, manager, record, usage
from control.spec import SandboxSpec
from tests.control.conftest import Host
from tests.support.patience import until
from tests.support.postgres import Postgres

S = SessionState


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries again at once."""
    monkeypatch.setattr(record, "RETRY_S", 0.05)
    monkeypatch.setattr(manager, "RETRY_S", 0.05)
    monkeypatch.setattr(usage, "USAGE_S", 0.05)


@pytest.fixture
def store_url(postgres_url: str) -> str:
    """A server, which can be stopped."""
    return postgres_url


async def test_a_database_that_goes_away_stops_nothing_that_runs_and_loses_no_transition(
    host: Host, postgres: Postgres
) -> None:
    go = host.root / "go"
    session = await host.launch("sh", "-c", f"until [ -e {go} ]; do sleep 0.05; done; echo late; exit 4")
    await host.state(session, S.RUNNING)
    created = (await host.manager.create(msgspec.convert({"image": "sandbox"}, SandboxSpec))).id
    postgres.stop()
    try:
        # What is new waits, what runs ends as if nothing were.
        for asked in (
            host.manager.create(msgspec.convert({"image": "sandbox"}, SandboxSpec)),
            host.manager.launch(created),
        ):
            with pytest.raises(StoreUnavailableError):
                await asked
        go.touch()
        ended = await host.ended(session)
        assert (ended.life.reason, ended.life.exit and ended.life.exit.code) == (Reason.EXIT_CODE, 4)
        await until(lambda: session not in host.gateway.grants, "the end of the grant")
        assert host.control.recorder.behind() == 1
    finally:
        postgres.start()
    await host.cleaned(session)
    assert not host.engine.containers
    assert not host.engine.volumes
    assert await host.manager.store.held_addresses() == {}
    assert host.control.recorder.behind() == 0
    stored = await host.manager.store.get(session)
    assert stored is not None
    assert stored.life == ended.life
    on_disk = journal.read(host.root / "sessions" / session / "events.jsonl")
    assert [each.number for each in await host.manager.store.events(session)] == [each.number for each in on_disk]
    assert host.log(session) == b"late\n"
    await host.manager.launch(created)
    await host.state(created, S.CONNECTED)
    await host.manager.stop(created, 0)
    await host.ended(created)


async def test_a_daemon_that_dies_while_the_database_is_away_brings_it_up_to_the_journal_later(
    host: Host, postgres: Postgres
) -> None:
    session = await host.launch("sh", "-c", "sleep 0.3; exit 4")
    await host.state(session, S.RUNNING)
    postgres.stop()
    try:
        ended = await host.ended(session)
        await host.stop()
    finally:
        postgres.start()
    await host.start()
    await host.cleaned(session)
    assert not host.engine.containers
    assert not host.engine.volumes
    assert await host.manager.store.held_addresses() == {}
    stored = await host.manager.store.get(session)
    assert stored is not None
    assert stored.life == ended.life
