"""From one gateway process to the next: what is left to the service manager at the end, and found there at the start.

A stop is a restart as far as a process can know, so whatever can go on is parked each time; if no process comes, the
manager drops it, and it ends then.
"""

import contextlib
import logging
import os
import socket
import stat
from collections.abc import Mapping
from typing import Final

from gateway.beside import Predecessor
from gateway.channel import SuccessionError
from gateway.core.parked import MAX_BYTES, Parked, ParkedError, decode_parked, encode_parked
from gateway.net.parking import Parking
from gateway.runtime import fdstore
from gateway.runtime.addresses import TcpAddress, UnixAddress, listen
from gateway.unfinished import Unfinished

log = logging.getLogger("gateway.succession")

# Names in the manager's store. Short: they come back in the environment.
PARCEL: Final = "parked"
# There while a gateway runs: whoever finds it, and no parcel, comes after one that had no time to park.
ALIVE: Final = "alive"


class Inheritance:
    """What this process was given at its start: sockets to listen on, and what the process before left."""

    def __init__(self, passed: Mapping[str, list[int]], predecessor: Predecessor | None = None) -> None:
        """Take it. A `predecessor` goes on until `confirm`, and as it was if that is never called. Raises SuccessionError."""
        self._predecessor = predecessor
        self._passed = {name: list(descriptors) for name, descriptors in passed.items()}
        self.descriptors: list[int] = []
        self.record: Parked | None = None
        self._listeners: dict[str, int] = {}
        alive, parcels = self._passed.pop(ALIVE, []), self._passed.pop(PARCEL, [])
        _close(alive)
        self._is_announced = bool(alive) or predecessor is not None
        self._has_parcel = bool(parcels)
        if parcels:
            # Before it is opened: who finds the sign beside a parcel that is empty knows that this process died with it.
            self.announce()
        for parcel in parcels:
            self._open(parcel, "what the gateway before this one left cannot be taken up, its tunnels are cut")
        if alive and self.record is None:
            log.warning(
                "the gateway before this one ended without handing over (a crash, or killed): its tunnels are cut, "
                "their last audit lines and at most a second of their usage are lost"
            )
        if predecessor is not None:
            self._open(predecessor.await_parcel(), "what the running gateway hands over cannot be taken up")
            if self.record is None:
                raise SuccessionError("the running gateway goes on")

    def announce(self) -> None:
        """Have the manager keep the sign that a gateway runs."""
        if fdstore.is_offered() and not self._is_announced:
            self._is_announced = True
            sign = os.memfd_create(ALIVE, os.MFD_CLOEXEC)
            fdstore.store(ALIVE, sign)
            os.close(sign)

    def confirm(self) -> None:
        """Say that nothing is in the way of taking over; on return this is the main process. Raises SuccessionError.

        What can fail at a start comes before.
        """
        if self._predecessor is not None:
            self._predecessor.confirm()

    def _open(self, parcel: int, otherwise: str) -> None:
        try:
            data, descriptors = fdstore.receive(parcel, MAX_BYTES)
            try:
                record = decode_parked(data, len(descriptors))
                _check_kinds(record, descriptors)
            except ParkedError:
                _close(descriptors)
                raise
        except (fdstore.ParcelError, ParkedError) as error:
            log.error("%s: %s", otherwise, error)
            return
        if self.record is not None:
            log.error("the gateway before this one left two records; the first is taken up")
            _close(descriptors)
            return
        self.record, self.descriptors = record, descriptors
        self._listeners = {name: descriptors[place] for name, place in record.listeners.items()}
        self._passed |= {name: [descriptors[place]] for name, place in record.passed.items()}

    def listening(self, name: str, address: TcpAddress | UnixAddress) -> tuple[socket.socket, bool]:
        """Return the socket to listen on, and whether it is the manager's. Raises ListenError.

        It is the one that the manager passed; or what the process before listened on, if the address is still the same;
        or a new one.
        """
        if passed := self._passed.pop(name, None):
            _close(passed[1:])
            return _listening(passed[0]), True
        if (left := self._listeners.pop(name, None)) is not None:
            sock = _listening(left)
            if _is_at(sock, address):
                return sock, False
            sock.close()
        return listen(address), False

    def close_rest(self) -> None:
        """Close what was given and is not wanted, when all else is taken up."""
        if self._has_parcel:
            # It is empty: a crash from here on loses what any crash loses.
            fdstore.remove(PARCEL)
        for name, descriptors in self._passed.items():
            log.warning("descriptors that the manager passed as %r are not known and closed", name)
            _close(descriptors)
        _close(list(self._listeners.values()))


def _listening(descriptor: int) -> socket.socket:
    sock = socket.socket(fileno=descriptor)
    sock.setblocking(False)
    return sock


def _is_at(sock: socket.socket, address: TcpAddress | UnixAddress) -> bool:
    name = sock.getsockname()
    if isinstance(address, UnixAddress):
        return bool(name == address.path)
    return isinstance(name, tuple) and name[:2] == (address.host, address.port)


def _check_kinds(record: Parked, descriptors: list[int]) -> None:
    """Raise ParkedError unless each descriptor is what the record takes it for."""
    pipes = record.pipe_places
    for place, descriptor in enumerate(descriptors):
        is_right = stat.S_ISFIFO if place in pipes else stat.S_ISSOCK
        if not is_right(os.fstat(descriptor).st_mode):
            raise ParkedError("it takes a descriptor for another kind than it is")


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def withdraw() -> None:
    """Have the manager forget the sign that a gateway runs: it ends as it should."""
    if fdstore.is_offered():
        fdstore.remove(ALIVE)
        # What a process that is gone has said last, the manager may not take for the service's.
        fdstore.barrier()


def leave_with_manager(parking: Parking, listeners: Mapping[str, socket.socket], unfinished: Unfinished) -> bool:
    """Park everything in the manager's store; False, and nothing has changed, if the manager does not keep it.

    Never waits but for the manager, for at most five seconds; nothing moves meanwhile.
    """
    record, descriptors = parking.pack(listeners, {})
    try:
        parcel = fdstore.Parcel(encode_parked(record), descriptors)
    except (fdstore.ParcelError, ParkedError) as error:
        log.error("%s; what is open is drained and then cut", error)
        return False
    try:
        fdstore.store(PARCEL, parcel.far.fileno())
        reached = fdstore.barrier()
        parcel.far.close()
        if not (reached and parcel.is_held):
            # Should it keep it late, two processes would hold the same connections.
            fdstore.remove(PARCEL)
            log.error(
                "the service manager keeps no descriptors (FileDescriptorStoreMax=); what is open is drained and then cut"
            )
            return False
    finally:
        parcel.close()
    unfinished.write(record)
    parking.let_go()
    # Not before: with the sign alone the next process would not miss what died with this one.
    withdraw()
    in_pipes, in_record = record.bytes_held
    log.info(
        "left %d connections to the next process, %d bytes on their way in pipes and %d in the record",
        *(record.connections, in_pipes, in_record),
    )
    return True
