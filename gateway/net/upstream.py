"""One connection to a model provider: requests go out as they are given, replies come in by their framing.

A reply's head is given to the exchange whole, its body as it was framed, at once. What is in them is the exchange's
business.
"""

import socket
import struct
import time
from collections.abc import Callable
from typing import Final, Protocol

import httptools

from gateway.core.verdict import DenyReason
from gateway.net.poller import Poller
from gateway.net.wire import Wire

# nginx reads at most 8 x 4 KiB by default; providers send about 2 KiB.
MAX_REPLY_HEAD_BYTES: Final = 64 * 1024
# RFC 9110 §15.2 allows any number of interim replies; a provider sends none or one.
MAX_INTERIM_REPLIES: Final = 8

# A reply of which QUICK_READS small pieces in a row came within QUICK_S of each other is read once in a while (`Poller.rest`):
# a read and a write cost ten times what an event does, and more of them come meanwhile. No model is that quick, with 2,000
# events a second, only a server that has much of the reply already.
QUICK_S: Final = 500e-6
QUICK_READS: Final = 4
SMALL_READ_BYTES: Final = 64 * 1024

# linux/tcp.h: in struct tcp_info the 64 bits at 120 count the bytes that the peer acknowledged.
_TCP_INFO_BYTES: Final = 128
_read_acknowledged: Final = struct.Struct("=Q").unpack_from
_ACKNOWLEDGED_OFFSET: Final = 120


class UpstreamOwner(Protocol):
    """The exchange that a connection serves, as the connection sees it."""

    def upstream_ready(self, connection: "UpstreamConnection") -> None:
        """A connection is there."""

    def upstream_unavailable(self, reason: DenyReason, message: str) -> None:
        """No connection can be had."""

    def interim_reply(self, head: bytes) -> None:
        """A 1xx reply came; the final one follows."""

    def reply_started(self, status: int, head: bytes) -> Callable[[bytes], object]:
        """The final reply's head came. Returns who takes the body without its transfer coding, before it is relayed."""

    def relay(self, data: bytes) -> None:
        """Body bytes as they are framed."""

    def reply_completed(self, *, reusable: bool) -> None:
        """The reply is whole."""

    def upstream_lost(self, connection: "UpstreamConnection", *, clean: bool) -> None:
        """The connection ended before the reply was whole, or broke the protocol."""

    def upstream_full(self) -> None:
        """The provider does not take more now."""

    def upstream_drained(self) -> None:
        """The provider takes more again."""


class ConnectionKeeper(Protocol):
    """The pool, as a connection sees it."""

    def put_back(self, connection: "UpstreamConnection") -> None:
        """Take a connection that an exchange has left in good order."""

    def forget(self, connection: "UpstreamConnection") -> None:
        """A connection is gone."""


class UpstreamConnection(Wire):
    """One connection to the provider; serves one exchange at a time."""

    __slots__ = ("_before", "_complete", "_head", "_interims", "_over_tls", "_owner", "_parser", "_pieces", "_pool",
                 "_quick_reads", "_read_at", "_rests", "_reusable", "_settled", "_surplus", "_take_body", "on_body", "reused")  # fmt: skip

    def __init__(self, pool: ConnectionKeeper, poller: Poller, sock: socket.socket, *, over_tls: bool) -> None:
        super().__init__(poller, sock)
        self._pool = pool
        self._over_tls = over_tls
        self._owner: UpstreamOwner | None = None
        # The pieces of body in what was read last: httptools puts them in without a call of ours for each.
        self._pieces: list[bytes] = []
        self.on_body = self._pieces.append
        self._parser = httptools.HttpResponseParser(self)
        # Bytes of a head that is not whole; None while a body is read.
        self._head: bytes | None = b""
        self._complete = False
        self._reusable = False
        self._surplus = False
        self._interims = 0
        self._take_body: Callable[[bytes], object] = bool
        # When a reply's body was read last, how many small reads came quickly, and whether it is read once in a while only.
        self._read_at = 0.0
        self._quick_reads = 0
        self._rests = False
        # Acknowledged bytes at the start (the SYN is one), and when the present request began.
        self._before = 0
        self._before = self._acknowledged()
        self._settled = 0
        self.reused = False

    # --- for the exchange and the pool

    def start(self, owner: UpstreamOwner) -> None:
        """Serve `owner` from now on."""
        self._owner = owner
        self._head = b""
        self._complete = False
        self._interims = 0
        self._quick_reads = 0
        # Over TLS the bytes on the wire are not those that were written, so the kernel is asked.
        if self._over_tls and self.reused:
            self._settled = self._acknowledged()

    def took_nothing(self) -> bool:
        """Tell whether the peer's kernel acknowledged no byte of the request that is being served.

        Then the request cannot have been acted on, and sending it again cannot double it (RFC 9110 §9.2.2 allows a retry
        if there are "means to detect that the original request was never applied").
        """
        return self.reused and self._acknowledged() == self._settled

    def release(self, *, reusable: bool) -> None:
        """Leave the exchange."""
        self._owner = None
        # With some of a request still to be sent, the next one would stand behind it.
        if reusable and not (self._surplus or self.unsent_bytes or self.is_closed):
            self.reused = True
            if not self._over_tls:
                # All that was written was one whole request after the other, and each was answered.
                self._settled = self.written_bytes
            if self.is_paused:
                self.resume()
            self._end_rest()
            self._pool.put_back(self)
        else:
            self.close()

    def close(self) -> None:
        """Close at once, and free the place in the pool."""
        if not self.is_closed:
            super().close()
            self._pool.forget(self)
            owner, self._owner = self._owner, None
            if owner is not None:
                # Closed by a fault of ours: otherwise the owner has left, or been told.
                owner.upstream_lost(self, clean=False)

    # --- Wire

    def received(self, data: bytes) -> None:
        owner = self._owner
        if owner is None:
            # Nobody asked: what follows could only be taken for the next request's reply.
            self.close()
            return
        try:
            if self._head is not None:
                data = self._read_head(owner, self._head + data if self._head else data)
                if self._head is not None:
                    return
            if data:
                self._parser.feed_data(data)
                pieces = self._pieces
                if pieces:
                    self._take_body(pieces[0] if len(pieces) == 1 else b"".join(pieces))
                    pieces.clear()
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._break(owner, clean=False)
            return
        if self._surplus:
            self._break(owner, clean=False)
            return
        # Also without a body: the head goes out with it.
        owner.relay(data)
        if self._complete:
            owner.reply_completed(reusable=self._reusable)
        else:
            self._consider_rest(len(data))

    def pause(self) -> None:
        """Read no more until `resume`."""
        self._rests = False
        super().pause()

    def lost(self, *, clean: bool) -> None:
        owner = self._owner
        if owner is None:
            self.close()
        else:
            self._break(owner, clean=clean)

    def filled(self) -> None:
        if self._owner is not None:
            self._owner.upstream_full()

    def drained(self) -> None:
        if self._owner is not None:
            self._owner.upstream_drained()

    def emptied(self) -> None:
        pass

    # --- httptools' callbacks

    def on_message_begin(self) -> None:
        if self._complete:
            self._surplus = True

    def on_message_complete(self) -> None:
        self._complete = True
        # Asked here, because the parser forgets it with the message.
        self._reusable = self._parser.should_keep_alive()

    # --- within

    def _read_head(self, owner: UpstreamOwner, data: bytes) -> bytes:
        """Take the reply's head, and interim replies before it; return what follows. `_head` is None when it was whole."""
        while True:
            end = data.find(b"\r\n\r\n", 0, MAX_REPLY_HEAD_BYTES) + 4
            if end < 4:
                # Lines that end in bare newlines would be waited on for ever.
                if len(data) >= MAX_REPLY_HEAD_BYTES or data.count(b"\n") != data.count(b"\r\n"):
                    raise httptools.HttpParserError("the reply's head is too large or not of HTTP/1.1")
                self._head = data
                return b""
            head, data = data[:end], data[end:]
            self._parser.feed_data(head)
            status = self._parser.get_status_code()
            if status >= 200:
                self._head = None
                self._take_body = owner.reply_started(status, head)
                return data
            self._interims += 1
            if status == 101 or self._interims > MAX_INTERIM_REPLIES:
                raise httptools.HttpParserError("an upgrade that nobody asked for, or too many interim replies")
            self._complete = False
            owner.interim_reply(head)

    def _consider_rest(self, size: int) -> None:
        now = time.monotonic()
        if size < SMALL_READ_BYTES and (self._rests or now - self._read_at < QUICK_S):
            self._quick_reads += 1
            # Over TLS a read takes one record, however many there are.
            if self._quick_reads >= QUICK_READS and not (
                self._rests or self._over_tls or self.is_paused or self.is_closed
            ):
                self._rests = True
                self._poller.remove_reader(self.sock.fileno())
                self._poller.rest(self._on_rested)
        else:
            self._quick_reads = 0
        self._read_at = now

    def _on_rested(self) -> None:
        before = self._quick_reads
        if self._rests and not self.is_closed:
            self._on_readable()
            if self._quick_reads > before:
                self._poller.rest(self._on_rested)
            else:
                self._end_rest()

    def _end_rest(self) -> None:
        """Be told of what comes at once again."""
        if self._rests:
            self._rests = False
            if not (self.is_paused or self.is_closed):
                self._poller.add_reader(self.sock.fileno(), self._on_readable)

    def _break(self, owner: UpstreamOwner, *, clean: bool) -> None:
        self._owner = None
        owner.upstream_lost(self, clean=clean)
        self.close()

    def _acknowledged(self) -> int:
        """Return how many bytes the peer's kernel has acknowledged since the connection was made."""
        info = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        count: int = _read_acknowledged(info, _ACKNOWLEDGED_OFFSET)[0]
        return count - self._before
