"""Targets between one gateway process and the next: the record, the parcel, their messages, what the manager passes."""

import contextlib
import hashlib
import os
import socket
import struct
from array import array
from pathlib import Path

import msgspec

from gateway import channel, unfinished
from gateway.contract.ids import is_session_id
from gateway.core.authority import parse_authority
from gateway.core.parked import VERSION, ParkedError, decode_parked, encode_parked
from gateway.runtime import fdstore
from gateway.runtime.notify import watchdog_s
from tests.fuzz.properties import check_bounded

_MAX_RECORD: int = 1 << 12


def parked_record(body: bytes) -> bytes:
    """Return a record with this body and a header that fits."""
    return struct.pack(">16sIQ32s", b"opificia-parked\n", VERSION, len(body), hashlib.sha256(body).digest()) + body


def parked(data: bytes) -> None:
    """`decode_parked`: each descriptor belongs to one part, and what was read is written again as it was.

    The first byte says how many descriptors came with it.
    """
    with contextlib.suppress(ParkedError):
        decode_parked(data, 0)
    descriptors, body = (data[0] if data else 0), data[1:]
    try:
        record = decode_parked(parked_record(body), descriptors)
    except ParkedError as error:
        check_bounded(str(error), data)
        return
    places = [*record.listeners.values(), *record.passed.values()]
    for pair in record.pairs:
        places += [pair.client, pair.upstream]
    places += record.pipe_places
    for greeting in record.greetings:
        places += [greeting.client, greeting.upstream]
    places += [each.client for part in (record.asking, record.http, record.arrivals, record.endings) for each in part]
    assert sorted(places) == list(range(descriptors))
    assert min([count for flow in record.flows for count in (flow.count, flow.in_pipe)], default=0) >= 0
    for tunnel in (*record.tunnels, *record.greetings, *record.asking, *record.http):
        assert is_session_id(tunnel.session)
        assert tunnel.authority is None or parse_authority(tunnel.authority.encode()).port
    again = encode_parked(record)
    assert encode_parked(decode_parked(again, descriptors)) == again


def _descriptor(kind: int, content: bytes) -> int:
    match kind % 5:
        case 0 | 1:
            made = os.memfd_create("fuzz", os.MFD_CLOEXEC)
            os.write(made, content)
            return made
        case 2:
            return os.open("/dev/zero", os.O_RDONLY | os.O_CLOEXEC)
        case 3:
            return os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        case _:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as made_socket:
                return made_socket.detach()


def parcel(data: bytes) -> None:
    """`fdstore.receive`: the record and its descriptors, or an error; no descriptor is left open by either.

    Each message of the parcel is a byte for how many descriptors (and of which kind the first is), a byte for its length, and
    its bytes.
    """
    before = _open_descriptors()
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sent, position = 0, 0
    with near:
        while position + 2 <= len(data) and sent < 6:
            shape, length = data[position], data[position + 1] % 20
            message = data[position + 2 : position + 2 + length]
            position += 2 + length
            sent += 1
            descriptors = [_descriptor(shape >> 4, data) for _ in range(shape % 4)]
            try:
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))
                near.sendmsg([message], [rights] if descriptors else [], socket.MSG_NOSIGNAL)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
    try:
        record, got = fdstore.receive(far.detach(), _MAX_RECORD)
    except fdstore.ParcelError as error:
        check_bounded(str(error), data)
    else:
        assert len(record) <= _MAX_RECORD
        assert record in (data, b"")
        assert not any(os.get_inheritable(descriptor) for descriptor in got)
        again = fdstore.Parcel(record, got)
        other = again.far.dup()
        again.close()
        read, also = fdstore.receive(other.detach(), _MAX_RECORD)
        assert read == record
        assert len(also) == len(got)
        for descriptor in (*got, *also):
            os.close(descriptor)
    assert _open_descriptors() == before


def _open_descriptors() -> set[str]:
    # One is the look itself, and has the same number each time.
    return set(os.listdir("/proc/self/fd"))  # noqa: PTH208 - in every run; a Path for each costs more than the target


def channel_message(data: bytes) -> None:
    """`channel.decode`: a message that is written again as it was read, or an error of its own."""
    try:
        message = channel.decode(data)
    except channel.SuccessionError as error:
        check_bounded(str(error), data)
        return
    assert (message is None) == (not data)
    if message is not None:
        assert channel.decode(msgspec.msgpack.encode(message)) == message


def unfinished_lines(data: bytes) -> None:
    """`unfinished.decode`: lines whose session names no other file, and whose time can be written."""
    try:
        lines = unfinished.decode(data)
    except ValueError as error:
        check_bounded(str(error), data)
        return
    for line in lines:
        assert Path(f"{line.session}.log").name == f"{line.session}.log"
        assert line.ts.timestamp() > 0
    assert unfinished.decode(msgspec.json.encode(lines)) == lines


def manager_environment(data: bytes) -> None:
    """`fdstore.passed`, `is_offered`, `watchdog_s`: numbers or none, and no work without bound.

    A line for each variable: LISTEN_FDS, LISTEN_FDNAMES, FDSTORE, WATCHDOG_USEC.
    """
    # As os.environ has it.
    values = [line.decode("utf-8", "surrogateescape") for line in data.split(b"\n")]
    names = ("LISTEN_FDS", "LISTEN_FDNAMES", "FDSTORE", "WATCHDOG_USEC")
    environment = {
        "LISTEN_PID": str(os.getpid()),
        "NOTIFY_SOCKET": "/nowhere",
        **dict(zip(names, values, strict=False)),
    }
    found = fdstore.passed(environment)
    descriptors = [descriptor for each in found.values() for descriptor in each]
    assert len(set(descriptors)) == len(descriptors)
    assert min(descriptors, default=3) >= 3
    assert set(found) <= {*environment.get("LISTEN_FDNAMES", "").split(":"), "unknown"}
    assert fdstore.is_offered(environment) in (False, True)
    assert (watchdog_s(environment) or 1) > 0


HANDOVER_TARGETS = {
    "parked": parked,
    "parcel": parcel,
    "channel_message": channel_message,
    "unfinished_lines": unfinished_lines,
    "manager_environment": manager_environment,
}
