"""The gateway as control sees it: the contract socket, and runners handed over by splice after a look at their token.

It can be cut off, refuse grants, withhold acknowledgements, and report usage.
"""

import asyncio
import hashlib
import secrets
from pathlib import Path

from gateway.contract.framing import FrameReader, encode
from gateway.contract.messages import (
    PROTOCOL_VERSION,
    Ack,
    EgressAnswer,
    EgressQuestion,
    FromControl,
    PutGrant,
    RevokeGrant,
    Snapshot,
    UsageReport,
    Welcome,
)
from gateway.contract.opinion import EgressOpinion, EgressStep
from gateway.contract.policy import Grant, Usage
from tests.support.listener import StreamServer


def _unknown(host: str) -> EgressOpinion:
    return EgressOpinion(asked=host, host=host, port=443, step=EgressStep.RULES, reason="host_not_listed", message="no")


class FakeGateway:
    """One gateway process. `start` begins a new epoch; `stop` ends it with all connections."""

    def __init__(self, contract: Path, runner_upstream: Path) -> None:
        self.contract = contract
        self.runner_upstream = runner_upstream
        self.grants: dict[str, Grant] = {}
        self.log: list[tuple[str, str]] = []
        self.refuse: dict[str, tuple[str, ...]] = {}
        self.opinions: dict[str, EgressOpinion] = {}
        self.questions: list[EgressQuestion] = []
        self.answering = asyncio.Event()
        self.answering.set()
        self.snapshots = 0
        self.runner_url = ""
        self.epoch = ""
        self._servers: list[StreamServer] = []
        self._writers: set[asyncio.StreamWriter] = set()
        self._control: asyncio.StreamWriter | None = None
        self._port = 0

    async def start(self) -> None:
        """Serve."""
        self.epoch = secrets.token_hex(4)
        self.grants = {}
        runners = StreamServer(self._runner, ("127.0.0.1", self._port))
        self._port = runners.port
        self.runner_url = f"ws://127.0.0.1:{self._port}/runner"
        self.contract.unlink(missing_ok=True)
        self._servers = [runners, StreamServer(self._contract, self.contract)]

    async def stop(self) -> None:
        """End everything."""
        for server in self._servers:
            await server.stop()
        self._servers = []
        self.contract.unlink(missing_ok=True)

    def cut(self) -> None:
        """Cut all connections; new ones can be made."""
        for writer in list(self._writers):
            writer.transport.abort()

    def cut_runners(self) -> None:
        """Cut the connections of runners only."""
        for writer in list(self._writers):
            if writer is not self._control:
                writer.transport.abort()

    async def report(self, session: str, usage: Usage) -> None:
        """Report usage."""
        assert self._control is not None
        self._control.write(encode(UsageReport(self.epoch, session, usage)))
        await self._control.drain()

    async def _contract(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        self._control = writer
        try:
            writer.write(encode(Welcome(PROTOCOL_VERSION, self.epoch)))
            frames = FrameReader[FromControl](reader, FromControl)
            while (message := await frames.read()) is not None:
                await self.answering.wait()
                if isinstance(message, EgressQuestion):
                    self.questions.append(message)
                    opinions = tuple(self.opinions.get(host, _unknown(host)) for host in message.hosts)
                    writer.write(encode(EgressAnswer(message.serial, opinions, self.refuse.get("?", ()))))
                    continue
                problems: tuple[str, ...] = ()
                match message:
                    case Snapshot(_version, serial, grants):
                        self.snapshots += 1
                        self.grants = {grant.session: grant for grant in grants}
                        self.log.append(("snapshot", ",".join(self.grants)))
                    case PutGrant(serial, grant):
                        problems = self.refuse.get(grant.session, self.refuse.get("*", ()))
                        self.log.append(("put", grant.session))
                        if not problems:
                            self.grants[grant.session] = grant
                    case RevokeGrant(serial, session):
                        self.log.append(("revoke", session))
                        self.grants.pop(session, None)
                writer.write(encode(Ack(serial, problems)))
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _runner(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
            raw = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
            session = head.split("session=")[1].split(" ")[0]
            token = raw.get("Authorization", "").removeprefix("Bearer ")
            grant = self.grants.get(session)
            if grant is None or grant.token_sha256 != hashlib.sha256(token.encode()).hexdigest():
                writer.write(b"HTTP/1.1 401 no\r\nContent-Length: 0\r\n\r\n")
                await writer.drain()
                return
            up_reader, up_writer = await asyncio.open_unix_connection(str(self.runner_upstream))
            self._writers.add(up_writer)
            key = raw["Sec-WebSocket-Key"]
            assert headers["upgrade"] == "websocket"
            up_writer.write(
                f"GET /runner HTTP/1.1\r\nHost: control\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\nX-Opificia-Session: {session}\r\n\r\n".encode()
            )
            await asyncio.gather(self._pump(reader, up_writer), self._pump(up_reader, writer))
        except (ConnectionError, OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            self._writers.discard(writer)
            writer.close()
