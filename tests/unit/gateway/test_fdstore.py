"""Parcels: a record and descriptors through one socket; and what the manager is told."""

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gateway.runtime import fdstore
from gateway.runtime.fdstore import Parcel, ParcelError, receive
from gateway.runtime.notify import notify


@contextmanager
def files(count: int) -> Iterator[list[int]]:
    """Descriptors that can be told apart by their content."""
    made = []
    for number in range(count):
        descriptor = os.memfd_create("test")
        os.write(descriptor, b"%d" % number)
        made.append(descriptor)
    yield made
    for descriptor in made:
        os.close(descriptor)


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("count", [0, 1, 252, 253, 254, 1000])
def test_all_descriptors_come_in_their_order_after_the_sender_is_gone(count: int) -> None:
    with files(count) as sent:
        parcel = Parcel(b"record" * 1000, sent)
        far = parcel.far.dup()
        parcel.close()
    record, got = receive(far.detach(), 1 << 20)
    assert record == b"record" * 1000
    assert [os.pread(descriptor, 10, 0) for descriptor in got] == [b"%d" % number for number in range(count)]
    assert not any(os.get_inheritable(descriptor) for descriptor in got)
    for descriptor in got:
        os.close(descriptor)


def test_tells_whether_somebody_else_holds_it() -> None:
    with files(3) as sent:
        parcel = Parcel(b"record", sent)
        other = parcel.far.dup()
        parcel.far.close()
        assert parcel.is_held
        other.close()
        assert not parcel.is_held
        parcel.close()


@pytest.mark.parametrize(
    "messages",
    [
        [(b"", 1)],
        [(b"\0\0\0\1", 0)],
        [(b"\0\0\0\2", 1)],
        [(b"\0\0\0\3", 1), (b"\0\0\0\3", 1)],
        [(b"\0\0\0\1", 2)],
        [(b"\0\0\0\1more", 1)],
        [(b"\xff\xff\xff\xff", 1)],
    ],
)
def test_what_is_no_parcel_is_refused_and_leaves_nothing_open(messages: list[tuple[bytes, int]]) -> None:
    before = open_descriptors()
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with files(3) as descriptors:
        for data, count in messages:
            socket.send_fds(near, [data or b"\0"], descriptors[:count])
        near.close()
        with pytest.raises(ParcelError):
            receive(far.detach(), 1000)
    assert open_descriptors() == before


def test_a_record_beyond_the_limit_is_refused_and_leaves_nothing_open() -> None:
    before = open_descriptors()
    with files(3) as descriptors:
        parcel = Parcel(b"x" * 1001, descriptors)
        with pytest.raises(ParcelError, match="1001 bytes"):
            receive(parcel.far.detach(), 1000)
        parcel.close()
    assert open_descriptors() == before


def test_a_socket_that_nothing_waits_in_is_refused_at_once() -> None:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with near, pytest.raises(ParcelError):
        receive(far.detach(), 1000)


@pytest.mark.parametrize("kind", ["file", "folder", "pipe", "datagrams", "listening"])
def test_another_kind_of_descriptor_is_no_parcel_and_is_closed(kind: str, tmp_path: Path) -> None:
    before = open_descriptors()
    if kind in ("file", "folder"):
        descriptor = os.memfd_create("test") if kind == "file" else os.open(tmp_path, os.O_RDONLY)
    elif kind == "pipe":
        descriptor, other = os.pipe()
        os.close(other)
    else:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM if kind == "datagrams" else socket.SOCK_SEQPACKET)
        sock.bind(str(tmp_path / "socket"))
        if kind == "listening":
            sock.listen()
        descriptor = sock.detach()
    with pytest.raises(ParcelError):
        receive(descriptor, 1000)
    assert open_descriptors() == before


@pytest.mark.parametrize("kind", ["folder", "socket"])
def test_a_record_that_is_no_file_is_refused_and_leaves_nothing_open(kind: str, tmp_path: Path) -> None:
    before = open_descriptors()
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    descriptor = os.open(tmp_path, os.O_RDONLY) if kind == "folder" else os.dup(near.fileno())
    socket.send_fds(near, [(1).to_bytes(4, "big")], [descriptor])
    os.close(descriptor)
    near.close()
    with pytest.raises(ParcelError):
        receive(far.detach(), 1000)
    assert open_descriptors() == before


def test_a_descriptor_that_is_none_is_an_error_of_the_sender() -> None:
    before = open_descriptors()
    with pytest.raises(ParcelError):
        Parcel(b"record", [1 << 20])
    assert open_descriptors() == before


@pytest.mark.parametrize(
    ("environment", "offered"),
    [
        ({}, False),
        ({"NOTIFY_SOCKET": "/run/notify"}, False),
        ({"NOTIFY_SOCKET": "/run/notify", "FDSTORE": "0"}, False),
        ({"NOTIFY_SOCKET": "/run/notify", "FDSTORE": "many"}, False),
        ({"FDSTORE": "8"}, False),
        ({"NOTIFY_SOCKET": "/run/notify", "FDSTORE": "8"}, True),
    ],
)
def test_a_store_is_offered_by_number(environment: dict[str, str], offered: bool) -> None:
    assert fdstore.is_offered(environment) is offered


def test_a_barrier_is_passed_when_the_manager_has_closed_its_end(tmp_path: Path) -> None:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(path))
        environment = {"NOTIFY_SOCKET": str(path)}
        assert not fdstore.barrier(environment, seconds=0.01)
        data, descriptors, _, _ = socket.recv_fds(manager, 100, 10)
        assert data == b"BARRIER=1"
        for descriptor in descriptors:
            os.close(descriptor)
    assert not fdstore.barrier({}, seconds=10)


@pytest.mark.parametrize("spare", [0, 1, 2])
def test_without_descriptors_to_spare_nothing_is_told_or_packed_and_nothing_is_left_open(
    tmp_path: Path, spare: int
) -> None:
    path = tmp_path / "notify"
    environment = {"NOTIFY_SOCKET": str(path)}
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(path))
        before = open_descriptors()
        free = [os.dup(manager.fileno()) for _ in range(spare)]
        # None of the lower numbers is free: the kernel gives out the lowest.
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(free, default=manager.fileno()) + 1, hard))
        fill = []
        try:
            while True:
                fill.append(os.dup(manager.fileno()))
        except OSError:
            for descriptor in free:
                os.close(descriptor)
        try:
            told = notify("READY=1", environment), fdstore.barrier(environment, seconds=0.01)
            with pytest.raises(ParcelError, match="Too many open files"):
                Parcel(b"record", [])
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for descriptor in fill:
                os.close(descriptor)
        assert told == (spare > 0, False)
        assert open_descriptors() == before


def test_descriptors_for_another_process_are_not_ours() -> None:
    assert fdstore.passed({"LISTEN_PID": "1", "LISTEN_FDS": "3"}) == {}
    assert fdstore.passed({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "none"}) == {}


def test_more_than_a_socket_takes_is_an_error_and_waits_for_nobody() -> None:
    # Some 70,000 are taken; an unprivileged sender has fewer, and is refused sooner.
    with files(1) as sent, pytest.raises(ParcelError, match="cannot be handed over"):
        Parcel(b"record", sent * 100_000)
