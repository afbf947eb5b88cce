"""A reply that comes quickly in small pieces is read once in a while: when that begins, what it must not lose, when it ends."""

import asyncio
import socket
from collections.abc import Callable, Iterator
from typing import cast

import pytest

from gateway.core.verdict import DenyReason
from gateway.net import upstream as upstream_module
from gateway.net.poller import REST_S, Poller
from gateway.net.upstream import QUICK_READS, QUICK_S, SMALL_READ_BYTES, UpstreamConnection

PIECE = b"data: {}\n\n"


class StillPoller:
    """Stands in for the poller: remembers what is watched and what rests, and calls nobody."""

    def __init__(self) -> None:
        self.is_serving_many = False
        self.watched: set[int] = set()
        self.resting: list[Callable[[], object]] = []

    def add_reader(self, fd: int, _callback: object) -> None:
        self.watched.add(fd)

    def remove_reader(self, fd: int) -> None:
        self.watched.discard(fd)

    def forget(self, fd: int) -> None:
        self.watched.discard(fd)

    def rest(self, work: Callable[[], object]) -> None:
        self.resting.append(work)

    def wake(self) -> None:
        rested, self.resting = self.resting, []
        for work in rested:
            work()


class Clock:
    """The connection's clock; it stands still until told otherwise."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Keeper:
    """The pool, and the exchange: keeps what it is given."""

    def __init__(self) -> None:
        self.relayed: list[bytes] = []
        self.lost: list[bool] = []
        self.put: list[UpstreamConnection] = []

    def put_back(self, connection: UpstreamConnection) -> None:
        self.put.append(connection)

    def forget(self, connection: UpstreamConnection) -> None: ...

    def upstream_ready(self, connection: UpstreamConnection) -> None: ...

    def upstream_unavailable(self, reason: DenyReason, message: str) -> None: ...

    def interim_reply(self, head: bytes) -> None: ...

    def reply_started(self, status: int, head: bytes) -> Callable[[bytes], object]:
        return bool

    def relay(self, data: bytes) -> None:
        if data:
            self.relayed.append(data)

    def reply_completed(self, *, reusable: bool) -> None:
        self.connection.release(reusable=reusable)

    def upstream_lost(self, connection: UpstreamConnection, *, clean: bool) -> None:
        self.lost.append(clean)

    def upstream_full(self) -> None: ...

    def upstream_drained(self) -> None: ...

    connection: UpstreamConnection


class Provider(Keeper):
    """Both ends of one connection whose reply has begun."""

    def __init__(self, clock: Clock, *, over_tls: bool = False, length: int = 1 << 30) -> None:
        super().__init__()
        self.clock = clock
        self.poller = StillPoller()
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.far = socket.create_connection(server.getsockname())
            near, _ = server.accept()
        near.setblocking(False)
        self.far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = UpstreamConnection(self, cast(Poller, self.poller), near, over_tls=over_tls)
        self.connection.start(self)
        self.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % length)
        self.connection._on_readable()

    def close(self) -> None:
        self.far.close()
        self.connection.close()

    def send(self, data: bytes) -> None:
        """Send, and wait until it is there whole."""
        self.far.sendall(data)
        near = self.connection.sock
        near.settimeout(60)
        near.recv(len(data), socket.MSG_PEEK | socket.MSG_WAITALL)
        near.setblocking(False)

    def say(self, data: bytes = PIECE, after: float = QUICK_S / 2) -> None:
        """Send a piece that the poller tells of."""
        self.clock.now += after
        self.send(data)
        self.connection._on_readable()

    @property
    def is_watched(self) -> bool:
        return self.connection.sock.fileno() in self.poller.watched

    def begin_rest(self) -> None:
        self.say(after=1)
        for _ in range(QUICK_READS):
            assert self.is_watched
            self.say()
        assert not self.is_watched
        assert len(self.poller.resting) == 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(upstream_module, "time", clock)
    return clock


@pytest.fixture
def provider(clock: Clock) -> Iterator[Provider]:
    provider = Provider(clock)
    yield provider
    provider.close()


def test_what_comes_quickly_rests_and_is_read_together_until_nothing_comes(provider: Provider) -> None:
    provider.begin_rest()
    provider.relayed.clear()
    for _ in range(3):
        provider.send(5 * PIECE)
        provider.clock.now += REST_S
        provider.poller.wake()
        assert not provider.is_watched
    assert provider.relayed == [5 * PIECE] * 3
    provider.poller.wake()
    assert provider.is_watched
    assert not provider.poller.resting


def test_what_comes_slowly_never_rests(provider: Provider) -> None:
    for _ in range(10 * QUICK_READS):
        provider.say(after=2 * QUICK_S)
        assert provider.is_watched
    assert not provider.poller.resting


def test_a_pause_in_the_row_begins_the_row_anew(provider: Provider) -> None:
    for _ in range(10):
        provider.say(after=2 * QUICK_S)
        for _ in range(QUICK_READS - 1):
            provider.say()
        assert provider.is_watched


def test_large_pieces_never_rest_and_end_a_rest(provider: Provider) -> None:
    for _ in range(2 * QUICK_READS):
        provider.say(bytes(SMALL_READ_BYTES))
        assert provider.is_watched
    provider.begin_rest()
    provider.send(bytes(SMALL_READ_BYTES))
    provider.poller.wake()
    assert provider.is_watched
    assert not provider.poller.resting


def test_over_tls_nothing_rests_because_a_read_takes_one_record(clock: Clock) -> None:
    provider = Provider(clock, over_tls=True)
    try:
        provider.say(after=1)
        for _ in range(2 * QUICK_READS):
            provider.say()
            assert provider.is_watched
    finally:
        provider.close()


def test_a_client_that_takes_no_more_ends_a_rest_and_nothing_is_read_until_it_does(provider: Provider) -> None:
    provider.begin_rest()
    provider.connection.pause()
    provider.relayed.clear()
    provider.send(PIECE)
    provider.poller.wake()
    assert not provider.relayed
    assert not provider.is_watched
    assert not provider.poller.resting
    provider.connection.resume()
    assert provider.is_watched


def test_a_reply_that_ends_in_a_rest_leaves_a_watched_connection(clock: Clock) -> None:
    provider = Provider(clock, length=(QUICK_READS + 3) * len(PIECE))
    try:
        provider.begin_rest()
        provider.send(2 * PIECE)
        provider.poller.wake()
        assert provider.put == [provider.connection]
        assert provider.is_watched
        assert not provider.poller.resting
    finally:
        provider.close()


def test_an_end_of_the_connection_in_a_rest_is_told(provider: Provider) -> None:
    provider.begin_rest()
    provider.far.close()
    provider.connection.sock.settimeout(60)
    assert provider.connection.sock.recv(1, socket.MSG_PEEK) == b""
    provider.connection.sock.setblocking(False)
    provider.poller.wake()
    assert provider.lost == [True]
    assert provider.connection.is_closed


def test_a_connection_that_is_closed_in_a_rest_is_left_alone(provider: Provider) -> None:
    provider.begin_rest()
    provider.connection.close()
    provider.poller.wake()
    assert not provider.poller.resting


async def test_the_poller_calls_what_rested_once_and_in_a_row_and_reports_its_faults() -> None:
    poller = Poller(asyncio.get_running_loop())
    reported: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    called: list[str] = []
    done = asyncio.Event()

    def fail() -> None:
        called.append(f"fail {poller.is_serving_many}")
        poller.after_batch(done.set)
        raise ValueError("on purpose")

    def work() -> None:
        called.append(f"work {poller.is_serving_many} {done.is_set()}")

    try:
        poller.rest(fail)
        poller.rest(fail)
        poller.rest(work)
        await asyncio.wait_for(done.wait(), 60)
        assert called == ["fail True", "work True False"]
        assert [str(each["exception"]) for each in reported] == ["on purpose"]
        assert not poller.is_serving_many
    finally:
        poller.close()
