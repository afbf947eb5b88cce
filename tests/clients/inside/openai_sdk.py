"""Talk to a model with OpenAI's SDK and nothing but the environment. Prints a report as JSON on its last line."""

import json
import sys
from typing import Any

import openai

PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
QUESTION = "What does the file say?"


def chat(client: openai.OpenAI) -> dict[str, Any]:
    """Stream a chat, then have a tool used."""
    messages: Any = [{"role": "user", "content": QUESTION}]
    stream = client.chat.completions.create(
        model="fake-model", messages=messages, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    tools: Any = [{"type": "function", "function": {"name": "read_file", "parameters": PARAMETERS}}]
    asked = client.chat.completions.create(model="fake-model", messages=messages, tools=tools).choices[0]
    assert asked.message.tool_calls is not None
    (call,) = asked.message.tool_calls
    assert call.type == "function"
    messages.append(asked.message)
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "It says hello."})
    answer = client.chat.completions.create(model="fake-model", messages=messages, tools=tools)
    return {
        "pieces": [
            chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content
        ],
        "output_tokens": chunks[-1].usage.completion_tokens if chunks[-1].usage else 0,
        "stop_reason": asked.finish_reason,
        "tool": call.function.name,
        "tool_input": json.loads(call.function.arguments),
        "answer": answer.choices[0].message.content,
    }


def respond(client: openai.OpenAI) -> dict[str, Any]:
    """The same with the Responses API."""
    conversation: Any = [{"role": "user", "content": QUESTION}]
    with client.responses.stream(model="fake-model", input=conversation) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        streamed = stream.get_final_response()
    tools: Any = [{"type": "function", "name": "read_file", "parameters": PARAMETERS, "strict": False}]
    (call,) = client.responses.create(model="fake-model", input=conversation, tools=tools).output
    assert call.type == "function_call"
    conversation.append(call.model_dump(mode="json", exclude_none=True))
    conversation.append({"type": "function_call_output", "call_id": call.call_id, "output": "It says hello."})
    answer = client.responses.create(model="fake-model", input=conversation, tools=tools)
    return {
        "pieces": pieces,
        "output_tokens": streamed.usage.output_tokens if streamed.usage else 0,
        "tool": call.name,
        "tool_input": json.loads(call.arguments),
        "answer": answer.output_text,
    }


def ask(client: openai.OpenAI, model: str) -> dict[str, Any]:
    """Get one answer and return what its user learns when it fails."""
    try:
        client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": QUESTION}], max_completion_tokens=100
        )
    except openai.APIStatusError as error:
        body: Any = error.body
        return {
            "status": error.status_code,
            "type": body["type"],
            "code": body["code"],
            "message": body["message"],
            "retry_after": error.response.headers.get("retry-after"),
        }
    except Exception as error:
        return {"broken": type(error).__name__}
    return {}


def main() -> dict[str, Any]:
    """Do what the argument names."""
    if sys.argv[1] == "talk":
        client = openai.OpenAI()
        models = [model.id for model in client.models.list()]
        return {"chat": chat(client), "responses": respond(client), "models": models}
    if sys.argv[1] == "fail":
        client = openai.OpenAI(max_retries=0)
        return {model: ask(client, model) for model in ("fake-429", "fake-400", "fake-cut-early")}
    for answers in range(5):
        if refusal := ask(openai.OpenAI(), "fake-model"):
            return {"answers": answers, "refusal": refusal}
    return {"answers": 5}


print(json.dumps(main()))
