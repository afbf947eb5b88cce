"""The runner socket: WebSocket connections of runners, which the gateway has authenticated and hands over.

The gateway names the session in `X-Opificia-Session`; only its group can connect to this socket. Everything after that is
the sandbox speaking: frames are bounded, unknown ones answered with an error, a peer that does not read is dropped.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from aiohttp import WSMsgType, web

from control.runner.channel import PING_MS, Channel
from control.runner.messages import ErrorFrame, FrameError, FromRunner, Hello, Ping, Pong, ToRunner, decode, encode
from gateway.contract.ids import is_session_id

log = logging.getLogger(__name__)

HELLO_S: Final = 15.0
SEND_S: Final = 30.0
# One runner has one connection, and for a moment its successor.
MAX_CONNECTIONS_PER_SESSION: Final = 4
# Errors answered on one connection; a runner with more of them does not speak the protocol.
MAX_ERRORS: Final = 100
# Frames of one connection in a row. What has arrived is there without waiting, thousands of them at once.
FRAMES_A_TURN: Final = 64


class RunnerConnection:
    """One WebSocket: bounded sending, and reading that lets others have their turns."""

    def __init__(self, socket: web.WebSocketResponse) -> None:
        self._socket = socket
        self._sending = asyncio.Lock()
        self._received = 0

    async def receive(self) -> FromRunner:
        """Return the next message. Raises FrameError for a frame that is none; ConnectionError when it was the last."""
        while True:
            self._received += 1
            if self._received % FRAMES_A_TURN == 0:
                await asyncio.sleep(0)
            frame = await self._socket.receive()
            match frame.type:
                case WSMsgType.TEXT:
                    return decode(frame.data)
                case WSMsgType.BINARY:
                    raise FrameError("malformed", "messages are text frames")
                case WSMsgType.PING:
                    await self._socket.pong(frame.data)
                case WSMsgType.PONG:
                    continue
                case WSMsgType.ERROR:
                    raise ConnectionError(f"it broke the protocol: {frame.data}")
                case _:
                    raise ConnectionError("it was closed")

    async def send(self, message: ToRunner) -> None:
        """Send a message. Raises ConnectionError when the peer is gone or does not read."""
        try:
            async with asyncio.timeout(SEND_S), self._sending:
                await self._socket.send_str(encode(message))
        except TimeoutError as error:
            raise ConnectionError("the runner does not read") from error

    async def close(self, reason: str) -> None:
        """End the connection; a peer that does not answer is not waited for."""
        try:
            async with asyncio.timeout(1.0):
                await self._socket.close(message=reason.encode()[:120])
        except (TimeoutError, ConnectionError):
            pass


async def _end_connection(_request: web.Request, response: web.StreamResponse) -> None:
    """Take no second request: one that the sandbox wrote would name whatever session it likes."""
    response.force_close()


class RunnerServer:
    """Finds the session of each connection and carries its frames to the session's channel."""

    def __init__(self, channel_of: Callable[[str], Channel | None], frame_bytes: int) -> None:
        self._channel_of = channel_of
        self._frame_bytes = frame_bytes
        self._connections: dict[str, int] = {}
        self._conversations: set[asyncio.Task[None]] = set()

    def application(self) -> web.Application:
        """Return the application that answers on the runner socket."""
        app = web.Application()
        app.router.add_get("/runner", self._serve)
        app.on_shutdown.append(self._close)
        app.on_response_prepare.append(_end_connection)
        return app

    async def _close(self, _app: web.Application) -> None:
        """End all conversations, and wait until what they leave behind is recorded."""
        for task in self._conversations:
            task.cancel()
        await asyncio.gather(*self._conversations, return_exceptions=True)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        session = request.headers.get("X-Opificia-Session", "")
        channel = self._channel_of(session) if is_session_id(session) else None
        if channel is None:
            raise web.HTTPNotFound(text="no such live session\n")
        if self._connections.get(session, 0) >= MAX_CONNECTIONS_PER_SESSION:
            raise web.HTTPTooManyRequests(text="too many connections of this session\n")
        self._connections[session] = self._connections.get(session, 0) + 1
        try:
            # No compression: a few bytes could unfold to gigabytes. No answers to pings but ours: they take turns too.
            socket = web.WebSocketResponse(max_msg_size=self._frame_bytes, compress=False, autoping=False)
            try:
                await socket.prepare(request)
            except ConnectionError as error:
                # It has gone already. Raised as it is, it would be logged as a failure of ours.
                raise web.HTTPBadRequest from error
            conversation = asyncio.create_task(self._converse(socket, channel), name=f"runner-{session}")
            self._conversations.add(conversation)
            conversation.add_done_callback(self._conversations.discard)
            # Cancelling one that has to wait is the server's business alone, see `_close`.
            await asyncio.wait([conversation])
            return socket
        finally:
            self._connections[session] -= 1
            if not self._connections[session]:
                del self._connections[session]

    async def _converse(self, socket: web.WebSocketResponse, channel: Channel) -> None:
        connection = RunnerConnection(socket)
        pinging = asyncio.create_task(self._ping(connection), name="runner-ping")
        try:
            async with asyncio.timeout(HELLO_S):
                first = await connection.receive()
            if not isinstance(first, Hello):
                raise FrameError("hello_expected", "the first message must be hello")
            await channel.hello(connection, first)
            await self._listen(connection, channel)
        except FrameError as error:
            await self._complain(connection, error)
            await connection.close(error.reason)
        except (ConnectionError, TimeoutError) as error:
            log.debug("session %s: the runner's connection ended: %s", channel.record.id, error or "it was silent")
            await connection.close("silent")
        finally:
            pinging.cancel()
            await channel.lost(connection)
            await connection.close("over")

    async def _listen(self, connection: RunnerConnection, channel: Channel) -> None:
        errors = 0
        while True:
            try:
                async with asyncio.timeout(3 * PING_MS / 1000):
                    message = await connection.receive()
                match message:
                    case Pong():
                        continue
                    case Hello():
                        raise FrameError("unexpected", "hello comes once a connection")
                    case _:
                        await channel.receive(message)
            except FrameError as error:
                errors += 1
                if errors > MAX_ERRORS:
                    raise
                await self._complain(connection, error)

    @staticmethod
    async def _complain(connection: RunnerConnection, error: FrameError) -> None:
        try:
            await connection.send(ErrorFrame(error.reason, str(error)))
        except ConnectionError:
            pass

    @staticmethod
    async def _ping(connection: RunnerConnection) -> None:
        try:
            while True:
                await asyncio.sleep(PING_MS / 1000)
                await connection.send(Ping())
        except ConnectionError:
            await connection.close("cannot be written to")
