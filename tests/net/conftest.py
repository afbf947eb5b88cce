"""Gateways for network tests: one shared by the tests that need nothing special, others as a test asks.

What a sandbox may say is tested twice: at the port itself, and from a container through bridge, firewall, forwarder and door.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import uvloop

from tests.support.engine import PrivateEngine
from tests.support.forwarded import Forwarded
from tests.support.gateway_process import GatewayProcess, doors, gateway_process
from tests.support.sockets import drop_clients

TWICE = {
    "test_connect_requests",
    "test_connect_addresses",
    "test_model",
    "test_tunnel",
    "test_plain",
    "test_plain_bodies",
    "test_overload",
}

# What only a sandbox does, or only its way to the gateway changes.
FORWARDED = {"test_crowd"}

# These run the gateway's own code, so they run it on the gateway's own loop.
INSIDE = {"test_dial", "test_resolve"}


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Choose the loop of each module."""
    if item.path.stem in INSIDE:
        return {"uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}


@pytest.fixture(autouse=True)
async def clients_end_with_their_test() -> AsyncIterator[None]:
    """Drop what a failed test left open."""
    yield
    await drop_clients()


@pytest.fixture(scope="package")
def engine() -> Iterator[PrivateEngine]:
    """A Docker engine in namespaces of its own; a new one for the folder, so that no folder meets another's host."""
    with PrivateEngine.acquire() as private:
        yield private


@pytest.fixture(scope="package")
def forwarded(engine: PrivateEngine) -> Iterator[Forwarded]:
    """A prepared host with a container on it."""
    place = Forwarded(engine)
    place.start()
    yield place
    place.stop()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the modules of TWICE both ways, those of FORWARDED from a container alone."""
    module = metafunc.module.__name__.rpartition(".")[2]
    if module in TWICE | FORWARDED:
        ways = ["forwarder"] if module in FORWARDED else ["direct", "forwarder"]
        metafunc.parametrize("way", ways, indirect=True, scope="module")


@pytest.fixture(scope="module", autouse=True)
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Which way the clients of `gateway_process` take."""
    chosen = getattr(request, "param", "direct")
    doors.forwarded = request.getfixturevalue("forwarded") if chosen == "forwarder" else None
    yield chosen
    doors.forwarded = None


@pytest.fixture(scope="module")
def gateway(way: str) -> Iterator[GatewayProcess]:
    """Run one gateway with a session of each kind for a module of tests."""
    sessions: list[dict[str, Any]] = [
        {"id": "s1"},
        {"id": "second"},
        {
            "id": "listed",
            "network": "registries",
            "allow": ["*.example.com", "plain.example.org", "git.example.net:22"],
        },
        {"id": "denied", "deny": ["127.0.0.1", "*.evil.example"]},
        {"id": "offline", "network": "none"},
    ]
    with gateway_process(sessions=sessions) as process:
        yield process
