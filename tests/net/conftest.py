"""Gateways for network tests: one shared by the tests that need nothing special, others as a test asks."""

from collections.abc import Iterator

import pytest

from tests.support.gateway_process import GatewayProcess, gateway_process


@pytest.fixture(scope="module")
def gateway() -> Iterator[GatewayProcess]:
    """Run one gateway with a session of each kind for a module of tests."""
    sessions = [
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
