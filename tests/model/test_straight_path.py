"""A model call from end to end."""

import anthropic

from tests.model.harness import KEY, TOKEN, running_proxy
from tests.support.provider import INPUT_TOKENS, OUTPUT_TOKENS, TEXT, FakeProvider


async def test_streams_a_message_to_the_official_client(provider: FakeProvider) -> None:
    async with running_proxy(f"http://127.0.0.1:{provider.port}") as proxy:
        async with anthropic.AsyncAnthropic(base_url=proxy.base_url, auth_token=TOKEN, api_key=None) as client:
            async with client.messages.stream(
                model="fake-model", max_tokens=100, messages=[{"role": "user", "content": "Hi"}]
            ) as stream:
                text = "".join([piece async for piece in stream.text_stream])
        await proxy.settled()
        assert text == TEXT
        assert proxy.usage().input_tokens == INPUT_TOKENS
        assert proxy.usage().output_tokens == OUTPUT_TOKENS
        assert provider.requests[0].header("x-api-key") == KEY
        assert provider.requests[0].header("authorization") is None
        assert [line.event for line in proxy.audit.lines] == ["allow", "close"]
