"""Plain HTTP through the sandbox port: who may ask for what, what a host gets to see, and what can not be smuggled."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.support.dns_server import DnsServer, Records
from tests.support.gateway_process import TOKEN, GatewayProcess, gateway_process
from tests.support.origin import HELLO, Exchange, Origin, origin, say_hello
from tests.support.sockets import Client, basic

GOOD = ("s1", TOKEN)
# A loopback address of this run's own, so that its port 80 is free.
HTTP_ADDRESS = f"127.80.{os.getpid() >> 8 & 255}.{os.getpid() & 255}"


def ask(
    to: Origin | str,
    path: str = "/",
    *headers: str,
    method: str = "GET",
    version: str = "1.1",
    credentials: tuple[str, str] | None = GOOD,
) -> bytes:
    """Return a proxy request for a path at an origin, or at `host:port`."""
    host = to if isinstance(to, str) else f"127.0.0.1:{to.server.port}"
    lines = [f"{method} http://{host}{path} HTTP/{version}", f"Host: {host}", *headers]
    if credentials is not None:
        lines.append(f"Proxy-Authorization: {basic(*credentials)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


@asynccontextmanager
async def tunnel(gateway: GatewayProcess) -> AsyncIterator[tuple[Client, Origin]]:
    """A tunnel by CONNECT to port 80 of an origin."""
    async with origin(host=HTTP_ADDRESS, port=80) as server, await gateway.client() as client:
        assert (await client.tunnel(f"{HTTP_ADDRESS}:80", GOOD)).status == 200
        yield client, server


# -- the straight path


async def test_a_proxy_request_reaches_the_host_without_what_was_for_the_gateway(gateway: GatewayProcess) -> None:
    async with origin() as server, await gateway.client() as client:
        reply = await client.ask(
            ask(server, "/a?b=c", "Accept: */*", "Proxy-Connection: keep-alive", "Connection: X-Hop", "X-Hop: 1")
        )
        assert (reply.status, reply.body) == (200, b"hello")
        host = f"127.0.0.1:{server.server.port}".encode()
        assert server.heads == [b"GET /a?b=c HTTP/1.1\r\nHost: %b\r\nAccept: */*\r\n\r\n" % host]


async def test_every_request_is_logged_with_what_it_moved() -> None:
    with gateway_process() as own:
        async with origin() as server, await own.client() as client:
            port = server.server.port
            await client.ask(ask(server))
            close = await own.await_audit("s1", event="close", port=port)
            lines = own.audit("s1")
    assert [line["event"] for line in lines] == ["allow", "close"]
    assert {(line["kind"], line["host"], line["address"]) for line in lines} == {("http", "127.0.0.1", "127.0.0.1")}
    assert lines[0]["reason"] == "open"
    assert (close["reason"], close["bytes_up"], close["bytes_down"]) == ("done", len(server.heads[0]), len(HELLO))


async def test_pipelined_requests_are_answered_in_order_over_one_connection(gateway: GatewayProcess) -> None:
    async def echo_path(exchange: Exchange) -> None:
        path = exchange.head.split(b" ")[1]
        await exchange.answer(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(path), path))

    async with origin(echo_path) as server, await gateway.client() as client:
        paths = [f"/{number}" for number in range(50)]
        await client.send(b"".join(ask(server, path) for path in paths))
        assert [(await client.reply()).body.decode() for _ in paths] == paths
        assert server.connections == 1


async def test_pipelined_requests_to_two_hosts_reach_each_its_own(gateway: GatewayProcess) -> None:
    async def say_other(exchange: Exchange) -> None:
        await exchange.answer(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nother")

    async with origin() as one, origin(say_other) as other, await gateway.client() as client:
        await client.send(ask(one, "/1") + ask(other, "/2") + ask(one, "/3"))
        assert [(await client.reply()).body for _ in range(3)] == [b"hello", b"other", b"hello"]
        assert [head.split(b" ")[1] for head in one.heads] == [b"/1", b"/3"]
        assert [head.split(b" ")[1] for head in other.heads] == [b"/2"]


async def test_a_request_that_comes_a_byte_at_a_time_is_served(gateway: GatewayProcess) -> None:
    async with origin() as server, await gateway.client() as client:
        await client.send_slowly(ask(server) + ask(server))
        assert (await client.reply()).body == b"hello"
        assert (await client.reply()).body == b"hello"


async def test_an_http_1_0_client_gets_one_answer_and_the_end(gateway: GatewayProcess) -> None:
    async with origin() as server, await gateway.client() as client:
        await client.send(ask(server, version="1.0") + ask(server, "/never"))
        reply = await client.reply()
        assert (reply.body, reply.headers["connection"]) == (b"hello", "close")
        assert await client.read_to_end() == b""
        assert len(server.heads) == 1


async def test_a_client_that_says_close_gets_one_answer_and_the_end(gateway: GatewayProcess) -> None:
    async with origin() as server, await gateway.client() as client:
        reply = await client.ask(ask(server, "/", "Connection: close") + ask(server, "/never"))
        assert reply.headers["connection"] == "close"
        assert await client.read_to_end() == b""
        assert len(server.heads) == 1


async def test_a_client_that_half_closes_after_its_request_reads_its_answer(gateway: GatewayProcess) -> None:
    async with origin() as server, await gateway.client() as client:
        await client.send(ask(server))
        client.writer.write_eof()
        assert (await client.read_to_end()).endswith(b"hello")


# -- inside a CONNECT to port 80


async def test_a_tunnel_to_port_80_carries_requests_for_its_host(gateway: GatewayProcess) -> None:
    async with tunnel(gateway) as (client, server):
        for path in ("/1", "/2"):
            reply = await client.ask(f"GET {path} HTTP/1.1\r\nHost: {HTTP_ADDRESS}\r\n\r\n".encode())
            assert reply.body == b"hello"
        assert len(server.heads) == 2
    line = await gateway.await_audit("s1", event="allow", host=HTTP_ADDRESS)
    assert (line["kind"], line["port"]) == ("http", 80)


async def test_requests_that_come_with_the_connect_head_are_served_in_order(gateway: GatewayProcess) -> None:
    async with origin(host=HTTP_ADDRESS, port=80) as server, await gateway.client() as client:
        requests = [f"GET /{number} HTTP/1.1\r\nHost: {HTTP_ADDRESS}\r\n\r\n".encode() for number in range(20)]
        assert (await client.tunnel(f"{HTTP_ADDRESS}:80", GOOD, early=b"".join(requests[:10]))).status == 200
        await client.send(b"".join(requests[10:]))
        for _ in requests:
            assert (await client.reply()).body == b"hello"
        assert [head.split(b" ")[1].decode() for head in server.heads] == [f"/{number}" for number in range(20)]


@pytest.mark.parametrize(
    "request_head",
    [
        "GET / HTTP/1.1\r\nHost: other.example",
        "GET / HTTP/1.1\r\nHost: HERE:8080",
        "GET / HTTP/1.1",
        "GET / HTTP/1.1\r\nHost: HERE\r\nHost: other.example",
        "GET http://other.example/ HTTP/1.1\r\nHost: other.example",
        "GET http://other.example/ HTTP/1.1\r\nHost: HERE",
        "CONNECT other.example:80 HTTP/1.1\r\nHost: other.example:80",
    ],
)
async def test_a_tunnel_carries_no_request_for_another_host(gateway: GatewayProcess, request_head: str) -> None:
    async with tunnel(gateway) as (client, server):
        reply = await client.ask(f"{request_head}\r\n\r\n".replace("HERE", HTTP_ADDRESS).encode())
        assert reply.status == 400
        assert await client.read_to_end() == b""
        assert server.connections == 0


async def test_a_second_request_in_a_tunnel_for_another_host_is_refused(gateway: GatewayProcess) -> None:
    async with tunnel(gateway) as (client, server):
        good = f"GET / HTTP/1.1\r\nHost: {HTTP_ADDRESS}\r\n\r\n"
        await client.send((good + "GET / HTTP/1.1\r\nHost: other.example\r\n\r\n" + good).encode())
        assert (await client.reply()).status == 200
        assert (await client.reply()).status == 400
        assert await client.read_to_end() == b""
        assert len(server.heads) == 1


@pytest.mark.parametrize("first", [b"\x16\x03\x01\x02\x00\x01\x00", b"\x05\x01\x00", b"SSH-2.0-x\r\n"])
async def test_a_tunnel_to_port_80_that_speaks_no_http_is_answered_at_once(
    gateway: GatewayProcess, first: bytes
) -> None:
    async with tunnel(gateway) as (client, server):
        assert (await client.ask(first)).status == 400
        assert await client.read_to_end() == b""
        assert server.connections == 0


# -- who may ask for what


async def test_asks_for_credentials_with_a_challenge(gateway: GatewayProcess) -> None:
    async with origin() as server, await gateway.client() as client:
        reply = await client.ask(ask(server, credentials=None))
        assert (reply.status, reply.reason) == (407, "credentials_missing")
        assert reply.headers["proxy-authenticate"] == 'Basic realm="opificia"'
        assert server.connections == 0


async def test_credentials_are_asked_for_with_every_request(gateway: GatewayProcess) -> None:
    async with origin() as server, await gateway.client() as client:
        await client.send(ask(server) + ask(server, credentials=None))
        assert (await client.reply()).status == 200
        assert (await client.reply()).status == 407
        assert len(server.heads) == 1


@pytest.mark.parametrize("value", ["Basic", "Bearer x", basic("s1", "wrong"), basic("nobody", TOKEN)])
async def test_refuses_wrong_credentials_with_407(gateway: GatewayProcess, value: str) -> None:
    async with origin() as server, await gateway.client() as client:
        reply = await client.ask(ask(server, "/", f"Proxy-Authorization: {value}", credentials=None))
        assert (reply.status, reply.reason) == (407, "credentials_wrong")
        assert server.connections == 0


async def test_two_different_credentials_are_refused(gateway: GatewayProcess) -> None:
    async with await gateway.client() as client:
        reply = await client.ask(ask("a.example", "/", f"Proxy-Authorization: {basic('x', 'y')}"))
        assert (reply.status, reply.reason) == (400, "malformed_request")


@pytest.mark.parametrize(
    ("session", "target", "reason"),
    [
        ("offline", "deb.debian.org", "network_disabled"),
        ("listed", "example.com", "host_not_listed"),
        ("listed", "127.0.0.1:9", "host_not_listed"),
        ("denied", "127.0.0.1:9", "host_denied"),
        ("denied", "A.evil.EXAMPLE.", "host_denied"),
        ("s1", "169.254.169.254", "address_not_public"),
        ("s1", "10.0.0.1", "address_not_public"),
        ("s1", "[::ffff:169.254.169.254]", "address_not_public"),
    ],
)
async def test_refuses_by_the_same_rules_as_a_connect(
    gateway: GatewayProcess, session: str, target: str, reason: str
) -> None:
    async with await gateway.client(session) as client:
        reply = await client.ask(ask(target, credentials=(session, TOKEN)))
        assert (reply.status, reply.reason) == (403, reason)
        assert reason in reply.phrase
        assert json.loads(reply.body)["error"]["reason"] == reason
        assert await client.read_to_end() == b""
    line = await gateway.await_audit(session, event="refuse", kind="http", reason=reason)
    assert line["port"] in (80, 9)


async def test_the_gateways_own_port_is_refused(gateway: GatewayProcess) -> None:
    async with await gateway.client() as client:
        reply = await client.ask(ask(f"127.0.0.1:{gateway.metrics_port}", "/metrics"))
        assert (reply.status, reply.reason) == (403, "address_not_public")


async def test_keep_alive_to_another_host_is_judged_anew(gateway: GatewayProcess) -> None:
    async with origin() as server, await gateway.client() as client:
        await client.send(ask(server) + ask("169.254.169.254", "/latest/meta-data/") + ask(server, "/never"))
        assert (await client.reply()).status == 200
        reply = await client.reply()
        assert (reply.status, reply.reason) == (403, "address_not_public")
        assert await client.read_to_end() == b""
        assert len(server.heads) == 1


async def test_a_name_that_answers_another_address_later_is_judged_and_dialled_once() -> None:
    async with DnsServer() as names, origin() as server:
        names.script("a.example", Records(("127.0.0.1",), ttl=300), Records(("169.254.169.254",)))
        with gateway_process({"egress": {"nameservers": [names.address]}}) as gateway:
            async with await gateway.client() as client:
                assert (await client.ask(ask(f"a.example:{server.server.port}"))).body == b"hello"
            assert names.count("a.example", "A") == 1


async def test_a_name_with_one_private_address_is_refused_whole() -> None:
    async with DnsServer() as names:
        names.script("a.example", Records(("127.0.0.1", "10.1.2.3")))
        with gateway_process({"egress": {"nameservers": [names.address]}}) as gateway:
            async with await gateway.client() as client:
                reply = await client.ask(ask("a.example"))
                assert (reply.status, reply.reason) == (403, "address_not_public")


async def test_a_host_that_refuses_is_502_in_words_without_an_address(gateway: GatewayProcess) -> None:
    async with origin() as server:
        port = server.server.port
    async with await gateway.client() as client:
        reply = await client.ask(ask(f"127.0.0.1:{port}"))
        assert (reply.status, reply.reason) == (502, "connect_refused")
        assert "refused" in json.loads(reply.body)["error"]["message"]


async def test_a_refused_head_request_is_answered_without_a_body(gateway: GatewayProcess) -> None:
    async with await gateway.client() as client:
        await client.send(ask("169.254.169.254", method="HEAD"))
        answer = await client.read_to_end()
        assert answer.startswith(b"HTTP/1.1 403 ")
        assert answer.endswith(b"\r\n\r\n")


# -- heads that mean two things


@pytest.mark.parametrize(
    "lines",
    [
        ["GET http://HERE/ HTTP/1.1", "Host: other.example"],
        ["GET http://HERE/ HTTP/1.1", "Host: HERE", "Host: other.example"],
        ["GET http://HERE/ HTTP/1.1"],
        ["GET http://user@HERE/ HTTP/1.1", "Host: HERE"],
        ["GET http://HERE/#x HTTP/1.1", "Host: HERE"],
        ["POST http://HERE/ HTTP/1.1", "Host: HERE", "Content-Length: 4", "Transfer-Encoding: chunked"],
        ["POST http://HERE/ HTTP/1.1", "Host: HERE", "Content-Length: 4", "Content-Length: 5"],
        ["POST http://HERE/ HTTP/1.1", "Host: HERE", "Transfer-Encoding: chunked, identity"],
        ["POST http://HERE/ HTTP/1.0", "Host: HERE", "Transfer-Encoding: chunked"],
        ["GET http://HERE/ HTTP/1.1", "Host: HERE", " folded: x"],
        ["GET http://HERE/ HTTP/1.1", "Host : HERE"],
        ["GET http://HERE/ HTTP/2.0", "Host: HERE"],
        ["PRI * HTTP/2.0"],
    ],
)
async def test_a_request_that_two_readers_could_read_differently_is_refused(
    gateway: GatewayProcess, lines: list[str]
) -> None:
    async with origin() as server, await gateway.client() as client:
        # As the second request of a connection: the first one went through the listener's own checks as well.
        head = "\r\n".join([*lines, f"Proxy-Authorization: {basic(*GOOD)}", "", ""])
        await client.send(ask(server) + head.replace("HERE", f"127.0.0.1:{server.server.port}").encode() + b"0\r\n\r\n")
        assert (await client.reply()).status == 200
        assert (await client.reply()).status == 400
        assert await client.read_to_end() == b""
        assert len(server.heads) == 1


@pytest.mark.parametrize(
    "body",
    [
        b"5\r\nabcde0\r\n\r\n",
        b"5\nabcde\r\n0\r\n\r\n",
        b"0x5\r\nabcde\r\n0\r\n\r\n",
        b"5;a\nb\r\nabcde\r\n0\r\n\r\n",
        b"\r\n",
    ],
)
async def test_a_chunked_body_that_two_readers_could_read_differently_is_refused(
    gateway: GatewayProcess, body: bytes
) -> None:
    async with origin() as server, await gateway.client() as client:
        await client.send(
            ask(server, "/", "Transfer-Encoding: chunked", method="POST") + body + ask(server, "/smuggled")
        )
        answers = await client.read_to_end()
        assert b" 400 " in answers.split(b"\r\n")[0] or answers == HELLO
        assert b"/smuggled" not in b"".join(server.heads)


async def test_a_request_hidden_in_a_body_stays_a_body(gateway: GatewayProcess) -> None:
    bodies: list[bytes] = []

    async def take(exchange: Exchange) -> None:
        if exchange.head.startswith(b"POST"):
            bodies.append(await exchange.body(len(hidden)))
        await exchange.answer(HELLO)

    hidden = b"GET http://169.254.169.254/ HTTP/1.1\r\nHost: 169.254.169.254\r\n\r\n"
    async with origin(take) as server, await gateway.client() as client:
        length = f"Content-Length: {len(hidden)}"
        await client.send(ask(server, "/", length, method="POST") + hidden + ask(server, "/after"))
        assert (await client.reply()).status == 200
        assert (await client.reply()).status == 200
        assert bodies == [hidden]
        assert [head.split(b" ")[1] for head in server.heads] == [b"/", b"/after"]


async def test_a_head_that_never_ends_is_closed_at_its_deadline() -> None:
    with gateway_process({"limits": {"head_timeout_ms": 1_500}}) as gateway:
        async with origin() as server, await gateway.client() as client:
            assert (await client.ask(ask(server))).status == 200
            await client.send(b"GET http://")
            reply = await client.reply()
            assert (reply.status, reply.reason) == (408, "head_timeout")
            assert await client.read_to_end() == b""


async def test_a_second_head_of_64_kib_is_refused(gateway: GatewayProcess) -> None:
    async with origin() as server, await gateway.client() as client:
        await client.send(ask(server) + b"GET http://a.example/ HTTP/1.1\r\nX: " + b"x" * 65536 + b"\r\n\r\n")
        assert (await client.reply()).status == 200
        reply = await client.reply()
        assert (reply.status, reply.reason) == (431, "head_too_large")


async def test_an_upgrade_is_not_passed_on(gateway: GatewayProcess) -> None:
    async with origin() as server, await gateway.client() as client:
        settings = ["Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__"]
        assert (await client.ask(ask(server, "/", *settings))).status == 200
        assert b"pgrade" not in server.heads[0]
        assert b"Http2" not in server.heads[0]


async def test_a_thousand_requests_on_one_connection_hold_one_connection_and_one_slot() -> None:
    session = {"id": "s1", "egress_budget": {"connections": 1}}
    with gateway_process(sessions=[session]) as gateway:
        async with origin(say_hello) as server, await gateway.client() as client:

            async def read_all() -> None:
                for _ in range(1000):
                    assert (await client.reply()).status == 200

            reading = asyncio.ensure_future(read_all())
            for _ in range(10):
                await client.send(ask(server) * 100)
            await reading
            assert server.connections == 1
