"""OpenAI's SDK in a sandbox, led to a second provider by the environment alone."""

from typing import Any

import pytest

from tests.clients.conftest import PYTHON_PATH, Launch
from tests.clients.world import World
from tests.support.provider import OUTPUT_TOKENS, TEXT, WORDS

pytestmark = pytest.mark.usefixtures("sdks")


def report(sandbox: Launch, session: str, what: str) -> Any:
    return sandbox(session).run("python3", "/in/openai_sdk.py", what, environment=PYTHON_PATH).report()


@pytest.fixture(scope="module")
def talk(sandbox: Launch) -> Any:
    return report(sandbox, "model", "talk")


@pytest.fixture(scope="module")
def failures(sandbox: Launch) -> Any:
    return report(sandbox, "model", "fail")


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_text_streams_and_a_tools_result_is_answered(talk: Any, api: str) -> None:
    said = talk[api]
    assert (said["pieces"], said["output_tokens"]) == (list(WORDS), OUTPUT_TOKENS)
    assert (said["tool"], said["tool_input"]) == ("read_file", {"path": "README.md"})
    assert said["answer"] == TEXT


def test_models_are_listed(talk: Any) -> None:
    assert talk["models"] == ["fake-model"]


def test_the_provider_sees_the_operators_key_and_not_the_sessions_token(talk: Any, world: World) -> None:
    assert talk
    asked = [request for request in world.provider.requests if request.target.startswith(("/v1/chat", "/v1/responses"))]
    assert {request.header("authorization") for request in asked} == {f"Bearer {world.provider.key}"}


def test_errors_of_the_provider_arrive_word_for_word(failures: Any) -> None:
    limited, wrong = failures["fake-429"], failures["fake-400"]
    assert (limited["status"], limited["type"], limited["retry_after"]) == (429, "rate_limit_error", "7")
    assert (wrong["status"], wrong["message"]) == (400, "prompt is too long: " + "x" * 20_000)


def test_a_provider_that_hangs_up_is_the_gateways_error_in_openais_shape(failures: Any) -> None:
    failure = failures["fake-cut-early"]
    assert (failure["status"], failure["type"], failure["code"]) == (502, "server_error", "upstream_failed")


def test_a_spent_budget_is_said_in_openais_shape(sandbox: Launch) -> None:
    assert report(sandbox, "model", "spend") == {"answers": 5}
    spent = report(sandbox, "thrifty", "spend")
    assert spent["answers"] <= 2
    refusal = spent["refusal"]
    assert (refusal["status"], refusal["type"], refusal["code"]) == (403, "permission_error", "budget_exhausted")
    assert refusal["message"] == f"The session's budget of {2 * OUTPUT_TOKENS} output tokens is used up"
