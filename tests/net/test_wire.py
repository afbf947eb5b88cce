"""The wire under both ends of a model request: when what is written is sent."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import pytest

from gateway.net.poller import Poller
from gateway.net.wire import GATHER_BYTES, Wire


@pytest.fixture
async def poller() -> AsyncIterator[Poller]:
    poller = Poller(asyncio.get_running_loop())
    yield poller
    poller.close()


class Answering(Wire):
    """Calls `answer` with what it reads; tells what it was told."""

    def __init__(self, poller: Poller, sock: socket.socket, answer: Callable[["Answering", bytes], None]) -> None:
        super().__init__(poller, sock)
        self._answer = answer
        self.told: list[str] = []

    def received(self, data: bytes) -> None:
        self._answer(self, data)

    def lost(self, *, clean: bool) -> None:
        self.close()

    def filled(self) -> None:
        self.told.append("filled")

    def drained(self) -> None:
        self.told.append("drained")

    def emptied(self) -> None:
        self.told.append("emptied")


class Wires:
    """Several wires that have something to read at the same moment, and their far ends."""

    def __init__(self, poller: Poller, number: int, answer: Callable[[Answering, bytes], None]) -> None:
        self.far: list[socket.socket] = []
        self.near: list[Answering] = []
        for _ in range(number):
            near, far = socket.socketpair()
            near.setblocking(False)
            far.setblocking(False)
            far.send(b"ask")
            self.far.append(far)
            self.near.append(Answering(poller, near, answer))

    def __enter__(self) -> "Wires":
        return self

    def __exit__(self, *_: object) -> None:
        for wire in self.near:
            wire.close()
        for far in self.far:
            far.close()

    def arrived(self) -> bytes:
        """Return what has come to the far ends, all together, and leave it there."""
        found = b""
        for far in self.far:
            with suppress(BlockingIOError):
                found += far.recv(1 << 20, socket.MSG_PEEK)
        return found


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)


async def test_what_is_written_while_others_are_read_is_sent_in_order_when_all_have_been_read(poller: Poller) -> None:
    seen: list[bytes] = []

    def answer(wire: Answering, data: bytes) -> None:
        seen.append(wires.arrived())
        wire.write(b"first,")
        wire.write(b"second;")

    with Wires(poller, 3, answer) as wires:
        await until(lambda: wires.arrived() == b"first,second;" * 3)
        assert seen == [b""] * 3
        assert all(wire.told == ["emptied"] and not wire.unsent_bytes for wire in wires.near)


async def test_what_is_written_for_one_alone_is_sent_at_once(poller: Poller) -> None:
    seen: list[bytes] = []

    def answer(wire: Answering, data: bytes) -> None:
        wire.write(b"answer")
        seen.append(wires.arrived())

    with Wires(poller, 1, answer) as wires:
        await until(lambda: bool(seen))
        assert seen == [b"answer"]


async def test_what_is_large_is_sent_at_once(poller: Poller) -> None:
    seen: list[int] = []

    def answer(wire: Answering, data: bytes) -> None:
        before = len(wires.arrived())
        wire.write(bytes(GATHER_BYTES + 1))
        seen.append(len(wires.arrived()) - before)

    with Wires(poller, 2, answer) as wires:
        await until(lambda: len(seen) == 2)
        assert seen == [GATHER_BYTES + 1] * 2


async def test_a_wire_that_is_closed_after_its_write_has_sent_it(poller: Poller) -> None:
    def answer(wire: Answering, data: bytes) -> None:
        wire.write(b"last words")
        wire.close()

    with Wires(poller, 2, answer) as wires:
        await until(lambda: wires.arrived() == b"last words" * 2)
        await until(lambda: all(wire.is_closed for wire in wires.near))
        assert all(wire.told == [] for wire in wires.near)


async def test_what_the_peer_does_not_take_at_the_end_of_the_batch_follows_later_whole(poller: Poller) -> None:
    pieces = [bytes([number]) * GATHER_BYTES for number in range(1, 65)]

    def answer(wire: Answering, data: bytes) -> None:
        for piece in pieces:
            wire.write(piece)

    with Wires(poller, 2, answer) as wires:
        await until(lambda: all("filled" in wire.told for wire in wires.near))
        whole = b"".join(pieces)
        for wire, far in zip(wires.near, wires.far, strict=True):
            got = b""
            async with asyncio.timeout(60):
                while len(got) < len(whole):
                    with suppress(BlockingIOError):
                        got += far.recv(1 << 20)
                    await asyncio.sleep(0)
            assert got == whole
            await until(lambda wire=wire: wire.told == ["filled", "drained", "emptied"])  # type: ignore[misc]


async def test_a_fault_in_what_follows_a_batch_is_reported_and_stops_no_other(poller: Poller) -> None:
    reported: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))

    def answer(wire: Answering, data: bytes) -> None:
        poller.after_batch(fail)
        wire.write(b"answer")

    def fail() -> None:
        raise ValueError("on purpose")

    with Wires(poller, 2, answer) as wires:
        await until(lambda: wires.arrived() == b"answer" * 2)
        assert [str(each["exception"]) for each in reported] == ["on purpose"] * 2


@pytest.mark.parametrize("fails_in", ["received", "drained", "emptied"])
async def test_a_fault_in_what_a_wire_calls_closes_it_and_is_reported_and_the_others_go_on(
    fails_in: str, poller: Poller
) -> None:
    """Otherwise there would be a connection that nobody serves, and its peer would wait for ever."""
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["exception"]))

    def answer(wire: Answering, data: bytes) -> None:
        if wire is not wires.near[0]:
            wire.write(b"answer")
        elif fails_in == "received":
            fail()
        else:
            # More than the kernel takes: it is held, then sent as the far end reads.
            wire.write(bytes(4_000_000))

    def fail() -> None:
        raise ZeroDivisionError

    with Wires(poller, 2, answer) as wires:
        broken, far = wires.near[0], wires.far[0]
        if fails_in != "received":
            setattr(broken, fails_in, fail)
        async with asyncio.timeout(60):
            while not broken.is_closed:
                with suppress(BlockingIOError):
                    far.recv(1 << 20)
                await asyncio.sleep(0)
        assert [type(error) for error in reported] == [ZeroDivisionError]
        assert broken.sock.fileno() < 0
        assert not wires.near[1].is_closed
        await until(lambda: wires.arrived().endswith(b"answer"))
        assert len(poller) == 1
