"""A private engine with our images and a prepared host; sandboxes that run a command in place of the runner."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from control.docker.service import DockerService
from control.images.store import install
from control.plan.container import DockerSettings, ImageSettings
from control.plan.host import ForwarderSettings, HostPlan
from control.plan.network import NetworkSettings
from gateway.contract.limits import MIB, ControlLimits
from tests.docker.door import Door
from tests.docker.sandboxes import HOST_ID, Sandboxes
from tests.support import identities
from tests.support.engine import PrivateEngine
from tests.support.paths import IMAGES

LIMITS = ControlLimits(log_bytes=8 * MIB, out_bytes=16 * MIB, out_files=200)


@pytest.fixture(scope="package")
def engine() -> Iterator[PrivateEngine]:
    """A Docker engine in namespaces of its own; a new one for the folder, so that no folder meets another's host."""
    with PrivateEngine.acquire() as private:
        yield private


def open_service(engine: PrivateEngine) -> DockerService:
    """Make a service for the running loop; the caller closes it."""
    return DockerService(DockerSettings(socket=str(engine.socket)), HOST_ID, limits=LIMITS)


@pytest.fixture(scope="package")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    """The gateway's side of the door: answers every connection with the PROXY header that it came with."""
    folder = tmp_path_factory.mktemp("door")
    for parent in (folder, *folder.parents):
        if parent.stat().st_uid == os.getuid() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o055)
    os.chown(folder, identities.GATEWAY, identities.FORWARDER)
    door = Door(folder / "sandbox.sock")
    os.chown(door.path, identities.GATEWAY, identities.FORWARDER)
    door.path.chmod(0o660)
    thread = threading.Thread(target=door.serve, daemon=True)
    thread.start()
    yield door
    door.close()
    thread.join()


def host_plan(door: Door) -> HostPlan:
    """What a host of these tests is to have."""
    return HostPlan(
        network=NetworkSettings(),
        images=ImageSettings(),
        forwarder=ForwarderSettings(user=f"{identities.FORWARDER}:{identities.FORWARDER}"),
        door=str(door.path.parent),
    )


async def prepare(engine: PrivateEngine, plan: HostPlan) -> list[str]:
    """Load the images into an engine, prepare the host, and return the changes that were made."""
    service = open_service(engine)
    try:
        await install(service.images, plan.images, IMAGES)
        return await service.prepare_host(plan)
    finally:
        await service.close()


@pytest.fixture(scope="package")
def plan(door: Door) -> HostPlan:
    """What this host is to have."""
    return host_plan(door)


@pytest.fixture(scope="package")
def prepared(engine: PrivateEngine, plan: HostPlan) -> list[str]:
    """Prepare the host once for all tests."""
    return asyncio.run(prepare(engine, plan))


@pytest.fixture
async def service(engine: PrivateEngine, prepared: list[str]) -> AsyncIterator[DockerService]:
    """A service on the prepared host."""
    service = open_service(engine)
    yield service
    await service.close()


@pytest.fixture
async def sandboxes(service: DockerService, plan: HostPlan, tmp_path: Path) -> AsyncIterator[Sandboxes]:
    """Launch sandboxes; all are gone after the test."""
    sandboxes = Sandboxes(service, plan.network, LIMITS, tmp_path)
    yield sandboxes
    await sandboxes.close()
