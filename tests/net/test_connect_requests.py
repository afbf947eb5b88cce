"""What a sandbox may say at the port, and what it is told when it may not: heads, names, credentials, levels."""

import asyncio
import contextlib
import json

import pytest

from tests.support.gateway_process import TOKEN, GatewayProcess, gateway_process
from tests.support.patience import PATIENCE_S
from tests.support.sockets import Client, basic, echo_server

GOOD = ("s1", TOKEN)


@pytest.mark.parametrize(
    "target",
    [
        "[[example.com]]:443",
        "[example.com]:443",
        "[localhost]:443",
        "example.com:+443",
        "example.com:443/x",
        "example.com:0",
        "example.com:65536",
        "example.com:",
        "example.com",
        "user@example.com:443",
        "user:pw@example.com:443",
        "api.example.com..:443",
        ".example.com:443",
        "a..example.com:443",
        ":443",
        "0x7f.1:443",
        "127.1:443",
        "2130706433:443",
        "0177.0.0.1:443",
        "[fe80::1%25eth0]:443",
        "127.0.0.1:443:443",
    ],
)
async def test_refuses_an_authority_that_two_readers_could_read_differently(
    gateway: GatewayProcess, target: str
) -> None:
    async with await gateway.client() as client:
        reply = await client.tunnel(target, GOOD)
        assert reply.status == 400
        assert reply.reason in ("malformed_authority", "malformed_request")
        assert await client.read_to_end() == b""


async def test_refuses_two_different_host_headers(gateway: GatewayProcess) -> None:
    async with await gateway.client() as client:
        head = f"CONNECT a.example:443 HTTP/1.1\r\nHost: a.example\r\nHost: b.example\r\nProxy-Authorization: {basic(*GOOD)}"
        reply = await client.ask(head.encode() + b"\r\n\r\n")
        assert (reply.status, reply.reason) == (400, "malformed_request")


async def test_refuses_a_host_header_that_names_another_host_than_the_target(gateway: GatewayProcess) -> None:
    async with await gateway.client() as client:
        head = f"CONNECT a.example:443 HTTP/1.1\r\nHost: b.example:443\r\nProxy-Authorization: {basic(*GOOD)}\r\n\r\n"
        reply = await client.ask(head.encode())
        assert (reply.status, reply.reason) == (400, "malformed_authority")


async def test_refuses_a_head_of_64_kib(gateway: GatewayProcess) -> None:
    async with await gateway.client() as client:
        reply = await client.ask(b"CONNECT a.example:443 HTTP/1.1\r\nX: " + b"x" * 65536 + b"\r\n\r\n")
        assert (reply.status, reply.reason) == (431, "head_too_large")


async def test_closes_a_head_that_comes_a_byte_at_a_time_at_the_deadline() -> None:
    with gateway_process({"limits": {"head_timeout_ms": 1_500}}) as gateway:
        async with await gateway.client() as client:
            await client.send(b"CONNECT a.example:443 HT")
            reply = await client.reply()
            assert (reply.status, reply.reason) == (408, "head_timeout")
            assert await client.read_to_end() == b""


@pytest.mark.parametrize("first", [b"\x16\x03\x01\x02\x00\x01\x00", b"\x05\x01\x00", b"\x04\x01\x00\x50"])
async def test_answers_tls_and_socks_at_once_instead_of_hanging(gateway: GatewayProcess, first: bytes) -> None:
    async with await gateway.client() as client:
        reply = await client.ask(first)
        assert (reply.status, reply.reason) == (400, "malformed_request")
        assert await client.read_to_end() == b""


async def test_a_head_split_into_single_bytes_is_read(gateway: GatewayProcess) -> None:
    async with echo_server() as server, await gateway.client() as client:
        head = f"CONNECT 127.0.0.1:{server.port} HTTP/1.1\r\nProxy-Authorization: {basic(*GOOD)}\r\n\r\n"
        await client.send_slowly(head.encode())
        assert (await client.reply(body=False)).status == 200


async def test_never_answers_a_second_request_after_a_refused_one(gateway: GatewayProcess) -> None:
    async with echo_server() as server, await gateway.client() as client:
        refused = f"CONNECT 169.254.169.254:443 HTTP/1.1\r\nProxy-Authorization: {basic(*GOOD)}\r\n\r\n"
        allowed = f"CONNECT 127.0.0.1:{server.port} HTTP/1.1\r\nProxy-Authorization: {basic(*GOOD)}\r\n\r\n"
        reply = await client.ask((refused + allowed).encode())
        assert reply.status == 403
        assert await client.read_to_end() == b""


async def test_asks_for_credentials_with_a_challenge(gateway: GatewayProcess) -> None:
    async with await gateway.client() as client:
        reply = await client.tunnel("example.com:443")
        assert (reply.status, reply.reason) == (407, "credentials_missing")
        assert reply.headers["proxy-authenticate"] == 'Basic realm="opificia"'


@pytest.mark.parametrize(
    "credentials",
    ["Basic", "Basic !!!", "Bearer x", basic("s1", "wrong"), basic("nobody", TOKEN), basic("S1", TOKEN), basic("", "")],
)
async def test_refuses_wrong_credentials_with_407(gateway: GatewayProcess, credentials: str) -> None:
    async with await gateway.client() as client:
        head = f"CONNECT example.com:443 HTTP/1.1\r\nProxy-Authorization: {credentials}\r\n\r\n"
        reply = await client.ask(head.encode())
        assert (reply.status, reply.reason) == (407, "credentials_wrong")
        assert "proxy-authenticate" in reply.headers


async def test_a_policy_refusal_is_403_and_says_why_three_times(gateway: GatewayProcess) -> None:
    async with await gateway.client("listed") as client:
        reply = await client.tunnel("unlisted.example.org:443", ("listed", TOKEN))
        assert reply.status == 403
        assert reply.reason == "host_not_listed"
        assert "host_not_listed" in reply.phrase
        error = json.loads(reply.body)["error"]
        assert (error["reason"], error["host"], error["port"]) == ("host_not_listed", "unlisted.example.org", 443)
        assert error["message"]
    line = await gateway.await_audit("listed", event="refuse", host="unlisted.example.org")
    assert line["reason"] == "host_not_listed"


@pytest.mark.parametrize(
    ("session", "target", "reason"),
    [
        ("offline", "pypi.org:443", "network_disabled"),
        ("listed", "example.com:443", "host_not_listed"),
        ("listed", "evilexample.com:443", "host_not_listed"),
        ("listed", "git.example.net:443", "port_not_listed"),
        ("listed", "127.0.0.1:9", "host_not_listed"),
        ("denied", "127.0.0.1:9", "host_denied"),
        ("denied", "a.evil.example:443", "host_denied"),
        ("denied", "A.EVIL.example.:443", "host_denied"),
    ],
)
async def test_refuses_by_level_and_rules(gateway: GatewayProcess, session: str, target: str, reason: str) -> None:
    async with await gateway.client(session) as client:
        reply = await client.tunnel(target, (session, TOKEN))
        assert (reply.status, reply.reason) == (403, reason)


async def test_unknown_things_at_the_port_are_404(gateway: GatewayProcess) -> None:
    for request in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"):
        async with await gateway.client() as client:
            assert (await client.ask(request)).status == 404


async def test_a_health_check_that_opens_and_closes_is_served_and_not_logged(gateway: GatewayProcess) -> None:
    before = gateway.log()
    for _ in range(20):
        client = await gateway.client()
        await client.close()
    async with await gateway.client() as client:
        assert (await client.ask(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")).status == 404
    assert gateway.log() == before


async def test_tokens_never_reach_the_log(gateway: GatewayProcess) -> None:
    async with await gateway.client() as client:
        await client.tunnel("example.com:443", ("s1", "a-token-that-is-wrong"))
    assert "a-token-that-is-wrong" not in gateway.log()
    assert TOKEN not in gateway.log()


async def test_unauthenticated_connections_are_capped_for_each_source() -> None:
    with gateway_process({"limits": {"unauthenticated_per_source": 4}}) as gateway:
        clients = [await gateway.client() for _ in range(5)]

        async def wait_with_half_a_head(client: Client) -> None:
            # A reset where it was closed before it spoke.
            with contextlib.suppress(ConnectionError):
                await client.send(b"CONN")
                assert await client.read_to_end() == b""

        tasks = [asyncio.create_task(wait_with_half_a_head(client)) for client in clients]
        done, held = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        assert (len(done), len(held)) == (1, 4)
        await clients[tasks.index(held.pop())].close()

        async def served() -> bool:
            async with await gateway.client() as again:
                try:
                    return (await again.ask(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")).status == 404
                except (asyncio.IncompleteReadError, ConnectionError):
                    return False

        async with asyncio.timeout(PATIENCE_S):
            while not await served():
                await asyncio.sleep(0)
        for client in clients:
            await client.close()
        await asyncio.gather(*tasks)
