"""Plain HTTP: budgets and slots are exact and come back, whoever leaves, stalls or is revoked in the middle."""

import asyncio
import signal

import pytest

from tests.net.test_plain import GOOD, HTTP_ADDRESS, ask
from tests.net.test_plain_bodies import BIG, says
from tests.support.dns_server import DnsServer, Records
from tests.support.gateway_process import TOKEN, GatewayProcess, gateway_process
from tests.support.origin import HELLO, Exchange, origin
from tests.support.patience import PATIENCE_S
from tests.support.sockets import Client, proxy_v2

ONE_SLOT = {"id": "s1", "egress_budget": {"connections": 1}}


async def never_answer(exchange: Exchange) -> None:
    await exchange.reader.read()


async def slot_is_free(gateway: GatewayProcess) -> bool:
    """Tell whether the session's only slot serves somebody else at once or within its wait."""
    async with origin() as server, await gateway.client() as client:
        return (await client.ask(ask(server))).status == 200


# -- budget


async def test_not_a_byte_passes_beyond_the_budget() -> None:
    session = {"id": "s1", "egress_budget": {"bytes": 100_000}}
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(BIG)
    with gateway_process(sessions=[session]) as gateway:
        async with origin(says(head, BIG)) as server, await gateway.client() as client:
            await client.send(ask(server))
            got = await client.read_to_end()
            close = await gateway.await_audit("s1", event="close")
            assert close["reason"] == "budget_exhausted"
            assert close["bytes_up"] == len(server.heads[0])
            assert close["bytes_down"] == len(got)
            assert close["bytes_up"] + close["bytes_down"] == 100_000
            await server.until(lambda: server.closed == 1)
        async with await gateway.client() as client:
            reply = await client.ask(ask("127.0.0.1:9"))
            assert (reply.status, reply.reason) == (403, "budget_exhausted")
        async with await gateway.client() as client:
            assert (await client.tunnel("127.0.0.1:9", GOOD)).reason == "budget_exhausted"


async def test_an_upload_ends_exactly_at_the_budget_and_says_so() -> None:
    session = {"id": "s1", "egress_budget": {"bytes": 50_000}}
    received = bytearray()

    async def take(exchange: Exchange) -> None:
        received.extend(exchange.head)
        while piece := await exchange.reader.read(65536):
            received.extend(piece)

    with gateway_process(sessions=[session]) as gateway:
        async with origin(take) as server, await gateway.client() as client:
            await client.send(ask(server, "/", f"Content-Length: {len(BIG)}", method="POST") + BIG[:60_000])
            reply = await client.reply()
            assert (reply.status, reply.reason) == (403, "budget_exhausted")
            await server.until(lambda: server.closed == 1)
            assert len(received) == 50_000


async def test_an_exchange_that_takes_the_very_last_byte_is_whole() -> None:
    async with origin() as server:
        needed = len(ask(server, credentials=None)) - len(f"http://127.0.0.1:{server.server.port}") + len(HELLO)
        with gateway_process(sessions=[{"id": "s1", "egress_budget": {"bytes": needed}}]) as gateway:
            async with await gateway.client() as client:
                assert (await client.ask(ask(server))).body == b"hello"
                assert (await client.ask(ask(server))).reason == "budget_exhausted"


async def test_a_head_that_does_not_fit_the_budget_is_not_begun() -> None:
    with gateway_process(sessions=[{"id": "s1", "egress_budget": {"bytes": 10}}]) as gateway:
        async with origin() as server, await gateway.client() as client:
            assert (await client.ask(ask(server))).reason == "budget_exhausted"
            assert server.heads == []


# -- slots


async def test_a_waiting_request_gets_the_slot_when_it_is_free() -> None:
    release = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        if exchange.number == 0:
            await release.wait()
        await exchange.answer(HELLO)

    with gateway_process(sessions=[ONE_SLOT]) as gateway:
        async with origin(script) as server, await gateway.client() as one, await gateway.client() as two:
            await one.send(ask(server))
            await server.until(lambda: len(server.heads) == 1)
            waiting = asyncio.ensure_future(two.ask(ask(server)))
            assert (await gateway.await_audit("s1", event="allow"))["port"] == server.server.port
            release.set()
            assert (await one.reply()).body == b"hello"
            assert (await waiting).body == b"hello"


async def test_a_request_without_a_slot_is_429_after_the_wait() -> None:
    with gateway_process({"limits": {"egress_slot_wait_ms": 200}}, [ONE_SLOT]) as gateway:
        async with origin(never_answer) as server, await gateway.client() as one, await gateway.client() as two:
            await one.send(ask(server))
            await server.until(lambda: len(server.heads) == 1)
            reply = await two.ask(ask(server))
            assert (reply.status, reply.reason) == (429, "no_free_slot")
            assert int(reply.headers["retry-after"]) > 0


async def test_a_kept_connection_gives_its_slot_to_whoever_waits() -> None:
    with gateway_process({"limits": {"egress_slot_wait_ms": 20_000}}, [ONE_SLOT]) as gateway:
        async with origin() as server, await gateway.client() as one, await gateway.client() as two:
            assert (await one.ask(ask(server))).body == b"hello"
            # The first client does nothing more, and its connection to the host stays open for a while.
            assert (await two.ask(ask(server))).body == b"hello"


async def test_a_request_for_another_host_needs_no_second_slot() -> None:
    with gateway_process(sessions=[ONE_SLOT]) as gateway:
        async with origin() as server, origin() as other, await gateway.client() as client:
            for one in (server, other, server, other):
                assert (await client.ask(ask(one))).body == b"hello"


@pytest.mark.parametrize("how", ["close", "reset", "half_close"])
async def test_the_slot_comes_back_when_the_client_leaves_an_unanswered_request(how: str) -> None:
    with gateway_process({"limits": {"egress_slot_wait_ms": 15_000}}, [ONE_SLOT]) as gateway:
        async with origin(never_answer) as server:
            client = await gateway.client()
            await client.send(ask(server))
            await server.until(lambda: len(server.heads) == 1)
            if how == "reset":
                client.reset()
            elif how == "half_close":
                client.writer.write_eof()
            else:
                client.writer.close()
            await server.until(lambda: server.closed == 1)
            assert (await gateway.await_audit("s1", event="close"))["reason"] == "client_gone"
            assert await slot_is_free(gateway)
            await client.close()


async def test_the_slot_comes_back_when_the_client_resets_while_the_name_is_asked_for() -> None:
    async with DnsServer() as names:
        names.script("a.example", Records(("127.0.0.1",)))
        names.hold()
        with gateway_process({"egress": {"nameservers": [names.address]}}, [ONE_SLOT]) as gateway:
            client = await gateway.client()
            await client.send(ask("a.example"))
            async with asyncio.timeout(PATIENCE_S):
                while not names.queries:
                    await asyncio.sleep(0)
            client.reset()
            assert (await gateway.await_audit("s1", event="refuse"))["reason"] == "client_gone"
            names.release()
            assert await slot_is_free(gateway)
            assert "Traceback" not in gateway.log()


async def test_the_slot_comes_back_when_the_client_leaves_while_it_waits_for_one() -> None:
    with gateway_process(sessions=[ONE_SLOT]) as gateway:
        async with origin(never_answer) as server, await gateway.client() as one:
            await one.send(ask(server))
            await server.until(lambda: len(server.heads) == 1)
            waiting = await gateway.client()
            await waiting.send(ask(server))
            waiting.reset()
            assert (await gateway.await_audit("s1", event="refuse"))["reason"] == "client_gone"
            one.reset()
            await server.until(lambda: server.closed == 1)
            assert await slot_is_free(gateway)


async def test_the_slot_comes_back_when_a_client_stops_reading_and_is_gone() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (len(BIG) * 8)
    with gateway_process(sessions=[ONE_SLOT]) as gateway:
        async with origin(says(head, *[BIG] * 8)) as server:
            client = await gateway.client()
            await client.send(ask(server))
            await client.reply(body=False)
            client.reset()
            await server.until(lambda: server.closed == 1)
            assert await slot_is_free(gateway)


# -- time


async def test_an_exchange_in_which_nothing_moves_is_504() -> None:
    with gateway_process({"limits": {"egress_idle_ms": 1_500}}, [ONE_SLOT]) as gateway:
        async with origin(never_answer) as server, await gateway.client() as client:
            reply = await client.ask(ask(server))
            assert (reply.status, reply.reason) == (504, "upstream_timeout")
            assert (await gateway.await_audit("s1", event="close"))["reason"] == "idle"
            assert await slot_is_free(gateway)


async def test_a_response_that_stands_still_is_closed() -> None:
    async def half(exchange: Exchange) -> None:
        await exchange.answer(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhello")
        await exchange.reader.read()

    with gateway_process({"limits": {"egress_idle_ms": 1_500}}, [ONE_SLOT]) as gateway:
        async with origin(half) as server, await gateway.client() as client:
            await client.send(ask(server))
            assert (await client.read_to_end()).endswith(b"\r\n\r\nhello")
            await server.until(lambda: server.closed == 1)


async def test_a_response_that_moves_a_little_at_a_time_is_kept() -> None:
    async def drip(exchange: Exchange) -> None:
        await exchange.answer(b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n")
        for _ in range(8):
            # Each pause is shorter than the limit, all together are longer.
            await asyncio.sleep(0.3)
            await exchange.answer(b"x")

    with gateway_process({"limits": {"egress_idle_ms": 2_000}}) as gateway:
        async with origin(drip) as server, await gateway.client() as client:
            assert (await client.ask(ask(server))).body == b"x" * 8


async def test_a_connection_without_a_request_is_closed_when_idle() -> None:
    with gateway_process({"limits": {"egress_idle_ms": 1_500}}) as gateway:
        async with origin() as server, await gateway.client() as client:
            assert (await client.ask(ask(server))).body == b"hello"
            assert await client.read_to_end() == b""
        async with await gateway.client() as client:
            assert (await client.tunnel(f"{HTTP_ADDRESS}:80", GOOD)).status == 200
            assert await client.read_to_end() == b""


# -- revocation


async def revoke(gateway: GatewayProcess) -> None:
    """Take the session `s1` away."""
    gateway.sessions = [{"id": "other", "token": TOKEN}]
    gateway.write_files()
    gateway.signal(signal.SIGHUP)


async def test_all_connections_of_a_revoked_session_close_at_once_and_are_logged() -> None:
    async def half(exchange: Exchange) -> None:
        await exchange.answer(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhello")
        await exchange.reader.read()

    with gateway_process() as gateway:
        async with origin(half) as server:
            clients = [await gateway.client() for _ in range(20)]
            for client in clients:
                await client.send(ask(server))
                assert (await client.reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200")
            async with await gateway.client() as idle:
                assert (await idle.tunnel(f"{HTTP_ADDRESS}:80", GOOD)).status == 200
                await revoke(gateway)
                for client in [*clients, idle]:
                    assert await ends(client)
            await server.until(lambda: server.closed == 20)
            for client in clients:
                await client.close()
            async with asyncio.timeout(PATIENCE_S):
                while len([line for line in gateway.audit("s1") if line["reason"] == "revoked"]) < 20:
                    await asyncio.sleep(0.01)


async def test_a_request_of_a_revoked_session_that_waits_for_a_slot_ends() -> None:
    with gateway_process(sessions=[ONE_SLOT]) as gateway:
        async with origin(never_answer) as server, await gateway.client() as one, await gateway.client() as two:
            await one.send(ask(server))
            await server.until(lambda: len(server.heads) == 1)
            await two.send(ask(server))
            await gateway.await_audit("s1", event="allow")
            await revoke(gateway)
            assert await ends(one)
            assert await ends(two)
            assert "Traceback" not in gateway.log()


async def ends(client: Client) -> bool:
    """Wait for the end of a connection, however it comes."""
    try:
        await client.read_to_end()
    except ConnectionError:
        pass
    return True


# -- many


async def test_idle_connections_of_one_session_are_bounded() -> None:
    with gateway_process({"limits": {"egress_waiters_per_session": 4}}, [ONE_SLOT]) as gateway:
        tunnels = [await gateway.client() for _ in range(5)]
        for client in tunnels:
            assert (await client.tunnel(f"{HTTP_ADDRESS}:80", GOOD)).status == 200
        async with await gateway.client() as extra:
            assert (await extra.tunnel(f"{HTTP_ADDRESS}:80", GOOD)).status == 200
            assert (await extra.reply()).reason == "no_free_slot"
        for client in tunnels:
            await client.close()


async def test_nothing_is_left_open_after_a_storm_of_clients_that_leave_at_any_point() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 300000\r\n\r\n"
    with gateway_process(sessions=[{"id": "s1", "egress_budget": {"connections": 8}}]) as gateway:
        async with origin(says(head, BIG[:300_000])) as server:
            async with await gateway.client() as client:
                await client.ask(ask(server))
            before = gateway.descriptors()

            async def leave_after(size: int) -> None:
                client = await gateway.client()
                try:
                    await client.send(ask(server) * 3)
                    await client.read_exactly(size)
                except (ConnectionError, asyncio.IncompleteReadError):
                    pass
                client.reset()
                await client.close()

            for turn in range(5):
                await asyncio.gather(*(leave_after(turn * 7_001 + number * 13_007) for number in range(30)))
            async with asyncio.timeout(PATIENCE_S):
                while gateway.descriptors() > before + 1:
                    await asyncio.sleep(0.02)
            async with await gateway.client() as client:
                assert (await client.ask(ask(server))).status == 200
            assert "Traceback" not in gateway.log()
            assert "ERROR" not in gateway.log()


async def test_behind_the_forwarder_only_the_sessions_own_container_is_served() -> None:
    sessions = [{"id": "s1", "address": "10.231.0.16"}, {"id": "homeless"}]
    with gateway_process({"listen": {"proxy_protocol": True}}, sessions) as gateway:
        async with origin() as server:

            async def status(source: str | None, session: str = "s1") -> int:
                async with await gateway.client(proxy=proxy_v2(source)) as client:
                    return (await client.ask(ask(server, credentials=(session, TOKEN)))).status

            assert await status("10.231.0.16") == 200
            assert await status("10.231.0.17") == 407
            assert await status(None) == 407
            assert await status("10.231.0.16", "homeless") == 407
            assert len(server.heads) == 1


async def test_another_sessions_request_on_the_same_connection_gets_a_connection_of_its_own() -> None:
    with gateway_process(sessions=[{"id": "s1"}, {"id": "second"}]) as gateway:
        async with origin() as server, await gateway.client() as client:
            assert (await client.ask(ask(server))).body == b"hello"
            assert (await client.ask(ask(server, credentials=("second", TOKEN)))).body == b"hello"
            assert server.connections == 2
            await gateway.await_audit("second", event="close", port=server.server.port)


# -- the gateway stops


async def test_a_stop_waits_for_no_connection_that_asks_for_nothing() -> None:
    with gateway_process({"limits": {"drain_ms": 600_000}}) as gateway:
        async with origin() as server, await gateway.client() as idle, await gateway.client() as begun:
            for client in (idle, begun):
                assert (await client.ask(ask(server))).status == 200
            await begun.send(ask(server)[:20])
            gateway.signal(signal.SIGTERM)
            for client in (idle, begun):
                assert await client.read_to_end() == b""
        assert gateway.stop() == 0


async def test_a_stop_lets_the_present_request_end_and_says_that_no_other_follows() -> None:
    released = asyncio.Event()

    async def answer_late(exchange: Exchange) -> None:
        if exchange.number:
            await released.wait()
        await exchange.answer(HELLO)

    with gateway_process({"limits": {"drain_ms": 600_000}}) as gateway:
        async with origin(answer_late) as server, await gateway.client() as idle, await gateway.client() as client:
            assert (await idle.ask(ask(server))).status == 200
            await client.send(ask(server))
            await server.until(lambda: len(server.exchanges) == 2)
            gateway.signal(signal.SIGTERM)
            assert await idle.read_to_end() == b""
            released.set()
            reply = await client.reply()
            assert (reply.status, reply.body, reply.headers["connection"]) == (200, b"hello", "close")
            assert await client.read_to_end() == b""
        assert gateway.stop() == 0
