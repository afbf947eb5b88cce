"""A gateway that starts beside a running one and takes its place, so that not even a model stream is cut.

TLS state cannot move, so the running one stays until its last stream has ended. It parks everything else in a parcel, as at a
stop, but for a process that is there already. They speak over a socket of their own:

    successor   → Ready     its configuration is good, it has what it needs
    predecessor → (parcel)  nothing moves here until the answer
    successor   → Taken     the record is good, it listens, nothing is left that could fail
    predecessor → Go        the service manager knows who is the main process now; the predecessor has let go
    predecessor → Spent     from then on: what its streams have used since the last time
    successor   → Revoked   a session is over, or its grant narrower: its streams are to be cut

Whatever goes wrong before `Taken` leaves the predecessor as it was, and the successor ends.
"""

import asyncio
import collections
import contextlib
import logging
import os
import select
import signal
import socket
import sys
from collections.abc import Mapping
from typing import Final

import msgspec

from gateway.contract.policy import Usage
from gateway.registry import Registry
from gateway.runtime import fdstore
from gateway.runtime.notify import notify

log = logging.getLogger("gateway.beside")

# The environment variable that holds the number of the socket.
CHANNEL: Final = "OPIFICIA_PREDECESSOR"
# How long a successor may take to read its configuration; and each may take to answer.
START_S: Final = 30.0
ANSWER_S: Final = 10.0
_MAX_MESSAGE_BYTES: Final = 4096
# How often what the other did not take is offered again.
_RETRY_S: Final = 0.02
# What the service manager said to this process and not to the next.
_OWN: Final = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "WATCHDOG_PID")


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The successor could take over."""

    pid: int


class Taken(msgspec.Struct, frozen=True, tag="taken"):
    """The successor has the parcel."""


class Go(msgspec.Struct, frozen=True, tag="go"):
    """The successor is the main process."""


class Spent(msgspec.Struct, frozen=True, tag="spent"):
    """What a session has used in the predecessor since the last such message."""

    session: str
    usage: Usage


class Revoked(msgspec.Struct, frozen=True, tag="revoked"):
    """What a session has open was granted once, and is no more."""

    session: str


class SuccessionError(Exception):
    """The other process did not do its part; the message is one sentence."""


Message = Ready | Taken | Go | Spent | Revoked
_decoder: Final = msgspec.msgpack.Decoder(Message)


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
        message = self._decode(self._recv())
        if message is None:
            raise SuccessionError("the other gateway ended before it took over; its own messages say why")
        if not isinstance(message, kind):
            raise SuccessionError("the other gateway says something else than it should")

    async def read(self) -> Message | None:
        """Return the next message, None when the other process has ended. Raises SuccessionError."""
        loop = asyncio.get_running_loop()
        try:
            return self._decode(await loop.sock_recv(self.sock, _MAX_MESSAGE_BYTES))
        except OSError:
            return None

    def _recv(self) -> bytes:
        try:
            return self.sock.recv(_MAX_MESSAGE_BYTES)
        except OSError as error:
            raise SuccessionError(f"the other gateway cannot be reached: {error.strerror}") from error

    @staticmethod
    def _decode(data: bytes) -> Message | None:
        try:
            return _decoder.decode(data) if data else None
        except msgspec.MsgspecError as error:
            raise SuccessionError(f"the other gateway cannot be understood: {error}") from error

    def close(self) -> None:
        """End it."""
        self.sock.close()


class Predecessor:
    """The gateway that started this process beside itself."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        # Whether it has streams still; what is cut later is told to it.
        self.is_there = True

    @classmethod
    def from_environment(cls) -> "Predecessor | None":
        """Return it if there is one."""
        number = os.environ.pop(CHANNEL, "")
        if not number:
            return None
        descriptor = int(number)
        os.set_inheritable(descriptor, False)
        return cls(Channel(socket.socket(fileno=descriptor)))

    def await_parcel(self) -> int:
        """Say that this process is ready, and return the parcel's descriptor. Raises SuccessionError."""
        channel = self._channel
        channel.send(Ready(os.getpid()))
        channel.await_readable(ANSWER_S)
        try:
            _, descriptors = fdstore.receive_message(channel.sock)
        except OSError as error:
            raise SuccessionError(f"the gateway before this one cannot be reached: {error.strerror}") from error
        if len(descriptors) != 1:
            raise SuccessionError("the gateway before this one did not hand over")
        return descriptors[0]

    def confirm(self) -> None:
        """Say that the parcel is good; on return this is the main process. Raises SuccessionError."""
        self._channel.send(Taken())
        self._channel.await_message(Go, ANSWER_S)

    def cut(self, session: str) -> None:
        """Have it cut what a session still has there."""
        if self.is_there:
            self._channel.post(Revoked(session))

    async def follow(self, registry: Registry) -> None:
        """Count what its streams use, until it ends."""
        try:
            while (message := await self._channel.read()) is not None:
                session = registry.get(message.session) if isinstance(message, Spent) else None
                if isinstance(message, Spent) and session is not None:
                    session.spent_elsewhere(message.usage)
        except SuccessionError as error:
            log.error("%s", error)
        self.is_there = False
        self._channel.close()
        for session in registry:
            session.model.release_elsewhere()
        log.info("the gateway before this one has ended")


class Successor:
    """The gateway that this process started beside itself."""

    def __init__(self, channel: Channel, pid: int) -> None:
        self._channel = channel
        self._pid = pid
        self._told: dict[str, Usage] = {}

    @classmethod
    async def start(cls) -> "Successor":
        """Start it and wait until it is ready. Raises SuccessionError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {name: value for name, value in os.environ.items() if name not in _OWN}
        environment[CHANNEL] = str(theirs.fileno())
        channel = Channel(ours)
        try:
            # Forked twice, so that it is a child of the service manager and not of ours.
            starter = await asyncio.create_subprocess_exec(
                "setsid", "--fork", *own_command(), env=environment, pass_fds=[theirs.fileno()]
            )
            await starter.wait()
            theirs.close()
            async with asyncio.timeout(START_S):
                message = await channel.read()
        except (OSError, TimeoutError) as error:
            channel.close()
            raise SuccessionError(f"the next gateway did not start: {error or 'not in time'}") from error
        finally:
            theirs.close()
        if not isinstance(message, Ready):
            channel.close()
            raise SuccessionError("the next gateway did not start; its own messages say why")
        return cls(channel, message.pid)

    def hand(self, record: bytes, descriptors: list[int], environment: Mapping[str, str] = os.environ) -> None:
        """Give it everything and make it the main process. Raises SuccessionError; then it ends and nothing has changed.

        Nothing else may happen in this process meanwhile.
        """
        try:
            parcel = fdstore.Parcel(record, descriptors)
            try:
                socket.send_fds(self._channel.sock, [b"parcel"], [parcel.far.fileno()], socket.MSG_NOSIGNAL)
                self._channel.await_message(Taken, ANSWER_S)
            finally:
                parcel.close()
        except (fdstore.ParcelError, OSError, SuccessionError) as error:
            # Should it answer late, two processes would hold the same connections.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            self._channel.close()
            raise SuccessionError(str(error)) from error
        notify(f"MAINPID={self._pid}", environment)
        # Its READY=1 counts only once the manager knows it.
        fdstore.barrier(environment)
        with contextlib.suppress(SuccessionError):
            self._channel.send(Go())

    def begin(self, registry: Registry) -> None:
        """Take what was used so far as told."""
        self._told = {session.id: session.usage() for session in registry}

    @property
    def has_heard(self) -> bool:
        """Whether it was sent all that it was told."""
        return not self._channel.is_behind

    def tell(self, registry: Registry) -> None:
        """Tell it what was used since the last time."""
        for session in registry:
            usage = session.usage()
            more = usage.minus(self._told.get(session.id, Usage()))
            if more != Usage():
                self._told[session.id] = usage
                self._channel.post(Spent(session.id, more))

    async def follow(self, registry: Registry) -> None:
        """Cut what is granted no more, until it ends."""
        try:
            while (message := await self._channel.read()) is not None:
                if isinstance(message, Revoked):
                    registry.cut(message.session)
        except SuccessionError as error:
            # It may have said what is to be cut.
            log.error("%s; what this process kept is cut", error)
            for session in registry:
                registry.cut(session.id)

    def close(self) -> None:
        """Say that all has ended here."""
        self._channel.close()


def own_command() -> list[str]:
    """Return the command that this program was started by; a link in it may lead to a newer version by now."""
    program = sys.argv[0]
    if not program.endswith(".py") and os.access(program, os.X_OK):
        return [program, *sys.argv[1:]]
    return [sys.executable, *sys.orig_argv[1:]]
