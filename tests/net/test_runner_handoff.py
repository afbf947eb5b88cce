"""/runner: authenticated here, handed to control by splice, with the session's id and without its token."""

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from tests.support.app_server import AppServer
from tests.support.gateway_process import TOKEN, GatewayProcess, gateway_process
from tests.support.listener import StreamServer
from tests.support.patience import PATIENCE_S

UPGRADE = (
    b"Host: opificia-gateway\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
)


@asynccontextmanager
async def control() -> AsyncIterator[tuple[Path, list[dict[str, str]]]]:
    """Control's runner socket, as an aiohttp WebSocket server that echoes."""
    seen: list[dict[str, str]] = []

    async def runner(request: web.Request) -> web.WebSocketResponse:
        seen.append({name.lower(): value for name, value in request.headers.items()} | {"path": request.path_qs})
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            await socket.send_str(str(message.data))
        return socket

    app = web.Application()
    app.router.add_get("/runner", runner)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        path = Path(folder) / "control.sock"
        server = AppServer(app, shutdown_timeout=0.1)
        await server.listen(path)
        path.chmod(0o666)
        try:
            yield path, seen
        finally:
            await server.close()


@asynccontextmanager
async def handing_gateway() -> AsyncIterator[tuple[GatewayProcess, list[dict[str, str]]]]:
    async with control() as (path, seen):
        sessions = [{"id": "s1", "egress_budget": {"bytes": 10, "connections": 1}}, {"id": "s2"}]
        config = {"runner": {"upstream": f"unix:{path}"}, "limits": {"egress_idle_ms": 300}}
        with gateway_process(config, sessions) as gateway:
            yield gateway, seen


def url(gateway: GatewayProcess, session: str = "s1") -> str:
    return f"http://127.0.0.1:{gateway.port}/runner?session={session}"


async def test_a_runner_talks_to_control_and_control_learns_the_session_but_no_token() -> None:
    async with handing_gateway() as (gateway, seen), aiohttp.ClientSession() as http:
        headers = {"Authorization": f"Bearer {TOKEN}", "Cookie": "a=b", "X-Opificia-Session": "s2"}
        async with http.ws_connect(url(gateway), headers=headers) as socket:
            # More than the egress budget, and longer than the egress idle limit: neither is the runner's.
            for text in ("hello", "x" * 200_000, "again"):
                await socket.send_str(text)
                assert (await socket.receive_str()) == text
        assert seen[0]["x-opificia-session"] == "s1"
        assert TOKEN not in str(seen)
        assert "cookie" not in seen[0]
        assert seen[0]["path"] == "/runner"


@pytest.mark.parametrize(
    ("session", "authorization"),
    [
        ("s1", ""),
        ("s1", "Bearer wrong"),
        ("nobody", f"Bearer {TOKEN}"),
        ("s1", f"Basic {TOKEN}"),
        ("", f"Bearer {TOKEN}"),
    ],
)
async def test_refuses_a_runner_without_the_sessions_token(session: str, authorization: str) -> None:
    async with handing_gateway() as (gateway, seen), aiohttp.ClientSession() as http:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await http.ws_connect(url(gateway, session), headers={"Authorization": authorization})
        assert refused.value.status == 401
        assert not seen


async def test_refuses_a_plain_request_for_the_runners_path() -> None:
    async with handing_gateway() as (gateway, seen), aiohttp.ClientSession() as http:
        async with http.get(url(gateway), headers={"Authorization": f"Bearer {TOKEN}"}) as response:
            assert response.status == 400
        assert not seen


async def test_says_503_while_control_is_away() -> None:
    config = {"runner": {"upstream": "unix:/nonexistent/control.sock"}}
    with gateway_process(config) as gateway:
        async with aiohttp.ClientSession() as http:
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await http.ws_connect(url(gateway), headers={"Authorization": f"Bearer {TOKEN}"})
            assert refused.value.status == 503


async def test_a_gateway_without_control_has_no_place_for_runners_and_keeps_nothing_of_them() -> None:
    with gateway_process() as gateway:
        before = gateway.descriptors()
        for _ in range(20):
            client = await gateway.client()
            assert (await client.ask(request())).status == 404
            await client.close()
        async with asyncio.timeout(PATIENCE_S):
            while gateway.descriptors() > before + 2:
                await asyncio.sleep(0.01)
        assert "never retrieved" not in gateway.log()


async def test_a_revoked_sessions_runner_is_cut() -> None:
    import signal

    async with handing_gateway() as (gateway, _), aiohttp.ClientSession() as http:
        async with http.ws_connect(url(gateway), headers={"Authorization": f"Bearer {TOKEN}"}) as socket:
            await socket.send_str("x")
            await socket.receive_str()
            gateway.sessions = gateway.sessions[1:]
            gateway.write_files()
            os.kill(gateway.pid, signal.SIGHUP)
            async with asyncio.timeout(PATIENCE_S):
                message = await socket.receive()
            assert message.type in (aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.ERROR)


def request(target: bytes = b"/runner?session=s1") -> bytes:
    return b"GET %b HTTP/1.1\r\n%bAuthorization: Bearer %b\r\n\r\n" % (target, UPGRADE, TOKEN.encode())


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", 503),
        (b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\n\r\n", 429),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", 503),
        (b"HTTP/1.1 101 " + b"x" * 9000, 503),
        (b"", 503),
    ],
)
async def test_nothing_a_runner_sends_reaches_a_control_that_still_reads_requests(answer: bytes, status: int) -> None:
    """It could be a request with `X-Opificia-Session` of another's, which control would believe."""
    heard = bytearray()
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.extend(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer)
        if answer:
            # The gateway closes on an answer that it does not read to the end.
            with contextlib.suppress(ConnectionResetError):
                heard.extend(await reader.read())
        ended.set()
        writer.close()

    forged = b"GET /runner HTTP/1.1\r\n%bX-Opificia-Session: s2\r\n\r\n" % UPGRADE
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        path = Path(folder) / "control.sock"
        async with StreamServer(serve, path):
            path.chmod(0o666)
            with gateway_process({"runner": {"upstream": f"unix:{path}"}}) as gateway:
                client = await gateway.client()
                reply = await client.ask(request() + forged)
                await client.close()
                assert reply.status == status
                async with asyncio.timeout(PATIENCE_S):
                    await ended.wait()
                assert b"X-Opificia-Session: s1" in heard
                assert b"s2" not in heard


@pytest.mark.parametrize(
    "query",
    [
        b"&".join(b"field%d=1" % number for number in range(20)) + b"&session=s1",
        b"session=s2&session=s1",
        b"session=s1&other=1",
        b"session=%731",
        b"session=",
        b"",
    ],
)
async def test_a_target_that_is_not_exactly_the_one_given_to_sandboxes_names_no_session(query: bytes) -> None:
    async with handing_gateway() as (gateway, seen):
        client = await gateway.client()
        reply = await client.ask(request(b"/runner?" + query))
        await client.close()
        assert reply.status == 401
        assert not seen
        assert "Traceback" not in gateway.log()


async def test_a_runner_that_comes_again_and_again_while_control_is_away_does_not_fill_the_log() -> None:
    tries = 100
    with gateway_process({"runner": {"upstream": "unix:/nonexistent/control.sock"}}) as gateway:
        for _ in range(tries):
            async with await gateway.client() as client:
                head = b"GET /runner?session=s1 HTTP/1.1\r\nAuthorization: Bearer %b\r\n%b\r\n" % (
                    TOKEN.encode(),
                    UPGRADE,
                )
                assert (await client.ask(head)).status == 503
        # Said once in ten seconds.
        assert 1 <= gateway.log().count("control cannot be reached") < tries / 2
