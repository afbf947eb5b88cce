"""The poller, with real sockets on the real loop."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import cast

import pytest

from gateway.net import poller as poller_module
from gateway.net.arrival import Arrival
from gateway.net.listener import Listener
from gateway.net.poller import AFTER_VAIN, QUICK, SPIN_S, TURN_S, Poller
from tests.support.patience import PATIENCE_S


@pytest.fixture
async def poller() -> AsyncIterator[Poller]:
    poller = Poller(asyncio.get_running_loop())
    yield poller
    poller.close()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    left.setblocking(False)
    right.setblocking(False)
    yield left, right
    left.close()
    right.close()


class Clock:
    """The poller's clock; it stands still until told otherwise."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(poller_module, "time", clock)
    return clock


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0)


async def turns(number: int = 20) -> None:
    """Let the loop look at its descriptors a few times."""
    for _ in range(number):
        await asyncio.sleep(0.001)


async def test_calls_the_reader_as_long_as_there_is_something_to_read(
    poller: Poller, pair: tuple[socket.socket, socket.socket]
) -> None:
    left, right = pair
    read: list[bytes] = []
    poller.add_reader(left.fileno(), lambda: read.append(left.recv(1)))
    right.send(b"abc")
    await until(lambda: read == [b"a", b"b", b"c"])


async def test_tells_the_reader_of_an_end_and_of_a_reset(poller: Poller) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    for linger in (None, b"\x01\0\0\0\0\0\0\0"):
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
        accepted.setblocking(False)
        called: list[object] = []

        def on_readable(accepted: socket.socket = accepted, called: list[object] = called) -> None:
            try:
                called.append(accepted.recv(1))
            except ConnectionResetError as error:
                called.append(type(error))
            poller.forget(accepted.fileno())
            accepted.close()

        poller.add_reader(accepted.fileno(), on_readable)
        if linger:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        client.close()
        await until(lambda called=called: bool(called))  # type: ignore[misc]
        assert called == [ConnectionResetError if linger else b""]
    server.close()


async def test_a_writer_beside_a_reader_is_called_and_goes_alone(
    poller: Poller, pair: tuple[socket.socket, socket.socket]
) -> None:
    left, right = pair
    read: list[bytes] = []
    written: list[int] = []

    def on_writable() -> None:
        written.append(left.send(b"x"))
        poller.remove_writer(left.fileno())

    poller.add_reader(left.fileno(), lambda: read.append(left.recv(1)))
    poller.add_writer(left.fileno(), on_writable)
    await until(lambda: bool(written))
    right.send(b"y")
    await until(lambda: bool(read))
    await turns()
    assert (written, read) == ([1], [b"y"])


async def test_a_removed_socket_is_left_to_others(poller: Poller, pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = pair
    poller.add_reader(left.fileno(), lambda: pytest.fail("it was removed"))
    poller.remove_reader(left.fileno())
    assert len(poller) == 0
    right.send(b"for the loop")
    assert await asyncio.get_running_loop().sock_recv(left, 100) == b"for the loop"


async def test_does_not_spin_on_a_hang_up_that_nobody_reads(
    poller: Poller, pair: tuple[socket.socket, socket.socket]
) -> None:
    left, right = pair
    calls: list[None] = []

    def on_readable() -> None:
        calls.append(None)
        poller.remove_reader(left.fileno())

    poller.add_reader(left.fileno(), on_readable)
    right.close()
    await until(lambda: bool(calls))
    await turns()
    assert len(calls) == 1
    assert len(poller) == 0


async def test_an_event_for_a_closed_socket_does_not_reach_the_next_one_with_its_number(poller: Poller) -> None:
    first, first_peer = socket.socketpair()
    second, second_peer = socket.socketpair()
    successor: list[socket.socket] = []
    wrong: list[str] = []

    def replace(other: socket.socket) -> Callable[[], None]:
        def on_readable() -> None:
            # Both have an event in this batch. The other one is closed, and its number taken by a socket without any.
            if successor:
                wrong.append("the closed socket was called")
                return
            number = other.fileno()
            poller.forget(number)
            other.close()
            new, peer = socket.socketpair()
            successor.extend((new, peer))
            assert number in (new.fileno(), peer.fileno())
            poller.add_reader(number, lambda: wrong.append("an event was taken for the new socket's"))

        return on_readable

    poller.add_reader(first.fileno(), replace(second))
    poller.add_reader(second.fileno(), replace(first))
    first_peer.send(b"x")
    second_peer.send(b"x")
    await until(lambda: bool(successor))
    for sock in (first, second):
        if sock.fileno() >= 0:
            poller.remove_reader(sock.fileno())
    await turns()
    assert wrong == []
    for sock in (first, first_peer, second, second_peer, *successor):
        poller.forget(sock.fileno())
        sock.close()


async def test_a_callback_that_raises_is_reported_and_stops_nobody_else(
    poller: Poller, pair: tuple[socket.socket, socket.socket]
) -> None:
    left, right = pair
    reported: list[object] = []
    read: list[bytes] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: reported.append(context.get("exception")))

    def fail() -> None:
        raise ZeroDivisionError

    # It comes first in the batch, and its socket stays ready.
    poller.add_reader(left.fileno(), fail)
    poller.add_reader(right.fileno(), lambda: read.append(right.recv(1)))
    left.send(b"x")
    right.send(b"x")
    await until(lambda: bool(read) and bool(reported))
    await turns()
    assert [type(error) for error in reported] == [ZeroDivisionError]
    assert read == [b"x"]
    # Whoever owns the socket may watch it again.
    poller.add_reader(left.fileno(), lambda: read.append(left.recv(1)))
    await until(lambda: len(read) == 2)


async def test_a_callback_that_closes_its_socket_and_raises_harms_no_successor(
    poller: Poller, pair: tuple[socket.socket, socket.socket]
) -> None:
    left, right = pair
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: reported.append(context.get("exception")))
    number = left.fileno()

    def fail() -> None:
        left.close()
        raise ZeroDivisionError

    poller.add_reader(number, fail)
    right.send(b"x")
    await until(lambda: bool(reported))
    successor, peer = socket.socketpair()
    read: list[bytes] = []
    poller.add_reader(successor.fileno(), lambda: read.append(successor.recv(1)))
    peer.send(b"y")
    await until(lambda: read == [b"y"])
    poller.forget(successor.fileno())
    successor.close()
    peer.close()


@pytest.mark.parametrize("how", ["without a word", "as a connection that was given back and is dropped"])
async def test_a_socket_that_its_callback_removes_and_closes_harms_neither_its_successor_nor_the_others(
    how: str, poller: Poller, pair: tuple[socket.socket, socket.socket]
) -> None:
    left, right = pair
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: reported.append(context.get("exception")))
    read: list[bytes] = []
    number = left.fileno()

    def give_away() -> None:
        poller.remove_reader(number)
        if how == "without a word":
            left.close()
        else:
            Arrival(cast(Listener, SimpleNamespace(poller=poller, proxy_protocol=False)), left, None).drop()

    poller.add_reader(number, give_away)
    right.send(b"x")
    await until(lambda: left.fileno() < 0)
    assert [type(error) for error in reported] == ([OSError] if how == "without a word" else [])
    successor, peer = socket.socketpair()
    other, far_from_other = socket.socketpair()
    with successor, peer, other, far_from_other:
        assert successor.fileno() == number
        for each in (successor, other):
            poller.add_reader(each.fileno(), lambda each=each: read.append(each.recv(1)))  # type: ignore[misc]
        peer.send(b"a")
        far_from_other.send(b"b")
        await until(lambda: sorted(read) == [b"a", b"b"])
        poller.forget(successor.fileno())
        poller.forget(other.fileno())


async def test_changes_that_a_callback_makes_hold_when_it_returns(
    poller: Poller, pair: tuple[socket.socket, socket.socket]
) -> None:
    left, right = pair
    first: list[None] = []
    second: list[bytes] = []

    def on_readable() -> None:
        first.append(None)
        poller.remove_reader(left.fileno())
        poller.add_reader(left.fileno(), lambda: second.append(left.recv(1)))

    poller.add_reader(left.fileno(), on_readable)
    right.send(b"x")
    await until(lambda: second == [b"x"])
    assert len(first) == 1


async def test_deferred_work_comes_after_every_socket_that_is_ready(
    poller: Poller, pair: tuple[socket.socket, socket.socket]
) -> None:
    left, right = pair
    order: list[str] = []

    def bulk() -> None:
        order.append("bulk")
        left.recv(1)

    def small() -> None:
        order.append("small")
        right.recv(1)

    poller.add_reader(left.fileno(), lambda: poller.defer(bulk))
    poller.add_reader(right.fileno(), small)
    right.send(b"x")
    left.send(b"x")
    await until(lambda: len(order) == 2)
    assert order == ["small", "bulk"]


async def test_deferred_work_that_takes_long_lets_the_others_come_in_turn(poller: Poller) -> None:
    pairs = [socket.socketpair() for _ in range(3)]
    order: list[int] = []

    def reader(number: int, sock: socket.socket) -> Callable[[], None]:
        def work() -> None:
            order.append(number)
            sock.recv(1)
            end = time.monotonic() + TURN_S
            while time.monotonic() < end:
                pass

        return lambda: poller.defer(work)

    for number, (sock, peer) in enumerate(pairs):
        peer.send(b"xyz")
        poller.add_reader(sock.fileno(), reader(number, sock))
    await until(lambda: len(order) == 9)
    assert [sorted(order[at : at + 3]) for at in (0, 3, 6)] == [[0, 1, 2]] * 3
    for sock, peer in pairs:
        poller.forget(sock.fileno())
        sock.close()
        peer.close()


async def test_deferred_work_that_is_taken_back_is_not_done(
    poller: Poller, pair: tuple[socket.socket, socket.socket]
) -> None:
    left, right = pair
    done: list[str] = []

    def work() -> None:
        done.append("deferred")

    def on_readable() -> None:
        left.recv(1)
        poller.defer(work)
        poller.cancel(work)
        done.append("read")

    poller.add_reader(left.fileno(), on_readable)
    right.send(b"x")
    await until(lambda: bool(done))
    await turns()
    assert done == ["read"]


class Talk:
    """Messages that a reader of the poller takes one by one."""

    def __init__(self, poller: Poller, pair: tuple[socket.socket, socket.socket]) -> None:
        self._left, self._right = pair
        self.read: list[bytes] = []
        poller.add_reader(self._left.fileno(), lambda: self.read.append(self._left.recv(1)))

    async def messages(self, count: int) -> None:
        for _ in range(count):
            before = len(self.read)
            self._right.send(b"x")
            await until(lambda before=before: len(self.read) > before)  # type: ignore[misc]


async def test_does_not_let_the_loop_sleep_while_messages_come_quickly_and_rests_soon_after(
    poller: Poller, pair: tuple[socket.socket, socket.socket], clock: Clock
) -> None:
    talk = Talk(poller, pair)
    await talk.messages(QUICK)
    assert not poller.spinning
    await talk.messages(1)
    assert poller.spinning
    # Timers and whatever else the loop has to do go on meanwhile.
    await turns()
    assert poller.spinning
    await talk.messages(3)
    clock.now += 2 * SPIN_S
    await until(lambda: not poller.spinning)
    # What comes after such a pause is alone again, and more must come before another is risked.
    await talk.messages(1 + AFTER_VAIN + QUICK - 1)
    assert not poller.spinning
    await talk.messages(1)
    assert poller.spinning


async def test_rests_between_messages_that_come_slowly(
    poller: Poller, pair: tuple[socket.socket, socket.socket], clock: Clock
) -> None:
    talk = Talk(poller, pair)
    for _ in range(3 * QUICK):
        clock.now += 2 * SPIN_S
        await talk.messages(1)
        assert not poller.spinning


async def test_rests_between_pieces_of_bulk(
    poller: Poller, pair: tuple[socket.socket, socket.socket], clock: Clock
) -> None:
    left, right = pair
    read: list[bytes] = []
    poller.add_reader(left.fileno(), lambda: poller.defer(lambda: read.append(left.recv(1))))
    for _ in range(3 * QUICK):
        read.clear()
        right.send(b"x")
        await until(lambda: bool(read))
        assert not poller.spinning


async def test_a_callback_that_raises_ends_no_later_spin(
    poller: Poller, pair: tuple[socket.socket, socket.socket], clock: Clock
) -> None:
    loop = asyncio.get_running_loop()
    reported: list[object] = []
    loop.set_exception_handler(lambda _loop, context: reported.append(context.get("exception")))
    talk = Talk(poller, pair)
    await talk.messages(QUICK + 1)
    failing, peer = socket.socketpair()

    def fail() -> None:
        poller.forget(failing.fileno())
        raise ZeroDivisionError

    poller.add_reader(failing.fileno(), fail)
    peer.send(b"x")
    await until(lambda: bool(reported))
    await talk.messages(QUICK + 1)
    assert poller.spinning
    failing.close()
    peer.close()
