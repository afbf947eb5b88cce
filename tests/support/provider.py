"""A model provider that is not one: Anthropic's and OpenAI's APIs as far as agents use them, with failures on demand.

As a program it stands in for the provider in the demo and in tests with real clients:

    python -m tests.support.provider --listen 127.0.0.1:9500 --key sk-fake

What a reply is like is chosen by the request's model: see SCRIPTS. Everything that came in is kept in `requests`; the
program shows it at `GET /fake/requests`, without credentials.
"""

import argparse
import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from aiohttp import web

from tests.support.app_server import AppServer

INPUT_TOKENS: Final = 25
OUTPUT_TOKENS: Final = 15
CACHE_READ_TOKENS: Final = 7
CACHE_WRITE_TOKENS: Final = 3
WORDS: Final = ("Hello", ", ", "this is ", "a fake model ", "écrit en trois octets: €€€")
TEXT: Final = "".join(WORDS)

SCRIPTS: Final[Mapping[str, str]] = {
    "fake-429": "429 with retry-after: 7",
    "fake-529": "529 overloaded",
    "fake-400": "400 with a message of 20,000 characters",
    "fake-401-key": "401 whose message repeats the key",
    "fake-redirect": "307 to another host",
    "fake-silent": "accepts, never answers",
    "fake-stall": "begins a stream, then falls silent",
    "fake-cut": "begins a stream, then cuts the connection",
    "fake-cut-early": "cuts the connection before a reply",
    "fake-slow": "20 events, 25 ms apart",
    "fake-long": "goes on streaming for as long as anybody listens",
    "fake-big": "a stream with one data line of 1 MB",
    "fake-gzip": "compressed although nobody asked",
    "fake-no-usage": "a reply without usage",
    "fake-close": "answers and closes the connection",
}


@dataclass(frozen=True)
class Recorded:
    """One request as it arrived."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    peer: tuple[str, int]

    def header(self, name: str) -> str | None:
        """Return the only value of a header, None without it."""
        values = [value for key, value in self.headers if key.lower() == name]
        assert len(values) <= 1, f"{name} came {len(values)} times"
        return values[0] if values else None

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


@dataclass
class FakeProvider:
    """The provider's server. `cancelled` counts replies whose client left before they were whole."""

    key: str
    requests: list[Recorded] = field(default_factory=list)
    cancelled: int = 0
    port: int = 0
    _server: AppServer | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None) -> None:
        """Listen; `port` is the one that was taken."""
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v1/messages", self._guard(self._messages))
        app.router.add_post("/v1/messages/count_tokens", self._guard(self._count_tokens))
        app.router.add_get("/v1/models", self._guard(self._models))
        app.router.add_post("/v1/chat/completions", self._guard(self._chat))
        app.router.add_post("/v1/responses", self._guard(self._responses))
        app.router.add_get("/fake/requests", self._show)
        self._server = AppServer(
            app, auto_decompress=False, handler_cancellation=True, access_log=None, shutdown_timeout=0.1
        )
        self.port = await self._server.listen((host, port), tls)

    async def close(self) -> None:
        """Stop."""
        if self._server is not None:
            await self._server.close()

    def _guard(
        self, handler: Callable[[web.Request, Any], Awaitable[web.StreamResponse]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """Record the request, check the key, play the scripted failures, then answer."""

        async def guarded(request: web.Request) -> web.StreamResponse:
            body = await request.read()
            headers = tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in request.raw_headers)
            assert request.transport is not None
            peer = request.transport.get_extra_info("peername")
            self.requests.append(Recorded(request.method, request.raw_path, headers, body, peer))
            if self.key not in (request.headers.get("x-api-key"), request.headers.get("authorization", "")[7:]):
                return self._error(request, 401, "authentication_error", "invalid x-api-key")
            try:
                ask = json.loads(body) if body else {}
            except ValueError:
                return self._error(request, 400, "invalid_request_error", "the body is not JSON")
            try:
                return await self._scripted(request, str(ask.get("model", ""))) or await handler(request, ask)
            except (asyncio.CancelledError, ConnectionResetError):
                self.cancelled += 1
                raise

        return guarded

    async def _scripted(self, request: web.Request, model: str) -> web.StreamResponse | None:
        match model:
            case "fake-429":
                headers = {"retry-after": "7", "anthropic-ratelimit-requests-remaining": "0"}
                return self._error(request, 429, "rate_limit_error", "slow down", headers)
            case "fake-529":
                return self._error(request, 529, "overloaded_error", "Overloaded")
            case "fake-400":
                return self._error(request, 400, "invalid_request_error", "prompt is too long: " + "x" * 20_000)
            case "fake-401-key":
                return self._error(request, 401, "authentication_error", f"invalid key {self.key} given")
            case "fake-redirect":
                return web.Response(status=307, headers={"location": "http://elsewhere.example/v1/messages"})
            case "fake-silent":
                await asyncio.Event().wait()
            case "fake-cut-early":
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
        return None

    @staticmethod
    def _error(
        request: web.Request, status: int, kind: str, message: str, headers: Mapping[str, str] | None = None
    ) -> web.Response:
        if request.path.startswith("/v1/messages") or "x-api-key" in request.headers:
            body: object = {"type": "error", "error": {"type": kind, "message": message}, "request_id": "req_fake"}
        else:
            body = {"error": {"message": message, "type": kind, "param": None, "code": None}}
        return web.json_response(body, status=status, headers={"request-id": "req_fake", **(headers or {})})

    async def _stream(
        self, request: web.Request, model: str, events: AsyncIterator[bytes] | list[bytes]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream", "request-id": "req_fake"})
        if model == "fake-gzip":
            response.enable_compression(web.ContentCoding.gzip)
        if model == "fake-close":
            response.force_close()
        await response.prepare(request)
        if isinstance(events, list):
            cut = {"fake-stall", "fake-cut"} & {model}
            for index, event in enumerate(events):
                if cut and index == 4:
                    break
                await response.write(event)
            if model == "fake-stall":
                await asyncio.Event().wait()
            if model == "fake-cut":
                assert request.transport is not None
                request.transport.abort()
        else:
            async for event in events:
                await response.write(event)
        await response.write_eof()
        return response

    # --- Anthropic

    async def _messages(self, request: web.Request, ask: Any) -> web.StreamResponse:
        model = ask.get("model", "")
        usage = {
            "input_tokens": INPUT_TOKENS,
            "cache_read_input_tokens": CACHE_READ_TOKENS,
            "cache_creation_input_tokens": CACHE_WRITE_TOKENS,
        }
        content, reason = _anthropic_content(ask)
        if not ask.get("stream"):
            message = _anthropic_message(model, content, reason, {**usage, "output_tokens": OUTPUT_TOKENS})
            if model == "fake-no-usage":
                del message["usage"]
            return web.json_response(message, headers={"request-id": "req_fake"})
        start = _anthropic_message(model, [], None, {**usage, "output_tokens": 1})
        events = [_event("message_start", {"message": start})]
        if model in ("fake-slow", "fake-long"):
            return await self._stream(request, model, _paced(events[0], 20 if model == "fake-slow" else None))
        events += _anthropic_block_events(content[0], model)
        final = {"delta": {"stop_reason": reason, "stop_sequence": None}, "usage": {"output_tokens": OUTPUT_TOKENS}}
        if model == "fake-no-usage":
            del final["usage"], start["usage"]
            events[0] = _event("message_start", {"message": start})
        events += [_event("message_delta", final), _event("message_stop", {})]
        return await self._stream(request, model, events)

    async def _count_tokens(self, _request: web.Request, _ask: Any) -> web.StreamResponse:
        return web.json_response({"input_tokens": INPUT_TOKENS})

    async def _models(self, request: web.Request, _ask: Any) -> web.StreamResponse:
        data = [{"type": "model", "object": "model", "id": "fake-model", "display_name": "Fake", "created": 0,
                 "created_at": "2025-01-01T00:00:00Z", "owned_by": "fake"}]  # fmt: skip
        return web.json_response(
            {"object": "list", "data": data, "has_more": False, "first_id": "fake-model", "last_id": "fake-model"},
            headers={"request-id": "req_fake", "x-query": request.query_string},
        )

    # --- OpenAI

    async def _chat(self, request: web.Request, ask: Any) -> web.StreamResponse:
        model = ask.get("model", "")
        usage = {
            "prompt_tokens": INPUT_TOKENS + CACHE_READ_TOKENS,
            "completion_tokens": OUTPUT_TOKENS,
            "total_tokens": INPUT_TOKENS + CACHE_READ_TOKENS + OUTPUT_TOKENS,
            "prompt_tokens_details": {"cached_tokens": CACHE_READ_TOKENS},
        }
        base = {"id": "chatcmpl-fake", "created": 0, "model": model}
        if not ask.get("stream"):
            choice = _openai_choice(ask)
            return web.json_response({**base, "object": "chat.completion", "choices": [choice], "usage": usage})
        with_usage = bool((ask.get("stream_options") or {}).get("include_usage"))
        chunks: list[dict[str, Any]] = [
            {"choices": [{"index": 0, "delta": {"content": word}, "finish_reason": None}]} for word in WORDS
        ]
        chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        if with_usage:
            chunks = [{**chunk, "usage": None} for chunk in chunks] + [{"choices": [], "usage": usage}]
        events = [_data({**base, "object": "chat.completion.chunk", **chunk}) for chunk in chunks]
        return await self._stream(request, model, [*events, b"data: [DONE]\n\n"])

    async def _responses(self, request: web.Request, ask: Any) -> web.StreamResponse:
        model = ask.get("model", "")
        usage = {
            "input_tokens": INPUT_TOKENS + CACHE_READ_TOKENS,
            "input_tokens_details": {"cached_tokens": CACHE_READ_TOKENS},
            "output_tokens": OUTPUT_TOKENS,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": INPUT_TOKENS + CACHE_READ_TOKENS + OUTPUT_TOKENS,
        }
        item: dict[str, Any] = {"type": "message", "id": "msg_fake", "role": "assistant", "status": "completed",
                "content": [{"type": "output_text", "text": TEXT, "annotations": []}]}  # fmt: skip
        whole = {"id": "resp_fake", "object": "response", "created_at": 0, "model": model, "status": "completed",
                 "output": [item], "usage": usage, "parallel_tool_calls": True, "tool_choice": "auto", "tools": []}  # fmt: skip
        if not ask.get("stream"):
            return web.json_response({**whole, "output": [_openai_item(ask) or item]})
        begun = {**whole, "status": "in_progress", "output": [], "usage": None}
        at = {"item_id": "msg_fake", "output_index": 0, "content_index": 0}
        part = item["content"][0]
        steps: list[tuple[str, dict[str, Any]]] = [
            ("created", {"response": begun}),
            ("output_item.added", {"output_index": 0, "item": {**item, "status": "in_progress", "content": []}}),
            ("content_part.added", {**at, "part": {**part, "text": ""}}),
            *(("output_text.delta", {**at, "delta": word, "logprobs": []}) for word in WORDS),
            ("output_text.done", {**at, "text": TEXT, "logprobs": []}),
            ("content_part.done", {**at, "part": part}),
            ("output_item.done", {"output_index": 0, "item": item}),
            ("completed", {"response": whole}),
        ]
        events = [
            _event(f"response.{kind}", {**data, "sequence_number": number}) for number, (kind, data) in enumerate(steps)
        ]
        return await self._stream(request, model, events)

    async def _show(self, _request: web.Request) -> web.StreamResponse:
        shown = [
            {
                "method": each.method,
                "target": each.target,
                "headers": sorted({name.lower() for name, _ in each.headers}),
                "body_bytes": len(each.body),
                "key_right": self.key in (each.header("x-api-key"), (each.header("authorization") or "")[7:]),
            }
            for each in self.requests
        ]
        return web.json_response(shown)


def _event(kind: str, data: Mapping[str, Any]) -> bytes:
    return f"event: {kind}\n".encode() + _data({"type": kind, **data})


def _data(data: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"


async def _paced(start: bytes, count: int | None) -> AsyncIterator[bytes]:
    yield start
    yield _event("content_block_start", {"index": 0, "content_block": {"type": "text", "text": ""}})
    sent = 0
    while count is None or sent < count:
        await asyncio.sleep(0.025)
        delta = {"type": "text_delta", "text": f"word {sent} "}
        yield _event("content_block_delta", {"index": 0, "delta": delta})
        sent += 1
    yield _event("content_block_stop", {"index": 0})
    yield _event("message_delta", {"delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": OUTPUT_TOKENS}})
    yield _event("message_stop", {})


def _anthropic_content(ask: Mapping[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """Answer with a call of the first tool, or, once its result came (or without tools), with text."""
    messages = ask.get("messages") or [{}]
    last = messages[-1].get("content")
    answered = isinstance(last, list) and any(block.get("type") == "tool_result" for block in last)
    if ask.get("tools") and not answered:
        name = ask["tools"][0]["name"]
        return [{"type": "tool_use", "id": "toolu_fake", "name": name, "input": {"path": "README.md"}}], "tool_use"
    return [{"type": "text", "text": TEXT}], "end_turn"


def _anthropic_message(
    model: str, content: list[dict[str, Any]], reason: str | None, usage: Mapping[str, int]
) -> dict[str, Any]:
    return {"id": "msg_fake", "type": "message", "role": "assistant", "model": model, "content": content,
            "stop_reason": reason, "stop_sequence": None, "usage": dict(usage)}  # fmt: skip


def _anthropic_block_events(block: Mapping[str, Any], model: str) -> list[bytes]:
    if block["type"] == "tool_use":
        start = {**block, "input": {}}
        whole = json.dumps(block["input"])
        deltas = [{"type": "input_json_delta", "partial_json": part} for part in (whole[:5], whole[5:])]
    else:
        start = {"type": "text", "text": ""}
        words = ("x" * 1_000_000,) if model == "fake-big" else WORDS
        deltas = [{"type": "text_delta", "text": word} for word in words]
    return [
        _event("content_block_start", {"index": 0, "content_block": start}),
        _event("ping", {}),
        *(_event("content_block_delta", {"index": 0, "delta": delta}) for delta in deltas),
        _event("content_block_stop", {"index": 0}),
    ]


def _openai_choice(ask: Mapping[str, Any]) -> dict[str, Any]:
    if ask.get("tools") and ask["messages"][-1]["role"] != "tool":
        function = {"name": ask["tools"][0]["function"]["name"], "arguments": '{"path": "README.md"}'}
        call = {"id": "call_fake", "type": "function", "function": function}
        message: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [call]}
        return {"index": 0, "message": message, "finish_reason": "tool_calls"}
    return {"index": 0, "message": {"role": "assistant", "content": TEXT}, "finish_reason": "stop"}


def _openai_item(ask: Mapping[str, Any]) -> dict[str, Any] | None:
    if ask.get("tools") and ask["input"][-1].get("type") != "function_call_output":
        return {"type": "function_call", "id": "fc_fake", "call_id": "call_fake", "status": "completed",
                "name": ask["tools"][0]["name"], "arguments": '{"path": "README.md"}'}  # fmt: skip
    return None


async def _serve(host: str, port: int, key: str) -> None:
    provider = FakeProvider(key)
    await provider.start(host, port)
    print(f"fake model provider on http://{host}:{provider.port}", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    """Run the provider as a program."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--listen", default="127.0.0.1:9500", help="host:port, port 0 for any")
    parser.add_argument("--key", required=True, help="the key that requests must carry")
    arguments = parser.parse_args()
    host, _, port = arguments.listen.rpartition(":")
    try:
        asyncio.run(_serve(host, int(port), arguments.key))
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
