"""What a launch needs: image, input and a volume's name to make its container, a host that is ready and a grant to start it.

What needs not wait for another is done side by side, each with a reason of its own when it fails. Nothing is started here.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path
from typing import Final, TypeVar

from control.docker.types import ImageFacts
from control.link import GatewayLink, GatewayUnavailableError, GrantRefusedError
from control.plan.container import ContainerPlan, SandboxPlan, SandboxSettings
from control.plan.environment import sandbox_environment
from control.plan.grants import grant_for, policy_digest
from control.plan.network import NetworkSettings
from control.plan.session import Reason
from control.sessions import folders
from control.sessions.engine import Engine
from control.sessions.record import Record, Recorder, see_through
from gateway.contract.limits import ControlLimits
from gateway.contract.policy import Usage

T = TypeVar("T")

# The gateway answers within milliseconds; longer than its restart takes, and a launch that waits is not lost yet.
GRANT_TIMEOUT_S: Final = 15.0


@dataclass(frozen=True, slots=True)
class Services:
    """What every session's life needs of the daemon."""

    recorder: Recorder
    engine: Engine
    link: GatewayLink
    limits: ControlLimits
    sandbox: SandboxSettings
    network: NetworkSettings
    runner_path: Path
    container_plan: Callable[[SandboxPlan], ContainerPlan]
    # Problems of the host for which nothing may start, empty when it is ready.
    host_problems: Callable[[], Awaitable[list[str]]]
    # What belongs to no session is told of, not removed.
    detect_only: bool = False


class EndError(Exception):
    """The session is to end for this reason."""

    def __init__(self, reason: Reason, message: str = "") -> None:
        super().__init__(message)
        self.reason = reason


async def whole(work: Awaitable[T]) -> T:
    """Wait for a step of the engine to its end even when cancelled: half of one cannot be taken down."""
    task = asyncio.ensure_future(work)
    if await see_through(task):
        raise asyncio.CancelledError
    return task.result()


class Launch:
    """One launch."""

    def __init__(self, record: Record, services: Services) -> None:
        self.record: Final = record
        self._services = services

    async def prepare(self, token: str) -> tuple[ContainerPlan, str]:
        """Return the container to make and the id of its image. Raises EndError, EngineError."""
        services, record, spec = self._services, self.record, self.record.spec
        try:
            async with asyncio.TaskGroup() as group:
                finding_image = group.create_task(self._image())
                finding_in_dir = group.create_task(self._in_dir())
                naming_volume = group.create_task(services.engine.declare_out_volume(record.id))
        except ExceptionGroup as failed:
            raise _telling(failed) from failed
        image = finding_image.result()
        plan = services.container_plan(
            SandboxPlan(
                session=record.id,
                run=record.stored.run_id,
                policy_digest=policy_digest(spec),
                image=image.id,
                address=IPv4Address(record.life.address),
                environment=sandbox_environment(
                    record.id,
                    record.stored.run_id,
                    token,
                    services.network,
                    ca_bundle=bool(services.sandbox.ca_bundle),
                    openai_provider=services.sandbox.openai_provider,
                    extra=spec.env,
                ),
                in_dir=finding_in_dir.result(),
                out_volume=naming_volume.result(),
                runner=None if image.own_runner else str(services.runner_path),
                image_volumes=image.volumes,
                memory_bytes=spec.resources.memory_bytes,
                cpus=spec.resources.cpus,
                pids=spec.resources.pids,
                runtime=spec.runtime,
            )
        )
        return plan, image.id

    async def permit(self) -> None:
        """Return when the container may be started: the host's walls stand, and the gateway has acknowledged the grant.

        Takes as long as making the container, which is nothing without its start. Raises EndError, EngineError.
        """
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._require_host())
                group.create_task(self._grant())
        except ExceptionGroup as failed:
            raise _telling(failed) from failed

    async def make_volume(self) -> None:
        """Make what /out is mounted from. Takes as long as making the container, which needs only its name."""
        services = self._services
        await services.engine.create_out_volume(self.record.id, services.limits.out_bytes, services.limits.out_files)

    async def _require_host(self) -> None:
        if problems := await self._services.host_problems():
            raise EndError(Reason.HOST_NOT_READY, problems[0])

    async def _image(self) -> ImageFacts:
        reference = self.record.spec.image
        image = await self._services.engine.image(reference)
        if image is None:
            raise EndError(
                Reason.IMAGE_MISSING,
                f"the engine has no image {reference}; build or load it with `opificia images`, it is not pulled",
            )
        if not image.own_runner and not image.can_run_runner:
            raise EndError(Reason.IMAGE_UNUSABLE, f"{reference} has no Python 3.8 or later and brings no runner")
        return image

    async def _in_dir(self) -> str:
        wanted = self.record.spec.in_dir
        if not wanted:
            return str(self.record.folder / "in")
        try:
            return await asyncio.to_thread(folders.check_in_dir, wanted, self._services.sandbox.in_roots)
        except folders.InputError as error:
            raise EndError(Reason.IN_DIR_REFUSED, str(error)) from error

    async def _grant(self) -> None:
        record = self.record
        life = record.life
        grant = grant_for(record.spec, record.id, life.token_sha256, life.address, Usage())
        try:
            await self._services.link.put(grant, GRANT_TIMEOUT_S)
        except GrantRefusedError as error:
            raise EndError(Reason.GRANT_REFUSED, str(error)) from error
        except GatewayUnavailableError as error:
            raise EndError(Reason.GATEWAY_UNAVAILABLE, f"{error}; is opificia-gateway running?") from error


def _telling(failed: ExceptionGroup[Exception]) -> Exception:
    """Return the one of several failures that says most: a reason before an accident."""
    ends, others = failed.split(EndError)
    found: Exception = ends or others or failed
    while isinstance(found, ExceptionGroup):
        found = found.exceptions[0]
    return found
