"""One connection to a model provider: requests go out as they are given, replies come in by their framing.

A reply's head is given to the exchange whole, its body as it was framed, at once. What is in them is the exchange's
business.
"""

import asyncio
import socket
import struct
from typing import Final, Protocol, cast

import httptools

from gateway.core.verdict import DenyReason

# nginx reads at most 8 x 4 KiB by default; providers send about 2 KiB.
MAX_REPLY_HEAD_BYTES: Final = 64 * 1024
# RFC 9110 §15.2 allows any number of interim replies; a provider sends none or one.
MAX_INTERIM_REPLIES: Final = 8

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

    def reply_started(self, status: int, head: bytes) -> None:
        """The final reply's head came."""

    def body_received(self, body: bytes) -> None:
        """Body bytes, without their transfer coding. Called before the same bytes are relayed."""

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


class UpstreamConnection(asyncio.Protocol):
    """One connection to the provider; serves one exchange at a time."""

    __slots__ = ("_before", "_complete", "_head", "_interims", "_over_tls", "_owner", "_parser", "_paused", "_pool",
                 "_reusable", "_settled", "_surplus", "_watch", "_written", "is_full", "reused", "transport")  # fmt: skip

    transport: asyncio.Transport

    def __init__(self, pool: ConnectionKeeper, watch: socket.socket, *, over_tls: bool) -> None:
        self._pool = pool
        self._over_tls = over_tls
        # A second descriptor of the same connection: how much the peer acknowledged is asked after the first is closed.
        self._watch = watch
        self._owner: UpstreamOwner | None = None
        self._parser = httptools.HttpResponseParser(self)
        # Bytes of a head that is not whole; None while a body is read.
        self._head: bytes | None = b""
        self._complete = False
        self._reusable = False
        self._surplus = False
        self._interims = 0
        self._paused = False
        self._written = 0
        # Acknowledged bytes at the start (the SYN is one), and when the present request began.
        self._before = 0
        self._before = self._acknowledged()
        self._settled = 0
        self.reused = False
        # Whether more was written than the peer takes at present.
        self.is_full = False

    # --- for the exchange and the pool

    def start(self, owner: UpstreamOwner) -> None:
        """Serve `owner` from now on."""
        self._owner = owner
        self._head = b""
        self._complete = False
        self._interims = 0
        # Over TLS the bytes on the wire are not those that were written, so the kernel is asked.
        if self.reused and self._over_tls:
            self._settled = self._acknowledged()

    def write(self, data: list[bytes], size: int) -> None:
        """Send `data`, which is `size` bytes long."""
        self._written += size
        self.transport.writelines(data)

    def pause(self) -> None:
        """Read no more until `resume`."""
        self._paused = True
        self.transport.pause_reading()

    def resume(self) -> None:
        """Read again."""
        self._paused = False
        self.transport.resume_reading()

    def took_nothing(self) -> bool:
        """Tell whether the peer's kernel acknowledged no byte of the request that is being served.

        Then the request cannot have been acted on, and sending it again cannot double it (RFC 9110 §9.2.2 allows a retry
        if there are "means to detect that the original request was never applied").
        """
        return self.reused and self._acknowledged() == self._settled

    def release(self, *, reusable: bool) -> None:
        """Leave the exchange."""
        self._owner = None
        if reusable and not self._surplus and not self.transport.is_closing():
            self.reused = True
            if not self._over_tls:
                # All that was written was one whole request after the other, and each was answered.
                self._settled = self._written
            if self._paused:
                self.resume()
            self._pool.put_back(self)
        else:
            self.transport.abort()

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not derived from asyncio's.
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        owner = self._owner
        if owner is None:
            # Nobody asked: what follows could only be taken for the next request's reply.
            self.transport.abort()
            return
        try:
            if self._head is not None:
                data = self._read_head(owner, self._head + data)
                if self._head is not None:
                    return
            if data:
                self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._break(owner)
            return
        if self._surplus:
            self._break(owner)
            return
        # Also without a body: the head goes out with it.
        owner.relay(data)
        if self._complete:
            owner.reply_completed(reusable=self._reusable)

    def eof_received(self) -> None:
        """The provider closed; the transport closes by itself, and `connection_lost` tells the exchange."""

    def connection_lost(self, exc: Exception | None) -> None:
        owner, self._owner = self._owner, None
        self._pool.forget(self)
        if owner is not None:
            owner.upstream_lost(self, clean=exc is None)
        self._watch.close()

    def pause_writing(self) -> None:
        self.is_full = True
        if self._owner is not None:
            self._owner.upstream_full()

    def resume_writing(self) -> None:
        self.is_full = False
        if self._owner is not None:
            self._owner.upstream_drained()

    # --- httptools' callbacks

    def on_message_begin(self) -> None:
        if self._complete:
            self._surplus = True

    def on_body(self, body: bytes) -> None:
        if self._owner is not None:
            self._owner.body_received(body)

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
                owner.reply_started(status, head)
                return data
            self._interims += 1
            if status == 101 or self._interims > MAX_INTERIM_REPLIES:
                raise httptools.HttpParserError("an upgrade that nobody asked for, or too many interim replies")
            self._complete = False
            owner.interim_reply(head)

    def _break(self, owner: UpstreamOwner) -> None:
        self._owner = None
        owner.upstream_lost(self, clean=False)
        self.transport.abort()

    def _acknowledged(self) -> int:
        """Return how many bytes the peer's kernel has acknowledged since the connection was made."""
        info = self._watch.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        count: int = _read_acknowledged(info, _ACKNOWLEDGED_OFFSET)[0]
        return count - self._before
