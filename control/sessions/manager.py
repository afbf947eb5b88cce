"""All sessions: creates them, queues them, starts and ends their lives, and takes them up again after a restart."""

import asyncio
import logging
from collections.abc import Coroutine
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any, Final

import msgspec

from control.db.database import StoreUnavailableError
from control.db.rows import Selection, StoredSession
from control.db.store import Store
from control.docker.types import EngineError
from control.plan.admission import Admission, AdmissionError, Demand
from control.plan.grants import grant_for, policy_digest, total
from control.plan.reconcile import Adopt, CleanUp, Fail, Refuse, Relaunch, RemoveStray, Requeue, reconcile
from control.plan.retention import Keep
from control.plan.session import (
    ContainerCreated,
    Ended,
    EndRequested,
    LaunchCut,
    LaunchRequested,
    LaunchStarted,
    NotAllowed,
    Reason,
    Session,
    SessionState,
)
from control.runner.channel import Channel, RunHandle
from control.runner.messages import Run
from control.sessions import folders
from control.sessions.expiry import Expiry
from control.sessions.launch import Services
from control.sessions.life import Life
from control.sessions.record import Record, now_ms
from control.sessions.refusals import InvalidSpecError, NoSuchSessionError, WrongStateError
from control.sessions.retention import Retention
from control.sessions.strays import Strays
from control.sessions.uptime import boot_id, uptime_ms
from control.sessions.usage import UsageKeeper
from control.spec import Bounds, SandboxSpec, spec_problems
from gateway.contract.ids import new_session_id, new_token, token_sha256
from gateway.contract.policy import Usage

log = logging.getLogger(__name__)

# How soon a clean-up that failed is tried again.
RETRY_S: Final = 2.0


class SessionManager:
    """Owns all live sessions. `run` must be running; `start` comes before any other call."""

    def __init__(
        self, services: Services, store: Store, admission: Admission, bounds: Bounds, sessions_folder: Path
    ) -> None:
        self.admission: Final = admission
        self.store: Final = store
        self._services = services
        self._bounds = bounds
        self._folder = sessions_folder
        self._strays = Strays(services.engine, services.limits, sessions_folder, services.detect_only)
        limits = services.limits
        keep = Keep(limits.keep_ended_ms, limits.keep_ended_sessions, limits.keep_ended_bytes)
        self._retention = Retention(store, sessions_folder, keep)
        self._usage = UsageKeeper(store, services.link.usage)
        self._expiry = Expiry(self.records, self._expire, limits.never_launched_ms)
        self._records: dict[str, Record] = {}
        self._lives: dict[str, Life] = {}
        self._addresses: dict[str, IPv4Address] = {}
        # Containers of launches that were cut, to be gone before the next launch of their sessions.
        self._leftovers: dict[str, str] = {}
        self._unpacking: set[str] = set()
        self._last_address: IPv4Address | None = None
        self._position = 0
        self._group: asyncio.TaskGroup | None = None
        self._ready = asyncio.Event()

    @property
    def in_limit(self) -> int:
        """Bytes that a session's input may take."""
        return self._services.limits.in_bytes

    # What callers ask.

    async def create(self, spec: SandboxSpec, key: str = "", digest: str = "") -> StoredSession:
        """Make a session. Raises InvalidSpecError, SessionExistsError, KeyReusedError, StoreUnavailableError, OSError."""
        problems = spec_problems(spec, self._bounds)
        if problems:
            raise InvalidSpecError(problems)
        session = spec.session_id or new_session_id()
        spec = msgspec.structs.replace(spec, session_id=session, run_id=spec.run_id or session)
        # Order of creation, which a clock that was set back must not disturb.
        self._position = max(self._position + 1, now_ms() * 1000)
        sandbox = self._services.sandbox
        new = StoredSession(
            id=session,
            run_id=spec.run_id,
            position=self._position,
            created_at=now_ms(),
            memory_bytes=spec.resources.memory_bytes or sandbox.memory_bytes,
            cpus=spec.resources.cpus or sandbox.cpus,
            spec=spec,
            life=Session(),
        )
        stored = await self.store.insert(new, key, digest)
        if stored is new:
            record = self._records[session] = Record(new, self._folder / session)
            await asyncio.to_thread(folders.put_aside, record.folder, new.created_at)
            await asyncio.to_thread(folders.make, record.folder)
            return new
        return self.view(stored)

    async def unpack_input(self, session: str, archive: Path) -> None:
        """Unpack a tar into the session's /in. Raises NoSuchSessionError, WrongStateError, folders.InputError."""
        record = await self._record(session)
        asked = record.life.waiting or self.admission.position(session) is not None
        if record.life.state is not SessionState.CREATED or asked:
            raise WrongStateError(f"input comes before launch; the session is {record.life.state}")
        if session in self._unpacking:
            raise WrongStateError("another input is being unpacked")
        self._unpacking.add(session)
        try:
            await asyncio.to_thread(folders.unpack_input, record.folder, archive, self.in_limit)
        finally:
            self._unpacking.discard(session)

    async def launch(self, session: str) -> StoredSession:
        """Queue a session for its start.

        Raises NoSuchSessionError, WrongStateError, AdmissionError, StoreUnavailableError, OSError.
        """
        record = await self._record(session)
        if record.life.waiting:
            return record.view()
        # While the database is away nothing new starts, what runs goes on.
        await self.store.ping()
        await asyncio.to_thread(folders.make, record.folder)
        # Asked for twice at the same time: it may be in the queue, or out of it already.
        if self.admission.position(session) is not None or session in self._lives:
            return record.view()
        queued = record.life.state is SessionState.CREATED
        if queued:
            if session in self._unpacking:
                raise WrongStateError("its input is still being unpacked")
            self.admission.enqueue(session, Demand(record.stored.memory_bytes, record.stored.cpus))
        try:
            result = await self._services.recorder.record(record, LaunchRequested(), patient=False)
        except BaseException:
            self.admission.leave(session)
            raise
        if isinstance(result, NotAllowed):
            if queued:
                # Somebody has ended it meanwhile.
                self.admission.leave(session)
            raise WrongStateError(f"only a created session can be launched; this one is {result.state}")
        self._admit()
        return record.view()

    async def stop(self, session: str, grace_ms: int | None = None) -> StoredSession:
        """Begin to end a session; one that has ended stays as it is. Raises NoSuchSessionError."""
        record = await self._record(session)
        life = self._lives.get(session)
        if life is not None:
            await life.end(Reason.STOPPED_BY_USER, grace_ms=grace_ms)
        elif not record.life.state.final:
            self.admission.leave(session)
            await self._end_unlaunched(record, EndRequested(Reason.STOPPED_BY_USER))
        return record.view()

    async def _expire(self, record: Record, message: str) -> None:
        await self._end_unlaunched(record, EndRequested(Reason.NEVER_LAUNCHED, message))

    async def _end_unlaunched(self, record: Record, event: EndRequested) -> None:
        await self._services.recorder.record(record, event)
        self._spawn(self._clean(record), f"clean-{record.id}")

    async def run_command(self, session: str, run: Run) -> RunHandle:
        """Run a command in a connected session. Raises NoSuchSessionError, NotAllowedError, WrongStateError."""
        record = await self._record(session)
        life = self._lives.get(session)
        if life is None or record.life.ending is not None:
            raise WrongStateError(f"commands need a connected session; this one is {record.life.state}")
        return await life.channel.run(run, main=False, follow=True)

    async def cancel_command(self, session: str, run: str, grace_ms: int) -> None:
        """End a command that runs; one that is unknown or over is no error."""
        life = self._lives.get(session)
        if life is not None:
            await life.channel.cancel(run, grace_ms)

    async def get(self, session: str) -> StoredSession:
        """Return a session. Raises NoSuchSessionError, StoreUnavailableError."""
        record = self._records.get(session)
        if record is not None:
            return record.view()
        stored = await self.store.get(session)
        if stored is None:
            raise NoSuchSessionError(session)
        return stored

    async def page(self, selection: Selection, before: int | None, limit: int) -> list[StoredSession]:
        """Return sessions from the newest to the oldest."""
        return [self.view(each) for each in await self.store.page(selection, before=before, limit=limit)]

    def view(self, stored: StoredSession) -> StoredSession:
        """Return a session as memory knows it, which may be newer than the store."""
        record = self._records.get(stored.id)
        return stored if record is None else record.view()

    def record(self, session: str) -> Record | None:
        """Return the live record of a session, None when it has ended."""
        return self._records.get(session)

    def records(self) -> list[Record]:
        """Return all sessions that are not cleaned up yet."""
        return list(self._records.values())

    @property
    def strays(self) -> tuple[str, ...]:
        """What belongs to no session and was left as it is, one sentence each."""
        return tuple(self._strays.left.values())

    @property
    def addresses_held(self) -> int:
        """How many sandbox addresses may still be granted."""
        return len(self._addresses)

    def folder(self, session: str) -> Path:
        """Return the folder of a session that exists."""
        return self._folder / session

    def channel_of(self, session: str) -> Channel | None:
        """Return the channel to which a runner's connection belongs."""
        life = self._lives.get(session)
        return None if life is None else life.channel

    def used(self, session: str) -> Usage:
        """Return what a live session has used."""
        return self._services.link.usage.total(session)

    async def usage(self, session: str) -> Usage:
        """Return what a session has used, live or not. Raises StoreUnavailableError."""
        if session in self._records:
            return self.used(session)
        return total((await self.store.usage_of([session])).get(session, {}))

    # Start and stop of the daemon.

    async def start(self) -> None:
        """Take up what an earlier process left. Raises StoreUnavailableError, EngineError."""
        self._position = await self.store.last_position()
        self._addresses = {
            session: IPv4Address(address) for session, address in (await self.store.held_addresses()).items()
        }
        for stored in await self.store.unfinished():
            record = Record(stored, self._folder / stored.id)
            await self._services.recorder.restore(record)
            self._records[stored.id] = record
            if record.life.address:
                self._addresses.setdefault(stored.id, IPv4Address(record.life.address))
        for session, epochs in (await self.store.usage_of(list(self._records))).items():
            self._services.link.usage.load(session, epochs)
        self._services.link.hold(
            grant_for(record.spec, record.id, record.life.token_sha256, record.life.address, Usage())
            for record in self._records.values()
            if record.life.address and not record.life.state.final and record.life.exit is None
        )

    async def run(self) -> None:
        """Live with all sessions until cancelled; containers then stay as they are."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            group.create_task(self._usage.run(), name="usage")
            await self._reconcile()
            self._ready.set()
            group.create_task(self._strays.sweep(self._records.__contains__), name="strays")
            group.create_task(self._retention.sweep(), name="retention")
            group.create_task(self._expiry.run(), name="expiry")

    async def ready(self) -> None:
        """Return when what an earlier process left is taken up."""
        await self._ready.wait()

    async def _reconcile(self) -> None:
        found = await self._strays.containers()
        lives = {name: record.life for name, record in self._records.items()}
        policies = {name: policy_digest(record.spec) for name, record in self._records.items()}
        for action in reconcile(lives, policies, found):
            log.info("after the restart: %s", action)
            match action:
                case Requeue(session):
                    self._requeue(self._records[session])
                case Relaunch(session, container):
                    record = self._records[session]
                    if container:
                        self._leftovers[session] = container
                    if not record.life.waiting:
                        await self._services.recorder.record(record, LaunchCut())
                    self._requeue(record)
                case Adopt(session, container):
                    await self._begin(self._records[session], container)
                case Refuse(session, container):
                    message = f"its container {container[:12]} was made under another policy than the session's"
                    record = self._records[session]
                    await self._services.recorder.record(record, EndRequested(Reason.POLICY_MISMATCH, message))
                    await self._begin(record, container)
                case Fail(session, vanished):
                    self._spawn(self._fail(self._records[session], vanished), f"fail-{session}")
                case CleanUp(session):
                    self._spawn(self._clean(self._records[session]), f"clean-{session}")
                case RemoveStray(container, session, ran):
                    self._spawn(self._strays.remove(container, session, ran=ran), f"stray-{container[:12]}")
        self._admit()

    def _requeue(self, record: Record) -> None:
        """Queue a session that waited before the restart."""
        try:
            self.admission.restore(record.id, Demand(record.stored.memory_bytes, record.stored.cpus))
        except AdmissionError as error:
            # The operator has made the host smaller since.
            refused = EndRequested(Reason.HOST_NOT_READY, str(error))
            self._spawn(self._end_unlaunched(record, refused), f"refuse-{record.id}")

    async def _fail(self, record: Record, vanished: bool) -> None:
        recorder = self._services.recorder
        if not vanished:
            message = "the control daemon was restarted while the session was launched"
            await recorder.record(record, EndRequested(Reason.ORPHANED, message))
        await recorder.record(record, Ended())
        await self._clean(record)

    # Admission and lives.

    def _admit(self) -> None:
        admitted = self.admission.admit()
        for number, session in enumerate(admitted):
            record = self._records[session]
            # One whose launch was cut holds an address already.
            address = self._addresses.get(session)
            if address is None:
                address = self._services.network.free_address(set(self._addresses.values()), self._last_address)
            if address is None:
                # The subnet is the limit: whoever ends gives an address back, and this is called again.
                for late in reversed(admitted[number:]):
                    self.admission.put_back(late)
                return
            self._addresses[session] = self._last_address = address
            token = new_token()
            # From this moment on a stop goes to the life, whatever of the launch has happened yet.
            life = self._lives[session] = Life(record, self._services, token)
            started = LaunchStarted(str(address), token_sha256(token), boot_id(), uptime_ms())
            self._spawn(self._launch(record, life, started), f"session-{session}")

    async def _launch(self, record: Record, life: Life, started: LaunchStarted) -> None:
        await self._remove_leftover(record.id)
        # Not allowed if it was stopped in this very moment; then it has ended.
        if not isinstance(await self._services.recorder.record(record, started), NotAllowed):
            await life.run()
        del self._lives[record.id]
        await self._clean(record)

    async def _begin(self, record: Record, container: str) -> None:
        if not record.life.container:
            await self._services.recorder.record(record, ContainerCreated(container, ""))
        self.admission.hold(record.id, Demand(record.stored.memory_bytes, record.stored.cpus))
        self._lives[record.id] = Life(record, self._services)
        self._spawn(self._adopt(record, self._lives[record.id]), f"session-{record.id}")

    async def _adopt(self, record: Record, life: Life) -> None:
        await life.run()
        del self._lives[record.id]
        await self._clean(record)

    async def _remove_leftover(self, session: str) -> None:
        container = self._leftovers.pop(session, None)
        if container is not None:
            await self._strays.remove(container, session, ran=False)

    async def _clean(self, record: Record) -> None:
        """Take away what a session that has ended may have left, and forget it. Nothing is left when this returns."""
        session = record.id
        await self._remove_leftover(session)
        engine = self._services.engine
        while True:
            try:
                if record.life.container:
                    await engine.remove(record.life.container)
                elif record.life.address:
                    # Its making may have been asked for, and the answer lost: nobody else would ever look for it.
                    await engine.remove_made_for(session)
                # Its memory and CPUs are free; a volume that will not go must not keep others waiting.
                self.admission.leave(session)
                self._admit()
                if record.life.address:
                    await engine.remove_out_volume(session)
            except EngineError as error:
                log.warning("session %s cannot be cleaned up, trying again: %s", session, error)
                await asyncio.sleep(RETRY_S)
                continue
            break
        if record.life.address:
            await self._services.link.revoke(session)
        # Given back only now: nobody is granted it any more.
        while True:
            try:
                await self._usage.put()
                await self.store.release_address(session)
                if self._services.recorder.is_stored(record):
                    await self.store.mark_cleaned(session)
                    break
            except StoreUnavailableError as error:
                log.debug("session %s waits for the database: %s", session, error)
            await asyncio.sleep(RETRY_S)
        self._addresses.pop(session, None)
        self._records.pop(session, None)
        self._services.link.usage.forget(session)
        self._admit()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        assert self._group is not None
        self._group.create_task(work, name=name)

    async def _record(self, session: str) -> Record:
        record = self._records.get(session)
        if record is not None:
            return record
        stored = await self.store.get(session)
        if stored is None:
            raise NoSuchSessionError(session)
        return Record(stored, self._folder / session)
