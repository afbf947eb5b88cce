"""Containers and volumes of this installation that belong to no live session: logs kept, then removed.

They come from a crash between two steps, or from a database that was set back. Looked for at the start, and every so often.
An operator who has set a database back can have them told of only, and look at them first.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from control.docker.types import EngineError, NotFoundError, ObservedContainer
from control.plan.container import ROLE_SANDBOX
from control.plan.reconcile import Found
from control.sessions.engine import Engine
from control.sessions.logs import LogFiles
from control.sessions.record import now_ms
from gateway.contract.limits import ControlLimits

log = logging.getLogger(__name__)

RETRY_S: Final = 2.0
SWEEP_S: Final = 300.0
# An ended container's log is read in moments; a stray may not hold up the sweep.
LOGS_S: Final = 60.0


class Strays:
    """Finds and removes what nobody owns; with `detect_only` it only tells.

    `left`: what was found and left, by its name, a sentence each.
    """

    def __init__(self, engine: Engine, limits: ControlLimits, sessions_folder: Path, detect_only: bool) -> None:
        self._engine = engine
        self._limits = limits
        self._folder = sessions_folder
        self._detect_only = detect_only
        self.left: dict[str, str] = {}

    async def containers(self) -> list[Found]:
        """Return all sandboxes of this installation. Raises EngineError."""
        return await sandboxes(self._engine)

    async def sweep(self, known: Callable[[str], bool]) -> None:
        """Remove, every so often, what belongs to a session that is not `known` any more; until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                containers = [each for each in await self.containers() if not known(each.session)]
                volumes = [each for each in await self._engine.out_volumes() if not known(each)]
            except EngineError as error:
                log.warning("strays cannot be looked for now: %s", error)
                continue
            self.left.clear()
            for container in containers:
                log.warning("container %s of session %s is stray", container.id[:12], container.session)
                await self._once(self._remove(container.id, container.session, ran=container.ran))
            for session in volumes:
                log.warning("the volume of session %s is stray", session)
                await self._once(self._remove_volume(session))

    @staticmethod
    async def _once(removal: Awaitable[None]) -> None:
        """Leave what will not go to the next sweep: it must not keep this one from the others."""
        try:
            await removal
        except EngineError as error:
            log.warning("it cannot be removed now: %s", error)

    async def remove(self, container: str, session: str, *, ran: bool) -> None:
        """Stop a container, keep its logs if its session has a folder, and remove it; try until that succeeds."""
        while True:
            try:
                return await self._remove(container, session, ran=ran)
            except EngineError as error:
                log.warning("container %s cannot be removed, trying again: %s", container[:12], error)
                await asyncio.sleep(RETRY_S)

    async def _remove(self, container: str, session: str, *, ran: bool) -> None:
        if self._detect_only:
            name = container[:12]
            self.left[container] = (
                f"container {name} belongs to no session here (its label says {session}) and was left; docker rm -f {name}"
            )
            return
        try:
            if ran:
                await self._engine.stop(container, self._limits.stop_grace_ms / 1000)
                await self._keep_logs(container, self._folder / session)
            await self._engine.remove(container)
        except NotFoundError:
            return

    async def _remove_volume(self, session: str) -> None:
        if self._detect_only:
            self.left[session] = (
                f"the volume of session {session} belongs to no session here and was left; unset [docker] detect_only"
            )
        else:
            await self._engine.remove_out_volume(session)

    async def _keep_logs(self, container: str, folder: Path) -> None:
        if not await asyncio.to_thread(folder.is_dir):
            return
        try:
            logs = LogFiles(folder, self._limits.log_bytes, now_ms, lambda: None)
        except OSError as error:
            log.warning("the logs of container %s cannot be kept: %s", container[:12], error)
            return
        try:
            async with asyncio.timeout(LOGS_S):
                await self._engine.follow_logs(container, logs)
        except TimeoutError:
            log.warning("the logs of container %s cannot be read to their end", container[:12])
        finally:
            logs.close()


async def sandboxes(engine: Engine) -> list[Found]:
    """Return all sandboxes of this installation, whatever their state. Raises EngineError."""
    return [_found(each) for each in await engine.owned() if each.role == ROLE_SANDBOX]


def _found(container: ObservedContainer) -> Found:
    return Found(container.id, container.session, bool(container.started_at), container.policy_digest)
