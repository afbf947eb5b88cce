"""What would be decided: asked of the gateway, by API and command line, with problems said as everywhere."""

import json
from pathlib import Path

import pytest

from control.api.types import EgressCheck
from control.client import ControlClient, ControlError
from control.plan.session import SessionState
from control.spec import SessionPolicy
from gateway.contract.opinion import EgressOpinion, EgressStep, JudgedAddress
from gateway.contract.policy import EgressBudget, NetworkLevel
from tests.control.conftest import Host
from tests.control.test_cli import opificia
from tests.support.patience import until

PYPI = EgressOpinion(
    asked="files.example.com",
    host="files.example.com",
    port=443,
    allowed=True,
    step=EgressStep.ADDRESSES,
    rule="registries:some",
    addresses=(JudgedAddress("2001:db8::1", True, "trusted", "documentation (RFC 3849)"),),
)
POLICY = """
network = "registries"
allow = ["git.example.org:22", "*.example.com"]
deny = ["bad.example.com"]
models = ["claude-*"]
egress_budget = { bytes = 1_000_000, connections = 8 }
model_budget = { requests_per_minute = 60 }
"""


@pytest.fixture(autouse=True)
async def ready(host: Host) -> None:
    host.gateway.opinions["files.example.com"] = PYPI
    await until(lambda: host.control.link.connected, "the gateway")


async def problem(client: ControlClient, check: EgressCheck) -> tuple[int, str, list[str]]:
    with pytest.raises(ControlError) as refused:
        await client.check_egress(check)
    found = refused.value.problem
    return found.status, found.reason, [each.split(":")[0] for each in found.problems]


async def test_a_sessions_own_policy_is_asked_about_also_when_it_has_ended(host: Host, client: ControlClient) -> None:
    session = await host.launch("true", network="registries", allow=["a.example"], deny=["b.example"])
    await host.state(session, SessionState.EXITED)
    found = await client.check_egress(EgressCheck(hosts=("files.example.com", "evil.example"), session=session))
    assert found.policy == SessionPolicy(network=NetworkLevel.REGISTRIES, allow=("a.example",), deny=("b.example",))
    assert found.opinions[0] == PYPI
    assert found.opinions[1].reason == "host_not_listed"
    question = host.gateway.questions[-1]
    assert (question.network, question.allow, question.deny) == ("registries", ("a.example",), ("b.example",))


async def test_a_question_that_cannot_be_asked_is_a_problem(host: Host, client: ControlClient) -> None:
    policy = SessionPolicy()
    check = EgressCheck(hosts=("a",), session="unknown")
    assert await problem(client, check) == (404, "no_such_session", [])
    assert await problem(client, EgressCheck(hosts=("a",))) == (422, "invalid_body", [])
    both = EgressCheck(hosts=("a",), session="s", policy=policy)
    assert await problem(client, both) == (422, "invalid_body", [])
    assert await problem(client, EgressCheck(hosts=(), policy=policy)) == (422, "invalid_body", ["hosts"])
    assert await problem(client, EgressCheck(hosts=("a",) * 65, policy=policy)) == (422, "invalid_body", ["hosts"])
    bad = SessionPolicy(allow=("a b",), deny=("*",), egress_budget=EgressBudget(connections=0))
    status, reason, fields = await problem(client, EgressCheck(hosts=("a",), policy=bad))
    assert (status, reason, fields) == (422, "invalid_policy", ["allow", "deny", "egress_budget.connections"])
    host.gateway.refuse["?"] = ("allow: the gateway's own opinion",)
    assert await problem(client, EgressCheck(hosts=("a",), policy=policy)) == (422, "invalid_policy", ["allow"])


async def test_without_a_gateway_there_is_no_opinion(host: Host, client: ControlClient) -> None:
    await host.gateway.stop()
    await until(lambda: not host.control.link.connected, "the gateway's end")
    status, reason, _ = await problem(client, EgressCheck(hosts=("a",), policy=SessionPolicy()))
    assert (status, reason) == (503, "gateway_unavailable")


async def test_the_command_line_says_rule_step_and_addresses(host: Host, tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(POLICY)
    policy = str(tmp_path / "policy.toml")
    code, out, _ = await opificia(host, "egress", "check", "--policy", policy, "files.example.com")
    assert code == 0
    assert out.splitlines()[:2] == [
        "✓ files.example.com:443  allowed by registries:some",
        "    2001:db8::1  trusted, documentation (RFC 3849)",
    ]
    code, out, _ = await opificia(host, "egress", "check", "--policy", policy, "files.example.com", "evil.example")
    assert code == 1
    assert "✗ evil.example:443  refused at rules, host_not_listed: no" in out
    assert "--allow evil.example:443" in out
    code, out, _ = await opificia(host, "egress", "check", "--policy", policy, "files.example.com", "--json")
    assert json.loads(out)["policy"]["models"] == ["claude-*"]
    code, _, err = await opificia(host, "egress", "check", "files.example.com")
    assert (code, err) == (2, "opificia: give either --session or --policy\n")


async def test_a_policy_file_makes_a_session_and_options_add_to_it(host: Host, tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(POLICY)
    arguments = ("run", "sandbox", "--cwd", "/tmp", "--name", "mine", "--policy", str(tmp_path / "policy.toml"))
    code, _, err = await opificia(host, *arguments, "--allow", "more.example", "--budget", "2k", "--", "true")
    assert (code, err) == (0, "")
    spec = (await host.manager.get("mine")).spec
    assert spec.network is NetworkLevel.REGISTRIES
    assert spec.allow == ("git.example.org:22", "*.example.com", "more.example")
    assert spec.deny == ("bad.example.com",)
    assert spec.models == ("claude-*",)
    assert spec.egress_budget == EgressBudget(2048, 8)
    assert spec.model_budget.requests_per_minute == 60


async def test_every_problem_of_a_policy_file_is_said_with_its_line(host: Host, tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text('network = "all"\nallow = ["ok", "a b"]\nsurprise = 1\nmodels = [7]\n')
    for arguments in (
        ("run", "sandbox", "--policy", str(path), "--", "true"),
        ("egress", "check", "--policy", str(path), "x"),
    ):
        code, out, err = await opificia(host, *arguments)
        assert (code, out) == (2, "")
        assert [line.partition("policy.toml: ")[2].split(":")[:2] for line in err.splitlines()] == [
            ["line 1", " network"],
            ["line 2", " allow"],
            ["line 3", " surprise"],
            ["line 4", " models[0]"],
        ]
    code, _, err = await opificia(host, "egress", "check", "--policy", "/nowhere", "x")
    assert (code, len(err.splitlines())) == (2, 1)
