"""Sessions that ended go, with their files, when they are old or too many or too large; the others stay."""

import pytest

from control.plan.retention import FETCH_MS, Calendar, Keep, Kept, to_forget
from control.plan.session import SessionState
from control.sessions.record import now_ms
from control.sessions.retention import Retention
from tests.control.conftest import Host
from tests.support.patience import until

MIB = 1 << 20
NOW = 10_000_000_000
# An age at which only the limits of number and size say whether a session goes.
LONG_AGO = NOW - FETCH_MS - 1
OLDEST = [Kept(f"s{number}", LONG_AGO - 100 + number, 10) for number in range(5)]


def test_what_is_older_than_allowed_goes_and_0_keeps_for_ever() -> None:
    age = NOW - OLDEST[2].ended_at
    assert to_forget(OLDEST, 5, 50, Keep(age, 0, 0), NOW) == ["s0", "s1"]
    assert to_forget(OLDEST, 5, 50, Keep(0, 0, 0), NOW) == []


def test_the_oldest_go_when_there_are_more_than_allowed() -> None:
    assert to_forget(OLDEST, 5, 50, Keep(0, 3, 0), NOW) == ["s0", "s1"]
    assert to_forget(OLDEST, 5, 50, Keep(0, 5, 0), NOW) == []
    # Of more than were read, all that were read.
    assert to_forget(OLDEST, 100, 1000, Keep(0, 3, 0), NOW) == [each.id for each in OLDEST]


def test_the_oldest_go_when_their_folders_take_more_than_allowed() -> None:
    assert to_forget(OLDEST, 5, 50, Keep(0, 0, 25), NOW) == ["s0", "s1", "s2"]
    assert to_forget(OLDEST, 5, 50, Keep(0, 0, 50), NOW) == []


def test_what_ended_just_now_is_left_for_its_caller_to_fetch_unless_it_is_too_old() -> None:
    fresh = [Kept(each.id, NOW - 5, 10) for each in OLDEST]
    assert to_forget(fresh, 5, 50, Keep(0, 1, 1), NOW) == []
    assert to_forget(fresh, 5, 50, Keep(4, 0, 0), NOW) == [each.id for each in OLDEST]


def test_what_ended_just_now_is_left_for_its_caller_also_when_the_clock_is_set_forward() -> None:
    calendar, hour = Calendar(), 3_600_000
    assert calendar.now_ms(NOW, 5_000) == NOW
    # Led to the right time, a little in each minute.
    assert calendar.now_ms(NOW + 60_030, 65_000) == NOW + 60_030
    assert calendar.now_ms(NOW + hour + 120_030, 125_000) == NOW + 120_030
    assert calendar.now_ms(NOW + hour + FETCH_MS, 125_000 + FETCH_MS) == NOW + 120_030 + FETCH_MS
    # Whoever asked has had the time for it.
    assert calendar.now_ms(NOW + hour, 125_001 + FETCH_MS) == NOW + hour


def test_a_clock_that_is_set_back_keeps_what_ended_for_longer() -> None:
    calendar, day = Calendar(), 24 * 3_600_000
    assert calendar.now_ms(NOW, 5_000) == NOW
    assert calendar.now_ms(NOW - day, 65_000) == NOW - day
    assert calendar.now_ms(NOW - day + 60_000, 125_000) == NOW - day + 60_000


async def over(host: Host, *command: str) -> str:
    """Run a session to its end."""
    session = await host.launch(*command)
    await host.ended(session)
    await host.cleaned(session)
    return session


def retention(host: Host, *, ms: int = 0, sessions: int = 0, size: int = 0) -> Retention:
    return Retention(host.manager.store, host.root / "sessions", Keep(ms, sessions, size))


async def test_an_old_session_is_forgotten_with_its_files_and_a_live_one_is_not(host: Host) -> None:
    old = await over(host, "true")
    live = await host.launch("sleep", "1000")
    assert await retention(host, ms=60_000).enforce(now_ms()) == 0
    assert host.log(old) == b""
    assert await retention(host, ms=60_000).enforce(now_ms() + 60_001) == 1
    assert await host.manager.store.get(old) is None
    assert not (host.root / "sessions" / old).exists()
    assert (host.root / "sessions" / live).is_dir()
    assert await host.manager.store.get(live) is not None


async def test_the_sessions_that_ended_first_go_when_there_are_too_many(host: Host) -> None:
    # In the order of their ends, not of their beginnings.
    first = await host.launch("sleep", "1000")
    await host.state(first, SessionState.RUNNING)
    others = [await over(host, "true") for _ in range(3)]
    await host.manager.stop(first, 0)
    await host.cleaned(first)
    assert await retention(host, sessions=2).enforce(now_ms()) == 0
    assert await retention(host, sessions=2).enforce(now_ms() + FETCH_MS + 1) == 2
    left = {each.id for each in await host.manager.store.page()}
    assert left == {others[2], first}


async def test_the_sessions_that_ended_first_go_when_their_folders_take_too_much(host: Host) -> None:
    host.engine.out = {"result": b"x" * MIB}
    large = [await over(host, "true") for _ in range(3)]
    # A hole takes nothing of the disk, whatever its length.
    with (host.root / "sessions" / large[2] / "hole").open("wb") as file:
        file.truncate(100 * MIB)
    late = now_ms() + FETCH_MS + 1
    assert await retention(host, size=4 * MIB).enforce(late) == 0
    assert await retention(host, size=2 * MIB).enforce(late) == 2
    assert [each.id for each in await host.manager.store.page()] == [large[2]]


async def test_a_record_stays_while_its_files_cannot_be_removed(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    session = await over(host, "true")
    monkeypatch.setattr("control.sessions.folders.remove", lambda _folder: None)
    with pytest.raises(OSError, match="cannot be removed"):
        await retention(host, ms=1).enforce(now_ms() + 2)
    assert await host.manager.store.get(session) is not None


async def test_the_daemon_forgets_by_itself_and_keeps_for_ever_with_0(stopped_host: Host) -> None:
    host = stopped_host
    host.settings["limits"] |= {"keep_ended_ms": 0, "keep_ended_sessions": 0, "keep_ended_bytes": 0}
    await host.start()
    session = await over(host, "true")
    await host.stop()
    await host.start()
    assert await host.manager.store.get(session) is not None
    await host.stop()
    host.settings["limits"]["keep_ended_ms"] = 1
    await host.start()
    await until(lambda: not (host.root / "sessions" / session).exists(), "the sweep")
