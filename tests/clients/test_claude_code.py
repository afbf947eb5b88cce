"""Claude Code's CLI in a sandbox. Its package is 80 MB, so it is fetched only when asked for."""

import os

import pytest

from tests.clients.conftest import Launch, Place, need_registries
from tests.clients.world import World
from tests.support.gateway_process import GatewayProcess
from tests.support.provider import OUTPUT_TOKENS, TEXT

FLAG = "OPIFICIA_TEST_CLAUDE_CODE"
ASK = ("/in/claude/node_modules/.bin/claude", "--print", "--model", "fake-model", "Say hello")

if os.environ.get(FLAG) != "1":
    pytest.skip(f"Claude Code's CLI is not fetched: set {FLAG}=1", allow_module_level=True)


@pytest.fixture(scope="module", autouse=True)
def installed(sandbox: Launch, place: Place) -> None:
    """Install it through the gateway, and show it to all sandboxes."""
    need_registries()
    agent = sandbox("agent")
    done = agent.run("npm", "install", "--prefix", "/work/claude", "@anthropic-ai/claude-code")
    assert done.code == 0, done.output
    target = place.inside / "claude"
    target.mkdir()
    agent.copy_out("/work/claude", target)


def test_it_works_with_nothing_but_the_environment_and_asks_for_no_other_host(
    sandbox: Launch, gateway: GatewayProcess, world: World
) -> None:
    before, asked = len(gateway.audit("model")), len(world.provider.requests)
    done = sandbox("model").run(*ASK)
    assert done.code == 0, done.output
    assert done.stdout.strip() == TEXT
    # The stand-in has it use a tool first: there and back.
    assert [request.target for request in world.provider.requests[asked:]] == ["/v1/messages?beta=true"] * 2
    assert {line["kind"] for line in gateway.audit("model")[before:]} == {"model"}


def test_it_shows_that_the_budget_is_spent_and_stops(sandbox: Launch) -> None:
    thrifty = sandbox("thrifty")
    thrifty.run(*ASK)
    done = thrifty.run(*ASK)
    assert done.code != 0
    assert f"budget of {2 * OUTPUT_TOKENS} output tokens is used up" in done.output
