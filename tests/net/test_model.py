"""The model proxy in the real gateway: from the listener's hand-over to the provider, and what it leaves in logs."""

import asyncio
import json
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.model import wire
from tests.model.wire import PATH, request
from tests.net.test_plain import ask
from tests.support.gateway_process import TOKEN, GatewayProcess, gateway_process
from tests.support.identities import GATEWAY
from tests.support.origin import origin
from tests.support.patience import PATIENCE_S, until, within
from tests.support.provider import TEXT, FakeProvider

KEY = "sk-operator-secret-0123456789"
OTHER_TOKEN = "token-of-the-other"


@pytest.fixture
async def provider() -> AsyncIterator[FakeProvider]:
    fake = FakeProvider(KEY)
    await fake.start()
    yield fake
    await fake.close()


@pytest.fixture
def key_file() -> Iterator[Path]:
    # pytest's own temporary folders cannot be entered by the gateway's user.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        file = Path(folder) / "key"
        write_key(file, KEY)
        yield file


def write_key(file: Path, key: str) -> None:
    """Write a key as the operator would: readable by the gateway only."""
    file.write_text(key + "\n")
    file.chmod(0o600)
    os.chown(file, GATEWAY, GATEWAY)


@asynccontextmanager
async def modelling(
    provider: FakeProvider, key_file: Path, **limits: int
) -> AsyncIterator[tuple[GatewayProcess, "list[dict[str, Any]]"]]:
    """Run a gateway whose provider is the fake one, with two sessions."""
    sessions = [{"id": "s1"}, {"id": "s2", "token": OTHER_TOKEN}]
    config = {
        "model": {"upstream": f"http://127.0.0.1:{provider.port}", "api_key_file": str(key_file)},
        "limits": {"drain_ms": 5000, **limits},
    }
    with gateway_process(config, sessions) as gateway:
        yield gateway, sessions


@asynccontextmanager
async def connected(gateway: GatewayProcess, session: str = "s1") -> AsyncIterator[wire.Client]:
    """Connect from where the session's sandbox is."""
    async with await gateway.client(session) as client, asyncio.timeout(PATIENCE_S):
        yield wire.Client(client.reader, client.writer)


def message(model: str = "fake-model", **more: object) -> bytes:
    body = {"model": model, "max_tokens": 50, "messages": [{"role": "user", "content": "my secret plan"}], **more}
    return request(json.dumps(body).encode(), token=TOKEN)


async def test_a_stream_comes_through_the_gateway_and_is_logged(provider: FakeProvider, key_file: Path) -> None:
    async with modelling(provider, key_file) as (gateway, _), connected(gateway) as client:
        await client.send(message(stream=True))
        answer = await client.reply()
        assert answer.status == 200
        assert all(json.dumps(word, ensure_ascii=False).encode()[1:-1] in answer.body for word in (TEXT[:5],))
        line = await gateway.await_audit("s1", event="close", kind="model")
        assert line["model"]["model"] == "fake-model"
        assert line["model"]["output_tokens"] == 15
        assert provider.requests[0].header("x-api-key") == KEY
        # A second request on the same connection, and one in pieces, and one in absolute form.
        await client.send(message())
        assert (await client.reply()).status == 200
        whole = request(token=TOKEN, path="http://opificia-gateway:8900/model/s1/v1/messages")
        for start in range(0, len(whole), 50):
            await client.send(whole[start : start + 50])
        assert (await client.reply()).status == 200


async def test_a_first_head_in_pieces_reaches_the_model_proxy_whole(provider: FakeProvider, key_file: Path) -> None:
    async with modelling(provider, key_file) as (gateway, _):
        for size in (1, 7, 1000):
            async with connected(gateway) as client:
                whole = message()
                for start in range(0, len(whole), size):
                    await client.send(whole[start : start + size])
                assert (await client.reply()).status == 200


async def test_an_absolute_target_for_the_gateway_itself_is_served_as_if_direct(
    provider: FakeProvider, key_file: Path
) -> None:
    async with modelling(provider, key_file) as (gateway, _), connected(gateway) as client:
        await client.send(request(token=TOKEN, path="http://opificia-gateway:8900/model/s1/v1/messages"))
        assert (await client.reply()).status == 200


async def test_a_client_of_the_proxy_asks_hosts_and_the_model_on_one_connection(
    provider: FakeProvider, key_file: Path
) -> None:
    model = request(token=TOKEN, path="http://opificia-gateway:8900/model/s1/v1/messages")
    async with modelling(provider, key_file) as (gateway, _), origin() as server, connected(gateway) as client:
        for _ in range(2):
            for asked in (ask(server), model):
                for start in range(0, len(asked), 100):
                    await client.send(asked[start : start + 100])
                answer = await client.reply()
                assert (answer.status, answer.body == b"hello") == (200, asked is not model)
        await client.send(ask(server) + model + ask(server) + ask(server) + model + model + ask(server))
        answers = [await client.reply() for _ in range(7)]
        assert [answer.status for answer in answers] == [200] * 7
        assert [answer.body == b"hello" for answer in answers] == [True, False, True, True, False, False, True]
        assert len(provider.requests) == 5
        # Credentials are looked at anew with each request, whoever served the one before.
        await client.send(ask(server, credentials=("s1", "wrong")))
        assert (await client.reply()).status == 407


async def test_a_session_opens_nothing_but_its_own_path(provider: FakeProvider, key_file: Path) -> None:
    async with modelling(provider, key_file) as (gateway, _):
        async with connected(gateway) as client:
            await client.send(request(token=TOKEN, path="/model/s2/v1/messages"))
            assert (await client.reply()).status == 401
        if gateway.forwarded is not None:
            # The token is right, but it speaks from another session's container.
            async with connected(gateway, "s1") as client:
                await client.send(request(token=OTHER_TOKEN, path="/model/s2/v1/messages"))
                assert (await client.reply()).status == 401
            async with connected(gateway, "s2") as client:
                await client.send(request(token=OTHER_TOKEN, path="/model/s2/v1/messages"))
                assert (await client.reply()).status == 200


async def test_the_provider_is_left_within_a_second_of_the_client_leaving(
    provider: FakeProvider, key_file: Path
) -> None:
    async with modelling(provider, key_file) as (gateway, _):
        async with connected(gateway) as client:
            await client.send(message("fake-long", stream=True))
            await client.reader.readuntil(b"\n\n\r\n")
        async with within(1):
            await until(lambda: provider.cancelled == 1)
        line = await gateway.await_audit("s1", event="close")
        assert line["reason"] == "client_gone"
        assert line["model"]["input_tokens"] == 25


async def test_a_stream_survives_a_reload_that_changes_the_key(provider: FakeProvider, key_file: Path) -> None:
    async with modelling(provider, key_file) as (gateway, _), connected(gateway) as client:
        await client.send(message("fake-slow", stream=True))
        await client.reader.readuntil(b"\n\n\r\n")
        provider.key = "sk-rotated-secret-0123456789"
        write_key(key_file, provider.key)
        gateway.signal(signal.SIGHUP)
        await until(lambda: "reloaded" in gateway.log())
        async with connected(gateway) as second:
            await second.send(message())
            assert (await second.reply()).status == 200
        await client.reader.readuntil(b"message_stop")
        await client.reader.readuntil(b"\r\n0\r\n\r\n")


def gives_two_lines(key_file: Path, gateway: GatewayProcess) -> str:
    write_key(key_file, "sk-one\nsk-two")
    return "not one line"


def is_readable_by_others(key_file: Path, gateway: GatewayProcess) -> str:
    key_file.chmod(0o644)
    return "chmod 600"


def is_gone_with_that_of_another_provider(key_file: Path, gateway: GatewayProcess) -> str:
    (key_file.parent / "other").unlink()
    return f"{key_file.parent}/other cannot be read"


@pytest.mark.parametrize("breaks", [gives_two_lines, is_readable_by_others, is_gone_with_that_of_another_provider])
async def test_a_session_that_was_taken_away_is_gone_even_when_a_key_cannot_be_read(
    breaks: Callable[[Path, GatewayProcess], str], provider: FakeProvider, key_file: Path
) -> None:
    write_key(key_file.parent / "other", "sk-other")
    url = f"http://127.0.0.1:{provider.port}"
    other = {"name": "other", "upstream": url, "api_key_file": str(key_file.parent / "other")}
    config = {"model": {"upstream": url, "api_key_file": str(key_file), "provider": [other]}}
    with gateway_process(config, [{"id": "s1"}, {"id": "s2", "token": OTHER_TOKEN}]) as gateway:
        taken = request(token=OTHER_TOKEN, path="/model/s2/v1/messages")
        async with connected(gateway, "s2") as client:
            await client.send(taken)
            assert (await client.reply()).status == 200
        told = breaks(key_file, gateway)
        gateway.sessions.pop()
        gateway.write_files()
        gateway.signal(signal.SIGHUP)
        await until(lambda: "reloaded" in gateway.log())
        assert told in gateway.log()
        async with connected(gateway, "s2") as client:
            await client.send(taken)
            assert (await client.reply()).status == 401
        # The other one is served, with the key of before.
        async with connected(gateway) as client:
            await client.send(message())
            assert (await client.reply()).status == 200


async def test_a_key_is_changed_even_when_the_sessions_cannot_be_read(provider: FakeProvider, key_file: Path) -> None:
    async with modelling(provider, key_file) as (gateway, _):
        provider.key = "sk-rotated-secret-0123456789"
        write_key(key_file, provider.key)
        gateway.sessions.append({"id": "s3"})
        gateway.write_files()
        gateway.signal(signal.SIGHUP)
        await until(lambda: "reloaded" in gateway.log())
        assert "exactly one of token and token_sha256" in gateway.log()
        async with connected(gateway) as client:
            await client.send(message())
            assert (await client.reply()).status == 200


REFUSED_HEADS = [
    (request(token=TOKEN, headers=("X-A: " + "a" * 20_000,)), 431, b"head_too_large"),
    (request(token=TOKEN, path=PATH + "?" + "a" * 20_000), 431, b"head_too_large"),
    (request(token=TOKEN, headers=("X-A: 1",) * 200), 431, b"head_too_large"),
    (request(token=TOKEN, headers=("X-A: \0",)), 400, b"malformed_request"),
    (request(token=TOKEN, headers=("X-A: 1\r\n folded",)), 400, b"malformed_request"),
    (request(token=TOKEN, headers=("X-A: 1\nX-B: 2",)), 400, b"malformed_request"),
    (request(token=TOKEN, headers=("no header",)), 400, b"malformed_request"),
    (f"POST {PATH} HTTP/2.0\r\n\r\n".encode(), 400, b"malformed_request"),
    (f"POST {PATH}\r\n\r\n".encode(), 400, b"malformed_request"),
    (f"POST  {PATH} HTTP/1.1\r\n\r\n".encode(), 400, b"malformed_request"),
    (request(token=TOKEN, path="/model/s1/../s2/v1/messages"), 404, b"not_found"),
    (request(token=TOKEN, path="/model/"), 404, b"not_found"),
    (request(token=TOKEN, path=f"http://opificia-gateway{PATH}", headers=("X-A: \0",)), 400, b"malformed_request"),
    (request(token=TOKEN, path=f"HTTP://OPIFICIA-gateway:8900{PATH}", headers=("X: 1\nY: 2",)), 400, b"malformed_request"),
]  # fmt: skip


@pytest.mark.parametrize("shape", ["anthropic", "openai"])
async def test_a_first_head_that_is_refused_is_answered_in_the_providers_shape(shape: str) -> None:
    config = {"model": {"upstream": "http://127.0.0.1:9", "shape": shape}}
    with gateway_process(config) as gateway:
        for head, status, reason in REFUSED_HEADS:
            async with connected(gateway) as client:
                await client.send(head)
                answer = await client.reply()
                assert (answer.status, answer.header(b"x-opificia-reason")) == (status, reason), head[:100]
                assert answer.header(b"x-should-retry") == b"false"
                assert answer.header(b"connection") == b"close"
                body = json.loads(answer.body)
                assert (body.get("type") == "error") == (shape == "anthropic")
                if shape == "openai":
                    assert body["error"]["code"] == reason.decode()


async def test_a_head_for_the_model_after_a_request_to_a_host_is_refused_in_the_providers_shape() -> None:
    with gateway_process() as gateway:
        async with origin() as server:
            for head, status, reason in REFUSED_HEADS:
                async with connected(gateway) as client:
                    await client.send(ask(server))
                    assert (await client.reply()).body == b"hello"
                    await client.send(head)
                    answer = await client.reply()
                    assert (answer.status, answer.header(b"x-opificia-reason")) == (status, reason), head[:100]
                    assert json.loads(answer.body)["type"] == "error"


async def test_a_first_head_for_the_model_that_does_not_end_in_time_is_answered_in_the_providers_shape() -> None:
    with gateway_process({"limits": {"head_timeout_ms": 300}}) as gateway:
        async with connected(gateway) as client:
            await client.send(f"POST {PATH} HTTP/1.1\r\nHo".encode())
            answer = await client.reply()
            assert (answer.status, json.loads(answer.body)["type"]) == (408, "error")
            # The provider's SDKs ask again by themselves.
            assert answer.header(b"x-should-retry") is None


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/models",
        f"/{PATH}",
        "/runner",
        f"http://evil.example{PATH}",
        f"http://opificia-gateway@evil.example{PATH}",
    ],
)
async def test_a_first_head_for_anything_else_is_refused_in_the_gateways_own_shape(path: str) -> None:
    with gateway_process() as gateway:
        async with connected(gateway) as client:
            await client.send(request(token=TOKEN, path=path, headers=("X-A: \0",)))
            answer = await client.reply()
            assert (answer.status, json.loads(answer.body)["error"]["reason"]) == (400, "malformed_request")
            assert answer.header(b"x-should-retry") is None


async def test_stopping_lets_a_stream_end(provider: FakeProvider, key_file: Path) -> None:
    async with modelling(provider, key_file) as (gateway, _), connected(gateway) as client:
        await client.send(message("fake-slow", stream=True))
        await client.reader.readuntil(b"\n\n\r\n")
        gateway.signal(signal.SIGTERM)
        assert (await client.closed()).endswith(b"0\r\n\r\n")


async def test_no_key_token_or_content_is_in_anything_that_was_written(provider: FakeProvider, key_file: Path) -> None:
    scripts = ["fake-model", "fake-401-key", "fake-400", "fake-redirect", "fake-cut", "fake-cut-early", "fake-gzip"]
    replies = b""
    async with modelling(provider, key_file, model_first_byte_timeout_ms=300) as (gateway, _):
        for script in [*scripts, "fake-silent"]:
            async with connected(gateway) as client:
                await client.send(message(script, stream=True))
                replies += await client.reader.readuntil(b"\r\n\r\n") if script == "fake-model" else b""
        for bad in (
            request(token=TOKEN, headers=("Content-Length: 1",)),
            request(token=f"{TOKEN}x"),
            request(token=TOKEN, path=f"/model/s1/{TOKEN}"),
            request(token=TOKEN, headers=(f"X-A: {KEY}\nX",)),
            b"GET " + TOKEN.encode(),
        ):
            async with connected(gateway) as client:
                await client.send(bad)
                if bad.startswith(b"POST"):
                    replies += await client.closed()
        await provider.close()
        for script in ("fake-model", "fake-cut"):
            async with connected(gateway) as client:
                await client.send(message(script))
                answer = await client.reply()
                assert answer.status == 502
                replies += answer.head + answer.body
        await gateway.await_audit("s1", event="close", reason="connect_failed")
        gateway.signal(signal.SIGHUP)
        await until(lambda: "reloaded" in gateway.log())
        _, writer = reader_writer = await asyncio.open_connection("127.0.0.1", gateway.metrics_port)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        metrics = (await reader_writer[0].read()).decode()
        writer.close()
        assert "opificia_gateway_model_requests" in metrics
        written = [gateway.log(), metrics, replies.decode("latin-1")]
        written += [file.read_text() for file in gateway.audit_dir.iterdir()]
        assert "Traceback" not in gateway.log()
        assert b"127.0.0.1" not in replies
    for text in written:
        for secret in (KEY, TOKEN, OTHER_TOKEN, "secret plan"):
            assert secret not in text
