"""A gateway that starts beside a running one and takes its place, so that not even a model stream is cut.

TLS state cannot move, so the running one stays until its last stream has ended. It parks everything else in a parcel, as at a
stop, but for a process that is there already. They speak over a socket of their own:

    successor   → Ready     its configuration is good, it has what it needs
    predecessor → (parcel)  nothing moves here until the answer
    successor   → Taken     the record is good, it listens, nothing is left that could fail
    predecessor → Go        the service manager knows who is the main process now; the predecessor has let go
    predecessor → Spent     from then on and soon: what its streams have used, and the slots that they hold
    successor   → Spent     the same of sessions that have something there: both pay from one budget
    successor   → Revoked   a session is over, or its grant narrower: its streams are to be cut
    predecessor → Cut       they are, and what they used was told before
    successor   → End       all of them are to be cut, and then the channel ends

Whatever goes wrong before `Taken` leaves the predecessor as it was, and the successor ends.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterable, Mapping
from typing import Final

from gateway.channel import Channel, Cut, End, Go, Ready, Revoked, Spent, SuccessionError, Taken
from gateway.contract.policy import Usage
from gateway.core.parked import Parked, ParkedError, encode_parked
from gateway.registry import Registry, Session
from gateway.runtime import fdstore
from gateway.runtime.notify import notify

log = logging.getLogger("gateway.beside")

# The environment variable that holds the number of the socket.
CHANNEL: Final = "OPIFICIA_PREDECESSOR"
# How long a successor may take to read its configuration; and each may take to answer.
START_S: Final = 30.0
ANSWER_S: Final = 10.0
# How long a predecessor may take to tell what it used last: longer than it needs, and a dead one is known at once.
LAST_WORDS_S: Final = 5.0
# How often each tells what changed. What one moves in that time the other does not know of: a budget may be exceeded by it.
TELL_S: Final = 0.05
# What the service manager said to this process and not to the next.
_OWN: Final = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "WATCHDOG_PID")


class Predecessor:
    """The gateway that started this process beside itself."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        # Whether it has streams still; what is cut later is told to it.
        self.is_there = True
        # Sessions whose streams it was told to cut, until it has said that it has.
        self._cutting: dict[str, tuple[Session, asyncio.Event]] = {}
        # Sessions that have something there: how many bytes it knows of, and what it was told that is held here.
        self._known: dict[Session, int] = {}
        self._told_slots: dict[Session, int] = {}

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

    def cut(self, session: Session) -> None:
        """Have it cut what a session still has there."""
        if self.is_there and session.id not in self._cutting:
            self._cutting[session.id] = (session, asyncio.Event())
            self._channel.post(Revoked(session.id))

    async def has_cut(self, session: Session) -> None:
        """Wait until what a session had there is closed and counted; not for long."""
        if (cutting := self._cutting.get(session.id)) is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORDS_S):
                    await cutting[1].wait()

    def end(self) -> None:
        """Have it end, after it has told what was used."""
        if self.is_there:
            self._channel.post(End())

    def begin(self, registry: Registry, record: Parked) -> None:
        """Go on with what the record says that it keeps."""
        for parked in record.sessions:
            if (session := registry.get(parked.grant.session)) is not None:
                session.model.reserve_elsewhere(parked.model)
                session.hold_elsewhere(before=parked.slots_elsewhere)
                self._known[session] = session.bytes_known

    async def follow(self, registry: Registry) -> None:
        """Count what its streams use, and tell what is used here, until it ends."""
        telling = asyncio.get_running_loop().create_task(self._keep_telling())
        try:
            while (message := await self._channel.read()) is not None:
                match message:
                    case Spent(session_id):
                        # One that was revoked meanwhile is known here only.
                        cutting = self._cutting.get(session_id)
                        session = cutting[0] if cutting is not None else registry.get(session_id)
                        if session is not None:
                            self._take(session, message)
                    case Cut(session_id):
                        if (cutting := self._cutting.pop(session_id, None)) is not None:
                            cutting[1].set()
        except SuccessionError as error:
            log.error("%s", error)
        telling.cancel()
        self.is_there = False
        self._channel.close()
        for _, is_cut in self._cutting.values():
            is_cut.set()
        self._cutting.clear()
        for session in registry:
            session.model.release_elsewhere()
            session.hold_elsewhere(before=0)
        log.info("the gateway before this one has ended")

    def _take(self, session: Session, spent: Spent) -> None:
        session.spent_before(spent.usage)
        session.hold_elsewhere(before=spent.slots)
        self._known[session] = self._known.get(session, 0) + spent.usage.egress_bytes
        self._told_slots.setdefault(session, 0)

    async def _keep_telling(self) -> None:
        while True:
            if not self._channel.is_behind:
                self.tell()
            await asyncio.sleep(TELL_S)

    def tell(self) -> None:
        """Tell it what was used here since the last time, of sessions that it has something of."""
        for session, told in self._told_slots.items():
            size, slots = session.bytes_known - self._known[session], session.slots_for_before
            if size or slots != told:
                self._known[session] += size
                self._told_slots[session] = slots
                self._channel.post(Spent(session.id, Usage(egress_bytes_down=size), slots))


class Successor:
    """The gateway that this process started beside itself."""

    def __init__(self, channel: Channel, pid: int) -> None:
        self._channel = channel
        self._pid = pid
        # What it knows of each session, and how many slots.
        self._told: dict[Session, tuple[Usage, int]] = {}
        # Whether it has told this process to end.
        self.wants_end = False

    @classmethod
    async def start(cls) -> "Successor":
        """Start it and wait until it is ready. Raises SuccessionError."""
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise SuccessionError(f"the next gateway did not start: {error.strerror}") from error
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

    def hand(self, record: Parked, descriptors: list[int], environment: Mapping[str, str] = os.environ) -> None:
        """Give it everything and make it the main process. Raises SuccessionError; then it ends and nothing has changed.

        Nothing else may happen in this process meanwhile.
        """
        try:
            parcel = fdstore.Parcel(encode_parked(record), descriptors)
            try:
                socket.send_fds(self._channel.sock, [b"parcel"], [parcel.far.fileno()], socket.MSG_NOSIGNAL)
                self._channel.await_message(Taken, ANSWER_S)
            finally:
                parcel.close()
        except (fdstore.ParcelError, ParkedError, OSError, SuccessionError) as error:
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

    def begin(self, sessions: Iterable[Session]) -> None:
        """Take what was used so far as told."""
        # Of one that has something open here it hears in any case: then it tells, too.
        self._told = {session: (session.usage(), -1 if session.open_count else 0) for session in sessions}

    @property
    def has_heard(self) -> bool:
        """Whether it was sent all that it was told."""
        return not self._channel.is_behind

    def tell(self) -> None:
        """Tell it what was used since the last time, and which slots are held."""
        for session in self._told:
            self._tell_of(session)

    def _tell_of(self, session: Session) -> None:
        told, told_slots = self._told.get(session, (Usage(), 0))
        usage, slots = session.usage(), session.slots_for_after
        if usage != told or slots != told_slots:
            self._told[session] = (usage, slots)
            self._channel.post(Spent(session.id, usage.minus(told), slots))

    async def follow(self, registry: Registry) -> None:
        """Cut what is granted no more, and take from the budgets what is used there, until it ends."""
        cutting: set[asyncio.Task[None]] = set()
        try:
            while (message := await self._channel.read()) is not None:
                match message:
                    case Revoked(session_id):
                        registry.cut(session_id)
                        task = asyncio.get_running_loop().create_task(self._answer_cut(registry, session_id))
                        cutting.add(task)
                        task.add_done_callback(cutting.discard)
                    case Spent(session_id, usage, slots) if (session := registry.get(session_id)) is not None:
                        session.spent_after(usage.egress_bytes)
                        session.hold_elsewhere(after=slots)
                    case End():
                        self.wants_end = True
        except SuccessionError as error:
            # It may have said what is to be cut.
            log.error("%s; what this process kept is cut", error)
            for session in registry:
                registry.cut(session.id)
        finally:
            for task in cutting:
                task.cancel()

    async def _answer_cut(self, registry: Registry, session_id: str) -> None:
        session = registry.get(session_id)
        if session is not None:
            # A process before this one may have streams of it, too.
            await registry.has_cut(session)
            self._tell_of(session)
        self._channel.post(Cut(session_id))

    def close(self) -> None:
        """Say that all has ended here."""
        self._channel.close()


def own_command() -> list[str]:
    """Return the command that this program was started by; a link in it may lead to a newer version by now."""
    program = sys.argv[0]
    if not program.endswith(".py") and os.access(program, os.X_OK):
        return [program, *sys.argv[1:]]
    return [sys.executable, *sys.orig_argv[1:]]
