"""Explanations say what the decisions say, and where."""

from ipaddress import ip_address

import pytest

from gateway.contract.opinion import EgressStep
from gateway.contract.policy import NetworkLevel
from gateway.core.decide import HostFacts, decide_addresses, decide_host
from gateway.core.explain import Named, explain_addresses, explain_failure, explain_host
from gateway.core.rules import Policy, RegistryList
from gateway.core.verdict import Allow, Deny, DenyReason

POLICY = Policy.compile(
    NetworkLevel.REGISTRIES, ["*.example.com", "git.example.org:22"], ["bad.example.com"], RegistryList()
)


@pytest.mark.parametrize(
    ("asked", "step", "reason"),
    [
        ("a b", EgressStep.AUTHORITY, DenyReason.MALFORMED_AUTHORITY),
        ("127.1", EgressStep.AUTHORITY, DenyReason.MALFORMED_AUTHORITY),
        ("\udcff", EgressStep.AUTHORITY, DenyReason.MALFORMED_AUTHORITY),
        ("evil.example", EgressStep.RULES, DenyReason.HOST_NOT_LISTED),
        ("git.example.org", EgressStep.RULES, DenyReason.PORT_NOT_LISTED),
        ("BAD.example.com.", EgressStep.RULES, DenyReason.HOST_DENIED),
        ("203.0.113.1:80", EgressStep.RULES, DenyReason.HOST_NOT_LISTED),
    ],
)
def test_says_at_which_step_a_host_is_refused(asked: str, step: EgressStep, reason: DenyReason) -> None:
    found = explain_host(POLICY, asked)
    assert not isinstance(found, Named)
    assert (found.asked, found.allowed, found.step, found.reason) == (asked, False, step, reason)
    assert found.message


def test_says_which_rule_allows_a_host_and_what_each_address_is() -> None:
    named = explain_host(POLICY, "Api.Example.COM")
    assert isinstance(named, Named)
    assert decide_host(POLICY, named.authority) == Allow(named.rule) == Allow("allow:*.example.com")
    addresses = (ip_address("9.9.9.9"), ip_address("169.254.169.254"))
    found = explain_addresses(POLICY, named, addresses, HostFacts())
    whole = decide_addresses(POLICY, named.authority, addresses, HostFacts())
    assert isinstance(whole, Deny)
    assert (found.host, found.port, found.rule) == ("api.example.com", 443, "allow:*.example.com")
    assert (found.allowed, found.step, found.reason) == (False, EgressStep.ADDRESSES, whole.reason)
    assert [(each.address, each.allowed, each.why) for each in found.addresses] == [
        ("9.9.9.9", True, "public"),
        ("169.254.169.254", False, "address_not_public"),
    ]
    assert found.addresses[0].kind == ""
    assert found.addresses[1].kind.startswith("cloud_metadata (")
    assert not found.addresses[1].openable
    private = explain_addresses(POLICY, named, (ip_address("192.168.1.1"),), HostFacts())
    assert private.addresses[0].openable
    assert explain_addresses(POLICY, named, addresses[:1], HostFacts()).allowed


def test_a_host_without_addresses_is_refused() -> None:
    named = explain_host(POLICY, "api.example.com")
    assert isinstance(named, Named)
    assert not explain_addresses(POLICY, named, (), HostFacts()).allowed
    failed = explain_failure(named, Deny(DenyReason.RESOLVE_TIMEOUT, "late"))
    assert (failed.allowed, failed.step, failed.reason) == (False, EgressStep.RESOLVE, "resolve_timeout")
