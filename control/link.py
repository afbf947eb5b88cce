"""The client of the gateway's contract socket: brings grants and takes acknowledgements and usage.

What is granted is held here as a whole. A lost connection is made again; the gateway then gets the whole picture, and
whoever waits for an acknowledgement goes on waiting until the gateway has one for it.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec

from control.plan.grants import latest, total, used_before
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
from gateway.contract.opinion import EgressOpinion
from gateway.contract.policy import Grant, NetworkLevel, Usage
from gateway.runtime.addresses import UnixAddress

log = logging.getLogger(__name__)

FIRST_RETRY_S: Final = 0.1
# Requests wait up to 5 s for the grants after the gateway's start; a try costs next to nothing.
LAST_RETRY_S: Final = 1.0
# A gateway that accepts and then says nothing is as good as none.
ANSWER_S: Final = 10.0


class GrantRefusedError(Exception):
    """The gateway refuses the grant; `problems` says why, one sentence each."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class GatewayUnavailableError(Exception):
    """The gateway did not acknowledge in time."""


class _LostError(Exception):
    """The connection ended before the acknowledgement came."""


class UsageBook:
    """What sessions have used, by epoch of the gateway, and which of it the store has yet to learn."""

    def __init__(self) -> None:
        self._used: dict[str, dict[str, Usage]] = {}
        self._unstored: set[tuple[str, str]] = set()

    def load(self, session: str, epochs: dict[str, Usage]) -> None:
        """Take what the store knows of a session."""
        self._used[session] = dict(epochs)

    def report(self, session: str, epoch: str, usage: Usage) -> None:
        """Take a report of the gateway."""
        epochs = self._used.setdefault(session, {})
        newest = latest(epochs.get(epoch), usage)
        if newest != epochs.get(epoch):
            epochs[epoch] = newest
            self._unstored.add((session, epoch))

    def before(self, session: str, present: str | None) -> Usage:
        """Return what a session used in earlier epochs than the present one."""
        return used_before(self._used.get(session, {}), present)

    def total(self, session: str) -> Usage:
        """Return all that a session has used."""
        return total(self._used.get(session, {}))

    def take_unstored(self) -> list[tuple[str, str, Usage]]:
        """Return what the store has yet to learn, and take it for learnt."""
        changed = [(session, epoch, self._used[session][epoch]) for session, epoch in self._unstored]
        self._unstored.clear()
        return changed

    def not_stored(self, session: str, epoch: str) -> None:
        """Take back that the store has learnt it."""
        if epoch in self._used.get(session, {}):
            self._unstored.add((session, epoch))

    def forget(self, session: str) -> None:
        """Drop a session that is over and stored."""
        self._used.pop(session, None)
        self._unstored = {entry for entry in self._unstored if entry[0] != session}


class GatewayLink:
    """Holds the grants of all live sessions in force. `run` must be running."""

    def __init__(self, address: UnixAddress, usage: UsageBook) -> None:
        self.usage: Final = usage
        self._path = address.path
        self._grants: dict[str, Grant] = {}
        self._epoch: str | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._synced = asyncio.Event()
        self._serial = 0
        self._waiting: dict[int, asyncio.Future[tuple[str, ...]]] = {}
        self._asking: dict[int, asyncio.Future[EgressAnswer]] = {}

    @property
    def connected(self) -> bool:
        """Whether the gateway is there and knows all grants."""
        return self._synced.is_set()

    @property
    def epoch(self) -> str:
        """The epoch of the gateway that was connected last, empty before the first."""
        return self._epoch or ""

    def grants(self) -> list[Grant]:
        """Return all grants that are held."""
        return list(self._grants.values())

    def hold(self, grants: Iterable[Grant]) -> None:
        """Take up grants that were in force before a restart; the next snapshot brings them."""
        self._grants.update({grant.session: grant for grant in grants})

    async def put(self, grant: Grant, timeout_s: float) -> None:
        """Bring a grant in force; on return the gateway has acknowledged it.

        Raises GrantRefusedError, GatewayUnavailableError; the grant is then not held any more.
        """
        self._grants[grant.session] = grant
        try:
            async with asyncio.timeout(timeout_s):
                problems = await self._acknowledged(lambda serial: PutGrant(serial, self._with_usage(grant)))
        except TimeoutError as error:
            del self._grants[grant.session]
            raise GatewayUnavailableError(f"the gateway did not answer within {timeout_s:g} s") from error
        if problems:
            del self._grants[grant.session]
            raise GrantRefusedError(problems)

    async def revoke(self, session: str) -> None:
        """Take a grant back; on return the gateway has acknowledged that nobody has it. Waits as long as it takes."""
        self._grants.pop(session, None)
        await self._acknowledged(lambda serial: RevokeGrant(serial, session))

    async def opinions(
        self, network: NetworkLevel, allow: Sequence[str], deny: Sequence[str], hosts: Sequence[str], timeout_s: float
    ) -> tuple[EgressOpinion, ...]:
        """Return what the gateway would decide about each host under a policy.

        Raises GrantRefusedError with what is wrong with the policy, GatewayUnavailableError.
        """
        writer = self._writer
        if writer is None or not self.connected:
            raise GatewayUnavailableError("the gateway is not connected")
        question = EgressQuestion(self._next_serial(), network, tuple(allow), tuple(deny), tuple(hosts))
        answering: asyncio.Future[EgressAnswer] = asyncio.get_running_loop().create_future()
        self._asking[question.serial] = answering
        try:
            async with asyncio.timeout(timeout_s):
                await self._send(writer, question)
                answer = await answering
        except TimeoutError as error:
            raise GatewayUnavailableError(f"the gateway did not answer within {timeout_s:g} s") from error
        except (_LostError, OSError) as error:
            raise GatewayUnavailableError("the gateway went away before it answered") from error
        finally:
            self._asking.pop(question.serial, None)
        if answer.problems:
            raise GrantRefusedError(answer.problems)
        return answer.opinions

    async def run(self) -> None:
        """Stay connected until cancelled."""
        retry = FIRST_RETRY_S
        while True:
            try:
                await self._connection()
                problem = "it closed the connection"
            except (OSError, FramingError, TimeoutError) as error:
                problem = str(error) or type(error).__name__
            if self._synced.is_set():
                retry = FIRST_RETRY_S
                log.warning("the gateway is away: %s", problem)
            else:
                log.debug("the gateway cannot be reached at %s: %s", self._path, problem)
            self._synced.clear()
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(_LostError())
            for asking in self._asking.values():
                if not asking.done():
                    asking.set_exception(_LostError())
            self._waiting.clear()
            self._asking.clear()
            await asyncio.sleep(retry * random.uniform(0.5, 1.0))  # noqa: S311 - spreads, hides nothing
            retry = min(2 * retry, LAST_RETRY_S)

    async def _connection(self) -> None:
        reader, writer = await asyncio.open_unix_connection(self._path)
        try:
            frames = FrameReader[FromGateway](reader, FromGateway)
            async with asyncio.timeout(ANSWER_S):
                welcome = await frames.read()
                if not isinstance(welcome, Welcome) or welcome.version != PROTOCOL_VERSION:
                    raise FramingError(f"it does not speak contract version {PROTOCOL_VERSION}")
                self._epoch = welcome.epoch
                serial = self._next_serial()
                grants = tuple(self._with_usage(grant) for grant in self._grants.values())
                await self._send(writer, Snapshot(PROTOCOL_VERSION, serial, grants))
                await self._until_acknowledged(frames, serial)
            self._writer = writer
            self._synced.set()
            log.info("connected to the gateway with %d grants", len(grants))
            while (message := await frames.read()) is not None:
                self._take(message)
        finally:
            self._writer = None
            writer.close()

    async def _until_acknowledged(self, frames: FrameReader[FromGateway], serial: int) -> None:
        while (message := await frames.read()) is not None:
            if isinstance(message, Ack) and message.serial == serial:
                for problem in message.problems:
                    # The session itself goes on; it has no door until the cause is gone.
                    log.error("the gateway refuses a grant that was in force: %s", problem)
                return
            self._take(message)
        raise FramingError("it closed the connection before it acknowledged the grants")

    def _take(self, message: FromGateway) -> None:
        match message:
            case Ack(serial, problems):
                waiting = self._waiting.pop(serial, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(problems)
            case EgressAnswer(serial):
                asking = self._asking.pop(serial, None)
                if asking is not None and not asking.done():
                    asking.set_result(message)
            case UsageReport(epoch, session, usage):
                self.usage.report(session, epoch, usage)
            case Welcome():
                raise FramingError("it said welcome twice")

    async def _acknowledged(self, message: Callable[[int], FromControl]) -> tuple[str, ...]:
        while True:
            await self._synced.wait()
            writer = self._writer
            if writer is None:
                self._synced.clear()
                continue
            serial = self._next_serial()
            answer: asyncio.Future[tuple[str, ...]] = asyncio.get_running_loop().create_future()
            self._waiting[serial] = answer
            try:
                await self._send(writer, message(serial))
                return await answer
            except (_LostError, OSError):
                # The next snapshot brings it; ask again for an acknowledgement of its own.
                self._synced.clear()
            finally:
                self._waiting.pop(serial, None)

    def _with_usage(self, grant: Grant) -> Grant:
        return msgspec.structs.replace(grant, used=self.usage.before(grant.session, self._epoch))

    def _next_serial(self) -> int:
        self._serial += 1
        return self._serial

    @staticmethod
    async def _send(writer: asyncio.StreamWriter, message: FromControl) -> None:
        writer.write(encode(message))
        await writer.drain()
