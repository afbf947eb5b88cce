"""Journal first, then the database: what is on disk survives whatever is away."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from control.db.database import StoreUnavailableError
from control.db.rows import StoredEvent, StoredSession
from control.db.store import Store
from control.plan.session import (
    EndRequested,
    LaunchRequested,
    LaunchStarted,
    NotAllowed,
    Reason,
    Session,
    SessionState,
)
from control.sessions import journal
from control.sessions import record as record_module
from control.sessions.record import Record, Recorder
from control.spec import SandboxSpec
from tests.support.patience import PATIENCE_S, until


class Flaky(Store):
    """A store that can be away."""

    away = False
    appends = 0
    # While it is not set, calls wait.
    answers: asyncio.Event

    async def append(self, session: str, new: object, life: Session) -> None:
        self.appends += 1
        await self.answers.wait()
        if self.away:
            raise StoreUnavailableError("away")
        await super().append(session, new, life)  # type: ignore[arg-type]


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Flaky]:
    store = Flaky(f"sqlite:///{tmp_path}/control.db")
    store.answers = asyncio.Event()
    store.answers.set()
    await store.migrate()
    yield store
    await store.close()


@pytest.fixture
async def recorder(store: Flaky, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Recorder]:
    monkeypatch.setattr(record_module, "RETRY_S", 0.01)
    recorder = Recorder(store)
    running = asyncio.create_task(recorder.run())
    yield recorder
    store.answers.set()
    running.cancel()
    await recorder.close()


@pytest.fixture
async def record(store: Flaky, tmp_path: Path) -> Record:
    new = StoredSession(
        id="s1",
        run_id="r",
        position=1,
        created_at=1,
        memory_bytes=1,
        cpus=1,
        spec=SandboxSpec(image="x"),
        life=Session(),
    )
    await store.insert(new)
    return Record(new, tmp_path)


async def numbers(store: Store) -> list[int]:
    return [event.number for event in await store.events("s1")]


async def test_an_event_is_in_the_journal_and_in_the_database(recorder: Recorder, record: Record, store: Flaky) -> None:
    life = await recorder.record(record, LaunchRequested())
    assert isinstance(life, Session)
    assert life.waiting
    assert [stored.event for stored in journal.read(record.journal)] == [LaunchRequested()]
    assert await numbers(store) == [1]


async def test_the_age_of_a_session_is_not_changed_by_a_clock_that_is_set(
    record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = record_module.now_ms()
    fresh = Record(msgspec.structs.replace(record.stored, created_at=now), tmp_path)
    monkeypatch.setattr(record_module, "now_ms", lambda: now + 3_600_000)
    assert 0 <= fresh.age_ms < 1_800_000
    # Taken up after the clock was set back: not of an age below nothing, which would never come to its limit.
    monkeypatch.setattr(record_module, "now_ms", lambda: now - 86_400_000)
    assert Record(fresh.stored, tmp_path).age_ms >= 0
    assert record.age_ms > 86_400_000


async def test_what_is_not_allowed_is_not_recorded(recorder: Recorder, record: Record, store: Flaky) -> None:
    await recorder.record(record, EndRequested(Reason.STOPPED_BY_USER))
    assert isinstance(await recorder.record(record, LaunchRequested()), NotAllowed)
    assert len(journal.read(record.journal)) == 1


async def test_without_the_database_it_goes_on_and_the_database_catches_up_in_order(
    recorder: Recorder, record: Record, store: Flaky
) -> None:
    store.away = True
    await recorder.record(record, LaunchRequested())
    await recorder.record(record, LaunchStarted("10.0.0.16", "hash"))
    assert record.life.state is SessionState.LAUNCHING
    assert recorder.behind() == 1
    tried = store.appends
    await until(lambda: store.appends > tried + 2, "another try")
    store.away = False
    await until(lambda: recorder.behind() == 0, "the database's catching up")
    assert await numbers(store) == [1, 2]
    stored = await store.get("s1")
    assert stored is not None
    assert stored.life == record.life


async def test_while_a_database_hangs_what_runs_does_not_wait_for_it(
    recorder: Recorder, record: Record, store: Flaky
) -> None:
    store.away = True
    await recorder.record(record, LaunchRequested())
    store.away = False
    store.answers.clear()
    tried = store.appends
    await until(lambda: store.appends > tried, "another try")
    async with asyncio.timeout(PATIENCE_S):
        await recorder.record(record, LaunchStarted("10.0.0.16", "hash"))
        await recorder.record_all(record, [EndRequested(Reason.TIME_LIMIT, str(n)) for n in range(3)])
    assert not recorder.is_stored(record)
    assert len(journal.read(record.journal)) == 5
    store.answers.set()
    await until(lambda: recorder.behind() == 0, "the database's catching up")
    assert recorder.is_stored(record)
    assert await numbers(store) == [1, 2, 3, 4, 5]
    # It is asked at once again.
    await recorder.record(record, EndRequested(Reason.TIME_LIMIT))
    assert await numbers(store) == [1, 2, 3, 4, 5, 6]


async def test_a_new_process_brings_the_database_up_to_the_journal(
    recorder: Recorder, record: Record, store: Flaky, tmp_path: Path
) -> None:
    await recorder.record(record, LaunchRequested())
    store.away = True
    await recorder.record(record, LaunchStarted("10.0.0.16", "hash"))
    await recorder.record(record, EndRequested(Reason.TIME_LIMIT, "late"))
    store.away = False
    stored = await store.get("s1")
    assert stored is not None
    assert stored.life.state is SessionState.CREATED
    again = Record(stored, tmp_path)
    await recorder.restore(again)
    assert again.life == record.life
    assert await numbers(store) == [1, 2, 3]
    assert await store.held_addresses() == {"s1": "10.0.0.16"}


async def test_the_journal_tells_the_very_time_that_the_session_took(
    tmp_path: Path, record: Record, store: Flaky
) -> None:
    ticking = itertools.count(1_000)
    recorder = Recorder(store, lambda: next(ticking))
    await recorder.record(record, LaunchRequested())
    await recorder.record(record, LaunchStarted("10.0.0.16", "hash"))
    assert journal.read(record.journal)[-1].at == record.life.launched_at
    await recorder.close()


async def test_a_cancelled_caller_leaves_no_gap(recorder: Recorder, record: Record, store: Flaky) -> None:
    task = asyncio.create_task(recorder.record(record, LaunchRequested()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    # Either it has not begun or it is whole.
    known = len(journal.read(record.journal))
    assert record.number == known
    await recorder.record(record, LaunchStarted("10.0.0.16", ""))
    assert [event.number for event in journal.read(record.journal)] == list(range(1, known + 2))


async def test_many_at_once_keep_their_order(recorder: Recorder, record: Record, store: Flaky) -> None:
    await recorder.record(record, LaunchStarted("10.0.0.16", ""))
    await asyncio.gather(
        *(recorder.record(record, EndRequested(Reason.TIME_LIMIT, str(n))) for n in range(50)),
    )
    assert await numbers(store) == list(range(1, 52))


async def test_a_full_disk_fails_the_impatient_and_holds_the_patient(
    recorder: Recorder, record: Record, store: Flaky, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = True
    refused = 0

    def append(path: Path, events: list[StoredEvent]) -> None:
        nonlocal refused
        if full:
            refused += 1
            raise OSError(28, "No space left on device")
        write(path, events)

    write = journal.append
    monkeypatch.setattr(journal, "append", append)
    with pytest.raises(OSError, match="No space"):
        await recorder.record(record, LaunchRequested(), patient=False)
    assert record.number == 0
    waiting = asyncio.create_task(recorder.record(record, LaunchRequested()))
    async with asyncio.timeout(PATIENCE_S):
        while refused < 2:
            await asyncio.sleep(0)
    assert not waiting.done()
    full = False
    assert isinstance(await waiting, Session)
    assert await numbers(store) == [1]


def test_a_torn_last_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    journal.append(path, [StoredEvent(1, 5, LaunchRequested()), StoredEvent(2, 6, EndRequested(Reason.TIME_LIMIT))])
    whole = path.read_bytes()
    second = whole.index(b"\n") + 1
    for cut in range(second, len(whole)):
        path.write_bytes(whole[:cut])
        assert [event.number for event in journal.read(path)] == [1]
        assert path.read_bytes() == whole[:second]
    path.write_bytes(whole)
    assert [event.number for event in journal.read(path, after=1)] == [2]


def test_nothing_after_a_line_that_is_not_ours_is_believed(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    journal.append(path, [StoredEvent(1, 5, LaunchRequested())])
    good = path.read_bytes()
    path.write_bytes(good + b"garbage\n" + good)
    assert [event.number for event in journal.read(path)] == [1]


def test_no_journal_is_no_events(tmp_path: Path) -> None:
    assert journal.read(tmp_path / "events.jsonl") == []
