"""The life of one session from admission to its end: one task, which drives the container and the runner.

Every step is recorded before it is taken. Whoever ends the session does so by `end`: the reason is recorded, the step
under way is cancelled, and what exists is taken down in order: container stopped, grant revoked, logs and results kept,
final state recorded. Container, volume and address are then the manager's to take away.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Final

from control.docker.types import ContainerExit, EngineError, EngineUnavailableError, NotFoundError, OutLimits
from control.plan.container import ContainerPlan
from control.plan.session import (
    ContainerCreated,
    ContainerExited,
    Ended,
    EndRequested,
    Exit,
    NotAllowed,
    Reason,
)
from control.runner.channel import Channel, NotAllowedError
from control.runner.messages import Run
from control.sessions.launch import EndError, Launch, Services, whole
from control.sessions.logs import LogFiles
from control.sessions.record import Record, now_ms
from control.sessions.uptime import boot_id, gone_ms, uptime_ms

log = logging.getLogger(__name__)

MAIN_RUN: Final = "main"
# A runner that was told to shut down has nothing left to do.
SHUTDOWN_GRACE_S: Final = 30.0
RETRY_S: Final = 2.0
# How exactly the time of a runner's absence is told from that of the gateway's.
PRESENCE_STEP_S: Final = 1.0
# After the container's end its output is complete within moments, unless the engine hangs.
LOGS_TIMEOUT_S: Final = 60.0


class Life:
    """One live session."""

    def __init__(self, record: Record, services: Services, token: str = "", grace_ms: int | None = None) -> None:
        self.record: Final = record
        self.channel: Final = Channel(record, services.recorder, services.limits.runner_frame_bytes)
        self._services = services
        self._token = token
        self._adopted = not token
        # Time is told by the clock that nobody sets.
        self._begun = time.monotonic()
        self._gone_before_s = gone_ms(record.life, boot_id(), uptime_ms(), now_ms()) / 1000 if self._adopted else 0.0
        self._grace_ms = services.limits.stop_grace_ms if grace_ms is None else grace_ms
        # A grace was named; one that is named while the container has its grace already shortens that.
        self._hurried = asyncio.Event()
        self._steps: asyncio.Task[None] | None = None
        self._following: asyncio.Task[str] | None = None
        self._revoking: asyncio.Task[None] | None = None
        self._logs: LogFiles | None = None
        self._started = self._adopted
        self._exit: Exit | None = record.life.exit

    async def end(self, reason: Reason, message: str = "", grace_ms: int | None = None) -> bool:
        """Record that the session is to end and begin to end it; False when it has ended already."""
        if grace_ms is not None:
            self._grace_ms = grace_ms
        result = await self._services.recorder.record(self.record, EndRequested(reason, message))
        if self._steps is not None:
            self._steps.cancel()
        if grace_ms is not None:
            self._hurried.set()
        return not isinstance(result, NotAllowed)

    async def run(self) -> None:
        """Live to the end. Cancelling this leaves container and grant as they are, for the next start of the daemon."""
        if self._adopted:
            # Also of one that is to be ended: what it said since the last process is not kept yet.
            self._follow_logs(self.record.life.container)
        self._steps = asyncio.create_task(self._live(), name=f"session-{self.record.id}")
        if self.record.life.ending is not None:
            self._steps.cancel()
        try:
            await asyncio.wait([self._steps])
            await self._note_outcome(self._steps)
            await self._finish()
        except asyncio.CancelledError:
            self._steps.cancel()
            await asyncio.wait([self._steps])
            raise
        finally:
            ending = [task for task in (self._following, self._revoking) if task is not None]
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)
            if self._logs is not None:
                self._logs.close()
            await self.channel.close("the session is over")

    async def _note_outcome(self, steps: "asyncio.Task[None]") -> None:
        """Record why the steps ended, if nobody asked them to and the container did not."""
        if steps.cancelled():
            return
        match steps.exception():
            case None:
                return
            case EndError() as error:
                reason, message = error.reason, str(error)
            case EngineError() as error:
                reason, message = Reason.ENGINE_ERROR, str(error)
            case error:
                log.error("session %s: %r", self.record.id, error, exc_info=error)
                reason, message = Reason.CONTROL_ERROR, f"the control daemon failed: {type(error).__name__}"
        await self._services.recorder.record(self.record, EndRequested(reason, message))

    # Launch and watch.

    async def _live(self) -> None:
        if not self._adopted:
            await self._launch()
        await self._watch(self.record.life.container)

    async def _launch(self) -> None:
        launch = Launch(self.record, self._services)
        # Both take longer than the container's making, which needs only the volume's name; its start needs all of it.
        volume = asyncio.create_task(launch.make_volume(), name=f"volume-{self.record.id}")
        permit = asyncio.create_task(launch.permit(), name=f"permit-{self.record.id}")
        try:
            plan, image_id = await launch.prepare(self._token)
            self._token = ""
            if permit.done():
                # What may not start is not made.
                permit.result()
            container = await whole(self._create(plan, image_id))
            await permit
            await asyncio.shield(volume)
        finally:
            permit.cancel()
            # Half of a volume cannot be taken down.
            await whole(asyncio.gather(volume, permit, return_exceptions=True))
        await whole(self._start(container))

    async def _start(self, container: str) -> None:
        await self._services.engine.start(container)
        self._started = True

    async def _create(self, plan: ContainerPlan, image_id: str) -> str:
        """Make the container and record it. To be seen through: both happen, or neither."""
        container = await self._services.engine.create(plan)
        # Attached while the disk takes note: the start waits for both.
        self._follow_logs(container)
        await self._services.recorder.record(self.record, ContainerCreated(container, image_id))
        return container

    def _follow_logs(self, container: str) -> None:
        loop, logged = asyncio.get_running_loop(), self.record.logged
        self._logs = LogFiles(
            self.record.folder,
            self._services.limits.log_bytes,
            now_ms,
            lambda: _call_soon(loop, logged.raise_),
        )
        self._following = asyncio.create_task(
            self._services.engine.follow_logs(container, self._logs), name=f"logs-{self.record.id}"
        )

    async def _watch(self, container: str) -> None:
        """Return when the container has ended. Raises EndError when it is to be ended."""
        watchers: list[asyncio.Task[Any]] = []
        try:
            exiting = asyncio.create_task(self._wait_for_exit(container), name="container-exit")
            watchers = [
                exiting,
                asyncio.create_task(self._converse(), name="conversation"),
                asyncio.create_task(self.channel.keep(), name="runner-events"),
                asyncio.create_task(self._time_limit(), name="time-limit"),
            ]
            done, _ = await asyncio.wait(watchers, return_when=asyncio.FIRST_COMPLETED)
            # An exit is the truth, whatever else ended in the same moment.
            if exiting in done:
                exiting.result()
            for task in done:
                task.result()
        finally:
            for task in watchers:
                task.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)

    async def _wait_for_exit(self, container: str) -> None:
        try:
            self._exit = _exit(await self._services.engine.wait(container))
        except NotFoundError:
            # Removed behind our back: nobody knows its exit any more.
            self._exit = Exit(None)

    async def _converse(self) -> None:
        """Lead the runner: hello, the session's command, shutdown; end the session when the runner stays away."""
        limits, channel, life = self._services.limits, self.channel, self.record.life
        if not self._adopted or life.connected_at is None:
            allowed_s = limits.hello_timeout_ms / 1000
            if not await self._comes(channel.present, allowed_s):
                raise EndError(Reason.HELLO_TIMEOUT, f"the runner did not say hello within {allowed_s:g} s")
        staying = asyncio.create_task(self._stay_connected(), name="runner-presence")
        leading = asyncio.create_task(self._lead(), name="runner-lead")
        try:
            done, _ = await asyncio.wait([staying, leading], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (staying, leading):
                task.cancel()
            await asyncio.gather(staying, leading, return_exceptions=True)

    async def _stay_connected(self) -> None:
        """Raise EndError when the runner is away for too long."""
        allowed_s = self._services.limits.runner_reconnect_ms / 1000
        while True:
            await self.channel.gone.wait()
            if not await self._comes(self.channel.present, allowed_s):
                raise EndError(Reason.RUNNER_LOST, f"the runner was away for {allowed_s:g} s")

    async def _comes(self, event: asyncio.Event, allowed_s: float) -> bool:
        """Wait for what the runner is to do in so much time; while the gateway is away none passes: it is not its fault."""
        left_s = allowed_s
        while left_s > 0 and not event.is_set():
            step_s = min(left_s, PRESENCE_STEP_S)
            try:
                async with asyncio.timeout(step_s):
                    await event.wait()
            except TimeoutError:
                if self._services.link.connected:
                    left_s -= step_s
        return event.is_set()

    async def _lead(self) -> None:
        spec, life = self.record.spec, self.record.life
        if not spec.command:
            await asyncio.Event().wait()
        code = life.claimed_code
        if code is None:
            message = Run(run=MAIN_RUN, argv=spec.command, cwd=spec.cwd)
            if life.main_run:
                handle = self.channel.adopt(message)
            else:
                try:
                    handle = await self.channel.run(message, main=True, follow=False)
                except NotAllowedError as error:
                    raise EndError(Reason.CONTROL_ERROR, str(error)) from error
            code = (await handle.completed).exit_code
        await self.channel.present.wait()
        await self.channel.shutdown(code, int(SHUTDOWN_GRACE_S * 1000) // 2)
        # Its end is told by its container's.
        await self._comes(asyncio.Event(), SHUTDOWN_GRACE_S)
        raise EndError(Reason.SHUTDOWN_TIMEOUT, "the runner did not end when its command had")

    async def _time_limit(self) -> None:
        allowed_ms = self.record.spec.time_limit_ms or self._services.limits.session_time_ms
        gone_s = self._gone_before_s + time.monotonic() - self._begun
        await asyncio.sleep(max(0.0, allowed_ms / 1000 - gone_s))
        raise EndError(Reason.TIME_LIMIT, f"the session's time of {allowed_ms / 1000:g} s is over")

    # Take down.

    async def _finish(self) -> None:
        record, services = self.record, self._services
        container = record.life.container
        if container:
            await self._ensure_exit(container)
            await services.recorder.record(record, ContainerExited(self._exit or Exit(None)))
        self._revoking = asyncio.create_task(services.link.revoke(record.id), name=f"revoke-{record.id}")
        await self.channel.close("the session is over")
        note = await self._collect(container) if container else ""
        await services.recorder.record(record, Ended(note))

    async def _ensure_exit(self, container: str) -> None:
        """Stop the container, however often that must be tried: the engine may be away, and nothing may run on."""
        if not self._started:
            # Its start failed or was never asked for. There is no exit; its removal ends what may have begun.
            self._exit = Exit(None)
        while self._exit is None:
            try:
                await self._stop(container)
                self._exit = _exit(await self._services.engine.wait(container))
            except NotFoundError:
                self._exit = Exit(None)
            except EngineError as error:
                log.warning("session %s: cannot stop its container, trying again: %s", self.record.id, error)
                await asyncio.sleep(RETRY_S)

    async def _stop(self, container: str) -> None:
        self._hurried.clear()
        hurrying = asyncio.create_task(self._kill_when_hurried(container), name="hurry")
        try:
            await self._services.engine.stop(container, self._grace_ms / 1000)
        finally:
            hurrying.cancel()
            await asyncio.gather(hurrying, return_exceptions=True)

    async def _kill_when_hurried(self, container: str) -> None:
        """Kill the container when a shorter grace was named than the one that the engine gives it already."""
        await self._hurried.wait()
        await asyncio.sleep(self._grace_ms / 1000)
        await self._services.engine.kill(container)

    async def _collect(self, container: str) -> str:
        """Keep logs and results; return what could not be kept, one sentence."""
        notes = []
        if self._following is not None and self._started:
            try:
                async with asyncio.timeout(LOGS_TIMEOUT_S):
                    if note := await self._following:
                        notes.append(note)
            except (TimeoutError, EngineError) as error:
                notes.append(
                    f"the end of the logs could not be kept: {error or 'the engine hangs, or the disk is full'}"
                )
        if note := await self._keep_results(container):
            notes.append(note)
        return "; ".join(notes)

    async def _keep_results(self, container: str) -> str:
        """Keep what is in /out, however long the engine is away: until then nothing removes it. Returns what was not kept."""
        services, record = self._services, self.record
        limits = OutLimits(services.limits.out_bytes, services.limits.out_files)
        while True:
            try:
                summary = await services.engine.archive_out(container, record.folder / "out.tar", limits)
                return "the results are cut at the limit of /out" if summary.truncated else ""
            except EngineUnavailableError as error:
                log.warning("session %s: its results cannot be read, trying again: %s", record.id, error)
                await asyncio.sleep(RETRY_S)
            except EngineError as error:
                return "" if record.life.connected_at is None else f"the results could not be kept: {error.message}"


def _exit(exit_: ContainerExit) -> Exit:
    return Exit(exit_.exit_code, exit_.oom_killed, exit_.error)


def _call_soon(loop: asyncio.AbstractEventLoop, act: Callable[[], None]) -> None:
    # The loop may have closed under a log thread that is still ending.
    try:
        loop.call_soon_threadsafe(act)
    except RuntimeError:
        pass
