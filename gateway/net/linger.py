"""Ends a connection so that the client can read why.

close(2) with unread bytes sends a reset, and a reset makes the client throw away the reply that said why. So the last
reply is followed by a half-close, and what still comes is read and thrown away, for a short time and up to a bound.
"""

import asyncio
import socket
from typing import Final

from gateway.net.deadlines import Deadlines
from gateway.net.poller import Poller

# nginx waits 5 s between reads (lingering_timeout); a sandbox is on the same host.
LINGER_S: Final = 2.0
MAX_DISCARDED_BYTES: Final = 256 * 1024
# More connections than this being ended at once: the rest is closed hard.
MAX_LINGERING: Final = 1024
_DISCARD_BYTES: Final = 64 * 1024


class _Ending:
    __slots__ = ("discarded", "lingering", "sock")

    def __init__(self, lingering: "Lingering", sock: socket.socket) -> None:
        self.lingering = lingering
        self.sock = sock
        self.discarded = 0

    def on_readable(self) -> None:
        try:
            size = len(self.sock.recv(_DISCARD_BYTES))
        except BlockingIOError:
            return
        except OSError:
            size = 0
        self.discarded += size
        if size == 0 or self.discarded > MAX_DISCARDED_BYTES:
            self.lingering.end(self)


class Lingering:
    """The connections that have got their last reply."""

    def __init__(self, loop: asyncio.AbstractEventLoop, poller: Poller) -> None:
        self._poller = poller
        self._deadlines: Deadlines[_Ending] = Deadlines(loop, LINGER_S, self.end)

    def __len__(self) -> int:
        return len(self._deadlines)

    def close_with(self, sock: socket.socket, reply: bytes) -> None:
        """Send `reply` on a non-blocking socket, then close it, kindly if there is room.

        The reply fits an empty send buffer; a client that filled it by not reading loses it.
        """
        try:
            sock.send(reply)
            sock.shutdown(socket.SHUT_WR)
        except OSError:
            self._close(sock)
            return
        if len(self._deadlines) >= MAX_LINGERING:
            self._close(sock)
            return
        ending = _Ending(self, sock)
        self._deadlines.add(ending)
        self._poller.add_reader(sock.fileno(), ending.on_readable)

    def parked(self) -> list[tuple[socket.socket, float, int]]:
        """Return each connection with the seconds it has left and the bytes that were thrown away."""
        return [(each.sock, self._deadlines.left_s(each), each.discarded) for each in self._deadlines]

    def take_up(self, sock: socket.socket, left_s: float, discarded: int) -> None:
        """Go on ending a connection that an earlier process began to end."""
        ending = _Ending(self, sock)
        ending.discarded = discarded
        self._deadlines.add(ending, left_s)
        self._poller.add_reader(sock.fileno(), ending.on_readable)

    def let_go(self) -> None:
        """Forget them all: another process goes on with them."""
        for ending in list(self._deadlines):
            self._deadlines.discard(ending)
            self._poller.remove_reader(ending.sock.fileno())
            ending.sock.close()

    def end(self, ending: _Ending) -> None:
        """Close for good."""
        self._deadlines.discard(ending)
        self._close(ending.sock)

    def _close(self, sock: socket.socket) -> None:
        self._poller.forget(sock.fileno())
        sock.close()

    def close(self) -> None:
        """Close them all."""
        for ending in list(self._deadlines):
            self._close(ending.sock)
        self._deadlines.close()
