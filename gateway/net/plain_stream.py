"""One end of a plain-HTTP exchange: a transport whose input is bounded and taken when wanted, and whose output can be full.

Client and host are both such an end. Whatever changes at one of them wakes the relay, which looks at both.
"""

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Callable
from typing import Final

from gateway.core.plain_head import MAX_RESPONSE_HEAD_BYTES

# Input held before reading pauses. The largest head must fit.
MAX_HELD_BYTES: Final = MAX_RESPONSE_HEAD_BYTES
# Output waiting for a slow reader before the other end is read no more.
MAX_UNSENT_BYTES: Final = 64 * 1024
# Shared by all streams: it is empty whenever the loop runs anything else.
_buffer = memoryview(bytearray(64 * 1024))
# SO_LINGER on with no time: close(2) resets the connection.
_RESET: Final = struct.pack("ii", 1, 0)


class Stream(asyncio.BufferedProtocol):
    """One end. `changed` is called when there is new input, room for output, or an end; `lost` when it is gone.

    `data` is the input not yet used; whoever takes from it calls `taken`. `ended` says that no more will come, `failed`
    that the end was a fault. `active` is when it last moved, in the loop's time.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, changed: Callable[[], None], lost: Callable[[], None] | None = None
    ) -> None:
        self._loop = loop
        self._changed = changed
        self._lost = lost
        self._transport: asyncio.Transport
        self.is_connected = False
        self._paused = False
        self.data = bytearray()
        self.ended = False
        self.failed = False
        self.is_full = False
        self.active = loop.time()

    # -- what the transport calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self.is_connected = True
        transport.set_write_buffer_limits(high=MAX_UNSENT_BYTES)

    def get_buffer(self, sizehint: int) -> memoryview:
        return _buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.feed(_buffer[:nbytes])

    def eof_received(self) -> bool:
        self.ended = True
        self._changed()
        # The other direction stays open: a client may say that it has asked for all it wanted.
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended = True
        self.failed = exc is not None
        self.is_full = False
        self._changed()
        if self._lost is not None:
            self._lost()

    def pause_writing(self) -> None:
        self.is_full = True

    def resume_writing(self) -> None:
        self.is_full = False
        self.active = self._loop.time()
        self._changed()

    # -- what the relay calls

    def feed(self, data: bytes | memoryview) -> None:
        """Take input that has come."""
        self.data += data
        self.active = self._loop.time()
        if len(self.data) >= MAX_HELD_BYTES and not self._paused and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()
        self._changed()

    def taken(self) -> None:
        """Read on if there is room again."""
        if self._paused and len(self.data) < MAX_HELD_BYTES and not self._transport.is_closing():
            self._paused = False
            self._transport.resume_reading()

    def write(self, data: bytes) -> None:
        """Send; the caller has looked at `is_full`. After the end it goes nowhere."""
        self.active = self._loop.time()
        if not self._transport.is_closing():
            self._transport.write(data)

    @property
    def is_open(self) -> bool:
        """Whether anything can still be sent."""
        return not self._transport.is_closing()

    @property
    def has_unsent(self) -> bool:
        """Whether output waits for the reader. Ask for a `changed` at its end by `wake_when_sent`."""
        return self.is_open and self._transport.get_write_buffer_size() > 0

    def wake_when_sent(self) -> None:
        """From now on be full while anything is unsent."""
        if self.is_open:
            self._transport.set_write_buffer_limits(high=0)

    def abort(self, *, reset: bool = False) -> None:
        """Close at once. With `reset` the peer is told, if possible, that what it has is not whole."""
        if reset and self.is_open:
            with contextlib.suppress(OSError), self._duplicate() as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._transport.abort()

    def detach(self) -> socket.socket:
        """Close the transport and return its connection as a raw non-blocking socket. Nothing must be unsent.

        Raises OSError, and closes nothing, when there is no descriptor for it. (`transport.write_eof` could half-close as
        well, but corrupts the heap in uvloop 0.21 to 0.23.)
        """
        sock = self._duplicate()
        sock.setblocking(False)
        self._transport.abort()
        return sock

    def _duplicate(self) -> socket.socket:
        return socket.socket(fileno=os.dup(self._transport.get_extra_info("socket").fileno()))
