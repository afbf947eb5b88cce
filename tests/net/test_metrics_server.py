"""The metrics port: two paths, one request a connection, nothing else."""

import asyncio
import contextlib
import os
import tempfile

import pytest

from gateway.net.metrics_server import MAX_CONNECTIONS
from tests.support.gateway_process import GatewayProcess, gateway_process
from tests.support.identities import GATEWAY
from tests.support.patience import PATIENCE_S
from tests.support.sockets import Client, Reply, echo_server

TUNNEL = ("s1", "token-of-a-test")


async def ask(gateway: GatewayProcess, request: bytes) -> Reply:
    async with await Client.connect(("127.0.0.1", gateway.metrics_port)) as client:
        reply = await client.ask(request)
        assert await client.read_to_end() == b""
        return reply


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


async def test_metrics_are_text_and_count_what_happened(gateway: GatewayProcess) -> None:
    async with echo_server() as server, await gateway.client() as client:
        assert (await client.tunnel(f"127.0.0.1:{server.port}", TUNNEL)).status == 200
        reply = await ask(gateway, get("/metrics"))
        assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
        lines = reply.body.decode().splitlines()
        assert "opificia_gateway_tunnels 1.0" in lines
        assert "opificia_gateway_slots_held 1.0" in lines
        assert 'opificia_gateway_decisions_total{kind="connect",reason="allowed"} 1.0' in lines
        assert 'opificia_gateway_connect_seconds_bucket{le="+Inf"} 1.0' in lines


async def test_slots_and_pipes_are_counted_while_they_are_held(gateway: GatewayProcess) -> None:
    async def held() -> list[str]:
        lines = (await ask(gateway, get("/metrics"))).body.decode().splitlines()
        return [
            line.rsplit(" ", 1)[1]
            for line in lines
            if line.startswith(("opificia_gateway_pipes_h", "opificia_gateway_slots_h"))
        ]

    async with echo_server() as server, await gateway.client() as client:
        assert (await client.tunnel(f"127.0.0.1:{server.port}", TUNNEL)).status == 200
        # More than the echo's buffers and ours hold: nobody reads what comes back.
        sending = asyncio.create_task(client.send(bytes(50_000_000)))
        async with asyncio.timeout(PATIENCE_S):
            while (now := await held()) in (["0.0", "1.0"], ["0.0", "0.0"]):
                await asyncio.sleep(0.01)
        assert float(now[0]) >= 1
        assert now[1] == "1.0"
        sending.cancel()
        client.reset()
        async with asyncio.timeout(PATIENCE_S):
            while await held() != ["0.0", "0.0"]:
                await asyncio.sleep(0.01)


async def test_health_tells_whether_sessions_are_known(gateway: GatewayProcess) -> None:
    assert (await ask(gateway, get("/health"))).status == 200
    with tempfile.TemporaryDirectory() as folder:
        os.chown(folder, GATEWAY, GATEWAY)
        listen = {"contract": f"unix:{folder}/gateway.sock"}
        with gateway_process({"listen": listen, "sessions": {"file": ""}}) as waiting:
            reply = await ask(waiting, get("/health"))
            assert (reply.status, reply.body) == (503, b'{"ready":false,"sessions":0}')


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (get("/"), 404),
        (get("/metrics/"), 404),
        (get("//metrics"), 404),
        (b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n", 405),
        (b"CONNECT example.com:443 HTTP/1.1\r\nHost: example.com:443\r\n\r\n", 405),
        (b"\x16\x03\x01\x02\x00", 400),
        (b"GET /metrics HTTP/1.1\r\n" + b"x: y\r\n" * 4000 + b"\r\n", 431),
    ],
)
async def test_anything_else_is_refused(gateway: GatewayProcess, request_: bytes, status: int) -> None:
    assert (await ask(gateway, request_)).status == status


async def test_a_request_in_pieces_is_answered_once(gateway: GatewayProcess) -> None:
    async with await Client.connect(("127.0.0.1", gateway.metrics_port)) as client:
        await client.send_slowly(get("/health"))
        assert (await client.reply()).status == 200
        assert await client.read_to_end() == b""


async def test_a_crowd_of_connections_is_bounded_and_keeps_no_scraper_out(gateway: GatewayProcess) -> None:
    crowd = [await asyncio.open_connection("127.0.0.1", gateway.metrics_port) for _ in range(MAX_CONNECTIONS + 8)]
    try:
        assert (await ask(gateway, get("/health"))).status == 200
        async with asyncio.timeout(PATIENCE_S):
            # Cut, and not at the end of its time: those that came last are there still.
            for reader, _ in crowd[:8]:
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
        assert not any(reader.at_eof() or reader.exception() for reader, _ in crowd[16:])
    finally:
        for _, writer in crowd:
            writer.transport.abort()
