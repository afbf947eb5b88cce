"""Anthropic's SDKs in a sandbox, with nothing but its environment, against a stand-in provider behind the gateway."""

from dataclasses import dataclass
from typing import Any

import pytest

from tests.clients.conftest import PYTHON_PATH, Launch
from tests.clients.world import World
from tests.support.gateway_process import GatewayProcess
from tests.support.processes import wait_until
from tests.support.provider import INPUT_TOKENS, OUTPUT_TOKENS, TEXT

pytestmark = pytest.mark.usefixtures("sdks")


@dataclass(frozen=True, slots=True)
class Sdk:
    """One SDK, by the program that uses it; both programs do and report the same."""

    name: str
    program: tuple[str, ...]
    cut: str

    def __str__(self) -> str:
        return self.name


PYTHON = Sdk("python", ("python3", "/in/anthropic_sdk.py"), "RemoteProtocolError")
TYPESCRIPT = Sdk("typescript", ("node", "/in/anthropic_sdk.mjs"), "AnthropicError")


@pytest.fixture(params=[PYTHON, TYPESCRIPT], ids=str, scope="module")
def sdk(request: pytest.FixtureRequest) -> Sdk:
    chosen: Sdk = request.param
    return chosen


def report(sandbox: Launch, session: str, sdk: Sdk, what: str) -> Any:
    return sandbox(session).run(*sdk.program, what, environment=PYTHON_PATH).report()


@pytest.fixture(scope="module")
def talk(sandbox: Launch, sdk: Sdk) -> Any:
    return report(sandbox, "model", sdk, "talk")


@pytest.fixture(scope="module")
def failures(sandbox: Launch, sdk: Sdk) -> Any:
    return report(sandbox, "model", sdk, "fail")


def test_text_streams_as_it_is_made(talk: Any) -> None:
    assert "".join(talk["pieces"]) == "".join(f"word {number} " for number in range(20))
    # The provider makes a piece each 25 ms. Collected on the way, they would arrive all at once.
    assert talk["seconds"] > 0.1
    assert talk["output_tokens"] == OUTPUT_TOKENS


def test_a_tool_is_used_and_its_result_answered(talk: Any) -> None:
    assert (talk["stop_reason"], talk["tool"], talk["tool_input"]) == ("tool_use", "read_file", {"path": "README.md"})
    assert talk["answer"] == TEXT


def test_tokens_are_counted_and_models_listed(talk: Any) -> None:
    assert talk["counted"] == INPUT_TOKENS
    assert talk["models"] == ["fake-model"]


def test_the_provider_sees_the_operators_key_and_not_the_sessions_token(talk: Any, world: World) -> None:
    assert talk
    for request in world.provider.requests:
        assert request.header("x-api-key") == world.provider.key
        assert request.header("authorization") is None


def test_rate_limits_of_the_provider_arrive_with_their_wait(failures: Any) -> None:
    failure = failures["fake-429"]
    assert (failure["status"], failure["type"], failure["retry_after"]) == (429, "rate_limit_error", "7")
    assert failure["request_id"] == "req_fake"


def test_errors_of_the_provider_arrive_word_for_word(failures: Any) -> None:
    failure = failures["fake-400"]
    assert (failure["status"], failure["type"]) == (400, "invalid_request_error")
    assert failure["message"] == "prompt is too long: " + "x" * 20_000
    assert (failures["fake-529"]["status"], failures["fake-529"]["type"]) == (529, "overloaded_error")


def test_a_stream_that_the_provider_cut_is_never_taken_for_whole(failures: Any, sdk: Sdk) -> None:
    assert failures["fake-cut"] == {"broken": sdk.cut}


def test_another_token_is_refused_in_the_providers_words(sandbox: Launch, sdk: Sdk) -> None:
    failure = report(sandbox, "model", sdk, "stranger")
    assert (failure["status"], failure["type"]) == (401, "authentication_error")
    assert failure["message"] == "the session is not known or its token is wrong"


def test_a_client_that_goes_by_the_proxy_for_the_gateway_itself_is_answered(sandbox: Launch) -> None:
    through_proxy = {**PYTHON_PATH, "NO_PROXY": "", "no_proxy": ""}
    nowhere = dict.fromkeys(("HTTP_PROXY", "http_proxy"), "http://localhost:1")
    model = sandbox("model")
    # That it goes by the proxy at all shows where there is none.
    lost = model.run(*PYTHON.program, "hurry", environment=through_proxy | nowhere).report()
    assert lost == {"answers": 0, "refusal": {"broken": "APIConnectionError"}}
    assert model.run(*PYTHON.program, "hurry", environment=through_proxy).report() == {"answers": 5}


def test_a_spent_budget_is_said_once_and_not_asked_again(sandbox: Launch, gateway: GatewayProcess, sdk: Sdk) -> None:
    assert report(sandbox, "model", sdk, "spend") == {"answers": 5}
    before = refusals(gateway, "thrifty")
    spent = report(sandbox, "thrifty", sdk, "spend")
    assert spent["answers"] <= 2
    assert (spent["refusal"]["status"], spent["refusal"]["type"]) == (403, "permission_error")
    assert spent["refusal"]["message"] == f"The session's budget of {2 * OUTPUT_TOKENS} output tokens is used up"
    # The SDK retries by itself twice, unless it is told that a retry is useless.
    wait_until(lambda: refusals(gateway, "thrifty") > before, "the refusal in the log")
    assert refusals(gateway, "thrifty") == before + 1


def test_a_minutes_requests_are_limited_with_the_wait_said(sandbox: Launch, sdk: Sdk) -> None:
    hasty = report(sandbox, "hasty", sdk, "hurry")
    assert hasty["answers"] <= 1
    assert (hasty["refusal"]["status"], hasty["refusal"]["type"]) == (429, "rate_limit_error")
    assert 0 < int(hasty["refusal"]["retry_after"]) <= 60


def refusals(gateway: GatewayProcess, session: str) -> int:
    """Return how many requests of a session the gateway has refused by now."""
    return sum(line["event"] == "refuse" for line in gateway.audit(session))
