"""A connection that has arrived: PROXY header and request head are read into one bounded buffer, then it is routed.

Peeking at a partial head would spin (the socket stays readable), so what was read travels with the connection: the bytes
beyond the head are the first bytes of a tunnel, or are fed to the protocol that takes over.
"""

import socket
import time
from ipaddress import IPv4Address, IPv6Address
from typing import TYPE_CHECKING, Final

from gateway.core.head import HeadError, parse_head
from gateway.core.incomplete import INCOMPLETE, Incomplete
from gateway.core.proxy_header import ProxyHeaderError, parse_proxy_header
from gateway.core.replies import refusal
from gateway.core.verdict import DenyReason
from gateway.net.decisions import key_of_connect

if TYPE_CHECKING:
    from gateway.net.listener import Listener

IPAddress = IPv4Address | IPv6Address
_READ_BYTES: Final = 8192


class Arrival:
    """One connection until it is known what it wants. Owns `sock` until it is handed to a route."""

    __slots__ = ("_listener", "buffer", "caller", "proxied", "sock", "source", "started", "watching")

    def __init__(self, listener: "Listener", sock: socket.socket, source: object) -> None:
        self._listener = listener
        self.sock = sock
        self.started = time.monotonic()
        # The caller's own address, from the PROXY header; None on a port without PROXY headers.
        self.caller: IPAddress | None = None
        # Whose share of waiting connections this is; None where it is not known yet, or nobody's.
        self.source = source
        self.buffer = b""
        self.proxied = not listener.proxy_protocol
        # Whether it waits for the rest of its head: counted, timed, its socket watched.
        self.watching = False

    def begin(self) -> None:
        """Serve at once what is there already (a forwarder sends header and head together); else wait for it."""
        if not self.on_readable():
            self._listener.hold(self)

    def on_readable(self) -> bool:
        """Read what has come; route the connection once its head is whole. False as long as it is not."""
        try:
            data = self.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            self.drop()
            return True
        if not data:
            # Opened and closed: a health check. Closed in mid-head: nobody to answer. Neither is logged.
            self.drop()
            return True
        self.buffer = self.buffer + data if self.buffer else data
        return self.read()

    def read(self) -> bool:
        """Look at what was read; route the connection if its head is whole. False if it is not."""
        try:
            return self._read()
        except ProxyHeaderError:
            # Whoever speaks without the header did not come through the forwarder. There is nothing to tell it.
            self.drop()
        except HeadError as error:
            self.refuse(error.status, error.reason, error.message)
        return True

    def _read(self) -> bool:
        listener = self._listener
        if not self.proxied:
            header = parse_proxy_header(self.buffer)
            if isinstance(header, Incomplete):
                return False
            self.proxied = True
            self.buffer = self.buffer[header.size :]
            self.caller = header.source
        key = b""
        whole = key_of_connect(self.buffer, listener.head_bytes)
        if whole is not None:
            key, size = whole
            decision = listener.services.decisions.find(key)
            if decision is not None:
                self._leave()
                listener.resume(self, decision, self.buffer[size:], key)
                return True
        head = parse_head(self.buffer, listener.head_bytes) if self.buffer else INCOMPLETE
        if isinstance(head, Incomplete):
            return self.source is None and not self._count()
        self._leave()
        listener.route(self, head, self.buffer, key)
        return True

    def _count(self) -> bool:
        """Make it one of its caller's that wait, now that its head has begun. Drops it and returns False if they are too many.

        Not with the PROXY header: a forwarder that leads hundreds of connections here at once sends all of the headers first.
        """
        if self.buffer:
            self.source = self.caller
            if self.watching and not self._listener.share(self):
                self.drop()
                return False
        return True

    def _leave(self) -> None:
        """Wait no more. The socket stays watched: a route that goes on reading only puts its own callback in place."""
        if self.watching:
            self._listener.forget(self)

    def release(self) -> None:
        """Stop watching the socket; it belongs to somebody else, or is about to be closed."""
        if self.watching:
            self._listener.forget(self)
            self._listener.poller.remove_reader(self.sock.fileno())
            self.watching = False

    def refuse(self, status: int, reason: DenyReason, message: str) -> None:
        """Answer with a refusal and close; who means the model proxy is answered as by its provider."""
        self.release()
        services = self._listener.services
        reply = services.model_refusal(self.buffer, reason, message) if self.proxied else None
        if reply is None:
            services.gateway.metrics.refused["request", reason].inc()
            reply = refusal(status, reason, message)
        services.lingering.close_with(self.sock, reply)

    def let_go(self) -> None:
        """Forget it: another process goes on with it."""
        self.release()
        self.sock.close()

    def drop(self) -> None:
        """Close without a word."""
        if self.watching:
            self._listener.forget(self)
            self.watching = False
        # Also where it is not watched here: whoever gave it back from within its callback may still have it in the poller.
        self._listener.poller.forget(self.sock.fileno())
        self.sock.close()

    def expire(self) -> None:
        """The head did not come in time."""
        if self.buffer:
            self.refuse(408, DenyReason.HEAD_TIMEOUT, "the request head did not arrive in time")
        else:
            self.drop()
