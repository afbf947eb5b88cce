"""A session that is created and never launched does not stay for ever; one that waits for room does."""

import pytest

from control.plan.session import Reason, SessionState
from control.sessions import expiry
from tests.control.conftest import Host
from tests.support.patience import until


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expiry, "LOOK_S", 0.02)


async def test_a_session_that_is_never_launched_fails_with_the_reason_and_those_that_were_launched_do_not(
    stopped_host: Host,
) -> None:
    host = stopped_host
    host.settings["limits"] |= {"never_launched_ms": 2_000, "max_running": 1}
    await host.start()
    running = await host.launch("sleep", "1000")
    waiting = await host.launch("true")
    left = (await host.make("true")).id
    ended = await host.ended(left)
    assert (ended.life.state, ended.life.reason) == (SessionState.FAILED, Reason.NEVER_LAUNCHED)
    assert "not launched within" in ended.life.message
    await host.cleaned(left)
    await host.state(running, SessionState.RUNNING)
    assert host.manager.admission.position(waiting) == 1


async def test_it_is_found_after_a_restart_as_well(stopped_host: Host) -> None:
    host = stopped_host
    host.settings["limits"]["never_launched_ms"] = 0
    await host.start()
    left = (await host.make("true")).id
    await host.stop()
    host.settings["limits"]["never_launched_ms"] = 1
    await host.start()
    assert (await host.ended(left)).life.reason is Reason.NEVER_LAUNCHED
    await until(lambda: host.manager.record(left) is None, "the clean-up")
