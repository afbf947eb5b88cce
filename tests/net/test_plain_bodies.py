"""Plain HTTP: where bodies end, what of a response is passed on, and what closes the client instead."""

import asyncio

import pytest

from gateway.core.chunked import ChunkedReader
from tests.net.test_plain import ask
from tests.support.gateway_process import GatewayProcess
from tests.support.origin import HELLO, Exchange, Script, origin, say_hello
from tests.support.patience import PATIENCE_S
from tests.support.sockets import Client

BIG = bytes(range(256)) * 16 * 1024  # 4 MiB


def says(*pieces: bytes, close: bool = False) -> Script:
    """Return a script that answers every request with these pieces, each in a segment of its own."""

    async def script(exchange: Exchange) -> None:
        for piece in pieces:
            await exchange.answer(piece)
            await asyncio.sleep(0)
        if close:
            exchange.writer.close()

    return script


async def read_chunks(client: Client) -> bytes:
    """Read a chunked body to its end."""
    reader = ChunkedReader()
    body = b""
    while not reader.done:
        async with asyncio.timeout(PATIENCE_S):
            data = await client.reader.read(65536)
        assert data, "the body ended without its last chunk"
        piece, size = reader.feed(data)
        assert size == len(data)
        body += piece
    return body


async def served_again(client: Client) -> bool:
    """Tell whether the connection serves another request."""
    async with origin() as other:
        await client.send(ask(other))
        try:
            return (await client.reply()).body == b"hello"
        except (asyncio.IncompleteReadError, ConnectionError):
            return False


# -- requests


@pytest.mark.parametrize("size", [0, 1, 65536, len(BIG)])
async def test_a_counted_body_arrives_whole_and_the_next_request_after_it(gateway: GatewayProcess, size: int) -> None:
    bodies: list[bytes] = []

    async def take(exchange: Exchange) -> None:
        if exchange.head.startswith(b"POST"):
            bodies.append(await exchange.body(size))
        await exchange.answer(HELLO)

    async with origin(take) as server, await gateway.client() as client:
        await client.send(ask(server, "/", f"Content-Length: {size}", method="POST") + BIG[:size] + ask(server))
        assert (await client.reply()).body == b"hello"
        assert (await client.reply()).body == b"hello"
        assert bodies == [BIG[:size]]


async def test_a_chunked_body_arrives_framed_anew_and_the_next_request_after_it(gateway: GatewayProcess) -> None:
    bodies: list[bytes] = []

    async def take(exchange: Exchange) -> None:
        if exchange.head.startswith(b"POST"):
            bodies.append(await exchange.reader.readuntil(b"0\r\n\r\n"))
        await exchange.answer(HELLO)

    async with origin(take) as server, await gateway.client() as client:
        body = b"5;name=value\r\nhello\r\n000006\r\n world\r\n0\r\nHost: other.example\r\n\r\n"
        await client.send_slowly(
            ask(server, "/", "Transfer-Encoding: chunked", method="POST") + body + ask(server, "/after"), 7
        )
        assert (await client.reply()).body == b"hello"
        assert (await client.reply()).body == b"hello"
        assert b"other.example" not in bodies[0]
        assert ChunkedReader().feed(bodies[0]) == (b"hello world", len(bodies[0]))


async def test_continue_is_passed_on_before_the_body_is_sent(gateway: GatewayProcess) -> None:
    async def take(exchange: Exchange) -> None:
        assert b"Expect: 100-continue" in exchange.head
        await exchange.answer(b"HTTP/1.1 100 Continue\r\n\r\n")
        assert await exchange.body(3) == b"abc"
        await exchange.answer(HELLO)

    async with origin(take) as server, await gateway.client() as client:
        head = ask(server, "/", "Expect: 100-continue", "Content-Length: 3", method="PUT")
        assert (await client.ask(head)).status == 100
        assert (await client.ask(b"abc")).body == b"hello"
        assert await served_again(client)


async def test_a_refusal_before_the_body_ends_the_connection_but_is_read_whole(gateway: GatewayProcess) -> None:
    refused = b"HTTP/1.1 413 Too Large\r\nContent-Length: 4\r\n\r\nhuge"
    async with origin(says(refused)) as server, await gateway.client() as client:
        await client.send(ask(server, "/", f"Content-Length: {len(BIG)}", method="POST") + BIG[:100_000])
        reply = await client.reply()
        assert (reply.status, reply.body, reply.headers["connection"]) == (413, b"huge", "close")
        assert await client.read_to_end() == b""


async def test_both_directions_are_open_at_once(gateway: GatewayProcess) -> None:
    async def echo_body(exchange: Exchange) -> None:
        await exchange.answer(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n")
        for _ in range(3):
            await exchange.answer(await exchange.body(2))

    async with origin(echo_body) as server, await gateway.client() as client:
        await client.send(ask(server, "/", "Content-Length: 6", method="POST"))
        await client.reply(body=False)
        for piece in (b"ab", b"cd", b"ef"):
            await client.send(piece)
            assert await client.read_exactly(2) == piece


async def test_half_a_body_and_the_end_is_answered_with_400_and_goes_no_further(gateway: GatewayProcess) -> None:
    async def take(exchange: Exchange) -> None:
        await exchange.body(1000)

    async with origin(take) as server, await gateway.client() as client:
        await client.send(ask(server, "/", "Content-Length: 1000", method="POST") + b"abc")
        client.writer.write_eof()
        assert (await client.read_to_end()).startswith(b"HTTP/1.1 400 ")
        await server.until(lambda: server.closed == 1)


# -- responses


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b""),
        (HELLO, b"hello"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n", b""),
        (b"HTTP/1.1 304 Not Modified\r\n\r\n", b""),
    ],
)
async def test_the_connection_is_kept_after_a_response_that_ends_by_itself(
    gateway: GatewayProcess, answer: bytes, body: bytes
) -> None:
    async with origin(says(answer)) as server, await gateway.client() as client:
        for _ in range(2):
            assert (await client.ask(ask(server))).body == body
        assert server.connections == 1
        assert await served_again(client)


async def test_a_response_to_head_has_its_length_and_no_body(gateway: GatewayProcess) -> None:
    async with (
        origin(says(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n")) as server,
        await gateway.client() as client,
    ):
        reply = await client.ask(ask(server, method="HEAD"), body=False)
        assert reply.headers["content-length"] == "5"
        assert await served_again(client)


async def test_a_chunked_response_is_framed_anew_and_the_connection_kept(gateway: GatewayProcess) -> None:
    answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;x=y\r\nhello\r\n0\r\nSet-Cookie: a\r\n\r\n"
    pieces = [answer[start : start + 1] for start in range(len(answer))]
    async with origin(says(*pieces)) as server, await gateway.client() as client:
        await client.send(ask(server))
        got = await client.reader.readuntil(b"0\r\n\r\n")
        assert b"transfer-encoding: chunked" in got.lower()
        assert b"x=y" not in got
        assert b"Set-Cookie" not in got
        assert await served_again(client)


async def test_a_response_until_the_end_goes_on_in_chunks_and_the_connection_is_kept(gateway: GatewayProcess) -> None:
    async with origin(says(b"HTTP/1.0 200 OK\r\n\r\n", BIG, close=True)) as server, await gateway.client() as client:
        reply = await client.ask(ask(server), body=False)
        assert reply.headers["transfer-encoding"] == "chunked"
        assert await read_chunks(client) == BIG
        assert await served_again(client)


async def test_a_response_until_the_end_ends_the_connection_of_an_http_1_0_client(gateway: GatewayProcess) -> None:
    async with origin(says(b"HTTP/1.0 200 OK\r\n\r\n", BIG, close=True)) as server, await gateway.client() as client:
        reply = await client.ask(ask(server, version="1.0"), body=False)
        assert reply.headers["connection"] == "close"
        assert await client.read_to_end() == BIG


async def test_a_large_response_arrives_whole_at_a_slow_reader(gateway: GatewayProcess) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(BIG)
    async with origin(says(head, BIG)) as server, await gateway.client() as client:
        await client.send(ask(server))
        await client.reply(body=False)
        got = bytearray()
        while len(got) < len(BIG):
            got += await client.read_exactly(min(10_000, len(BIG) - len(got)))
        assert got == BIG
        assert await served_again(client)


async def test_server_sent_events_pass_as_they_come(gateway: GatewayProcess) -> None:
    async def events(exchange: Exchange) -> None:
        await exchange.answer(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            size = await exchange.reader.readexactly(1)
            await exchange.answer(b"1\r\n%b\r\n" % size)

    async with origin(events) as server, await gateway.client() as client:
        await client.ask(ask(server), body=False)
        for number in range(5):
            await server.exchanges[0].answer(b"2\r\n%d\n\r\n" % number)
            assert await client.read_exactly(7) == b"2\r\n%d\n\r\n" % number


async def test_interim_responses_are_passed_on_but_not_to_http_1_0(gateway: GatewayProcess) -> None:
    async with origin(says(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n", HELLO)) as server:
        async with await gateway.client() as client:
            assert (await client.ask(ask(server))).status == 103
            assert (await client.reply()).status == 200
        async with await gateway.client() as client:
            assert (await client.ask(ask(server, version="1.0"))).status == 200


async def test_headers_of_the_hop_are_dropped_from_a_response(gateway: GatewayProcess) -> None:
    answer = (
        b"HTTP/1.1 401 No\r\nProxy-Authenticate: Basic realm=x\r\nConnection: X-Hop\r\nX-Hop: 1\r\nKeep-Alive: x\r\n"
        b"WWW-Authenticate: Basic\r\nContent-Length: 0\r\n\r\n"
    )
    async with origin(says(answer)) as server, await gateway.client() as client:
        reply = await client.ask(ask(server))
        assert reply.headers == {"www-authenticate": "Basic", "content-length": "0"}


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
        b"HTTP/1.1 200 OK\nContent-Length: 5\n\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length : 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2p1\r\n",
        b"\x15\x03\x03\x00\x02\x02\x46",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000,
    ],
)
async def test_a_malformed_response_is_502_and_the_end(gateway: GatewayProcess, answer: bytes) -> None:
    async with origin(says(answer)) as server, await gateway.client() as client:
        reply = await client.ask(ask(server))
        assert (reply.status, reply.reason) == (502, "upstream_failed")
        assert await client.read_to_end() == b""
        await server.until(lambda: server.closed == 1)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\nContent-Le"])
async def test_a_host_that_ends_without_an_answer_is_502(gateway: GatewayProcess, answer: bytes) -> None:
    async with origin(says(answer, close=True)) as server, await gateway.client() as client:
        reply = await client.ask(ask(server))
        assert (reply.status, reply.reason) == (502, "upstream_failed")


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhelloXX",
    ],
)
async def test_a_body_cut_short_never_looks_whole(gateway: GatewayProcess, answer: bytes) -> None:
    async with origin(says(answer, close=True)) as server, await gateway.client() as client:
        await client.send(ask(server) + ask(server))
        try:
            got = await client.read_to_end()
        except ConnectionError:
            got = b""
        assert not got.endswith((b"0\r\n\r\n", b"hellohello"))
        assert got.count(b"HTTP/1.1") <= 1
        line = await gateway.await_audit("s1", event="close", port=server.server.port)
        assert line["reason"] == "upstream_failed"


async def test_a_body_until_the_end_that_was_reset_is_not_taken_for_whole(gateway: GatewayProcess) -> None:
    async def reset(exchange: Exchange) -> None:
        await exchange.answer(b"HTTP/1.1 200 OK\r\n\r\nhel")
        await exchange.reader.readexactly(1)

    async with origin(reset) as server, await gateway.client() as client:
        await client.ask(ask(server), body=False)
        assert await client.read_exactly(8) == b"3\r\nhel\r\n"
        Client(server.exchanges[0].reader, server.exchanges[0].writer).reset()
        try:
            assert await client.read_to_end() == b""
        except ConnectionResetError:
            pass


async def test_bytes_behind_a_response_are_never_the_next_response(gateway: GatewayProcess) -> None:
    poison = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\npoison"

    async def script(exchange: Exchange) -> None:
        await exchange.answer(HELLO + poison if exchange.number == 0 else HELLO)

    async with origin(script) as server, await gateway.client() as client:
        await client.send(ask(server) * 3)
        for _ in range(3):
            assert (await client.reply()).body == b"hello"
        assert server.connections == 2


async def test_what_a_kept_host_says_unasked_is_never_the_next_response(gateway: GatewayProcess) -> None:
    async with origin() as server, await gateway.client() as client:
        assert (await client.ask(ask(server))).body == b"hello"
        await server.exchanges[0].answer(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\npoison")
        await server.until(lambda: server.closed == 1)
        assert (await client.ask(ask(server))).body == b"hello"
        assert server.connections == 2


# -- connections to hosts


async def test_a_kept_connection_that_the_host_closes_as_we_send_is_replaced_once(gateway: GatewayProcess) -> None:
    async def close_on_second(exchange: Exchange) -> None:
        if exchange.number == 0 and len(server.exchanges) == 2:
            exchange.writer.transport.abort()
            return
        await exchange.answer(HELLO)

    async with origin(close_on_second) as server, await gateway.client() as client:
        assert (await client.ask(ask(server))).body == b"hello"
        assert (await client.ask(ask(server))).body == b"hello"
        assert server.connections == 2


async def test_a_request_that_changes_something_is_sent_once_and_on_a_new_connection(gateway: GatewayProcess) -> None:
    async def script(exchange: Exchange) -> None:
        if exchange.head.startswith(b"DELETE"):
            exchange.writer.transport.abort()
            return
        await exchange.answer(HELLO)

    async with origin(script) as server, await gateway.client() as client:
        assert (await client.ask(ask(server))).body == b"hello"
        assert (await client.ask(ask(server, method="DELETE"))).status == 502
        assert [exchange.number for exchange in server.exchanges] == [0, 1]


async def test_a_host_that_says_close_gets_a_new_connection(gateway: GatewayProcess) -> None:
    answer = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
    async with origin(says(answer, close=True)) as server, await gateway.client() as client:
        for _ in range(3):
            assert (await client.ask(ask(server))).status == 200
        assert server.connections == 3


async def test_two_clients_never_share_a_connection_to_a_host(gateway: GatewayProcess) -> None:
    async with origin(say_hello) as server, await gateway.client() as one, await gateway.client() as two:
        for client in (one, two, one, two):
            assert (await client.ask(ask(server))).body == b"hello"
        assert server.connections == 2
