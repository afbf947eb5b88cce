"""Whether a session may reach a host, its addresses, and with this ClientHello."""

from importlib import resources
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.names import client_hello
from gateway.contract.policy import NetworkLevel
from gateway.core.address import address_class
from gateway.core.authority import Authority
from gateway.core.budget import Slots
from gateway.core.clienthello import ClientHello, parse_client_hello
from gateway.core.decide import HostFacts, decide_addresses, decide_hello, decide_host
from gateway.core.rules import Policy, load_registries
from gateway.core.verdict import Allow, Deny

_HOST = "files.pythonhosted.org"
_AUTHORITY = Authority(_HOST, 443)
_ALLOW = [f"*.team{number}.example" for number in range(12)] + ["git.example.org:22", "192.0.2.7:443"]
_DENY = ["*.telemetry.example", "paste.example", "198.51.100.9"]
_FACTS = HostFacts(
    denied_networks=(ip_network("93.184.0.0/16"), ip_network("2606:2800::/32")),
    own_addresses=frozenset(map(ip_address, ("127.0.0.1", "::1", "192.0.2.10", "2001:db8::10"))),
    own_ports=frozenset({8900, 8901}),
)
# What a content network answers.
_ADDRESSES = tuple(
    [IPv6Address(f"2a04:4e42:{part}::223") for part in ("0", "200", "400", "600")]
    + [IPv4Address(f"151.101.{part}.223") for part in (0, 64, 128, 192)]
)


@pytest.fixture(scope="module")
def policy() -> Policy:
    registries = load_registries((resources.files("gateway") / "data/registries.toml").read_text())
    return Policy.compile(NetworkLevel.REGISTRIES, _ALLOW, _DENY, registries)


def test_decide_host_that_the_registries_list(benchmark: BenchmarkFixture, policy: Policy) -> None:
    assert isinstance(benchmark(decide_host, policy, _AUTHORITY), Allow)


def test_decide_host_that_is_refused(benchmark: BenchmarkFixture, policy: Policy) -> None:
    assert isinstance(benchmark(decide_host, policy, Authority("a.b.c.elsewhere.example", 443)), Deny)


def test_decide_one_address(benchmark: BenchmarkFixture, policy: Policy) -> None:
    assert isinstance(benchmark(decide_addresses, policy, _AUTHORITY, _ADDRESSES[-1:], _FACTS), Allow)


def test_decide_eight_addresses(benchmark: BenchmarkFixture, policy: Policy) -> None:
    assert isinstance(benchmark(decide_addresses, policy, _AUTHORITY, _ADDRESSES, _FACTS), Allow)


def test_address_class_of_ipv4(benchmark: BenchmarkFixture) -> None:
    assert benchmark(address_class, _ADDRESSES[-1]) is None


def test_address_class_of_ipv6(benchmark: BenchmarkFixture) -> None:
    assert benchmark(address_class, _ADDRESSES[0]) is None


def test_parse_client_hello(benchmark: BenchmarkFixture) -> None:
    assert benchmark(parse_client_hello, client_hello(_HOST)).server_name == _HOST


def test_decide_hello(benchmark: BenchmarkFixture, policy: Policy) -> None:
    assert isinstance(benchmark(decide_hello, policy, _AUTHORITY, ClientHello(_HOST, False, ())), Allow)


def test_compile_a_policy(benchmark: BenchmarkFixture, policy: Policy) -> None:
    made = benchmark(Policy.compile, NetworkLevel.REGISTRIES, _ALLOW, _DENY, policy.registries)
    assert len(made.allow) == len(_ALLOW)


def test_take_a_slot_and_give_it_back(benchmark: BenchmarkFixture) -> None:
    slots = Slots(64, 1024)

    def use() -> bool:
        taken = slots.acquire(lambda: None)
        slots.release()
        return taken

    assert benchmark(use)
