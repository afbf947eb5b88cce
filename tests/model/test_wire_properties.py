"""Whatever is asked and answered, framed and cut in whatever way: the client has what the provider sent, and it is counted as said."""

import asyncio
import itertools
import json
import ssl
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trustme
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.contract.policy import ModelBudget, Usage
from gateway.core.providers import ShapeName
from tests.model.harness import KEY, TOKEN, running_proxy
from tests.model.wire import Peer, chunked, connected, request, scripted

RULES: dict[str, dict[str, Any]] = {
    "none": {},
    "models": {"models": ("m-*",)},
    "budget": {"budget": ModelBudget(input_tokens=1 << 40, output_tokens=1 << 40)},
}
PATHS = {"messages": "/v1/messages", "chat": "/v1/chat/completions", "responses": "/v1/responses"}
# What careless readers of a stream take for something else.
TEXTS = st.text(max_size=20) | st.sampled_from(
    [
        '"usage":{"output_tokens":999}',
        "data: [DONE]",
        "message_stop",
        "\u2028",
        "\r\n\r\n",
        "0\r\n\r\n",
        '\\"',
        "x" * 3000,
    ]
)
PLACES = st.lists(st.integers(0, 100_000), max_size=8)
COUNTS = st.integers(0, 10**9)


class Said(msgspec.Struct, frozen=True):
    """What a reply costs by its own words."""

    fresh: int
    read: int
    written: int
    made: int


class Answer(msgspec.Struct, frozen=True):
    """One exchange: how the request is framed, and all that the provider does about it."""

    api: str
    is_stream: bool
    said: Said
    texts: list[str]
    newline: str
    up_chunks: list[int] | None
    down: str
    down_chunks: list[int]
    interims: int
    status: int


ANSWERS = st.builds(
    Answer,
    api=st.sampled_from(sorted(PATHS)),
    is_stream=st.booleans(),
    said=st.builds(Said, COUNTS, COUNTS, COUNTS, COUNTS),
    texts=st.lists(TEXTS, max_size=4),
    newline=st.sampled_from(["\n", "\r\n"]),
    up_chunks=st.none() | PLACES,
    down=st.sampled_from(["length", "chunked", "close"]),
    down_chunks=PLACES,
    interims=st.integers(0, 2),
    status=st.sampled_from([200, 200, 200, 401, 529]),
)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """Cut `data` at the given places."""
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[start:end] for start, end in itertools.pairwise(edges)]


def asked(answer: Answer) -> bytes:
    """Return the request's body."""
    more = {"stream_options": {"include_usage": True}} if answer.api == "chat" else {}
    return json.dumps({"model": "m-1", "stream": answer.is_stream, **more, "text": answer.texts}).encode()


def usage_of(answer: Answer) -> dict[str, Any]:
    """Return the provider's usage object."""
    said = answer.said
    if answer.api == "messages":
        return {"input_tokens": said.fresh, "cache_read_input_tokens": said.read,
                "cache_creation_input_tokens": said.written, "output_tokens": said.made}  # fmt: skip
    details = {"cached_tokens": said.read}
    if answer.api == "chat":
        return {
            "prompt_tokens": said.fresh + said.read,
            "completion_tokens": said.made,
            "prompt_tokens_details": details,
        }
    return {"input_tokens": said.fresh + said.read, "output_tokens": said.made, "input_tokens_details": details}


def expected(answer: Answer) -> Usage:
    """Return what is to be booked."""
    said = answer.said
    if answer.status != 200:
        return Usage(model_requests=1)
    return Usage(
        model_requests=1,
        input_tokens=said.fresh,
        output_tokens=said.made,
        cache_read_tokens=said.read,
        cache_write_tokens=said.written if answer.api == "messages" else 0,
    )


def events(answer: Answer) -> Iterator[dict[str, Any] | str]:
    """Yield the events of a stream in the provider's manner."""
    usage = usage_of(answer)
    if answer.api == "messages":
        yield {"type": "message_start", "message": {"model": "m-1", "usage": {**usage, "output_tokens": 1}}}
        yield from ({"type": "content_block_delta", "delta": {"text": text}} for text in answer.texts)
        yield {"type": "message_delta", "usage": {"output_tokens": answer.said.made}}
        yield {"type": "message_stop"}
    elif answer.api == "chat":
        yield from ({"model": "m-1", "usage": None, "choices": [{"delta": {"content": text}}]} for text in answer.texts)
        yield {"model": "m-1", "choices": [], "usage": usage}
        yield "[DONE]"
    else:
        yield {"type": "response.created", "response": {"model": "m-1", "usage": None}}
        yield from ({"type": "response.output_text.delta", "delta": text} for text in answer.texts)
        yield {"type": "response.completed", "response": {"model": "m-1", "output": answer.texts, "usage": usage}}


def told(answer: Answer) -> bytes:
    """Return the reply's body."""
    if answer.status != 200:
        return json.dumps({"error": {"message": f"bad key {KEY}: {answer.texts}"}}).encode()
    if not answer.is_stream:
        return json.dumps({"model": "m-1", "content": answer.texts, "usage": usage_of(answer)}).encode()
    end = answer.newline
    return "".join(
        f"{'' if isinstance(event, str) else 'event: x' + end}"
        f"data: {event if isinstance(event, str) else json.dumps(event, ensure_ascii=False)}{end}{end}"
        for event in events(answer)
    ).encode()


def framed(answer: Answer) -> bytes:
    """Return all that the provider sends."""
    body = told(answer)
    kind = b"text/event-stream" if answer.is_stream and answer.status == 200 else b"application/json"
    head = b"HTTP/1.1 100 Continue\r\nx-note: %b\r\n\r\n" % KEY.encode() * answer.interims
    head += b"HTTP/1.1 %d Status\r\ncontent-type: %b\r\n" % (answer.status, kind)
    match answer.down:
        case "length":
            return head + b"content-length: %d\r\n\r\n" % len(body) + body
        case "chunked":
            return head + b"transfer-encoding: chunked\r\n\r\n" + chunked(*cut(body, answer.down_chunks))
        case _:
            return head + b"connection: close\r\n\r\n" + body


def sent(answer: Answer) -> bytes:
    """Return all that the client sends."""
    body, path = asked(answer), f"/model/s1{PATHS[answer.api]}"
    kind = "Content-Type: application/json"
    if answer.up_chunks is None:
        return request(body, path=path, headers=(kind,))
    head = request(b"", path=path, length=False, headers=(kind, "Transfer-Encoding: chunked"))
    return head + chunked(*cut(body, answer.up_chunks))


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, Path]:
    made = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.issue_cert("localhost").configure_cert(context)
    file = tmp_path_factory.mktemp("authority") / "ca.pem"
    made.cert_pem.write_to_path(str(file))
    return context, file


@pytest.mark.parametrize("over_tls", [False, True])
@settings(max_examples=80, deadline=None)
@given(
    answers=st.lists(ANSWERS, min_size=1, max_size=3),
    rule=st.sampled_from(sorted(RULES)),
    up=PLACES,
    down=st.lists(PLACES, min_size=3, max_size=3),
)
async def test_what_the_provider_sent_reaches_the_client_and_what_it_said_is_booked(
    authority: tuple[ssl.SSLContext, Path],
    answers: list[Answer],
    rule: str,
    up: list[int],
    down: list[list[int]],
    *,
    over_tls: bool,
) -> None:
    shape: ShapeName = "anthropic" if answers[0].api == "messages" else "openai"
    answers = [each for each in answers if (each.api == "messages") == (shape == "anthropic")]
    # In the order in which they are asked: one after the other, on whatever connection.
    turns = iter(list(zip(answers, down, strict=False)))
    arrived: list[bytes] = []

    async def handler(peer: Peer) -> None:
        if not over_tls:
            # There each piece is a record of its own, and uvloop's transports of TLS never drain to nothing.
            peer.writer.transport.set_write_buffer_limits(0)
        while True:
            arrived.append(await peer.request())
            answer, places = next(turns)
            for piece in cut(framed(answer), places):
                await peer.send(piece)
            if answer.down == "close":
                return

    context, ca_file = authority
    async with AsyncExitStack() as stack:
        upstream = await stack.enter_async_context(scripted(handler, tls=context if over_tls else None))
        proxy = await stack.enter_async_context(
            running_proxy(
                f"https://localhost:{upstream.port}" if over_tls else upstream.url,
                shape=shape,
                ca_file=str(ca_file) if over_tls else "",
                **RULES[rule],
            )
        )
        client = await stack.enter_async_context(connected(proxy.port))
        client.writer.transport.set_write_buffer_limits(0)
        sending = asyncio.ensure_future(_send(client.send, cut(b"".join(map(sent, answers)), up)))
        for answer in answers:
            replies = [await client.reply() for _ in range(answer.interims + 1)]
            assert [each.status for each in replies] == [100] * answer.interims + [answer.status]
            # An error that repeats the key is passed on with stars in its place; what succeeded is not touched.
            assert replies[-1].body == told(answer).replace(KEY.encode(), b"*" * len(KEY))
            assert all(KEY.encode() not in each.head for each in replies)
        await sending
        await proxy.settled()
        assert arrived == [asked(each) for each in answers]
        assert all(TOKEN.encode() not in data for data in upstream.received)
        total = Usage()
        for answer in answers:
            total = total.plus(expected(answer))
        assert proxy.usage() == total
        assert [line.event for line in proxy.audit.lines] == ["allow", "close"] * len(answers)
        assert {line.reason for line in proxy.audit.lines} <= {"model", "done"}
        client.close()


async def _send(send: Any, pieces: list[bytes]) -> None:
    for piece in pieces:
        await send(piece)
