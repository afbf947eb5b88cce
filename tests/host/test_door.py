"""What a sandbox can do through its one door, with real clients: container, forwarder, unix socket, gateway, world."""

import pytest

from gateway.contract.policy import Usage
from tests.host.conftest import METADATA
from tests.support.host import PrivateHost
from tests.support.processes import wait_until
from tests.support.programs import ASK_MODEL
from tests.support.sandbox import Sandbox

UNLISTED = "example.com"
# Reasons that come only after the policy has let a name through, on a machine without a way to it.
NETWORK_REASONS = {"name_not_found", "resolve_failed", "resolve_timeout", "connect_refused", "connect_unreachable"}
NETWORK_REASONS |= {"connect_failed", "connect_timeout"}

STEAL = """
import base64, http.client, os, sys
session, token, host = sys.argv[1:]
proxy = http.client.HTTPConnection("opificia-gateway", 8900, timeout=20)
credentials = base64.b64encode(f"{session}:{token}".encode()).decode()
proxy.set_tunnel(host, 443, {"Proxy-Authorization": f"Basic {credentials}"})
try:
    proxy.connect()
    print("200")
except OSError as error:
    print(error)
"""


def test_pip_downloads_a_real_package(agent: Sandbox) -> None:
    done = agent.run("pip", "download", "--no-cache-dir", "--no-deps", "--dest", "/work/wheels", "six")
    assert done.code == 0, done.output
    assert agent.run("sh", "-c", "ls /work/wheels/*.whl").code == 0


def test_npm_views_a_real_package(agent: Sandbox) -> None:
    done = agent.run("npm", "view", "is-number", "version")
    assert done.code == 0, done.output
    assert done.stdout.strip()


def test_git_and_curl_are_refused_a_host_that_is_not_listed(agent: Sandbox, other: Sandbox) -> None:
    url = f"https://{UNLISTED}/"
    other.run("curl", "-sS", "--max-time", "30", url)
    line = other.decision(UNLISTED)
    assert line["event"] == "allow" or line["reason"] in NETWORK_REASONS
    for client in (["curl", "-sS", url], ["git", "ls-remote", url]):
        done = agent.run(*client)
        assert done.code != 0
        assert "403" in done.stderr, done.output
    assert agent.decision(UNLISTED)["reason"] == "host_not_listed"


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_the_metadata_address_is_refused_even_where_a_rule_names_it(
    agent: Sandbox, other: Sandbox, scheme: str
) -> None:
    for sandbox, reason in ((agent, "host_not_listed"), (other, "address_not_public")):
        done = sandbox.run("curl", "-sS", "-D", "/dev/stdout", f"{scheme}://{METADATA}/latest/meta-data/")
        assert "403" in done.output
        assert f"X-Opificia-Reason: {reason}".lower() in done.stdout.lower()
        assert sandbox.decision(METADATA)["reason"] == reason


def test_a_stolen_token_is_worth_nothing_in_another_sandbox(agent: Sandbox, other: Sandbox) -> None:
    token = agent.run("printenv", "OPIFICIA_RUNNER_TOKEN").stdout.strip()
    arguments = (agent.session, token, "pypi.org")
    assert agent.python(STEAL, *arguments).stdout.strip() == "200"
    assert "407" in other.python(STEAL, *arguments).stdout


def test_the_official_sdk_streams_with_nothing_but_the_environment(agent: Sandbox) -> None:
    install = agent.run(
        *("pip", "install", "--quiet", "--no-cache-dir", "--target", "/work/sdk", "anthropic"), timeout_s=300
    )
    assert install.code == 0, install.output
    done = agent.run("env", "PYTHONPATH=/work/sdk", "python3", "-c", ASK_MODEL, "claude-haiku-4-5")
    assert done.code == 0, done.output
    pieces, _, text = done.stdout.strip().split(" ", 2)
    assert int(pieces) > 1
    assert text.startswith("Hello")


def test_model_tokens_are_counted_to_the_session(agent: Sandbox) -> None:
    before = agent.view().usage or Usage()
    ask = (
        'curl -sS $ANTHROPIC_BASE_URL/v1/messages -H "authorization: Bearer $ANTHROPIC_AUTH_TOKEN"'
        ' -H "content-type: application/json" -d @-'
    )
    body = '{"model": "claude-haiku-4-5", "max_tokens": 10, "messages": [{"role": "user", "content": "hello"}]}'
    assert '"usage"' in agent.run("sh", "-c", ask, stdin=body).stdout

    def counted() -> bool:
        used = agent.view().usage or Usage()
        return used.model_requests > before.model_requests and used.output_tokens > before.output_tokens

    # The gateway reports usage to control once a second.
    wait_until(counted, "the usage of one model request")


def test_the_egress_log_belongs_to_the_gateway_and_shows_the_callers_hosts(host: PrivateHost, agent: Sandbox) -> None:
    line = agent.decision("pypi.org", "close")
    assert line["bytes_down"] > 1_000
    assert line["session"] == agent.session
    log = host.egress_logs / f"{agent.session}.log"
    assert (log.stat().st_mode & 0o7777, log.stat().st_uid) == (0o640, 60601)
