"""Sessions that ended long ago go, with their files; the others stay."""

import pytest

from control.sessions.record import now_ms
from control.sessions.retention import Retention
from tests.control.conftest import Host, until


async def test_an_old_session_is_forgotten_with_its_files_and_a_live_one_is_not(host: Host) -> None:
    old = await host.launch("true")
    await host.ended(old)
    await host.cleaned(old)
    live = await host.launch("sleep", "1000")
    retention = Retention(host.manager.store, host.root / "sessions", 1)
    assert await retention.forget(now_ms() - 60_000) == 0
    assert host.log(old) == b""
    assert await retention.forget(now_ms() + 1) == 1
    assert await host.manager.store.get(old) is None
    assert not (host.root / "sessions" / old).exists()
    assert (host.root / "sessions" / live).is_dir()
    assert await host.manager.store.get(live) is not None


async def test_a_record_stays_while_its_files_cannot_be_removed(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    session = await host.launch("true")
    await host.ended(session)
    await host.cleaned(session)
    monkeypatch.setattr("control.sessions.folders.remove", lambda _folder: None)
    retention = Retention(host.manager.store, host.root / "sessions", 1)
    with pytest.raises(OSError, match="cannot be removed"):
        await retention.forget(now_ms() + 1)
    assert await host.manager.store.get(session) is not None


async def test_the_daemon_forgets_by_itself_and_keeps_for_ever_with_0(stopped_host: Host) -> None:
    host = stopped_host
    host.settings["limits"]["keep_ended_ms"] = 0
    await host.start()
    session = await host.launch("true")
    await host.ended(session)
    await host.cleaned(session)
    await host.stop()
    await host.start()
    assert await host.manager.store.get(session) is not None
    await host.stop()
    host.settings["limits"]["keep_ended_ms"] = 1
    await host.start()
    await until(lambda: not (host.root / "sessions" / session).exists(), "the sweep")
