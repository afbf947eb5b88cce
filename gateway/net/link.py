"""The contract socket: control connects, brings grants, and gets acknowledgements and usage.

If control goes away the gateway keeps the last grants and all tunnels; when it comes back it sends the whole picture
again. One control at a time: a second connection replaces the first, which is what a restarted control looks like.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Coroutine
from typing import Final

from gateway.context import Gateway
from gateway.contract.framing import FrameReader, FramingError, encode
from gateway.contract.messages import (
    PROTOCOL_VERSION,
    Ack,
    EgressAnswer,
    EgressQuestion,
    FromControl,
    FromGateway,
    PutGrant,
    RevokeGrant,
    Snapshot,
    UsageReport,
    Welcome,
)
from gateway.registry import Session

log = logging.getLogger("gateway.link")

# How often changed usage is reported.
REPORT_S: Final = 1.0
# How long a control that takes nothing of what is written for it keeps its connection, and this process, from its end.
TAKING_S: Final = 1.0


class ContractServer:
    """Serves the contract socket. `advise` answers questions about hosts; it takes as long as names take to resolve."""

    def __init__(
        self, gateway: Gateway, epoch: str, advise: Callable[[EgressQuestion], Awaitable[EgressAnswer]]
    ) -> None:
        self._gateway = gateway
        self._advise = advise
        self._epoch = epoch
        self._server: asyncio.Server | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, listening: socket.socket) -> None:
        """Serve on a listening unix socket."""
        self._server = await asyncio.start_unix_server(self._on_connect, sock=listening)

    async def close(self) -> None:
        """Stop, report what was used last, and end the connection when control has taken it."""
        if self._server is not None:
            self._server.close()
        if self._writer is not None:
            # If no process takes up the counts, control has them all the same.
            self._report_changes(self._writer)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def connected(self) -> bool:
        """Whether control is there."""
        return self._writer is not None

    async def _on_connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        previous, self._writer = self._writer, writer
        if previous is not None:
            log.info("control connected again; its earlier connection is closed")
            previous.close()
        try:
            self._send(writer, Welcome(PROTOCOL_VERSION, self._epoch))
            # What is reported must be all that control does not know: it may have lost everything.
            for session in self._gateway.registry:
                session.reported = None
            async with asyncio.TaskGroup() as group:
                tasks = {group.create_task(self._report(writer))}

                def beside(answer: Coroutine[None, None, None]) -> None:
                    # Beside the grants: a name that is slow to resolve holds up no launch.
                    task = group.create_task(answer)
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)

                await self._serve(FrameReader[FromControl](reader, FromControl), writer, beside)
                for each in tasks:
                    each.cancel()
        except* (FramingError, OSError) as errors:
            log.warning("control's connection ended: %s", "; ".join(str(error) for error in errors.exceptions))
        finally:
            if self._writer is writer:
                self._writer = None
            try:
                await _close(writer)
            finally:
                self._tasks.discard(task)

    async def _serve(
        self,
        frames: FrameReader[FromControl],
        writer: asyncio.StreamWriter,
        beside: Callable[[Coroutine[None, None, None]], None],
    ) -> None:
        registry = self._gateway.registry
        known = False
        while (message := await frames.read()) is not None:
            match message:
                case Snapshot():
                    if message.version != PROTOCOL_VERSION:
                        raise FramingError(f"control speaks contract version {message.version}, not {PROTOCOL_VERSION}")
                    problems = registry.replace_all(message.grants)
                    known = True
                    log.info("control brought %d grants", len(message.grants))
                case EgressQuestion():
                    beside(self._answer(message, writer))
                    continue
                case PutGrant() | RevokeGrant() if not known:
                    raise FramingError("a change came before the snapshot")
                case PutGrant(grant=grant):
                    problems = registry.put(grant)
                case RevokeGrant(session=session_id):
                    problems = ()
                    if (session := registry.revoke(session_id)) is not None:
                        beside(self._take_leave(session, message.serial, writer))
                        continue
            for problem in problems:
                log.error("a grant is refused: %s", problem)
            self._send(writer, Ack(message.serial, problems))
            await writer.drain()

    async def _take_leave(self, session: Session, serial: int, writer: asyncio.StreamWriter) -> None:
        # After a reload it may have had streams in the process before.
        await self._gateway.registry.has_cut(session)
        self._send(writer, UsageReport(self._epoch, session.id, session.usage(), final=True))
        self._send(writer, Ack(serial, ()))
        await writer.drain()

    async def _answer(self, question: EgressQuestion, writer: asyncio.StreamWriter) -> None:
        self._send(writer, await self._advise(question))
        await writer.drain()

    async def _report(self, writer: asyncio.StreamWriter) -> None:
        while True:
            self._report_changes(writer)
            await writer.drain()
            await asyncio.sleep(REPORT_S)

    def _report_changes(self, writer: asyncio.StreamWriter) -> None:
        for session in self._gateway.registry:
            usage = session.usage()
            if usage != session.reported:
                session.reported = usage
                self._send(writer, UsageReport(self._epoch, session.id, usage))

    @staticmethod
    def _send(writer: asyncio.StreamWriter, message: FromGateway) -> None:
        writer.write(encode(message))


async def _close(writer: asyncio.StreamWriter) -> None:
    """Close a connection when all that was written has been taken; cut it when nothing is taken any more.

    A process with something unsent would not end: it keeps its loop, and the next one waits for its end.
    """
    transport = writer.transport
    writer.close()
    closed = asyncio.gather(writer.wait_closed(), return_exceptions=True)
    try:
        unsent = transport.get_write_buffer_size() + 1
        while not closed.done() and (left := transport.get_write_buffer_size()) < unsent:
            unsent = left
            await asyncio.wait({closed}, timeout=TAKING_S)
    finally:
        transport.abort()
        # A turn or two of the loop.
        await asyncio.wait({closed}, timeout=TAKING_S)
