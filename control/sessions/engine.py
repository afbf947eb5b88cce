"""What sessions need of the container engine: the part of control.docker.service.DockerService that they use."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from control.docker.types import (
    ContainerExit,
    EngineInfo,
    ImageFacts,
    LogSink,
    ObservedContainer,
    OutLimits,
    OutSummary,
)
from control.plan.container import ContainerPlan


class Engine(Protocol):
    """All calls raise EngineError; NotFoundError when the engine has no such thing."""

    async def ping(self) -> EngineInfo:
        """Ask the engine who it is."""

    async def image(self, reference: str) -> ImageFacts | None:
        """Return what a launch must know of an image, or None when the engine does not have it."""

    async def create(self, plan: ContainerPlan) -> str:
        """Make a container and return its id."""

    async def start(self, container: str) -> None:
        """Start a container."""

    async def follow_logs(self, container: str, sink: LogSink) -> str:
        """Bring all output to `sink`; return when the container has ended and its output is whole, else what is missing."""

    async def wait(self, container: str) -> ContainerExit:
        """Return how the container ended, when it has."""

    async def stop(self, container: str, grace_s: float) -> None:
        """Ask the container to end, after the grace kill it."""

    async def kill(self, container: str) -> None:
        """Kill the container at once; one that has ended is no error."""

    async def remove(self, container: str) -> None:
        """Remove a container, running or not; one that is gone is no error."""

    async def remove_made_for(self, session: str) -> None:
        """Remove a session's containers whose making was asked for but never answered; none is no error."""

    async def owned(self) -> Sequence[ObservedContainer]:
        """Return the containers of this installation."""

    async def declare_out_volume(self, session: str) -> str:
        """Return the name of the session's volume, with which a container can be made; its start needs the volume."""

    async def create_out_volume(self, session: str, size_bytes: int, inodes: int) -> str:
        """Make the session's volume of limited size for /out and return its name."""

    async def out_volumes(self) -> Sequence[str]:
        """Return the sessions of this installation that have a volume."""

    async def remove_out_volume(self, session: str) -> None:
        """Remove the session's volume; one that is gone is no error."""

    async def archive_out(self, container: str, destination: Path, limits: OutLimits) -> OutSummary:
        """Write what the ended container left in /out to a tar file."""
