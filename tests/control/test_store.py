"""The store: the same tests on SQLite and on a real PostgreSQL."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy.ext.asyncio import AsyncConnection

from control.db.database import StoreUnavailableError
from control.db.rows import Selection, StoredEvent, StoredSession, encode
from control.db.store import KeyReusedError, SessionExistsError, Store
from control.db.tables import metadata
from control.plan.retention import Kept
from control.plan.session import (
    EndRequested,
    LaunchRequested,
    LaunchStarted,
    Reason,
    Session,
    SessionState,
    ToolCalled,
)
from control.spec import SandboxSpec
from gateway.contract.policy import NetworkLevel, Usage
from tests.support.postgres import Postgres


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/control.db"
    url: str = request.getfixturevalue("postgres_url")
    return url


@pytest.fixture
async def store(url: str) -> AsyncIterator[Store]:
    store = Store(url)
    await store.migrate()
    yield store
    await store.close()


def session(name: str, position: int = 1, **fields: Any) -> StoredSession:
    spec = SandboxSpec(image="sandbox", env={"A": "ü\n"}, network=NetworkLevel.OPEN, command=("a", "b"))
    values: dict[str, Any] = {
        "id": name,
        "run_id": "run",
        "position": position,
        "created_at": 1_700_000_000_000,
        "memory_bytes": 4 << 30,
        "cpus": 0.5,
        "spec": spec,
        "life": Session(),
    }
    return StoredSession(**{**values, **fields})


async def test_what_is_stored_is_what_comes_back(store: Store) -> None:
    new = session("s1")
    assert await store.insert(new) is new
    assert await store.get("s1") == new
    assert await store.get("s2") is None


async def test_an_id_is_used_once(store: Store) -> None:
    await store.insert(session("s1"))
    with pytest.raises(SessionExistsError):
        await store.insert(session("s1", 2))


async def test_a_key_makes_one_session(store: Store) -> None:
    await store.insert(session("s1"), "key", "digest")
    again = await store.insert(session("s2", 2), "key", "digest")
    assert again.id == "s1"
    assert await store.get("s2") is None
    with pytest.raises(KeyReusedError):
        await store.insert(session("s3", 3), "key", "other")


async def test_events_and_state_are_stored_together(store: Store) -> None:
    await store.insert(session("s1"))
    life = Session(state=SessionState.LAUNCHING, address="10.0.0.16")
    events = [
        StoredEvent(1, 5, LaunchRequested()),
        StoredEvent(2, 6, LaunchStarted("10.0.0.16", "hash")),
        StoredEvent(3, 7, ToolCalled(1, "c", "n", msgspec.Raw(b'{"a":"\\u0000"}'))),
    ]
    await store.append("s1", events, life)
    stored = await store.get("s1")
    assert stored is not None
    assert (stored.life, stored.last_event) == (life, 3)
    assert [msgspec.json.encode(each) for each in await store.events("s1")] == [
        msgspec.json.encode(each) for each in events
    ]
    assert [each.number for each in await store.events("s1", after=1, limit=1)] == [2]


async def test_repeating_an_append_changes_nothing(store: Store) -> None:
    await store.insert(session("s1"))
    first = [StoredEvent(1, 5, LaunchRequested())]
    await store.append("s1", first, Session(waiting=True))
    await store.append("s1", first, Session(waiting=True))
    both = [*first, StoredEvent(2, 6, EndRequested(Reason.STOPPED_BY_USER))]
    await store.append("s1", both, Session(state=SessionState.STOPPED, reason=Reason.STOPPED_BY_USER))
    assert [each.number for each in await store.events("s1")] == [1, 2]


async def test_an_address_is_held_until_it_is_released_for_good(store: Store) -> None:
    await store.insert(session("s1"))
    life = Session(state=SessionState.LAUNCHING, address="10.0.0.16")
    await store.append("s1", [StoredEvent(1, 5, LaunchStarted("10.0.0.16", ""))], life)
    assert await store.held_addresses() == {"s1": "10.0.0.16"}
    await store.release_address("s1")
    await store.append("s1", [StoredEvent(2, 6, EndRequested(Reason.TIME_LIMIT))], life)
    assert await store.held_addresses() == {}


async def test_pages_go_from_the_newest_to_the_oldest(store: Store) -> None:
    for number in range(1, 6):
        life = Session(state=SessionState.EXITED if number % 2 else SessionState.CREATED)
        await store.insert(msgspec.structs.replace(session(f"s{number}", number * 10), life=life))
    assert [each.id for each in await store.page(limit=2)] == ["s5", "s4"]
    assert [each.id for each in await store.page(before=40, limit=2)] == ["s3", "s2"]
    assert [each.id for each in await store.page(Selection((SessionState.EXITED,)))] == ["s5", "s3", "s1"]
    assert await store.last_position() == 50


async def test_unfinished_sessions_are_those_not_cleaned_up(store: Store) -> None:
    for number in (2, 1):
        await store.insert(session(f"s{number}", number))
    assert [each.id for each in await store.unfinished()] == ["s1", "s2"]
    await store.mark_cleaned("s1")
    assert [each.id for each in await store.unfinished()] == ["s2"]


def ended(at: int) -> Session:
    return Session(state=SessionState.EXITED, ended_at=at)


async def test_what_ended_first_is_found_and_forgotten_whole(store: Store) -> None:
    await store.insert(session("running", 1, created_at=10))
    await store.insert(session("not-cleaned", 2, created_at=10, life=ended(20)))
    await store.insert(session("late", 3, created_at=10, life=ended(200), cleaned=True))
    for number in range(5):
        name = f"old-{number}"
        await store.insert(session(name, 4 + number, created_at=10, life=ended(20), cleaned=True), name, "digest")
        await store.append(name, [StoredEvent(1, 5, LaunchRequested())], ended(20))
        await store.put_usage(name, "e", Usage(egress_bytes_up=1))
    assert await store.oldest_kept(2) == [Kept("old-0", 20, None), Kept("old-1", 20, None)]
    assert await store.kept() == (6, 0)
    assert len(await store.unmeasured(10)) == 6
    await store.put_sizes({"old-1": 7, "late": 1 << 40, "unknown": 1})
    assert await store.kept() == (6, (1 << 40) + 7)
    assert "old-1" not in await store.unmeasured(10)
    old = [each.id for each in await store.oldest_kept(5)]
    assert old == [f"old-{number}" for number in range(5)]
    await store.forget(old)
    assert await store.oldest_kept(10) == [Kept("late", 200, 1 << 40)]
    assert await store.get("old-0") is None
    assert await store.events("old-0") == []
    assert await store.usage_of(["old-0"]) == {}
    # The key is free again.
    assert (await store.insert(session("new", 20), "old-0", "other")).id == "new"
    assert [each.id for each in await store.page()] == ["new", "late", "not-cleaned", "running"]


async def test_usage_is_kept_by_epoch(store: Store) -> None:
    await store.insert(session("s1"))
    await store.put_usage("s1", "e1", Usage(egress_bytes_up=1))
    await store.put_usage("s1", "e1", Usage(egress_bytes_up=2))
    await store.put_usage("s1", "e2", Usage(egress_bytes_up=3))
    await store.put_usage("unknown", "e1", Usage())
    found = await store.usage_of(["s1", "unknown"])
    assert found == {"s1": {"e1": Usage(egress_bytes_up=2), "e2": Usage(egress_bytes_up=3)}}


async def test_migrations_make_what_the_code_expects(store: Store) -> None:
    def differences(connection: Any) -> list[Any]:
        return list(compare_metadata(MigrationContext.configure(connection, opts={"compare_type": True}), metadata))

    async with store.engine.connect() as connection:
        assert await connection.run_sync(differences) == []
    await store.migrate()


async def test_sessions_of_the_first_version_are_brought_along(url: str) -> None:
    store = Store(url)
    await store.migrate("0001")
    before = [session("ended", 1, life=ended(7), cleaned=True), session("new", 2)]

    async def fill(connection: AsyncConnection) -> None:
        insert = sa.text(
            "INSERT INTO sessions (id, run_id, position, created_at, state, image, network, memory_bytes, cpus, spec, life, "
            "last_event, cleaned) VALUES (:id, 'run', :position, 1700000000000, :state, 'sandbox', 'open', 4294967296, 0.5, "
            ":spec, :life, 0, :cleaned)"
        )
        for each in before:
            values = {"spec": encode(each.spec).decode(), "life": encode(each.life).decode(), "cleaned": each.cleaned}
            await connection.execute(
                insert, {**values, "id": each.id, "position": each.position, "state": each.life.state.value}
            )

    await store.write(fill)
    await store.migrate()
    assert [await store.get(each.id) for each in before] == before
    assert await store.oldest_kept(10) == [Kept("ended", 7, None)]
    await store.close()


async def test_a_database_without_an_encoding_keeps_text(postgres: Postgres) -> None:
    store = Store(postgres.create("unencoded", "--encoding=SQL_ASCII", "--template=template0", "--locale=C"))
    await store.migrate()
    # Its environment has a letter beyond ASCII.
    await store.insert(session("s1"))
    assert await store.get("s1") == session("s1")
    await store.close()


async def test_a_database_that_is_away_is_told_and_comes_back(postgres: Postgres, postgres_url: str) -> None:
    store = Store(postgres_url, call_timeout_s=3)
    await store.migrate()
    await store.insert(session("s1"))
    postgres.stop()
    with pytest.raises(StoreUnavailableError):
        await store.ping()
    with pytest.raises(StoreUnavailableError):
        await store.append("s1", [StoredEvent(1, 5, LaunchRequested())], Session(waiting=True))
    postgres.start()
    await store.append("s1", [StoredEvent(1, 5, LaunchRequested())], Session(waiting=True))
    assert [each.number for each in await store.events("s1")] == [1]
    await store.close()


async def test_a_database_that_cannot_be_opened_is_told(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path}/nowhere/control.db")
    with pytest.raises(StoreUnavailableError, match="unable to open"):
        await store.migrate()
    await store.close()


def test_only_known_databases() -> None:
    with pytest.raises(ValueError, match="sqlite"):
        Store("mysql://x")
