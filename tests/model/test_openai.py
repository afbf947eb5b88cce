"""A provider of the second shape, by configuration only."""

import json

import openai
import pytest

from gateway.config import ModelSettings
from gateway.contract.policy import ModelBudget, Usage
from gateway.core.providers import ProviderSettings
from tests.model.harness import KEY, TOKEN, running_proxy
from tests.model.wire import ask, request
from tests.support.provider import CACHE_READ_TOKENS, INPUT_TOKENS, OUTPUT_TOKENS, TEXT, FakeProvider

OPENAI_KEY = "sk-openai-key-98765"
BASE = "/model/s1/openai/v1"
WHOLE = Usage(
    model_requests=1, input_tokens=INPUT_TOKENS, output_tokens=OUTPUT_TOKENS, cache_read_tokens=CACHE_READ_TOKENS
)


@pytest.fixture
def settings(provider: FakeProvider, tmp_path: object) -> tuple[ProviderSettings, ...]:
    key_file = f"{tmp_path}/key"
    with open(key_file, "w", opener=lambda path, flags: __import__("os").open(path, flags, 0o600)) as file:
        file.write(OPENAI_KEY + "\n")
    provider.key = OPENAI_KEY
    return (ProviderSettings(name="openai", upstream=f"http://127.0.0.1:{provider.port}", api_key_file=key_file),)


async def test_the_official_client_streams_chats(
    provider: FakeProvider, settings: tuple[ProviderSettings, ...]
) -> None:
    async with running_proxy("http://unused.invalid", providers=settings) as proxy:
        async with openai.AsyncOpenAI(base_url=f"{proxy.base_url}/openai/v1", api_key=TOKEN) as client:
            stream = await client.chat.completions.create(
                model="fake-model",
                messages=[{"role": "user", "content": "Hi"}],
                stream=True,
                stream_options={"include_usage": True},
            )
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
        await proxy.settled()
        assert text == TEXT
        assert proxy.usage() == WHOLE
    assert provider.requests[0].header("authorization") == f"Bearer {OPENAI_KEY}"
    assert provider.requests[0].target == "/v1/chat/completions"


async def test_the_official_client_gets_whole_chats_responses_and_models(
    provider: FakeProvider, settings: tuple[ProviderSettings, ...]
) -> None:
    async with running_proxy("http://unused.invalid", providers=settings) as proxy:
        async with openai.AsyncOpenAI(base_url=f"{proxy.base_url}/openai/v1", api_key=TOKEN) as client:
            chat = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hi"}])
            assert chat.choices[0].message.content == TEXT
            await proxy.settled()
            assert proxy.usage() == WHOLE
            response = await client.responses.create(model="m", input="Hi")
            assert response.output_text == TEXT
            async with client.responses.stream(model="m", input="Hi") as stream:
                final = None
                async for event in stream:
                    final = event.type
                assert final == "response.completed"
            models = await client.models.list()
            assert models.data[0].id == "fake-model"
        await proxy.settled()
        assert proxy.usage().output_tokens == 3 * OUTPUT_TOKENS
        assert proxy.usage().cache_read_tokens == 3 * CACHE_READ_TOKENS


async def test_refusals_have_the_shape_of_the_provider(
    provider: FakeProvider, settings: tuple[ProviderSettings, ...]
) -> None:
    async with running_proxy("http://unused.invalid", providers=settings, models=("gpt-*",)) as proxy:
        async with openai.AsyncOpenAI(base_url=f"{proxy.base_url}/openai/v1", api_key=TOKEN) as client:
            with pytest.raises(openai.PermissionDeniedError) as caught:
                await client.chat.completions.create(model="other", messages=[])
            assert caught.value.code == "model_not_allowed"
        answer = await ask(proxy.port, request(path=f"{BASE}/chat/completions", token="wrong"))
        assert json.loads(answer.body)["error"]["type"] == "authentication_error"
    assert provider.requests == []


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("chat/completions", {"stream": True}, 400),
        ("chat/completions", {"stream": True, "stream_options": {}}, 400),
        ("chat/completions", {"stream": True, "stream_options": {"include_usage": False}}, 400),
        ("chat/completions", {"stream": True, "stream_options": {"include_usage": True}}, 200),
        ("chat/completions", {"stream": False}, 200),
        ("chat/completions", {"n": 3, "max_tokens": 5}, 200),
        ("chat/completions", {"n": 0, "max_tokens": 5}, 400),
        ("responses", {"stream": True}, 200),
        ("responses", {"background": True}, 400),
        ("responses", {"background": False, "max_output_tokens": 5}, 200),
    ],
)
async def test_under_a_budget_what_cannot_be_counted_is_refused(
    path: str,
    body: dict[str, object],
    status: int,
    provider: FakeProvider,
    settings: tuple[ProviderSettings, ...],
) -> None:
    budget = ModelBudget(output_tokens=1000)
    async with running_proxy("http://unused.invalid", providers=settings, budget=budget) as proxy:
        data = json.dumps({"model": "m", **body}).encode()
        assert (await ask(proxy.port, request(data, path=f"{BASE}/{path}"))).status == status
        await proxy.settled()
        assert proxy.usage().output_tokens == (OUTPUT_TOKENS if status == 200 else 0)


async def test_the_default_provider_can_be_of_this_shape(provider: FakeProvider) -> None:
    """An operator whose own model server speaks OpenAI's API, and no other provider."""
    async with running_proxy(f"http://127.0.0.1:{provider.port}", shape="openai") as proxy:
        async with openai.AsyncOpenAI(base_url=f"{proxy.base_url}/v1", api_key=TOKEN) as client:
            chat = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hi"}])
            assert chat.choices[0].message.content == TEXT
            await proxy.settled()
            assert proxy.usage() == WHOLE
        assert provider.requests[0].header("authorization") == f"Bearer {KEY}"
        # What the other shape has is not there, and refused in this one.
        refusal = await ask(proxy.port, request(path="/model/s1/v1/messages"))
        assert refusal.status == 404
        assert json.loads(refusal.body)["error"]["code"] == "not_found"


def test_the_default_url_is_not_taken_for_another_shape() -> None:
    assert ModelSettings(shape="openai", upstream="http://127.0.0.1:8000").problems() == []
    with pytest.raises(ValueError, match="not of the shape 'openai'"):
        ModelSettings(shape="openai")
