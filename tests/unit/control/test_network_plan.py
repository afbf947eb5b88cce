"""The address plan of the sandbox network."""

from ipaddress import IPv4Address

import pytest

from control.plan.network import NetworkSettings

SMALL = NetworkSettings(subnet="10.9.0.0/27")


def test_forwarder_and_bridge_have_the_first_addresses() -> None:
    assert NetworkSettings().bridge_address == IPv4Address("10.231.0.1")
    assert NetworkSettings().forwarder == IPv4Address("10.231.0.2")


def test_first_sandbox_has_the_sixteenth_address() -> None:
    assert NetworkSettings().free_address(set()) == IPv4Address("10.231.0.16")


def test_an_address_rests_before_it_is_given_again() -> None:
    first = SMALL.free_address(set())
    assert first is not None
    assert SMALL.free_address(set(), after=first) == first + 1


def test_every_address_is_given_once_and_then_none() -> None:
    taken: set[IPv4Address] = set()
    last = None
    while (address := SMALL.free_address(taken, after=last)) is not None:
        assert SMALL.is_sandbox(address)
        assert address not in taken
        taken.add(address)
        last = address
    assert len(taken) == SMALL.capacity == 15


def test_search_wraps_around_to_a_freed_address() -> None:
    every = {IPv4Address("10.9.0.16") + step for step in range(15)}
    freed = IPv4Address("10.9.0.20")
    assert SMALL.free_address(every - {freed}, after=IPv4Address("10.9.0.30")) == freed


@pytest.mark.parametrize("address", ["10.9.0.2", "10.9.0.15", "10.9.0.31", "10.9.0.32"])
def test_addresses_of_the_host_side_and_broadcast_are_no_sandboxes(address: str) -> None:
    assert not SMALL.is_sandbox(IPv4Address(address))


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        (NetworkSettings(name="a b"), "name"),
        (NetworkSettings(bridge="a-name-of-16-chr"), "bridge"),
        (NetworkSettings(bridge="0x"), "bridge"),
        (NetworkSettings(subnet="10.231.0.1/16"), "subnet"),
        (NetworkSettings(subnet="10.231.0.0/28"), "subnet"),
        (NetworkSettings(subnet="8.8.0.0/16"), "subnet"),
        (NetworkSettings(subnet="127.0.0.0/8"), "subnet"),
        (NetworkSettings(subnet="169.254.0.0/16"), "subnet"),
        (NetworkSettings(gateway_name="Gateway"), "gateway_name"),
        (NetworkSettings(gateway_port=80), "gateway_port"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: NetworkSettings, field: str) -> None:
    assert [problem.split(":")[0] for problem in settings.problems()] == [field]


def test_default_settings_have_no_problem() -> None:
    assert NetworkSettings().problems() == []
