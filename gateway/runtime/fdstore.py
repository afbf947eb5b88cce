"""The service manager's file descriptor store: what is put there outlives the process (sd_notify(3), FDSTORE=1).

One entry holds everything: a *parcel*, a socket in whose queue descriptors wait as SCM_RIGHTS messages (unix(7)). So the
manager keeps, compares, names and passes on one descriptor and not thousands: no long LISTEN_FDNAMES, no quadratic search
for duplicates, no matching by inode. The kernel keeps what is queued open as long as somebody holds the parcel.
"""

import array
import errno
import fcntl
import os
import select
import socket
from collections.abc import Mapping, Sequence
from typing import Final

from gateway.runtime.notify import notify, number_in

# SCM_MAX_FD of the kernel: descriptors in one message.
_PER_MESSAGE: Final = 253
# More than the machine's limit of open files can be; an absurd number is no parcel.
_MAX_DESCRIPTORS: Final = 1 << 20
_BARRIER_S: Final = 5.0
_SEALS: Final = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class ParcelError(Exception):
    """A parcel could not be made or opened; the message is one sentence."""


def is_offered(environment: Mapping[str, str] = os.environ) -> bool:
    """Tell whether the manager keeps descriptors for us.

    systemd says so by FDSTORE from version 254 on; for earlier ones the unit sets it beside FileDescriptorStoreMax=.
    """
    return bool(environment.get("NOTIFY_SOCKET")) and number_in(environment, "FDSTORE") > 0


def store(name: str, descriptor: int, environment: Mapping[str, str] = os.environ) -> bool:
    """Have the manager keep a descriptor under `name`; tell whether the message was taken.

    FDPOLL=0: the manager would otherwise drop a socket whose peer has hung up.
    """
    return notify(f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0", environment, [descriptor])


def remove(name: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Have the manager close all that it keeps under `name`."""
    return notify(f"FDSTOREREMOVE=1\nFDNAME={name}", environment)


def barrier(environment: Mapping[str, str] = os.environ, seconds: float = _BARRIER_S) -> bool:
    """Wait until the manager has read all that was sent before (sd_notify_barrier(3)); False when it does not in time."""
    try:
        ours, theirs = os.pipe2(os.O_CLOEXEC)
    except OSError:
        return False
    try:
        sent = notify("BARRIER=1", environment, [theirs])
    finally:
        os.close(theirs)
    poller = select.poll()
    poller.register(ours, 0)
    try:
        # The manager closes its copy of the other end.
        return sent and bool(poller.poll(seconds * 1000))
    finally:
        os.close(ours)


class Parcel:
    """A record and descriptors on their way. `far` is what the receiver must get; the descriptors stay open here too."""

    def __init__(self, record: bytes, descriptors: Sequence[int]) -> None:
        """Pack it. Raises ParcelError."""
        try:
            self._near, self.far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise ParcelError(f"descriptors cannot be handed over: {error.strerror}") from error
        try:
            post(self._near, record, descriptors)
        except ParcelError:
            self.close()
            raise

    @property
    def is_held(self) -> bool:
        """Whether somebody else holds it. Call when this process' own copy of `far` is closed."""
        poller = select.poll()
        poller.register(self._near.fileno(), 0)
        return not poller.poll(0)

    def close(self) -> None:
        """Hold it no more; what is in it lives on with the receiver."""
        self.far.close()
        self._near.close()


def post(sock: socket.socket, record: bytes, descriptors: Sequence[int]) -> None:
    """Send a record and descriptors to a SOCK_SEQPACKET socket, never waiting. Raises ParcelError."""
    memory = -1
    try:
        memory = os.memfd_create("opificia-parked", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        view = memoryview(record)
        while view:
            view = view[os.write(memory, view) :]
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)
        all_of_them = [memory, *descriptors]
        for start in range(0, len(all_of_them), _PER_MESSAGE):
            # Each message says how many are still to come, itself included.
            left = len(all_of_them) - start
            piece = all_of_them[start : start + _PER_MESSAGE]
            # Not socket.send_fds: Python 3.11 ignores its flags, and it would wait for room that nobody makes.
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", piece))
            sock.sendmsg([left.to_bytes(4, "big")], [rights], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    except OSError as error:
        raise ParcelError(f"descriptors cannot be handed over: {error.strerror}") from error
    finally:
        if memory >= 0:
            os.close(memory)


def receive(parcel: int, max_bytes: int) -> tuple[bytes, list[int]]:
    """Open a parcel, which is closed; return its record of at most `max_bytes` and its descriptors (close-on-exec).

    Raises ParcelError; then all that had come is closed.
    """
    got: list[int] = []
    try:
        with _socket(parcel) as sock:
            left = 0
            while left or not got:
                message, descriptors = receive_message(sock)
                got += descriptors
                said = int.from_bytes(message, "big")
                if len(message) != 4 or said != (left or said) or said > _MAX_DESCRIPTORS:
                    raise ParcelError("it is not a parcel of a gateway, or this process may not open as many files")
                left = said - len(descriptors)
                if left < 0 or not descriptors:
                    raise ParcelError("it is not a parcel of a gateway")
        record = _read(got[0], max_bytes)
        os.close(got.pop(0))
        return record, got
    except (OSError, ParcelError) as error:
        for descriptor in got:
            os.close(descriptor)
        if isinstance(error, OSError):
            raise ParcelError(f"it cannot be read: {error.strerror}") from error
        raise


def _socket(descriptor: int) -> socket.socket:
    try:
        return socket.socket(fileno=descriptor)
    except OSError:
        os.close(descriptor)
        raise


def receive_message(sock: socket.socket) -> tuple[bytes, list[int]]:
    """Return one message of at most 16 bytes, and the descriptors with it (close-on-exec), never waiting.

    Raises OSError; also when descriptors had to be left out, because this process may open no more.
    """
    # Not socket.recv_fds, which takes flags and ignores them (until Python 3.12).
    descriptors = array.array("i")
    room = socket.CMSG_LEN(_PER_MESSAGE * descriptors.itemsize)
    data, ancillary, flags, _ = sock.recvmsg(16, room, socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    if flags & socket.MSG_CTRUNC:
        for descriptor in descriptors:
            os.close(descriptor)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return data, list(descriptors)


def _read(memory: int, max_bytes: int) -> bytes:
    size = os.fstat(memory).st_size
    if size > max_bytes:
        raise ParcelError(f"its record has {size} bytes, more than {max_bytes}")
    with open(memory, "rb", closefd=False) as file:
        file.seek(0)
        return file.read(size)


def passed(environment: Mapping[str, str] = os.environ) -> dict[str, list[int]]:
    """Return the descriptors that the manager passed at start, by name (sd_listen_fds_with_names(3)).

    Sockets to listen on and what was stored come alike. They are not passed on to what this process starts.
    """
    if environment.get("LISTEN_PID") != str(os.getpid()):
        return {}
    names = environment.get("LISTEN_FDNAMES", "").split(":")
    found: dict[str, list[int]] = {}
    for index in range(number_in(environment, "LISTEN_FDS")):
        descriptor = 3 + index
        try:
            os.set_inheritable(descriptor, False)
        except OSError:
            # They have no gaps: what is not there is the end, whatever the number says.
            break
        found.setdefault(names[index] if index < len(names) else "unknown", []).append(descriptor)
    return found
