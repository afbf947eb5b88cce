"""A bad wire on either side of the gateway: what is carried is right or its end is told, and nobody else notices."""

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.support.faults import Fault, FaultProxy, Kind, Way
from tests.support.gateway_process import TOKEN, GatewayProcess, gateway_process
from tests.support.patience import PATIENCE_S
from tests.support.sockets import Client, Server, answer_after_end, echo_server

GOOD = ("s1", TOKEN)
SLOW = (
    Fault(Kind.DELAY, seconds=0.002),
    Fault(Kind.STALL, after=100_000),
    Fault(Kind.SPLIT, size=97),
    Fault(Kind.BANDWIDTH, rate=512 * 1024),
)
# Enough for several pieces of the wire, and for more than a pipe holds.
DATA = os.urandom(150_000)
IDLE_MS = 4_000


@pytest.fixture(scope="module")
def gateway() -> Iterator[GatewayProcess]:
    """One slot for the session that suffers: what it does not give back is missed by the next test."""
    sessions: list[dict[str, Any]] = [{"id": "s1", "egress_budget": {"bytes": 0, "connections": 1}}, {"id": "second"}]
    with gateway_process({"limits": {"egress_idle_ms": IDLE_MS, "egress_slot_wait_ms": 120_000}}, sessions) as process:
        yield process


@asynccontextmanager
async def bad_wire(gateway: GatewayProcess, pair: str, server: Server) -> AsyncIterator[tuple[Client, FaultProxy]]:
    """A tunnel with a bad wire at one side of the gateway. It is over, and logged, when the context ends."""
    port = server.port
    if pair == "sandbox-gateway":
        with FaultProxy(("127.0.0.1", gateway.port)) as wire:
            async with await Client.connect(wire.address) as client:
                assert (await client.tunnel(f"127.0.0.1:{server.port}", GOOD)).status == 200
                yield client, wire
    else:
        with FaultProxy(("127.0.0.1", server.port)) as wire:
            async with await gateway.client() as client:
                port = wire.address[1]
                assert (await client.tunnel(f"127.0.0.1:{port}", GOOD)).status == 200
                yield client, wire
    await gateway.await_audit("s1", event="close", port=port)


async def neighbour_is_served(gateway: GatewayProcess, server: Server) -> None:
    async with await gateway.client("second") as client:
        assert (await client.tunnel(f"127.0.0.1:{server.port}", ("second", TOKEN))).status == 200
        await client.send(b"ping")
        assert await client.read_exactly(4) == b"ping"


async def told_of_the_end(client: Client) -> None:
    """Send all of DATA, and see the connection end without an answer."""
    try:
        await client.send(DATA)
        assert await client.read_to_end() == b""
    except ConnectionError:
        pass


PAIRS = pytest.mark.parametrize("pair", ["sandbox-gateway", "gateway-upstream"])


@PAIRS
@pytest.mark.parametrize("fault", SLOW, ids=lambda fault: str(fault.kind))
async def test_a_slow_wire_carries_every_byte_and_stops_nobody_else(
    gateway: GatewayProcess, pair: str, fault: Fault
) -> None:
    async with echo_server() as server, bad_wire(gateway, pair, server) as (client, wire):
        wire.set(fault)
        sending = asyncio.create_task(client.send(DATA))
        reading = asyncio.create_task(client.read_exactly(len(DATA)))
        async with asyncio.timeout(PATIENCE_S):
            while not wire.acted:
                await asyncio.sleep(0.01)
        await neighbour_is_served(gateway, server)
        if fault.kind is Kind.STALL:
            assert not reading.done()
            wire.clear()
        await sending
        assert hashlib.sha256(await reading).digest() == hashlib.sha256(DATA).digest()


@PAIRS
@pytest.mark.parametrize("kind", [Kind.RESET, Kind.TRUNCATE])
async def test_a_cut_wire_is_told_to_the_other_side_and_gives_the_slot_back(
    gateway: GatewayProcess, pair: str, kind: Kind
) -> None:
    async with Server() as server, bad_wire(gateway, pair, server) as (client, wire):
        wire.set(Fault(kind, after=50_000, way=Way.UP))
        await told_of_the_end(client)
        port = server.port if pair == "sandbox-gateway" else wire.address[1]
        await server.until(lambda: bool(server.conversations) and server.conversations[0].ended is not None)
        # What arrived is the beginning of what was sent, never something else.
        assert DATA.startswith(bytes(server.conversations[0].received))
        assert len(server.conversations[0].received) < len(DATA)
    if kind is Kind.RESET:
        assert (await gateway.await_audit("s1", event="close", port=port))["reason"] == "reset"
    # The only slot of the session is free again.
    async with echo_server() as again, bad_wire(gateway, pair, again) as (client, _):
        await client.send(b"x")
        assert await client.read_exactly(1) == b"x"


@PAIRS
async def test_a_wire_that_ends_one_way_goes_on_the_other(gateway: GatewayProcess, pair: str) -> None:
    async with Server(answer_after_end(DATA)) as server, bad_wire(gateway, pair, server) as (client, wire):
        wire.set(Fault(Kind.HALF_CLOSE, way=Way.UP))
        assert await client.read_to_end() == DATA


@PAIRS
async def test_a_wire_that_stalls_for_good_is_given_up_as_idle(gateway: GatewayProcess, pair: str) -> None:
    async with echo_server() as server, bad_wire(gateway, pair, server) as (client, wire):
        wire.set(Fault(Kind.STALL))
        await client.send(b"x")
        await neighbour_is_served(gateway, server)
        # The client's own end cannot have come through.
        port = server.port if pair == "sandbox-gateway" else wire.address[1]
        assert (await gateway.await_audit("s1", event="close", port=port))["reason"] == "idle"
