"""What a gateway and the one that takes its place say to each other, and the socket between them (`gateway/beside.py`)."""

import asyncio
import collections
import select
import socket
from typing import Final

import msgspec

from gateway.contract.policy import Usage

_MAX_MESSAGE_BYTES: Final = 4096
# How often what the other did not take is offered again.
_RETRY_S: Final = 0.02


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The successor could take over."""

    pid: int


class Taken(msgspec.Struct, frozen=True, tag="taken"):
    """The successor has the parcel."""


class Go(msgspec.Struct, frozen=True, tag="go"):
    """The successor is the main process."""


class Spent(msgspec.Struct, frozen=True, tag="spent"):
    """What a session has used in the process that says it, since the last time, and how many slots it holds there now.

    From the successor only the bytes are told: the other needs no more, and counts nothing of it as its own.
    """

    session: str
    usage: Usage
    slots: int = 0


class Revoked(msgspec.Struct, frozen=True, tag="revoked"):
    """What a session has open was granted once, and is no more."""

    session: str


class Cut(msgspec.Struct, frozen=True, tag="cut"):
    """What a session had open in the predecessor is closed, and all that it used was told before."""

    session: str


class End(msgspec.Struct, frozen=True, tag="end"):
    """The predecessor is to end with what it still has, and to tell what was used."""


class SuccessionError(Exception):
    """The other process did not do its part; the message is one sentence."""


Message = Ready | Taken | Go | Spent | Revoked | Cut | End
_decoder: Final = msgspec.msgpack.Decoder(Message)


def decode(data: bytes) -> Message | None:
    """Read one message, None where the other process has ended. Raises SuccessionError."""
    try:
        return _decoder.decode(data) if data else None
    except (msgspec.MsgspecError, RecursionError) as error:
        raise SuccessionError(f"the other gateway cannot be understood: {error}") from error


class Channel:
    """One end of the socket between the two."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._posted: collections.deque[Message] = collections.deque()
        sock.setblocking(False)

    @property
    def is_behind(self) -> bool:
        """Whether something that was posted has not been sent yet."""
        return bool(self._posted)

    def post(self, message: Message) -> None:
        """Send as soon as the other process takes it, after what was posted before; one that has ended gets nothing.

        The socket holds fewer than 200 messages, and a thousand sessions may be over at once.
        """
        self._posted.append(message)
        if len(self._posted) == 1:
            self._send_posted()

    def _send_posted(self) -> None:
        try:
            while self._posted:
                self.sock.send(msgspec.msgpack.encode(self._posted[0]), socket.MSG_NOSIGNAL)
                self._posted.popleft()
        except BlockingIOError:
            asyncio.get_running_loop().call_later(_RETRY_S, self._send_posted)
        except OSError:
            self._posted.clear()

    def send(self, message: Message) -> None:
        """Send, never waiting. Raises SuccessionError."""
        try:
            self.sock.send(msgspec.msgpack.encode(message), socket.MSG_NOSIGNAL)
        except OSError as error:
            raise SuccessionError(f"the other gateway cannot be reached: {error.strerror}") from error

    def await_readable(self, seconds: float) -> None:
        """Wait, and let nothing else happen in this process, until there is something to read. Raises SuccessionError."""
        poller = select.poll()
        poller.register(self.sock.fileno(), select.POLLIN)
        if not poller.poll(seconds * 1000):
            raise SuccessionError(f"the other gateway did not answer within {seconds:g} s")

    def await_message(self, kind: type[Message], seconds: float) -> None:
        """Wait for a message of this kind. Raises SuccessionError."""
        self.await_readable(seconds)
        message = decode(self._recv())
        if message is None:
            raise SuccessionError("the other gateway ended before it took over; its own messages say why")
        if not isinstance(message, kind):
            raise SuccessionError("the other gateway says something else than it should")

    async def read(self) -> Message | None:
        """Return the next message, None when the other process has ended. Raises SuccessionError."""
        loop = asyncio.get_running_loop()
        try:
            try:
                data = await loop.sock_recv(self.sock, _MAX_MESSAGE_BYTES)
            except ConnectionResetError:
                # It ended with a message of ours unread. The kernel says so once, before what it had said last (unix(7)).
                data = await loop.sock_recv(self.sock, _MAX_MESSAGE_BYTES)
            return decode(data)
        except OSError:
            return None

    def _recv(self) -> bytes:
        try:
            return self.sock.recv(_MAX_MESSAGE_BYTES)
        except OSError as error:
            raise SuccessionError(f"the other gateway cannot be reached: {error.strerror}") from error

    def close(self) -> None:
        """End it."""
        self.sock.close()
