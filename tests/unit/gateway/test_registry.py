"""The registry: whole pictures and single grants, and whose an address is."""

from ipaddress import ip_address

import pytest

from gateway.contract.ids import token_sha256
from gateway.contract.policy import EgressBudget, Grant
from gateway.core.rules import RegistryList
from gateway.core.verdict import Deny
from gateway.registry import Registry, Session

ONE, TWO = "10.231.0.16", "10.231.0.17"


@pytest.fixture
def registry() -> Registry:
    return Registry(RegistryList(), require_address=True, ready=False)


def grant(session: str, address: str | None = None, **fields: object) -> Grant:
    return Grant(session=session, token_sha256=token_sha256(session), address=address, **fields)  # type: ignore[arg-type]


def place_of(registry: Registry, session: str) -> str | None:
    """Return from where a session is served."""
    for address in (ONE, TWO):
        if isinstance(registry.authenticate(session, session, ip_address(address)), Session):
            return address
    return None


def test_two_sessions_change_places_in_one_picture(registry: Registry) -> None:
    assert registry.replace_all([grant("a", ONE), grant("b", TWO)]) == ()
    assert registry.replace_all([grant("a", TWO), grant("b", ONE)]) == ()
    assert (place_of(registry, "a"), place_of(registry, "b")) == (TWO, ONE)


def test_an_address_is_never_two_sessions_however_it_is_written(registry: Registry) -> None:
    (problem,) = registry.replace_all([grant("a", "::1"), grant("b", "0::1")])
    assert problem == "b: address is session a's"
    assert registry.get("b") is None


def test_an_address_is_free_again_when_its_session_leaves_it(registry: Registry) -> None:
    assert registry.put(grant("a", ONE)) == ()
    assert registry.put(grant("b", ONE)) == ("address is session a's",)
    assert registry.put(grant("a", TWO)) == ()
    assert registry.put(grant("b", ONE)) == ()
    registry.revoke("b")
    assert registry.put(grant("c", ONE)) == ()
    assert place_of(registry, "c") == ONE


def test_a_grant_of_impossible_numbers_changes_nothing(registry: Registry) -> None:
    assert registry.put(grant("a", ONE)) == ()
    problems = registry.put(grant("a", ONE, egress_budget=EgressBudget(bytes=-1, connections=0)))
    assert [problem.split(":")[0] for problem in problems] == ["egress_budget.bytes", "egress_budget.connections"]
    assert place_of(registry, "a") == ONE


def test_a_session_without_a_place_is_served_nowhere(registry: Registry) -> None:
    assert registry.put(grant("a")) == ()
    assert isinstance(registry.authenticate("a", "a", None), Deny)
