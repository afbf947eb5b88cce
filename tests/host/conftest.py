"""One private host for the folder: engine, forwarder, both daemons as their own users, and two sandboxes."""

import contextlib
from collections.abc import AsyncIterator, Iterator

import docker
import pytest

from control.client import ControlClient
from control.plan.network import NetworkSettings
from control.spec import SandboxSpec
from gateway.contract.policy import NetworkLevel
from tests.support.engine import PrivateEngine
from tests.support.host import Model, PrivateHost, stand_in_model
from tests.support.sandbox import IMAGE, Sandbox

METADATA = "169.254.169.254"


@pytest.fixture(scope="package")
def engine() -> Iterator[PrivateEngine]:
    """A Docker engine in namespaces of its own; a new one for the folder, so that no folder meets another's host."""
    with PrivateEngine.acquire() as private:
        yield private


@pytest.fixture(scope="package")
def model() -> Iterator[Model]:
    with stand_in_model() as provider:
        yield provider


@pytest.fixture(scope="package")
def host(engine: PrivateEngine, model: Model) -> Iterator[PrivateHost]:
    with PrivateHost(engine, model) as private:
        yield private


@pytest.fixture(autouse=True)
def whole_again(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test did to the host's daemons or rules, the next one finds it whole."""
    yield
    private = request.node.funcargs.get("host")
    if isinstance(private, PrivateHost):
        private.wait_ready()


@pytest.fixture(scope="package")
def network() -> NetworkSettings:
    return NetworkSettings()


@pytest.fixture(scope="package")
def agent(host: PrivateHost) -> Iterator[Sandbox]:
    """Level `registries`, as most sessions have it."""
    sandbox = host.sandbox(SandboxSpec(image=IMAGE, network=NetworkLevel.REGISTRIES))
    yield sandbox
    sandbox.stop()


@pytest.fixture(scope="package")
def other(host: PrivateHost) -> Iterator[Sandbox]:
    """Level `open`, and a rule that names the metadata address."""
    sandbox = host.sandbox(SandboxSpec(image=IMAGE, network=NetworkLevel.OPEN, allow=(METADATA,)))
    yield sandbox
    sandbox.stop()


@pytest.fixture
async def control(host: PrivateHost) -> AsyncIterator[ControlClient]:
    async with ControlClient(host.api) as client:
        yield client


@pytest.fixture
def docker_client(engine: PrivateEngine) -> Iterator[docker.DockerClient]:
    with contextlib.closing(engine.client()) as client:
        yield client
