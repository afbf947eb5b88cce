"""What the daemons tell the service manager."""

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.net.poller import Poller
from gateway.net.progress import Progress
from gateway.runtime import fdstore
from gateway.runtime.notify import feed_watchdog, notify, notify_reloading, watchdog_s
from tests.support.patience import PATIENCE_S


class Manager:
    """The service manager's end."""

    def __init__(self, path: Path) -> None:
        self.environment = {"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": "300000"}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.setblocking(False)

    async def heard(self) -> str:
        async with asyncio.timeout(PATIENCE_S):
            return (await asyncio.get_running_loop().sock_recv(self._socket, 4096)).decode()

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    made = Manager(tmp_path / "notify")
    yield made
    made.close()


def test_without_a_manager_nothing_is_told_and_no_watchdog_runs() -> None:
    assert not notify("READY=1", {})
    assert watchdog_s({}) is None
    asyncio.run(feed_watchdog(lambda: pytest.fail("nobody asked"), {}))


def test_a_watchdog_for_another_process_is_not_ours() -> None:
    assert watchdog_s({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}) is None
    assert watchdog_s({"WATCHDOG_USEC": "30000000"}) == 30


@pytest.mark.parametrize("value", ["", "0", "-1", "soon"])
def test_a_watchdog_time_that_is_none_is_none(value: str) -> None:
    assert watchdog_s({"WATCHDOG_USEC": value}) is None


async def test_a_reload_says_when_it_began(manager: Manager) -> None:
    assert notify_reloading(manager.environment)
    first, second = (await manager.heard()).split("\n")
    assert first == "RELOADING=1"
    assert second.removeprefix("MONOTONIC_USEC=").isdigit()


async def test_the_watchdog_is_fed_only_while_progress_is_proved(manager: Manager) -> None:
    proofs: asyncio.Queue[None] = asyncio.Queue()
    feeding = asyncio.create_task(feed_watchdog(proofs.get, manager.environment))
    for _ in range(2):
        proofs.put_nowait(None)
        assert await manager.heard() == "WATCHDOG=1"
    with pytest.raises(BlockingIOError):
        manager._socket.recv(64)
    feeding.cancel()


async def test_progress_is_proved_through_the_poller_and_not_without_it() -> None:
    loop = asyncio.get_running_loop()
    poller = Poller(loop)
    progress = Progress(poller)
    for _ in range(3):
        await asyncio.wait_for(progress.prove(), 5)
    loop.remove_reader(poller._epoll.fileno())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(progress.prove(), 0.1)
    progress.close()
    poller.close()


@pytest.mark.parametrize("number", ["²", "٣", "-1", "1_0", " 1", "", "9" * 5_000])
def test_a_number_of_the_manager_that_is_none_is_as_good_as_none(number: str) -> None:
    # int() raises for some of them, although str.isdigit() takes them for numbers, and a daemon would not start.
    assert watchdog_s({"WATCHDOG_USEC": number}) is None
    assert not fdstore.is_offered({"NOTIFY_SOCKET": "/run/notify", "FDSTORE": number})
    assert fdstore.passed({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": number}) == {}


def test_descriptors_that_the_manager_says_it_passed_end_with_those_that_are_there() -> None:
    # By the number alone it would take for ever.
    found = fdstore.passed({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "9" * 18})
    assert max((max(each) for each in found.values()), default=0) <= max(
        int(path.name) for path in Path("/proc/self/fd").iterdir()
    )
