"""Inside the tunnel: the ClientHello check, half-closes, idle, budgets, slots and revocation."""

import asyncio
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.support.dns_server import DnsServer, Records
from tests.support.gateway_process import TOKEN, GatewayProcess, gateway_process
from tests.support.listener import Handler
from tests.support.patience import PATIENCE_S
from tests.support.sockets import (
    Client,
    Reply,
    Server,
    answer_after_end,
    echo,
    echo_server,
    greet_first,
)
from tests.support.tls_server import Authority, client_hello

GOOD = ("s1", TOKEN)
# A loopback address of this run's own, so that its port 443 is free.
HTTPS_ADDRESS = f"127.44.{os.getpid() // 250 % 250 + 1}.{os.getpid() % 250 + 1}"


@asynccontextmanager
async def server_on(handler: Handler, port: int = 0, tls: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    server = Server(handler)
    await server.start(host=HTTPS_ADDRESS if port else "127.0.0.1", port=port, tls=tls)
    try:
        yield server
    finally:
        await server.stop()


@asynccontextmanager
async def https_gateway(
    network: str = "open", **limits: int
) -> AsyncIterator[tuple[GatewayProcess, Server, Authority]]:
    """A gateway for which `site.example` is a TLS server on port 443."""
    authority = Authority()
    async with DnsServer() as names, server_on(echo, 443, authority.server_context("site.example")) as server:
        names.script("site.example", Records((HTTPS_ADDRESS,)))
        session = {"id": "s1", "network": network, "allow": ["site.example"]}
        with gateway_process({"egress": {"nameservers": [names.address]}, "limits": limits}, [session]) as gateway:
            yield gateway, server, authority


async def opened(gateway: GatewayProcess, target: str) -> Client:
    client = await gateway.client()
    assert (await client.tunnel(target, GOOD)).status == 200
    return client


async def test_tls_to_the_connect_host_works_end_to_end() -> None:
    async with https_gateway() as (gateway, _, authority), await opened(gateway, "site.example:443") as client:
        await client.start_tls(authority.client_context(), "site.example")
        await client.send(b"hello")
        assert await client.read_exactly(5) == b"hello"


async def test_an_international_name_is_one_name_to_rules_dns_tls_and_log() -> None:
    name = "xn--bcher-kva.example"
    authority = Authority()
    async with DnsServer() as names, server_on(echo, 443, authority.server_context(name)):
        names.script(name, Records((HTTPS_ADDRESS,)))
        session = {"id": "s1", "network": "registries", "allow": ["bücher.example"], "deny": ["kaffee.bücher.example"]}
        with gateway_process({"egress": {"nameservers": [names.address]}}, [session]) as gateway:
            # Upper case, full-width letters and dots, the A-label, a dot at the end.
            for spelling in ("BÜCHER.example", "ｂücher．ｅｘａｍｐｌｅ", "bücher。example.", name.upper()):
                async with await opened(gateway, f"{spelling}:443") as client:
                    await client.send(client_hello(name))
                    assert (await client.read_exactly(1)) == b"\x16"
            async with await gateway.client() as client:
                reply = await client.tunnel("Kaffee.Ｂücher.example:443", GOOD)
                assert (reply.status, reply.reason) == (403, "host_denied")
            await gateway.await_audit("s1", event="refuse", host=f"kaffee.{name}")
            assert {line["host"] for line in gateway.audit("s1") if line["event"] == "allow"} == {name}
            assert names.count(name, "A") == 1


async def test_a_hello_sent_with_the_head_is_read_too() -> None:
    async with https_gateway() as (gateway, _, _authority), await gateway.client() as client:
        reply = await client.tunnel("site.example:443", GOOD, early=client_hello("site.example"))
        assert reply.status == 200
        assert (await client.read_exactly(1)) == b"\x16"


async def test_a_hello_split_over_records_and_segments_is_read() -> None:
    async with https_gateway() as (gateway, _, _authority), await opened(gateway, "site.example:443") as client:
        hello = client_hello("site.example")
        body = hello[5:]
        third = len(body) // 3
        pieces = [body[:third], body[third : 2 * third], body[2 * third :]]
        records = b"".join(hello[:3] + len(piece).to_bytes(2, "big") + piece for piece in pieces)
        await client.send_slowly(records, len(records) // 10 + 1)
        assert (await client.read_exactly(1)) == b"\x16"


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (client_hello("other.example"), "sni_mismatch"),
        (client_hello(None), "sni_missing"),
        (b"GET / HTTP/1.1\r\nHost: site.example\r\n\r\n", "not_tls"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "not_tls"),
        (b"\x16\x03\x01\x00\x05\x02\x00\x00\x01\x00", "hello_malformed"),
    ],
)
async def test_refuses_what_is_not_a_hello_for_the_connect_host_before_a_byte_goes_upstream(
    first: bytes, reason: str
) -> None:
    recorder = None
    async with DnsServer() as names, server_on(recorder, 443) as server:  # type: ignore[arg-type]
        names.script("site.example", Records((HTTPS_ADDRESS,)))
        with gateway_process({"egress": {"nameservers": [names.address]}}) as gateway:
            async with await opened(gateway, "site.example:443") as client:
                await client.send(first)
                alert = await client.read_to_end()
            assert alert[0] == 0x15
            assert alert[-2:] == b"\x02\x70"  # fatal, unrecognized_name (RFC 8446 §6)
            line = await gateway.await_audit("s1", event="refuse")
            assert line["reason"] == reason
            assert not [line for line in gateway.audit("s1") if line["event"] == "allow"]
            await server.until(lambda: bool(server.conversations) and server.conversations[0].ended is not None)
            assert server.conversations[0].received == b""


async def test_a_hello_that_never_completes_is_closed_at_its_deadline() -> None:
    async with https_gateway(hello_timeout_ms=300) as (gateway, _, _authority):
        async with await opened(gateway, "site.example:443") as client:
            await client.send(client_hello("site.example")[:40])
            assert (await client.read_to_end())[:1] == b"\x15"
        assert (await gateway.await_audit("s1", event="refuse"))["reason"] == "hello_timeout"


async def test_an_ip_literal_must_come_without_a_server_name() -> None:
    async with https_gateway() as (gateway, _, _authority):
        async with await opened(gateway, f"{HTTPS_ADDRESS}:443") as client:
            await client.send(client_hello("site.example"))
            assert (await client.read_to_end())[:1] == b"\x15"
        async with await opened(gateway, f"{HTTPS_ADDRESS}:443") as client:
            await client.send(client_hello(None))
            assert (await client.read_exactly(1)) == b"\x16"


async def test_a_server_that_speaks_first_is_not_made_to_wait() -> None:
    with gateway_process() as gateway:
        async with server_on(greet_first(b"SSH-2.0-test\r\n")) as server:
            async with await opened(gateway, f"127.0.0.1:{server.port}") as client:
                assert await client.read_exactly(14) == b"SSH-2.0-test\r\n"


async def test_early_bytes_reach_the_upstream_first_and_in_order(gateway: GatewayProcess) -> None:
    async with server_on(None) as server, await gateway.client() as client:  # type: ignore[arg-type]
        assert (await client.tunnel(f"127.0.0.1:{server.port}", GOOD, early=b"first,")).status == 200
        await client.send(b"second")
        client.end()
        await server.until(lambda: bool(server.conversations) and server.conversations[0].ended == "end")
        assert server.conversations[0].received == b"first,second"


async def test_a_client_that_ends_first_still_gets_every_byte(gateway: GatewayProcess) -> None:
    answer = os.urandom(100_009)
    async with server_on(answer_after_end(answer)) as server:
        async with await opened(gateway, f"127.0.0.1:{server.port}") as client:
            await client.send(b"question")
            client.end()
            assert await client.read_to_end() == answer


async def test_a_server_that_ends_first_still_gets_every_byte(gateway: GatewayProcess) -> None:
    received = bytearray()
    done = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"bye")
        writer.write_eof()
        received.extend(await reader.read())
        done.set()

    async with server_on(handler) as server, await opened(gateway, f"127.0.0.1:{server.port}") as client:
        assert await client.read_to_end() == b"bye"
        await client.send(b"x" * 5000)
        client.end()
        async with asyncio.timeout(PATIENCE_S):
            await done.wait()
    assert len(received) == 5000


async def test_bulk_both_ways_at_once_is_byte_exact(gateway: GatewayProcess) -> None:
    data = os.urandom(8_000_003)
    async with echo_server() as server, await opened(gateway, f"127.0.0.1:{server.port}") as client:
        sending = asyncio.create_task(client.send(data))
        assert await client.read_exactly(len(data)) == data
        await sending
        client.end()
        assert await client.read_to_end() == b""
    line = await gateway.await_audit("s1", event="close", bytes_up=len(data))
    assert line["bytes_down"] == len(data)


async def test_a_conversation_that_turns_into_bulk_and_back_is_byte_exact(gateway: GatewayProcess) -> None:
    data, total = os.urandom(3_000_001), 0
    async with echo_server() as server, await opened(gateway, f"127.0.0.1:{server.port}") as client:
        for _ in range(3):
            for number in range(50):
                message = b"%d" % number
                await client.send(message)
                assert await client.read_exactly(len(message)) == message
                total += len(message)
            sending = asyncio.create_task(client.send(data))
            assert await client.read_exactly(len(data)) == data
            await sending
            total += len(data)
        client.end()
        assert await client.read_to_end() == b""
    line = await gateway.await_audit("s1", event="close", bytes_up=total)
    assert (line["reason"], line["bytes_down"]) == ("done", total)


async def test_a_silent_tunnel_is_closed_at_the_idle_limit_and_a_slow_one_kept() -> None:
    with gateway_process({"limits": {"egress_idle_ms": 2_500}}) as gateway:
        async with echo_server() as server:
            idle = await opened(gateway, f"127.0.0.1:{server.port}")
            slow = await opened(gateway, f"127.0.0.1:{server.port}")
            ended = asyncio.create_task(idle.read_to_end())
            while not ended.done():
                await slow.send(b".")
                assert await slow.read_exactly(1) == b"."
                await asyncio.wait([ended], timeout=0.2)
            assert await ended == b""
            await slow.send(b"still here")
            assert await slow.read_exactly(10) == b"still here"
            assert (await gateway.await_audit("s1", event="close"))["reason"] == "idle"
            await slow.close()
            await idle.close()


async def test_a_byte_budget_that_ends_in_mid_tunnel_closes_it_and_refuses_the_next() -> None:
    session = {"id": "s1", "egress_budget": {"bytes": 100_000, "connections": 64}}
    with gateway_process(sessions=[session]) as gateway:
        async with echo_server() as server:
            async with await opened(gateway, f"127.0.0.1:{server.port}") as client:
                await client.send(b"x" * 200_000)
                with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                    await client.read_exactly(100_001)
            line = await gateway.await_audit("s1", event="close", reason="budget_exhausted")
            assert line["bytes_up"] + line["bytes_down"] == 100_000
            async with await gateway.client() as client:
                reply = await client.tunnel(f"127.0.0.1:{server.port}", GOOD)
                assert (reply.status, reply.reason) == (403, "budget_exhausted")


SLOTS_64 = {"id": "s1", "egress_budget": {"bytes": 0, "connections": 64}}


async def asked_200_times(gateway: GatewayProcess, port: int) -> tuple[list[Client], list[asyncio.Task[Reply]]]:
    """Ask for 200 tunnels at once; each task ends with its reply."""
    clients = [await gateway.client() for _ in range(200)]
    return clients, [asyncio.create_task(each.tunnel(f"127.0.0.1:{port}", GOOD)) for each in clients]


async def done_of(asked: list[asyncio.Task[Reply]], count: int) -> set[int]:
    """Wait until `count` have their reply; return which."""
    waiting = set(asked)
    async with asyncio.timeout(PATIENCE_S):
        while len(waiting) > len(asked) - count:
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    return {number for number, task in enumerate(asked) if task.done()}


async def test_200_connects_on_64_slots_run_64_and_the_rest_wait_their_turn() -> None:
    limits = {"egress_slot_wait_ms": 120_000, "unauthenticated_per_source": 1000}
    with gateway_process({"limits": limits}, [SLOTS_64]) as gateway:
        async with echo_server() as server:
            clients, asked = await asked_200_times(gateway, server.port)
            first = await done_of(asked, 64)
            assert len(first) == 64
            for number in sorted(first)[:10]:
                await clients[number].close()
            done = await done_of(asked, 74)
            assert [asked[number].result().status for number in sorted(done)] == [200] * 74
            # Which ten they are depends on whose request was read first: tests of the queue itself hold the order.
            assert first < done
            for task in asked:
                task.cancel()
            await asyncio.wait(asked)
            for client in clients:
                await client.close()


async def test_200_connects_on_64_slots_that_stay_taken_are_136_refusals() -> None:
    limits = {"egress_slot_wait_ms": 200, "unauthenticated_per_source": 1000}
    with gateway_process({"limits": limits}, [SLOTS_64]) as gateway:
        async with echo_server() as server:
            clients, asked = await asked_200_times(gateway, server.port)
            replies = await asyncio.gather(*asked)
            statuses = [reply.status for reply in replies]
            assert (statuses.count(200), statuses.count(429)) == (64, 136)
            refused = next(reply for reply in replies if reply.status == 429)
            assert refused.reason == "no_free_slot"
            assert int(refused.headers["retry-after"]) > 0
            for client in clients:
                await client.close()


async def test_every_tunnel_of_a_revoked_session_closes_at_once_and_is_logged() -> None:
    import signal

    with gateway_process(sessions=[{"id": "s1"}, {"id": "s2"}]) as gateway:
        async with echo_server() as server:
            clients = [await opened(gateway, f"127.0.0.1:{server.port}") for _ in range(50)]
            other = await gateway.client("s2")
            assert (await other.tunnel(f"127.0.0.1:{server.port}", ("s2", TOKEN))).status == 200
            gateway.sessions = gateway.sessions[1:]
            gateway.write_files()
            gateway.signal(signal.SIGHUP)
            for client in clients:
                assert await client.read_to_end() == b""
                await client.close()
            closed = 0
            async with asyncio.timeout(PATIENCE_S):
                while closed < 50:
                    lines = [line for line in gateway.audit("s1") if line["event"] == "close"]
                    closed = len(lines)
                    await asyncio.sleep(0.01)
            assert {line["reason"] for line in lines} == {"revoked"}
            await other.send(b"x")
            assert await other.read_exactly(1) == b"x"
            await other.close()


async def test_every_path_gives_slots_descriptors_and_pipes_back() -> None:
    session = {"id": "s1", "egress_budget": {"bytes": 0, "connections": 4}}
    with gateway_process(sessions=[session]) as gateway:
        async with echo_server() as server:

            async def settled(count: int) -> None:
                async with asyncio.timeout(PATIENCE_S):
                    while gateway.descriptors() > count:
                        await asyncio.sleep(0.01)

            async with await opened(gateway, f"127.0.0.1:{server.port}") as client:
                data = b"x" * 3_000_000
                sending = asyncio.create_task(client.send(data))
                await client.read_exactly(len(data))
                await sending
            await gateway.await_audit("s1", event="close")
            before = gateway.descriptors()
            for _ in range(8):
                resetting = await opened(gateway, f"127.0.0.1:{server.port}")
                await resetting.send(b"y" * 300_000)
                resetting.reset()
                refused = await gateway.client()
                assert (await refused.tunnel("127.0.0.1:1", GOOD)).status == 502
                await refused.close()
                polite = await opened(gateway, f"127.0.0.1:{server.port}")
                polite.end()
                assert await polite.read_to_end() == b""
                await polite.close()
            await settled(before)
            # All four slots are free again.
            four = [await opened(gateway, f"127.0.0.1:{server.port}") for _ in range(4)]
            for client in four:
                await client.close()


async def test_many_stalled_readers_do_not_stop_the_others(gateway: GatewayProcess) -> None:
    async with echo_server() as server:
        stalled = [await opened(gateway, f"127.0.0.1:{server.port}") for _ in range(40)]
        blocked = [asyncio.create_task(each.send(b"z" * 20_000_000)) for each in stalled]
        data = os.urandom(2_000_000)
        async with await opened(gateway, f"127.0.0.1:{server.port}") as client:
            sending = asyncio.create_task(client.send(data))
            assert await client.read_exactly(len(data)) == data
            await sending
        for task in blocked:
            task.cancel()
        await asyncio.gather(*blocked, return_exceptions=True)
        for each in stalled:
            each.reset()
