"""Connects to addresses that were judged, never to a name. Several are tried in turn, fast (RFC 8305)."""

import asyncio
import errno
import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv4Address, IPv6Address
from typing import Final

from gateway.core.verdict import DenyReason
from gateway.net.deadlines import Deadlines
from gateway.net.poller import Poller

IPAddress = IPv4Address | IPv6Address

# RFC 8305 §5: "One recommended value for a default delay is 250 milliseconds."
ATTEMPT_DELAY_S: Final = 0.25
# A name may answer with many addresses; more attempts than this only help a port scan.
MAX_ATTEMPTS: Final = 8

_STREAM: Final = int(socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
_UNREACHABLE = {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.EACCES, errno.EPERM, errno.ENETDOWN}
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


@dataclass(frozen=True, slots=True)
class DialError:
    """No address could be reached. `message` says why in words, without an address."""

    reason: DenyReason
    message: str


@dataclass(slots=True)
class Connected:
    """A connected, non-blocking socket with TCP_NODELAY, and which address it reached, also as text."""

    sock: socket.socket
    address: IPAddress
    text: str


def interleave(addresses: Sequence[IPAddress]) -> list[IPAddress]:
    """Order addresses as RFC 8305 §4 asks: families in turn, IPv6 first, each family in the order given."""
    six = [address for address in addresses if address.version == 6]
    four = [address for address in addresses if address.version == 4]
    ordered: list[IPAddress] = []
    for index in range(max(len(six), len(four))):
        ordered += six[index : index + 1]
        ordered += four[index : index + 1]
    return ordered[:MAX_ATTEMPTS]


class Dialer:
    """Makes dials that share one deadline queue. All addresses of a dial have `timeout_s` together."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        timeout_s: float,
        observe: Callable[[float], None] = lambda _seconds: None,
        below: int = sys.maxsize,
        poller: Poller | None = None,
    ) -> None:
        self.loop = loop
        self._owns_poller = poller is None
        self.poller = Poller(loop) if poller is None else poller
        # See `descriptors`: a socket numbered higher takes what the gateway itself needs.
        self.below = below
        self.observe = observe
        self.deadlines: Deadlines[Dial] = Deadlines(loop, timeout_s, lambda dial: dial.expire())

    def dial(self, addresses: Sequence[IPAddress], port: int, done: Callable[[Connected | DialError], None]) -> "Dial":
        """Start connecting; `done` is called once, later or at once, unless the dial is cancelled."""
        ordered = interleave(addresses) if len(addresses) > 1 else addresses
        dial = Dial(self, ordered, port, done)
        self.deadlines.add(dial)
        dial.attempt()
        return dial

    async def connect(self, addresses: Sequence[IPAddress], port: int) -> Connected | DialError:
        """Do the same for a coroutine; cancelling it cancels the dial."""
        future: asyncio.Future[Connected | DialError] = self.loop.create_future()

        def done(result: Connected | DialError) -> None:
            if not future.done():
                future.set_result(result)
            elif isinstance(result, Connected):
                # Cancelled, but the coroutine has not run since: nobody else would close it.
                self.discard(result.sock)

        dial = self.dial(addresses, port, done)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and isinstance(result := future.result(), Connected):
                self.discard(result.sock)
            dial.cancel()
            raise

    def close(self) -> None:
        """Stop the timer."""
        self.deadlines.close()
        if self._owns_poller:
            self.poller.close()

    def discard(self, sock: socket.socket) -> None:
        """Close a socket that was dialled and is not wanted."""
        self.poller.forget(sock.fileno())
        sock.close()


class Dial:
    """One destination being connected to."""

    __slots__ = (
        "_addresses", "_attempts", "_dialer", "_done", "_error", "_next", "_port", "_started", "_timer", "finished",
    )  # fmt: skip

    def __init__(
        self, dialer: Dialer, addresses: Sequence[IPAddress], port: int, done: Callable[[Connected | DialError], None]
    ) -> None:
        self._dialer = dialer
        self._addresses = addresses
        self._port = port
        self._done = done
        self._attempts: dict[socket.socket, tuple[IPAddress, str]] = {}
        self._next = 0
        self._started = dialer.loop.time()
        self._error = 0
        self._timer: asyncio.TimerHandle | None = None
        self.finished = False

    def attempt(self) -> None:
        """Begin with the next address; begin with the one after it when that fails or takes long."""
        loop = self._dialer.loop
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._next < len(self._addresses):
            address = self._addresses[self._next]
            self._next += 1
            try:
                sock = socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET, _STREAM)
            except OSError as error:
                self._error = error.errno or errno.EIO
                continue
            if sock.fileno() >= self._dialer.below:
                sock.close()
                self._error = errno.EMFILE
                break
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            text = str(address)
            result = sock.connect_ex((text, self._port))
            if result == 0:
                self._attempts[sock] = (address, text)
                self._succeed(sock)
                return
            if result != errno.EINPROGRESS:
                self._error = result
                sock.close()
                continue
            self._attempts[sock] = (address, text)
            self._dialer.poller.add_writer(sock.fileno(), partial(self._on_writable, sock))
            if self._next < len(self._addresses):
                self._timer = loop.call_later(ATTEMPT_DELAY_S, self.attempt)
            return
        if not self._attempts:
            self._fail(_explain(self._error))

    def _on_writable(self, sock: socket.socket) -> None:
        error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error == 0:
            self._dialer.poller.remove_writer(sock.fileno())
            self._succeed(sock)
            return
        self._error = error
        self._abandon(sock)
        # RFC 8305 §5: a failed attempt starts the next one at once.
        self.attempt()

    def _abandon(self, sock: socket.socket) -> None:
        del self._attempts[sock]
        self._dialer.discard(sock)

    def _succeed(self, sock: socket.socket) -> None:
        address, text = self._attempts.pop(sock)
        self._dialer.observe(self._dialer.loop.time() - self._started)
        self._finish()
        self._done(Connected(sock, address, text))

    def _fail(self, error: DialError) -> None:
        self._finish()
        self._done(error)

    def _finish(self) -> None:
        self.finished = True
        self._dialer.deadlines.discard(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for sock in list(self._attempts):
            self._abandon(sock)

    def expire(self) -> None:
        """The time for all addresses together is over."""
        if not self.finished:
            self._fail(DialError(DenyReason.CONNECT_TIMEOUT, "the host did not answer in time"))

    def cancel(self) -> None:
        """Stop and close what was begun; `done` is not called."""
        if not self.finished:
            self._finish()


def _explain(error: int) -> DialError:
    """Say a connect error in words (connect(2)); the words hold no address."""
    words = os.strerror(error).lower() if error else "no address to connect to"
    if error == errno.ECONNREFUSED:
        return DialError(DenyReason.CONNECT_REFUSED, f"the host refused the connection: {words}")
    if error == errno.ETIMEDOUT:
        return DialError(DenyReason.CONNECT_TIMEOUT, f"the host did not answer in time: {words}")
    if error in _UNREACHABLE:
        return DialError(DenyReason.CONNECT_UNREACHABLE, f"the host cannot be reached: {words}")
    if error in _EXHAUSTED:
        return DialError(DenyReason.OVERLOADED, "the gateway has no free connection; try again")
    return DialError(DenyReason.CONNECT_FAILED, f"the host cannot be connected to: {words}")
