"""The control daemon: puts its parts together, starts them in order, and stops them so that nothing is lost.

Order: store, engine, host, then gateway link, runner socket, sessions, API. On stop the API goes first; sandboxes and
grants stay, and the next start takes them up again.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import secrets
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from control import VERSION
from control.api.bearer import Bearer
from control.api.server import api_application
from control.api.types import Health
from control.config import ControlConfig, unix_path
from control.db.database import StoreUnavailableError
from control.db.store import Store
from control.docker.seccomp import default_seccomp_profile
from control.docker.types import EngineError
from control.link import GatewayLink, UsageBook
from control.metrics import Figures, registry
from control.plan.admission import Admission
from control.plan.container import ContainerPlan, SandboxPlan, sandbox_container
from control.runner import client as reference_runner
from control.runner.server import RunnerServer
from control.sessions.engine import Engine
from control.sessions.launch import Services
from control.sessions.manager import SessionManager
from control.sessions.record import Recorder
from gateway.runtime.addresses import ListenError, listen, parse_address
from gateway.runtime.notify import feed_watchdog, notify

log = logging.getLogger(__name__)

# How long an answer about the host stands before it is checked again at the next launch.
HOST_CHECK_S: Final = 5.0
# How long whoever asks for our health waits for the engine, which may hang for a minute.
HEALTH_PATIENCE_S: Final = 5.0
# Streams of the API that still run when the daemon stops.
API_SHUTDOWN_S: Final = 2.0
# Callers, and runners that all come back after a restart, that may wait to be accepted: where the queue of a unix socket is
# full, connecting fails at once.
BACKLOG: Final = 1024

# Hard to guess at any rate of tries (RFC 6750 §5.2).
MIN_BEARER_CHARACTERS: Final = 32

_match_host_id: Final = re.compile(rb"[0-9a-f]{16}\n?").fullmatch


def _is_ours(record: logging.LogRecord) -> bool:
    """Tell a failure of ours from a peer's malformed request, which has its 400 and needs no traceback in our log."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError | web.RequestPayloadError)


_http_log: Final = logging.getLogger("control.http")
_http_log.addFilter(_is_ours)


class StartError(Exception):
    """The daemon cannot start; the message is one sentence with the remedy."""


class HostWatch:
    """Knows whether the host is ready for sandboxes: looks at most every few seconds, and once for all who ask meanwhile."""

    def __init__(self, verify: Callable[[], Awaitable[list[str]]]) -> None:
        self._verify = verify
        self._looking: asyncio.Task[list[str]] | None = None
        self._until = 0.0

    async def problems(self, patience_s: float | None = None) -> list[str]:
        """Return what is wrong with the host, one sentence each. An engine that does not answer is such a problem.

        So is one that takes longer for it than `patience_s`; the look goes on then, for whoever asks next.
        """
        looking = self._looking
        if looking is None or (looking.done() and asyncio.get_running_loop().time() >= self._until):
            looking = self._looking = asyncio.create_task(self._look(), name="host-look")
        done, _ = await asyncio.wait([looking], timeout=patience_s)
        if not done:
            return [f"the Docker engine has not answered for {patience_s:g} s; look at its log, it may hang"]
        return looking.result()

    async def close(self) -> None:
        """Look no more."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    async def _look(self) -> list[str]:
        try:
            problems = await self._verify()
        except EngineError as error:
            problems = [str(error)]
        self._until = asyncio.get_running_loop().time() + HOST_CHECK_S
        return problems


def host_id(data: Path) -> str:
    """Return the id by which containers of this installation are known, made at the first start. Raises StartError."""
    path = data / "host-id"
    try:
        if not path.exists():
            temporary = path.with_suffix(".new")
            temporary.write_text(secrets.token_hex(8) + "\n")
            temporary.rename(path)
        identity = path.read_bytes()
    except OSError as error:
        raise StartError(
            f"{path} cannot be read or made: {error.strerror}; check [paths] data and its owner"
        ) from error
    if not _match_host_id(identity):
        # Under another name it would find none of its containers, and launch their sessions again beside them.
        raise StartError(f"{path} holds no id; put back the value of the label opificia.host of this host's containers")
    return identity.decode().strip()


@contextlib.contextmanager
def alone(data: Path) -> Iterator[None]:
    """Keep other daemons from this folder while the context is open. Raises StartError when there is one.

    Two of them would take each other's sessions for what a restart left. The lock goes with the process (flock(2)).
    """
    path = data / "control.lock"
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o640)
    except OSError as error:
        raise StartError(f"{path} cannot be made: {error.strerror}; check [paths] data and its owner") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise StartError(
            f"another control daemon works in {data}; stop it first, or set another [paths] data"
        ) from None
    try:
        yield
    finally:
        os.close(fd)


class Control:
    """One control daemon. `verify` says what is wrong with the host; `prepare`, if given, makes it right at the start."""

    def __init__(
        self,
        config: ControlConfig,
        engine: Engine,
        identity: str,
        verify: Callable[[], Awaitable[list[str]]],
        prepare: Callable[[], Awaitable[list[str]]] | None = None,
    ) -> None:
        self.config: Final = config
        self._engine = engine
        self._identity = identity
        self._host = HostWatch(verify)
        self._prepare_host = prepare
        self.store: Final = Store(config.store.url)
        self.recorder: Final = Recorder(self.store)
        self.link: Final = GatewayLink(unix_path(config.gateway.contract), UsageBook())
        self._tasks: list[asyncio.Task[None]] = []

    async def failed(self) -> None:
        """Return never; raise when a part of the daemon fails that it cannot go on without."""
        await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        _raise_first(self._tasks)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[SessionManager]:
        """Run the daemon while the context is open. Raises StartError when it cannot start."""
        async with AsyncExitStack() as stack:
            stack.enter_context(alone(self.config.data))
            stack.push_async_callback(self.store.close)
            stack.push_async_callback(self._host.close)
            manager = await self._prepare()
            stack.push_async_callback(self.recorder.close)
            tasks = self._tasks = await stack.enter_async_context(_background())
            runners = RunnerServer(manager.channel_of, self.config.limits.runner_frame_bytes)
            # Before the sessions: a runner that outlived the last process is waiting at the door.
            await stack.enter_async_context(_site(runners.application(), self.config.listen.runner, 0.1))
            for work in (self.recorder.run(), self.link.run(), manager.run()):
                tasks.append(asyncio.create_task(work))
            ready = asyncio.create_task(manager.ready())
            await asyncio.wait([ready, *tasks], return_when=asyncio.FIRST_COMPLETED)
            _raise_first(tasks)
            await self._open_api(stack, manager)
            watchdog = asyncio.create_task(feed_watchdog(_take_turns))
            notify("READY=1")
            try:
                yield manager
            finally:
                notify("STOPPING=1")
                watchdog.cancel()

    async def _prepare(self) -> SessionManager:
        config = self.config
        try:
            await self.store.migrate()
        except StoreUnavailableError as error:
            raise StartError(f"{error}; check [store] url and that the database runs") from error
        try:
            engine = await self._engine.ping()
            for change in await self._prepare_host() if self._prepare_host is not None else ():
                log.info("the host: %s", change)
        except EngineError as error:
            raise StartError(str(error)) from error
        for warning in engine.warnings:
            log.warning("the engine: %s", warning)
        for problem in await self._host.problems():
            log.warning("no session can be launched: %s", problem)
        capacity = config.capacity(engine.memory_bytes, engine.cpus)
        profile = config.sandbox.seccomp_profile
        seccomp = _read(profile, "[sandbox] seccomp_profile") if profile else default_seccomp_profile()

        def container_plan(plan: SandboxPlan) -> ContainerPlan:
            return sandbox_container(plan, config.sandbox, config.network, config.limits, self._identity, seccomp)

        services = Services(
            recorder=self.recorder,
            engine=self._engine,
            link=self.link,
            limits=config.limits,
            sandbox=config.sandbox,
            network=config.network,
            runner_path=Path(reference_runner.__file__),
            container_plan=container_plan,
            host_problems=self._host.problems,
            detect_only=config.docker.detect_only,
        )
        manager = SessionManager(
            services, self.store, Admission(capacity), config.bounds(capacity), config.data / "sessions"
        )
        try:
            await manager.start()
        except StoreUnavailableError as error:
            raise StartError(f"{error}; check [store] url and that the database runs") from error
        return manager

    async def _open_api(self, stack: AsyncExitStack, manager: SessionManager) -> None:
        config = self.config

        def figures() -> Figures:
            records = manager.records()
            return Figures(
                live_by_state=dict(Counter(record.life.state.value for record in records)),
                waiting=len(manager.admission.positions()),
                admitted=manager.admission.admitted,
                addresses_held=manager.addresses_held,
                gateway_connected=self.link.connected,
                sessions_behind=self.recorder.behind(),
            )

        async def health() -> Health:
            return await self._health(manager)

        def application(bearer: Bearer | None = None) -> web.Application:
            return api_application(
                manager, self.link, health, registry(figures), Path(config.paths.egress_logs), bearer
            )

        await stack.enter_async_context(_site(application(), config.listen.api, API_SHUTDOWN_S))
        if config.listen.tcp:
            token = _read(config.listen.token_file, "[listen] token_file").strip()
            if len(token) < MIN_BEARER_CHARACTERS:
                raise StartError(f"[listen] token_file must hold at least {MIN_BEARER_CHARACTERS} characters")
            bearer = Bearer(token)
            await stack.enter_async_context(_site(application(bearer), config.listen.tcp, API_SHUTDOWN_S, bearer))

    async def _health(self, manager: SessionManager) -> Health:
        problems = list(await self._host.problems(HEALTH_PATIENCE_S))
        if not self.link.connected:
            problems.append("the gateway is not connected; check opificia-gateway")
        try:
            await self.store.ping()
        except StoreUnavailableError as error:
            problems.append(f"{error}; check the database")
        problems += manager.strays
        return Health(
            status="degraded" if problems else "ok",
            version=VERSION,
            host_id=self._identity,
            problems=tuple(problems),
            running=manager.admission.admitted,
            waiting=len(manager.admission.positions()),
        )


@asynccontextmanager
async def _background() -> AsyncIterator[list[asyncio.Task[None]]]:
    """Tasks that end with the context."""
    tasks: list[asyncio.Task[None]] = []
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _take_turns() -> None:
    """Return when the loop and a worker thread have had their turns: archives, logs and journals are written by those."""
    await asyncio.to_thread(lambda: None)


def _read(path: str, setting: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(
            f"{path} cannot be read: {getattr(error, 'strerror', None) or error}; check {setting}"
        ) from error


def _raise_first(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        if task.done():
            task.result()


@asynccontextmanager
async def _site(
    app: web.Application, address: str, shutdown_s: float, bearer: Bearer | None = None
) -> AsyncIterator[None]:
    try:
        listening = listen(parse_address(address), BACKLOG)
    except ListenError as error:
        raise StartError(str(error)) from error
    # A stream whose reader has gone would otherwise wait for the session's next word.
    runner = web.AppRunner(
        app, access_log=None, logger=_http_log, shutdown_timeout=shutdown_s, handler_cancellation=True
    )
    await runner.setup()
    assert runner.server is not None
    make = runner.server if bearer is None else bearer.connections(runner.server)
    # It sets the queue's length anew: to 100, if it is not told.
    server = await asyncio.get_running_loop().create_server(make, sock=listening, backlog=BACKLOG)
    try:
        yield
    finally:
        server.close()
        await runner.cleanup()
        listening.close()


async def serve(control: Control) -> None:
    """Run the daemon until SIGTERM or SIGINT. Raises StartError."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with control.running():
        log.info("ready on %s", control.config.listen.api)
        stopping = asyncio.create_task(stop.wait())
        failing = asyncio.create_task(control.failed())
        await asyncio.wait([stopping, failing], return_when=asyncio.FIRST_COMPLETED)
        for task in (stopping, failing):
            task.cancel()
        await asyncio.gather(stopping, return_exceptions=True)
        if failing.done() and not failing.cancelled():
            failing.result()
        log.info("stopping; sandboxes stay as they are")
