"""Talk to a model with Anthropic's SDK and nothing but the environment. Prints a report as JSON on its last line."""

import json
import sys
import time
from typing import Any

import anthropic

TOOLS: Any = [
    {
        "name": "read_file",
        "description": "Read a file",
        "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    }
]
QUESTION: Any = [{"role": "user", "content": "What does the file say?"}]


def talk() -> dict[str, Any]:
    """Stream, use a tool, count, list."""
    client = anthropic.Anthropic()
    with client.messages.stream(model="fake-slow", max_tokens=100, messages=QUESTION) as stream:
        arrivals = [(time.monotonic(), text) for text in stream.text_stream]
        streamed = stream.get_final_message()
    with client.messages.stream(model="fake-model", max_tokens=100, messages=QUESTION, tools=TOOLS) as stream:
        asked = stream.get_final_message()
    (call,) = asked.content
    assert call.type == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "It says hello."}
    conversation: Any = [
        *QUESTION,
        {"role": "assistant", "content": [call.model_dump(mode="json", exclude_none=True)]},
        {"role": "user", "content": [result]},
    ]
    answer = client.messages.create(model="fake-model", max_tokens=100, messages=conversation, tools=TOOLS)
    return {
        "pieces": [text for _, text in arrivals],
        "seconds": arrivals[-1][0] - arrivals[0][0],
        "output_tokens": streamed.usage.output_tokens,
        "stop_reason": asked.stop_reason,
        "tool": call.name,
        "tool_input": call.input,
        "answer": "".join(block.text for block in answer.content if block.type == "text"),
        "counted": client.messages.count_tokens(model="fake-model", messages=QUESTION).input_tokens,
        "models": [model.id for model in client.models.list()],
    }


def ask(client: anthropic.Anthropic, model: str) -> dict[str, Any]:
    """Stream one answer and return what its user learns when it fails."""
    try:
        with client.messages.stream(model=model, max_tokens=100, messages=QUESTION) as stream:
            stream.until_done()
    except anthropic.APIStatusError as error:
        body: Any = error.body
        return {
            "status": error.status_code,
            "type": body["error"]["type"],
            "message": body["error"]["message"],
            "request_id": error.request_id,
            "retry_after": error.response.headers.get("retry-after"),
        }
    except Exception as error:
        return {"broken": type(error).__name__}
    return {}


def main() -> dict[str, Any]:
    """Do what the argument names."""
    if sys.argv[1] == "talk":
        return talk()
    if sys.argv[1] == "fail":
        client = anthropic.Anthropic(max_retries=0)
        return {model: ask(client, model) for model in ("fake-429", "fake-400", "fake-529", "fake-cut")}
    if sys.argv[1] == "stranger":
        return ask(anthropic.Anthropic(auth_token="another-token"), "fake-model")
    # As many as five answers, with the SDK's own retries.
    client = anthropic.Anthropic(max_retries=2 if sys.argv[1] == "spend" else 0)
    for answers in range(5):
        if refusal := ask(client, "fake-model"):
            return {"answers": answers, "refusal": refusal}
    return {"answers": 5}


print(json.dumps(main()))
