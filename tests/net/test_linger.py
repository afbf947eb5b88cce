"""The end of a connection after its last reply: kind to who reads it, and bounded."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator

import pytest

from gateway.net import linger as linger_module
from gateway.net.linger import MAX_DISCARDED_BYTES, Lingering
from gateway.net.poller import Poller
from tests.support.patience import PATIENCE_S

REPLY = b"HTTP/1.1 400 no\r\n\r\n"


@pytest.fixture
async def poller() -> AsyncIterator[Poller]:
    poller = Poller(asyncio.get_running_loop())
    yield poller
    assert len(poller) == 0
    poller.close()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    near.setblocking(False)
    far.setblocking(False)
    with near, far:
        yield near, far


async def closed(sock: socket.socket) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while sock.fileno() >= 0:
            await asyncio.sleep(0)


async def test_whoever_never_ends_is_closed_when_the_time_is_over(
    poller: Poller, pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linger_module, "LINGER_S", 0.02)
    near, far = pair
    lingering = Lingering(asyncio.get_running_loop(), poller)
    lingering.close_with(near, REPLY)
    await closed(near)
    assert far.recv(100) == REPLY
    assert far.recv(100) == b""
    assert lingering.parked() == []
    lingering.close()


@pytest.mark.parametrize("how", ["ends", "sends without end"])
async def test_whoever_ends_or_sends_too_much_is_closed_before_the_time_is_over(
    how: str, poller: Poller, pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linger_module, "LINGER_S", 10_000.0)
    near, far = pair
    lingering = Lingering(asyncio.get_running_loop(), poller)
    far.send(b"the rest of a request")
    lingering.close_with(near, REPLY)
    # Unread bytes would have had a close take the reply along.
    assert far.recv(100) == REPLY
    ((sock, left_s, _),) = lingering.parked()
    assert sock is near
    assert left_s > 1000
    if how == "ends":
        far.close()
    else:
        sent = 0
        async with asyncio.timeout(PATIENCE_S):
            while near.fileno() >= 0:
                try:
                    sent += far.send(bytes(65536))
                except BlockingIOError:
                    pass
                except OSError:
                    break
                await asyncio.sleep(0)
        assert sent >= MAX_DISCARDED_BYTES
    await closed(near)
    lingering.close()


async def test_beyond_a_number_of_them_the_next_is_closed_at_once(
    poller: Poller, pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linger_module, "MAX_LINGERING", 0)
    near, far = pair
    lingering = Lingering(asyncio.get_running_loop(), poller)
    lingering.close_with(near, REPLY)
    assert near.fileno() < 0
    assert far.recv(100) == REPLY
    lingering.close()


async def test_those_that_still_linger_are_closed_with_the_gateway(
    poller: Poller, pair: tuple[socket.socket, socket.socket]
) -> None:
    near, far = pair
    lingering = Lingering(asyncio.get_running_loop(), poller)
    lingering.close_with(near, REPLY)
    assert len(lingering) == 1
    lingering.close()
    assert near.fileno() < 0
    assert far.recv(100) == REPLY
