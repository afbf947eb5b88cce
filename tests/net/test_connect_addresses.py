"""Where a name may lead: every answer is judged, the judged address is dialled, a bad resolver harms only its own name."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import dns.rcode
import pytest
import pytest_asyncio

from tests.support.dns_server import DnsServer, Failure, Records, Silence
from tests.support.gateway_process import TOKEN, GatewayProcess, gateway_process
from tests.support.patience import PATIENCE_S
from tests.support.sockets import Server, echo, echo_server

GOOD = ("s1", TOKEN)
# One loop for the module, so that most tests can share one gateway and its name server.
pytestmark = pytest.mark.asyncio(loop_scope="module")
Resolving = tuple[DnsServer, GatewayProcess]


@asynccontextmanager
async def resolving_gateway(config: dict[str, Any] | None = None) -> AsyncIterator[tuple[DnsServer, GatewayProcess]]:
    async with DnsServer() as names:
        merged = {"egress": {"nameservers": [names.address]}, **(config or {})}
        merged["egress"] = {**merged["egress"], "nameservers": [names.address]}
        with gateway_process(merged, [{"id": "s1"}, {"id": "s2"}]) as gateway:
            yield names, gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def resolving(way: str) -> AsyncIterator[Resolving]:
    async with resolving_gateway() as shared:
        yield shared


async def test_a_name_is_resolved_here_and_its_judged_address_dialled(resolving: Resolving) -> None:
    names, gateway = resolving
    async with echo_server() as server:
        names.script("echo.example.com", Records(("127.0.0.1",)))
        async with await gateway.client() as client:
            assert (await client.tunnel(f"ECHO.example.com.:{server.port}", GOOD, early=b"hello")).status == 200
            assert await client.read_exactly(5) == b"hello"
        line = await gateway.await_audit("s1", event="close", host="echo.example.com")
        assert (line["address"], line["reason"], line["bytes_up"], line["bytes_down"]) == ("127.0.0.1", "done", 5, 5)


async def test_a_rebinding_name_is_asked_once_and_never_again(resolving: Resolving) -> None:
    names, gateway = resolving
    async with echo_server() as server:
        names.script("rebind.example.com", Records(("127.0.0.1",)), Records(("169.254.169.254",)), kind="A")
        async with await gateway.client() as client:
            assert (await client.tunnel(f"rebind.example.com:{server.port}", GOOD)).status == 200
        assert names.count("rebind.example.com", "A") == 1


@pytest.mark.parametrize(
    "address",
    [
        "169.254.169.254", "10.0.0.1", "100.64.0.1", "198.18.0.1", "240.0.0.1", "192.0.0.8", "168.63.129.16",
        "100.100.100.200", "0.0.0.0", "255.255.255.255", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe",
        "2002:a9fe:a9fe::1", "2001:0:a9fe:a9fe::1", "::a9fe:a9fe", "fd00:ec2::254", "fe80::1", "fec0::1", "ff02::1",
    ],
)  # fmt: skip
async def test_refuses_a_name_that_leads_to_an_address_that_is_not_public(address: str, resolving: Resolving) -> None:
    names, gateway = resolving
    names.script("inside.example.com", Records((address,)))
    async with await gateway.client() as client:
        reply = await client.tunnel("inside.example.com:4000", GOOD)
        assert (reply.status, reply.reason) == (403, "address_not_public")
        assert address not in reply.body.decode() + reply.phrase


async def test_refuses_an_answer_that_mixes_public_and_private_whole(resolving: Resolving) -> None:
    names, gateway = resolving
    names.script("mixed.example.com", Records(("93.184.215.14", "10.0.0.1")))
    async with await gateway.client() as client:
        reply = await client.tunnel("mixed.example.com:4000", GOOD)
        assert (reply.status, reply.reason) == (403, "address_not_public")


async def test_refuses_an_ip_literal_in_every_form_that_is_not_public(resolving: Resolving) -> None:
    _, gateway = resolving
    for literal in ("169.254.169.254", "[::ffff:a9fe:a9fe]", "[64:ff9b::a9fe:a9fe]", "[fd00:ec2::254]"):
        async with await gateway.client() as client:
            reply = await client.tunnel(f"{literal}:4000", GOOD)
            assert (literal, reply.status, reply.reason) == (literal, 403, "address_not_public")


async def test_refuses_this_hosts_own_addresses_on_any_port(resolving: Resolving) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        own = probe.getsockname()[0]
    names, gateway = resolving
    async with Server(echo) as server:
        names.script("own.example.com", Records((own,)))
        async with await gateway.client() as client:
            reply = await client.tunnel(f"own.example.com:{server.port}", GOOD)
            assert (reply.status, reply.reason) == (403, "address_not_public")


async def test_refuses_the_gateways_own_ports_even_where_loopback_is_allowed(resolving: Resolving) -> None:
    _, gateway = resolving
    for port in (gateway.metrics_port,) if gateway.forwarded else (gateway.port, gateway.metrics_port):
        async with await gateway.client() as client:
            assert (await client.tunnel(f"127.0.0.1:{port}", GOOD)).reason == "address_not_public"


async def test_denied_networks_are_refused_though_public() -> None:
    async with resolving_gateway({"egress": {"denied_networks": ["93.184.0.0/16"]}}) as (names, gateway):
        names.script("public.example.com", Records(("93.184.215.14",)))
        async with await gateway.client() as client:
            assert (await client.tunnel("public.example.com:4000", GOOD)).reason == "address_denied"


async def test_a_trusted_network_stays_closed_for_other_hosts_and_ports() -> None:
    trusted = [{"hosts": ["x.example"], "ports": [1], "network": "10.0.0.0/8"}]
    async with resolving_gateway({"egress": {"trusted": trusted}}) as (names, gateway):
        names.script("x.example", Records(("10.0.0.1",)))
        names.script("y.example", Records(("10.0.0.1",)))
        for name in ("y.example:1", "x.example:2"):
            async with await gateway.client() as client:
                assert (await client.tunnel(name, GOOD)).reason == "address_not_public"


@pytest.mark.parametrize(
    ("answer", "status"), [(Failure(dns.rcode.SERVFAIL), 502), (Failure(dns.rcode.NXDOMAIN), 502), (Silence(), 504)]
)
async def test_a_failing_resolver_refuses_in_bounded_time_and_slows_nobody_else(answer: Any, status: int) -> None:
    config = {"limits": {"dns_timeout_ms": 2_500}}
    async with resolving_gateway(config) as (names, gateway), echo_server() as server:
        names.script("bad.example.com", answer)
        names.script("good.example.com", Records(("127.0.0.1",)))
        async with await gateway.client() as bad, await gateway.client("s2") as good:
            waiting = asyncio.create_task(bad.tunnel("bad.example.com:4000", GOOD))
            assert (await good.tunnel(f"good.example.com:{server.port}", ("s2", TOKEN))).status == 200
            assert (await waiting).status == status


async def test_a_client_that_resets_while_its_name_is_resolved_gives_its_slot_back() -> None:
    async with DnsServer() as names:
        session = {"id": "s1", "egress_budget": {"bytes": 0, "connections": 1}}
        with gateway_process({"egress": {"nameservers": [names.address]}}, [session]) as gateway:
            async with echo_server() as server:
                names.script("slow.example.com", Records(("127.0.0.1",)))
                names.script("quick.example.com", Records(("127.0.0.1",)))
                names.hold()
                leaver = await gateway.client()
                waiting = asyncio.create_task(leaver.tunnel("slow.example.com:4000", GOOD))
                async with asyncio.timeout(PATIENCE_S):
                    while not names.count("slow.example.com"):
                        await asyncio.sleep(0)
                leaver.reset()
                with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                    await waiting
                await gateway.await_audit("s1", event="refuse", reason="client_gone")
                names.release()
                async with await gateway.client() as client:
                    assert (await client.tunnel(f"quick.example.com:{server.port}", GOOD)).status == 200


async def test_first_address_dead_second_alive_connects_through_the_second(resolving: Resolving) -> None:
    names, gateway = resolving
    async with echo_server() as server:
        names.script("twice.example.com", Records(("127.0.0.2", "127.0.0.1")), kind="A")
        names.script("twice.example.com", Records(), kind="AAAA")
        async with await gateway.client() as client:
            assert (await client.tunnel(f"twice.example.com:{server.port}", GOOD)).status == 200
        assert (await gateway.await_audit("s1", event="allow", host="twice.example.com"))["address"] == "127.0.0.1"


async def test_a_refused_connection_is_told_in_words(resolving: Resolving) -> None:
    _, gateway = resolving
    async with await gateway.client() as client:
        reply = await client.tunnel("127.0.0.1:1", GOOD)
        assert (reply.status, reply.reason) == (502, "connect_refused")
        assert b"connection refused" in reply.body


async def test_a_host_that_never_answers_is_a_timeout() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        # A listener whose queue is full drops the SYN: exactly what a silent host looks like.
        with contextlib.ExitStack() as fillers:
            for _ in range(4):
                filler = fillers.enter_context(socket.socket())
                filler.setblocking(False)
                filler.connect_ex(full.getsockname())
            async with resolving_gateway({"limits": {"egress_connect_timeout_ms": 400}}) as (_, gateway):
                async with await gateway.client() as client:
                    reply = await client.tunnel(f"127.0.0.1:{full.getsockname()[1]}", GOOD)
                    assert (reply.status, reply.reason) == (504, "connect_timeout")
