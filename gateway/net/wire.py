"""A non-blocking socket on the poller, plain or TLS: input as it comes, output sent at once and otherwise held.

Both ends of a model request are such a wire. An asyncio transport around a socket cost a request more than all that the
gateway does with it (ADR 10). What to do with the bytes is for whoever derives from it.
"""

import socket
import ssl
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Final

from gateway.net.poller import Poller

# Read at once, and more than a TLS record can hold (RFC 8446 §5.1: 2^14 bytes): a record is never left half in OpenSSL,
# where the kernel would not tell of it.
READ_BYTES: Final = 256 * 1024
# Unsent bytes at which the other side is read no more, and at which it is read again; asyncio's own defaults.
HIGH_WATER_BYTES: Final = 64 * 1024
LOW_WATER_BYTES: Final = 16 * 1024

# What is written while other sockets wait to be read is sent when they have been, up to this size. A send wakes whoever waits
# for it, which costs more than all the rest of a small message; of those that are sent in a row most find it awake.
GATHER_BYTES: Final = 16 * 1024

_NOT_NOW: Final = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
# Shared by all wires: it is empty whenever anything else runs.
_buffer = memoryview(bytearray(READ_BYTES))


def _discard(data: bytes | memoryview) -> int:
    """Stand in for `send` where nobody takes anything any more."""
    return len(data)


class Wire(ABC):
    """Owns `sock`. A write never calls back but for `filled`, so a caller need not fear to be gone after it."""

    __slots__ = ("_poller", "_receive", "_send", "_unsent", "is_closed", "is_full", "is_paused", "sock",
                 "unsent_bytes", "written_bytes")  # fmt: skip

    def __init__(self, poller: Poller, sock: socket.socket) -> None:
        self._poller = poller
        self.sock = sock
        self._receive = sock.recv_into
        self._send: Callable[[bytes | memoryview], int] = sock.send
        # The first of these is offered to the socket again as it is: OpenSSL insists on it.
        self._unsent: deque[bytes | memoryview] | None = None
        self.unsent_bytes = 0
        self.written_bytes = 0
        # Whether more is unsent than the other side should add to.
        self.is_full = False
        # Whether the peer is not read from at present.
        self.is_paused = False
        self.is_closed = False
        poller.add_reader(sock.fileno(), self._on_readable)

    @abstractmethod
    def received(self, data: bytes) -> None:
        """Take input."""

    @abstractmethod
    def lost(self, *, clean: bool) -> None:
        """The peer has ended, or by a fault (not `clean`). The wire is still open; whoever has no use for it closes it."""

    @abstractmethod
    def filled(self) -> None:
        """The peer takes no more for now."""

    @abstractmethod
    def drained(self) -> None:
        """The peer takes more again."""

    @abstractmethod
    def emptied(self) -> None:
        """All that was held has been sent."""

    def write(self, data: bytes) -> None:
        """Send, now or when the sockets that are ready have been read, and hold what is not taken. After an end it goes nowhere."""
        size = len(data)
        self.written_bytes += size
        if self._unsent:
            self._unsent.append(data)
            self.unsent_bytes += size
        elif self._poller.is_serving_many and size <= GATHER_BYTES:
            self._hold(data, 0)
            self._poller.after_batch(self._on_writable)
        else:
            try:
                sent = self._send(data)
            except _NOT_NOW:
                sent = 0
            except OSError:
                # The reader finds the end, and before it what the peer may have said about it.
                self._send = _discard
                return
            if sent == size:
                return
            self._hold(data, sent)
            self._poller.add_writer(self.sock.fileno(), self._on_writable)
        if self.unsent_bytes > HIGH_WATER_BYTES and not self.is_full:
            self.is_full = True
            self.filled()

    def pause(self) -> None:
        """Read no more until `resume`."""
        if not self.is_paused and not self.is_closed:
            self.is_paused = True
            self._poller.remove_reader(self.sock.fileno())

    def resume(self) -> None:
        """Read again."""
        if self.is_paused and not self.is_closed:
            self.is_paused = False
            self._poller.add_reader(self.sock.fileno(), self._on_readable)

    def close(self) -> None:
        """Close at once; what the peer does not take now is lost. Once or more."""
        if not self.is_closed:
            if self._unsent:
                self._offer(self._unsent)
            self.is_closed = True
            self._poller.forget(self.sock.fileno())
            self.sock.close()
            self._send = _discard
            self._unsent = None
            self.unsent_bytes = 0

    def detach(self) -> socket.socket:
        """Be closed, and return the socket open. Nothing must be unsent."""
        self.is_closed = True
        self._poller.remove_reader(self.sock.fileno())
        self._send = _discard
        return self.sock

    def _on_readable(self) -> None:
        try:
            size = self._receive(_buffer)
        except _NOT_NOW:
            return
        except OSError:
            size = -1
        try:
            if size > 0:
                self.received(bytes(_buffer[:size]))
            else:
                self.lost(clean=size == 0)
        except BaseException:
            # A fault of ours must not leave a connection that nobody serves.
            self.close()
            raise

    def _hold(self, data: bytes, sent: int) -> None:
        if self._unsent is None:
            self._unsent = deque()
        self._unsent.append(memoryview(data)[sent:] if sent else data)
        self.unsent_bytes = len(data) - sent

    def _offer(self, unsent: deque[bytes | memoryview]) -> None:
        """Send what is held as far as it is taken."""
        try:
            while unsent:
                sent = self._send(unsent[0])
                self.unsent_bytes -= sent
                if sent == len(unsent[0]):
                    unsent.popleft()
                else:
                    unsent[0] = memoryview(unsent[0])[sent:]
        except _NOT_NOW:
            pass
        except OSError:
            self._send = _discard
            unsent.clear()
            self.unsent_bytes = 0

    def _on_writable(self) -> None:
        unsent = self._unsent
        if unsent is None:
            # Closed since it was written.
            return
        try:
            self._send_held(unsent)
        except BaseException:
            self.close()
            raise

    def _send_held(self, unsent: deque[bytes | memoryview]) -> None:
        self._offer(unsent)
        if unsent:
            self._poller.add_writer(self.sock.fileno(), self._on_writable)
        else:
            self._poller.remove_writer(self.sock.fileno())
        if self.is_full and self.unsent_bytes <= LOW_WATER_BYTES:
            self.is_full = False
            self.drained()
        if not unsent and not self.is_closed:
            self.emptied()
