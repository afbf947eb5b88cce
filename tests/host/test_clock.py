"""The machine's clock is set while sessions live: none ends early, none hangs, events stay in order.

Both daemons have the clock; engine, sandboxes and the test have the machine's. What of it a real clock would move as well,
the times of the engine's log, decides nothing (control/docker/logs.py: only what is said about lost output).
"""

import asyncio
from collections.abc import Iterator
from datetime import datetime

import docker
import pytest

from control.client import ControlClient
from control.plan.session import Reason, SessionState
from tests.host.lives import COUNT, connected, counted, ended, execute, how, launch, log, nothing_left, ready, running
from tests.support.clock import DAY_S, HOUR_S, Clock, settable_clock
from tests.support.host import PrivateHost


@pytest.fixture
def clock(host: PrivateHost) -> Iterator[Clock]:
    """Restart both daemons with a clock of the test's own, and after it without."""
    daemons = (host.gateway, host.control)
    before = [daemon.environment for daemon in daemons]
    with settable_clock() as made:
        try:
            for daemon in daemons:
                daemon.stop()
                daemon.environment = {**daemon.environment, **made.environment}
                daemon.start()
            yield made
        finally:
            for daemon, environment in zip(daemons, before, strict=True):
                daemon.stop()
                daemon.environment = environment
                daemon.start()


async def test_sessions_neither_end_nor_hang_when_the_clock_is_set(
    host: PrivateHost, clock: Clock, control: ControlClient, docker_client: docker.DockerClient
) -> None:
    await ready(control)
    # Half an hour: less than the clock is set by.
    session = await launch(control, COUNT, time_limit_ms=HOUR_S * 500)
    await running(control, session)
    others = []
    for offset in (HOUR_S, -DAY_S):
        clock.set(offset)
        # A whole life by the new time: its hello, its output, its results, its end.
        others.append(await launch(control, "echo here; echo there > /out/said; exit 5"))
        view = await ended(control, others[-1])
        assert how(view) == (SessionState.EXITED, Reason.EXIT_CODE, 5)
        assert log(host, others[-1]) == b"here\n"
        # It was the new time.
        machines = (host.sessions / others[-1] / "stdout.log").stat().st_mtime
        assert abs(datetime.fromisoformat(view.created_at).timestamp() - machines - offset) < 1000
        # New commands, and output that goes on.
        before = counted(log(host, session))
        assert (await execute(control, session, "true"))[0] == 0
        async with asyncio.timeout(60):
            while counted(log(host, session)) == before:
                await asyncio.sleep(0.05)
    # Taken up by a process that was started before the launch, as far as it can tell, and by one for which its time is long over.
    for offset in (-DAY_S, HOUR_S):
        await asyncio.to_thread(host.control.stop)
        clock.set(offset)
        host.control.start()
        await connected(control, session)
    assert (await execute(control, session, "touch", "/work/end"))[0] == 0
    assert how(await ended(control, session)) == (SessionState.EXITED, Reason.EXIT_CODE, 6)
    counted(log(host, session))
    numbers = [event.number async for event in control.events(session, follow=False)]
    assert numbers == list(range(1, len(numbers) + 1))
    await nothing_left(host, control, docker_client, session, *others)
    assert "Traceback" not in host.logs()
