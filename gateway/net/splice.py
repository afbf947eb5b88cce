"""The splicer: moves bytes between two raw sockets, both ways. The gateway's hot loop.

It decides nothing but how to move bytes: small messages by recv and send (splice costs more than a copy there), bulk by
splice(2) through a pooled pipe. It never waits, has no task, and allocates nothing while bytes flow. A byte is read only
when the ones before it have been written, so what it can hold is bounded by one buffer or one pipe a direction.
"""

import os
import socket
from collections.abc import Callable
from typing import Final, Protocol

from gateway.core.verdict import CloseReason
from gateway.net.pipes import PIPE_BYTES, Pipe, PipePool
from gateway.net.poller import Poller

# A read that fills this is bulk: from then on the direction is spliced, until a read is small again.
COPY_BYTES: Final = 64 * 1024
# A splice that moves less than this is no bulk any more.
BULK_BYTES: Final = 16 * 1024
# Reads of one direction before the other connections get their turn.
READS_PER_TURN: Final = 8

_FLAGS: Final = os.SPLICE_F_MOVE | os.SPLICE_F_NONBLOCK
_splice = os.splice
# Shared by all connections: it is empty whenever the loop runs anything else.
_buffer = memoryview(bytearray(COPY_BYTES))


class Account(Protocol):
    """Who pays for the bytes. `bytes_left` is counted down; at 0 the splicer closes."""

    bytes_up: int
    bytes_down: int
    bytes_left: int
    pipes: int


class Flow:
    """One direction of a spliced pair."""

    __slots__ = (
        "bulk", "count", "destination", "ended", "held", "in_pipe", "pipe", "shut", "source", "splicer", "up", "writing",
    )  # fmt: skip

    def __init__(self, splicer: "Splicer", source: socket.socket, destination: socket.socket, up: bool) -> None:
        self.splicer = splicer
        self.source = source
        self.destination = destination
        self.up = up
        self.count = 0
        self.bulk = False
        self.pipe: Pipe | None = None
        self.in_pipe = 0
        # What was read but not yet taken by the destination, when it was read by recv.
        self.held: bytes | memoryview = b""
        # The source has ended; then: everything has been passed on and the destination was told.
        self.ended = False
        self.shut = False
        self.writing = False

    def on_readable(self) -> None:
        """Move what the source has; called by the poller while nothing is held."""
        if self.bulk:
            self.splicer.poller.defer(self.move_bulk)
        else:
            self._copy()

    def move_bulk(self) -> None:
        """Move much, until there is no more for now or it is another's turn."""
        try:
            self._splice()
        except OSError:
            self.splicer.close(CloseReason.RESET)

    def _copy(self) -> None:
        account = self.splicer.account
        left = account.bytes_left
        if left <= 0:
            # Another tunnel of the session used it up. (A size of 0 would mean "all" to recv_into, "end" to splice.)
            self.splicer.close(CloseReason.BUDGET_EXHAUSTED)
            return
        size = sent = 0
        try:
            size = self.source.recv_into(_buffer, min(left, COPY_BYTES))
            if size:
                # Sent before it is counted: a message waits for what is between these two calls.
                sent = self.destination.send(_buffer[:size])
        except BlockingIOError:
            if not size:
                return
        except OSError:
            self._count(size)
            self.splicer.close(CloseReason.RESET)
            return
        if not size:
            self._end()
            return
        self._count(size)
        if sent < size:
            self.held = bytes(_buffer[sent:size])
            self._stall()
        elif left == size:
            self.splicer.close(CloseReason.BUDGET_EXHAUSTED)
        elif size == COPY_BYTES:
            self.bulk = True

    def _splice(self) -> None:
        splicer = self.splicer
        account = splicer.account
        pipe = splicer.pool.take(account)
        if pipe is None:
            self._copy()
            return
        self.pipe = pipe
        source = self.source.fileno()
        destination = self.destination.fileno()
        into, out = pipe[1], pipe[0]
        for _ in range(READS_PER_TURN):
            left = account.bytes_left
            if left <= 0:
                splicer.close(CloseReason.BUDGET_EXHAUSTED)
                return
            try:
                size = _splice(source, into, min(left, PIPE_BYTES), flags=_FLAGS)
            except BlockingIOError:
                break
            if size == 0:
                self._release_pipe()
                self._end()
                return
            self._count(size)
            self.in_pipe = size
            try:
                while self.in_pipe:
                    self.in_pipe -= _splice(out, destination, self.in_pipe, flags=_FLAGS)
            except BlockingIOError:
                self._stall()
                return
            if left == size:
                splicer.close(CloseReason.BUDGET_EXHAUSTED)
                return
            if size < BULK_BYTES:
                self.bulk = False
                break
        self._release_pipe()

    def _count(self, size: int) -> None:
        account = self.splicer.account
        self.count += size
        account.bytes_left -= size
        if self.up:
            account.bytes_up += size
        else:
            account.bytes_down += size

    def _release_pipe(self) -> None:
        if self.pipe is not None:
            self.splicer.pool.give_back(self.pipe, self.splicer.account)
            self.pipe = None

    def _stall(self) -> None:
        """Stop reading until the destination takes what is held."""
        self.writing = True
        poller = self.splicer.poller
        poller.remove_reader(self.source.fileno())
        poller.add_writer(self.destination.fileno(), self.on_writable)

    def pass_on(self, early: bytes) -> None:
        """Begin with bytes that were read from the source before; read once they are written."""
        try:
            sent = self.destination.send(early)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.splicer.close(CloseReason.RESET)
            return
        poller = self.splicer.poller
        if sent < len(early):
            self.held = early[sent:]
            self.writing = True
            poller.remove_reader(self.source.fileno())
            poller.add_writer(self.destination.fileno(), self.on_writable)
        elif self.splicer.account.bytes_left <= 0:
            self.splicer.close(CloseReason.BUDGET_EXHAUSTED)
        else:
            poller.add_reader(self.source.fileno(), self.on_readable)

    def on_writable(self) -> None:
        """Pass on what is held; then read again."""
        try:
            if self.in_pipe:
                assert self.pipe is not None
                destination = self.destination.fileno()
                while self.in_pipe:
                    self.in_pipe -= _splice(self.pipe[0], destination, self.in_pipe, flags=_FLAGS)
                self._release_pipe()
            while self.held:
                self.held = self.held[self.destination.send(self.held) :]
        except BlockingIOError:
            return
        except OSError:
            self.splicer.close(CloseReason.RESET)
            return
        splicer = self.splicer
        self.writing = False
        splicer.poller.remove_writer(self.destination.fileno())
        if splicer.account.bytes_left <= 0:
            splicer.close(CloseReason.BUDGET_EXHAUSTED)
        elif self.ended:
            self._shut()
        else:
            splicer.poller.add_reader(self.source.fileno(), self.on_readable)

    def _end(self) -> None:
        """The source has sent its last byte: tell the destination, keep the other direction."""
        self.ended = True
        self.splicer.poller.remove_reader(self.source.fileno())
        self._shut()

    def _shut(self) -> None:
        self.shut = True
        if self.splicer.up.shut and self.splicer.down.shut:
            self.splicer.close(CloseReason.DONE)
            return
        try:
            self.destination.shutdown(socket.SHUT_WR)
        except OSError:
            self.splicer.close(CloseReason.RESET)

    def drop(self) -> None:
        """Return the pipe; called once, when the splicer closes."""
        if self.pipe is not None:
            if self.in_pipe:
                self.splicer.pool.discard(self.pipe, self.splicer.account)
            else:
                self.splicer.pool.give_back(self.pipe, self.splicer.account)
            self.pipe = None
        self.held = b""


class Splicer:
    """Two sockets joined. Owns both until `close`, which calls `on_close` once."""

    __slots__ = ("account", "closed", "down", "marked", "on_close", "poller", "pool", "up")

    def __init__(
        self,
        poller: Poller,
        pool: PipePool,
        account: Account,
        client: socket.socket,
        upstream: socket.socket,
        on_close: Callable[[CloseReason], None],
    ) -> None:
        self.poller = poller
        self.pool = pool
        self.account = account
        self.on_close = on_close
        self.closed = False
        self.marked = -1
        self.up = Flow(self, client, upstream, True)
        self.down = Flow(self, upstream, client, False)

    def start(self, early_up: bytes = b"", early_down: bytes = b"") -> None:
        """Begin. `early_up` was read from the client already and goes upstream first, `early_down` to the client."""
        for flow, early in ((self.up, early_up), (self.down, early_down)):
            if self.closed:
                return
            if early:
                flow.count += len(early)
                flow.pass_on(early)
            else:
                self.poller.add_reader(flow.source.fileno(), flow.on_readable)

    def go_on(self) -> None:
        """Begin where an earlier process stopped: what it held and what had ended is set in both flows."""
        self.marked = self.up.count + self.down.count
        for flow in (self.up, self.down):
            if flow.held or flow.in_pipe:
                flow.writing = True
                self.poller.add_writer(flow.destination.fileno(), flow.on_writable)
            elif not flow.ended:
                self.poller.add_reader(flow.source.fileno(), flow.on_readable)

    def let_go(self) -> None:
        """Close here without a word to either peer or to `on_close`: another process has both sockets and the pipes.

        They are taken out of the poller one by one, because closing a copy would leave them in it.
        """
        self.closed = True
        up, down = self.up, self.down
        for flow in (up, down):
            self.poller.remove_reader(flow.source.fileno())
            self.poller.remove_writer(flow.source.fileno())
            if flow.bulk:
                self.poller.cancel(flow.move_bulk)
            flow.drop()
        up.source.close()
        down.source.close()
        del up.splicer, down.splicer

    def moved(self) -> bool:
        """Tell whether a byte has passed since the last call: the idle sweep's question."""
        total = self.up.count + self.down.count
        if total != self.marked:
            self.marked = total
            return True
        return False

    def close(self, reason: CloseReason) -> None:
        """Close both sockets and return the pipes, once."""
        if self.closed:
            return
        self.closed = True
        up, down = self.up, self.down
        for flow in (up, down):
            self.poller.forget(flow.source.fileno())
            if flow.bulk:
                self.poller.cancel(flow.move_bulk)
            flow.drop()
        up.source.close()
        down.source.close()
        self.on_close(reason)
        # No circle is left behind: memory comes back now, and the garbage collector has no reason to stop the loop.
        del up.splicer, down.splicer
