"""One session's runner as control knows it, across its connections: runs, event numbers, acknowledgements.

What the runner reports is recorded before it is acknowledged, in batches, so that a flood costs one sync for many events.
The runner is hostile: what it can make control keep is bounded here, what it can make control send is bounded by the server.
"""

import asyncio
import logging
from collections import deque
from typing import Final, Protocol

import msgspec

from control.plan.session import (
    CommandCompleted,
    CommandSent,
    Event,
    NotAllowed,
    RunnerConnected,
    RunnerDisconnected,
    RunnerStatus,
    ToolCalled,
    ToolReturned,
)
from control.runner.messages import (
    PROTOCOL_VERSION,
    Ack,
    Cancel,
    Completed,
    FrameError,
    Hello,
    Output,
    Run,
    Sequenced,
    Shutdown,
    Status,
    ToolCall,
    ToolResult,
    ToRunner,
    Welcome,
    nesting,
)
from control.sessions.record import Record, Recorder

log = logging.getLogger(__name__)

PING_MS: Final = 20_000
# Events that wait for the disk, and their bytes; a runner that sends more is read no further meanwhile.
MAX_BATCH: Final = 256
MAX_BATCH_BYTES: Final = 1024 * 1024
# What all reports of one session may take in the journal and the database. Completions are outside of it.
MAX_RECORDED_EVENTS: Final = 100_000
MAX_RECORDED_BYTES: Final = 64 * 1024 * 1024
MAX_DOCUMENT_BYTES: Final = 64 * 1024
# Readers of JSON call themselves for each level, and who reads the journal or a stream of events later has less room for
# that than who took the message: what is kept must be readable from anywhere.
MAX_NESTING: Final = 100
# Connections of one runner. Each is recorded, with its end; a runner that makes more of them fills the disk, and no other.
MAX_HELLOS: Final = 10_000
# Output of a run that its reader has yet to take, and how long the runner is held back for a slow reader.
MAX_UNREAD_BYTES: Final = 4 * 1024 * 1024
# What a message takes beside its text: empty ones are not free.
OVERHEAD_BYTES: Final = 256
SLOW_READER_S: Final = 30.0


class Connection(Protocol):
    """One WebSocket connection of a runner."""

    async def send(self, message: ToRunner) -> None:
        """Send a message. Raises ConnectionError."""

    async def close(self, reason: str) -> None:
        """End the connection."""


class RunFailedError(Exception):
    """The run's output cannot be followed any further; the message says why."""


class RunHandle:
    """A run that someone follows: its output as it comes, then its end."""

    def __init__(self, message: Run, main: bool) -> None:
        self.message: Final = message
        self.main: Final = main
        self.completed: Final[asyncio.Future[Completed]] = asyncio.get_running_loop().create_future()
        self.followed = False
        self._unread: deque[Output] = deque()
        self._unread_bytes = 0
        self._changed = asyncio.Event()
        self._taken = asyncio.Event()
        self._failed = ""

    async def offer(self, output: Output) -> None:
        """Hand over output, waiting a while for a reader that is slow; without a reader it goes nowhere."""
        if not self.followed or self._failed:
            return
        try:
            async with asyncio.timeout(SLOW_READER_S):
                while self._unread_bytes > MAX_UNREAD_BYTES and self.followed:
                    self._taken.clear()
                    await self._taken.wait()
        except TimeoutError:
            self.fail("its output was not read for too long")
            return
        self._unread.append(output)
        self._unread_bytes += len(output.data) + OVERHEAD_BYTES
        self._changed.set()

    def finish(self, completed: Completed) -> None:
        """Tell the end."""
        if not self.completed.done():
            self.completed.set_result(completed)
        self._changed.set()

    def fail(self, why: str) -> None:
        """Tell that there will be no end: the session is over."""
        self._failed = self._failed or why
        self._unread.clear()
        self._unread_bytes = 0
        self._changed.set()

    async def next(self) -> Output | Completed:
        """Return the next output, and after the last the end. Raises RunFailedError."""
        while True:
            if self._unread:
                output = self._unread.popleft()
                self._unread_bytes -= len(output.data) + OVERHEAD_BYTES
                self._taken.set()
                return output
            if self._failed:
                raise RunFailedError(self._failed)
            if self.completed.done():
                return self.completed.result()
            self._changed.clear()
            await self._changed.wait()

    def unfollow(self) -> None:
        """Stop keeping output."""
        self.followed = False
        self._taken.set()


class Channel:
    """The runner's side of one live session."""

    def __init__(self, record: Record, recorder: Recorder, frame_bytes: int) -> None:
        self.record: Final = record
        # Exactly one of the two is set: whether a runner is connected.
        self.present: Final = asyncio.Event()
        self.gone: Final = asyncio.Event()
        self.gone.set()
        self._recorder = recorder
        self._frame_bytes = frame_bytes
        self._connection: Connection | None = None
        # Those whose end is not recorded yet.
        self._runs: dict[str, RunHandle] = {}
        self._shutdown: Shutdown | None = None
        self._seq = record.life.runner_seq
        # The first event after a hello may skip numbers: acknowledged output is not recorded.
        self._resumed = True
        self._hellos = 0
        self._recorded_events = 0
        self._recorded_bytes = 0
        self._batch: list[Sequenced] = []
        self._batch_bytes = 0
        self._filled = asyncio.Event()
        self._flushed = asyncio.Event()
        self._closed = False

    async def hello(self, connection: Connection, hello: Hello) -> None:
        """Take a new connection: record it, say welcome, and send the runs that the runner has not got, or that it is to end.

        Raises FrameError when it is not to be taken; ConnectionError.
        """
        known = self.record.life.instance
        if hello.version != PROTOCOL_VERSION:
            raise FrameError("version", f"control speaks runner protocol {PROTOCOL_VERSION}, not {hello.version}")
        if known and known != hello.instance:
            raise FrameError("other_instance", "the session has a runner already, and this is another one")
        if self._hellos >= MAX_HELLOS:
            raise FrameError("too_many_connections", f"a runner may connect {MAX_HELLOS} times")
        self._hellos += 1
        life = await self._recorder.record(self.record, RunnerConnected(hello.instance, hello.runner))
        if isinstance(life, NotAllowed) or self._closed:
            raise FrameError("wrong_state", "the session takes no runner now")
        previous, self._connection = self._connection, connection
        if previous is not None:
            await previous.close("replaced by a newer connection")
        # What the old connection brought and is not on disk yet is in the batch, which is kept.
        self._resumed = True
        await connection.send(Welcome(PROTOCOL_VERSION, self.record.id, self._seq, PING_MS, self._frame_bytes))
        for run in list(self._runs.values()):
            if run.message.run not in hello.runs:
                await connection.send(run.message)
        if self._shutdown is not None:
            await connection.send(self._shutdown)
        self.gone.clear()
        self.present.set()

    async def lost(self, connection: Connection) -> None:
        """Note that a connection ended, unless a newer one is there."""
        if self._connection is connection:
            self._connection = None
            self.present.clear()
            self.gone.set()
            await self._recorder.record(self.record, RunnerDisconnected())

    async def run(self, message: Run, *, main: bool, follow: bool) -> RunHandle:
        """Record and send a command. Raises NotAllowedError when the session cannot take one now."""
        handle = RunHandle(message, main)
        handle.followed = follow
        life = await self._recorder.record(self.record, CommandSent(message.run, main, message.argv))
        if isinstance(life, NotAllowed):
            raise NotAllowedError(life)
        self._runs[message.run] = handle
        await self._send(message)
        return handle

    def adopt(self, message: Run) -> RunHandle:
        """Take up the session's own command again after a restart of control; it was recorded as sent."""
        handle = RunHandle(message, main=True)
        self._runs[message.run] = handle
        return handle

    async def cancel(self, run: str, grace_ms: int) -> None:
        """End a run; its completion still comes."""
        await self._send(Cancel(run, grace_ms))

    async def shutdown(self, exit_code: int, grace_ms: int) -> None:
        """Let the runner end. It is told so again on each further connection: with the present one the word may be lost."""
        self._shutdown = Shutdown(grace_ms, exit_code)
        await self._send(self._shutdown)

    async def receive(self, message: Sequenced) -> None:
        """Take an event. Raises FrameError when it is not expected."""
        if message.seq <= self._seq:
            return
        if message.seq != self._seq + 1 and not self._resumed:
            raise FrameError("sequence", f"event {message.seq} came where {self._seq + 1} was due")
        while len(self._batch) >= MAX_BATCH or self._batch_bytes >= MAX_BATCH_BYTES:
            self._flushed.clear()
            await self._flushed.wait()
        self._seq, self._resumed = message.seq, False
        kept = _kept(message)
        self._batch.append(kept)
        self._batch_bytes += _size(kept)
        self._filled.set()
        if isinstance(message, Output) and (run := self._runs.get(message.run)) is not None:
            try:
                message.content()
            except ValueError:
                raise FrameError("invalid", "output: its data is not what its encoding says") from None
            await run.offer(message)

    async def keep(self) -> None:
        """Record and acknowledge what comes in, until cancelled."""
        while True:
            await self._filled.wait()
            self._filled.clear()
            while self._batch:
                batch, self._batch, self._batch_bytes = self._batch, [], 0
                events = [event for message in batch if (event := self._event(message)) is not None]
                if events:
                    await self._recorder.record_all(self.record, events)
                for message in batch:
                    if isinstance(message, Completed) and (run := self._runs.pop(message.run, None)) is not None:
                        run.finish(message)
                self._flushed.set()
                await self._send(Ack(batch[-1].seq))

    async def close(self, why: str) -> None:
        """End the connection and whoever follows a run: the session is over."""
        self._closed = True
        for run in self._runs.values():
            run.fail(why)
        if self._connection is not None:
            connection, self._connection = self._connection, None
            self.present.clear()
            self.gone.set()
            await connection.close(why)

    async def _send(self, message: ToRunner) -> None:
        connection = self._connection
        if connection is None:
            return
        try:
            await connection.send(message)
        except ConnectionError as error:
            # A run or shutdown is sent again when the runner is back; all else has no meaning for another connection.
            log.info("session %s: the runner's connection failed: %s", self.record.id, error)
            await connection.close("cannot be written to")

    def _event(self, message: Sequenced) -> Event | None:
        """Return what of a message goes into the record; None when it does not, or no more may."""
        match message:
            case Output():
                return None
            case Completed():
                if message.run not in self.record.life.open_runs:
                    return None
                run = self._runs.get(message.run)
                main = message.run == self.record.life.main_run if run is None else run.main
                return CommandCompleted(
                    message.seq, message.run, main, message.exit_code, message.timed_out, message.error
                )
            case Status():
                event: Event = RunnerStatus(message.seq, message.status, message.detail)
            case ToolCall():
                event = ToolCalled(message.seq, message.call, message.name, message.arguments)
            case ToolResult():
                event = ToolReturned(message.seq, message.call, message.ok, message.content)
        return event if self._room(_size(message)) else None

    def _room(self, size: int) -> bool:
        full = self._recorded_events >= MAX_RECORDED_EVENTS or self._recorded_bytes >= MAX_RECORDED_BYTES
        self._recorded_events += 1
        self._recorded_bytes += size
        if full and self._recorded_events == MAX_RECORDED_EVENTS + 1:
            log.warning("session %s: its runner has reported as much as is kept; the rest is dropped", self.record.id)
        return not full


class NotAllowedError(Exception):
    """The session cannot do this in its state."""

    def __init__(self, refusal: NotAllowed) -> None:
        super().__init__(str(refusal))


def _kept(message: Sequenced) -> Sequenced:
    """Return what of a message is kept until it is on disk: its documents bounded, nothing of an output's text."""
    match message:
        case Output():
            return msgspec.structs.replace(message, data="")
        case ToolCall():
            return msgspec.structs.replace(message, arguments=_bounded(message.arguments))
        case ToolResult():
            return msgspec.structs.replace(message, content=_bounded(message.content))
        case _:
            return message


def _size(message: Sequenced) -> int:
    """Return about how many bytes a kept message takes."""
    match message:
        case Status():
            return OVERHEAD_BYTES + len(message.status) + len(message.detail)
        case ToolCall():
            return OVERHEAD_BYTES + len(bytes(message.arguments))
        case ToolResult():
            return OVERHEAD_BYTES + len(bytes(message.content))
        case _:
            return OVERHEAD_BYTES


def _bounded(document: msgspec.Raw) -> msgspec.Raw:
    """Return a document without the white space between its parts, or its size if it is too large or too deep.

    A newline there would break the journal and the API's streams of events, which have one line for an event.
    """
    size = len(bytes(document))
    if size <= MAX_DOCUMENT_BYTES and nesting(bytes(document)) <= MAX_NESTING:
        return msgspec.Raw(msgspec.json.format(bytes(document), indent=-1))
    return msgspec.Raw(msgspec.json.encode({"truncated": True, "bytes": size}))
