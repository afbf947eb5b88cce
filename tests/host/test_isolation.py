"""What a sandbox cannot reach. Each way is first shown open, with what closes it taken away."""

import secrets

import pytest

from control.plan.network import NetworkSettings
from tests.support.engine import PrivateEngine
from tests.support.host import Model
from tests.support.hostside import (
    HOST_RULES,
    NEIGHBOUR_RULES,
    ask_engine_dns,
    bridge_address,
    listening,
    without_rules,
)
from tests.support.programs import PORT, SERVE
from tests.support.sandbox import IMAGE, Sandbox


def test_a_port_of_the_host_is_unreachable_by_the_rules_alone(
    engine: PrivateEngine, network: NetworkSettings, agent: Sandbox
) -> None:
    with listening(engine, "tcp", PORT), bridge_address(engine, network) as address:
        with without_rules(engine, network, HOST_RULES):
            assert agent.reaches(address)
        assert not agent.reaches(address)


@pytest.mark.parametrize("rule", HOST_RULES)
def test_each_rule_of_the_host_closes_it_by_itself(
    engine: PrivateEngine, network: NetworkSettings, agent: Sandbox, rule: str
) -> None:
    others = [name for name in HOST_RULES if name != rule]
    with listening(engine, "tcp", PORT), bridge_address(engine, network) as address:
        with without_rules(engine, network, others):
            assert not agent.reaches(address)


def test_a_port_of_the_host_is_unreachable_by_the_missing_address_alone(
    engine: PrivateEngine, network: NetworkSettings, agent: Sandbox
) -> None:
    with listening(engine, "tcp", PORT), without_rules(engine, network, HOST_RULES):
        assert not agent.reaches(str(network.bridge_address))


def test_another_sandbox_is_unreachable(
    engine: PrivateEngine, network: NetworkSettings, agent: Sandbox, other: Sandbox
) -> None:
    address = str(other.address)
    with other.background("python3", "-c", SERVE, ready="listening"):
        with without_rules(engine, network, NEIGHBOUR_RULES):
            assert agent.reaches(address)
        assert not agent.reaches(address)


def test_a_made_up_name_does_not_leave_by_the_engines_dns(
    engine: PrivateEngine, network: NetworkSettings, agent: Sandbox
) -> None:
    name = f"secret-{secrets.token_hex(4)}.example"
    # The host's name server answers every name, and the engine's DNS forwards to it from the host's side.
    with listening(engine, "dns", 53) as queries:
        ask_engine_dns(engine, network, IMAGE, name)
        before = queries.read_text()
        assert name in before
        assert not agent.resolves(f"agent-{name}")
        assert queries.read_text() == before


def test_the_operators_key_is_nowhere_in_the_sandbox(agent: Sandbox, model: Model) -> None:
    planted = model.key[:4] + secrets.token_urlsafe(len(model.key))[: len(model.key) - 4]
    agent.run("sh", "-c", "cat > /work/planted", stdin=f"x={planted}\n")
    read, (planted_in, key_in) = agent.search(planted, model.key)
    assert planted_in == ["/work/planted"]
    assert key_in == []
    assert read > 1_000


def test_a_sandbox_has_no_privilege(agent: Sandbox) -> None:
    status = dict(
        line.split(":\t", 1) for line in agent.run("cat", "/proc/self/status").stdout.splitlines() if ":\t" in line
    )
    assert status["Uid"].split() == ["60610"] * 4
    assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"
    for path in ("/", "/etc", "/usr/bin", "/in", "/opificia"):
        assert agent.run("touch", f"{path}/x").code != 0
