"""The official Anthropic client, as an agent uses it."""

import anthropic
import pytest

from tests.model.harness import TOKEN, Proxy, running_proxy
from tests.support.provider import INPUT_TOKENS, TEXT, FakeProvider

TOOL: anthropic.types.ToolParam = {
    "name": "read_file",
    "description": "Read a file",
    "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
}


def sdk(proxy: Proxy, **more: object) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=proxy.base_url, auth_token=TOKEN, api_key=None, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("credential", ["auth_token", "api_key"])
async def test_a_tool_is_called_and_its_result_sent_back(credential: str, provider: FakeProvider) -> None:
    async with running_proxy(f"http://127.0.0.1:{provider.port}") as proxy:
        given = {"auth_token": None, "api_key": None, credential: TOKEN}
        async with anthropic.AsyncAnthropic(base_url=proxy.base_url, **given) as client:  # type: ignore[arg-type]
            messages: list[anthropic.types.MessageParam] = [{"role": "user", "content": "What is in README?"}]
            async with client.messages.stream(
                model="fake-model", max_tokens=100, tools=[TOOL], messages=messages
            ) as stream:
                first = await stream.get_final_message()
            assert first.stop_reason == "tool_use"
            (call,) = [block for block in first.content if block.type == "tool_use"]
            assert call.input == {"path": "README.md"}
            messages += [
                {"role": "assistant", "content": [block.model_dump() for block in first.content]},  # type: ignore[list-item]
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "text"}]},
            ]
            last = await client.messages.create(model="fake-model", max_tokens=100, tools=[TOOL], messages=messages)
            assert last.content[0].type == "text"
            assert last.content[0].text == TEXT
    assert provider.requests[1].json["messages"][2]["content"][0]["tool_use_id"] == "toolu_fake"


async def test_tokens_are_counted_and_models_listed(provider: FakeProvider) -> None:
    async with running_proxy(f"http://127.0.0.1:{provider.port}") as proxy, sdk(proxy) as client:
        count = await client.messages.count_tokens(model="fake-model", messages=[{"role": "user", "content": "x"}])
        assert count.input_tokens == INPUT_TOKENS
        models = [model.id async for model in client.models.list(limit=3)]
        assert models == ["fake-model"]


@pytest.mark.parametrize(
    ("model", "error"),
    [
        ("fake-529", anthropic.InternalServerError),
        ("fake-400", anthropic.BadRequestError),
        ("fake-401-key", anthropic.AuthenticationError),
        ("fake-cut-early", anthropic.InternalServerError),
    ],
)
async def test_errors_arrive_as_the_errors_that_they_are(
    model: str, error: type[anthropic.APIStatusError], provider: FakeProvider
) -> None:
    async with running_proxy(f"http://127.0.0.1:{provider.port}") as proxy, sdk(proxy, max_retries=0) as client:
        with pytest.raises(error):
            await client.messages.create(model=model, max_tokens=5, messages=[{"role": "user", "content": "x"}])


async def test_a_stream_that_is_cut_is_an_error_and_no_short_answer(provider: FakeProvider) -> None:
    async with running_proxy(f"http://127.0.0.1:{provider.port}") as proxy, sdk(proxy, max_retries=0) as client:
        with pytest.raises(Exception, match=r"(?i)incomplete|closed|peer"):
            async with client.messages.stream(
                model="fake-cut", max_tokens=5, messages=[{"role": "user", "content": "x"}]
            ) as stream:
                await stream.get_final_message()


async def test_a_refusal_that_a_retry_cannot_help_is_not_retried(provider: FakeProvider) -> None:
    async with running_proxy(f"http://127.0.0.1:{provider.port}", models=("none-*",)) as proxy:
        async with sdk(proxy, max_retries=5) as client:
            with pytest.raises(anthropic.PermissionDeniedError, match="may not use the model"):
                await client.messages.create(model="x", max_tokens=5, messages=[{"role": "user", "content": "x"}])
        assert [line.event for line in proxy.audit.lines] == ["refuse"]
