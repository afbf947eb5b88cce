"""A bad wire on either side of the gateway: what is carried is right or its end is told, and nobody else notices."""

import asyncio
import contextlib
import hashlib
import itertools
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.support.faults import Fault, FaultProxy, Kind, Way
from tests.support.gateway_process import TOKEN, GatewayProcess, gateway_process
from tests.support.origin import Exchange, Origin, origin
from tests.support.patience import PATIENCE_S
from tests.support.sockets import Client, Server, answer_after_end, basic, echo_server

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
# A response, as its host sends it.
HEAD = b"HTTP/1.1 200 OK\r\n"
RESPONSES = {
    "counted": HEAD + b"Content-Length: %d\r\n\r\n" % len(DATA) + DATA,
    "chunked": HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(DATA), DATA),
    "endless": HEAD + b"\r\n" + DATA,
}


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


# -- plain HTTP


@asynccontextmanager
async def bad_wire_for_http(
    gateway: GatewayProcess, pair: str, framing: str
) -> AsyncIterator[tuple[Client, FaultProxy, Origin, int]]:
    """A client and a host whose response is framed so, with a bad wire at one side of the gateway; and the host's port."""

    async def answer(exchange: Exchange) -> None:
        if b"POST" in exchange.head:
            await exchange.body(len(DATA))
        await exchange.answer(RESPONSES[framing])
        if framing == "endless":
            exchange.writer.close()

    async with origin(answer) as server:
        near, far = ("127.0.0.1", gateway.port), ("127.0.0.1", server.server.port)
        with FaultProxy(near if pair == "sandbox-gateway" else far) as wire:
            if pair == "sandbox-gateway":
                async with await Client.connect(wire.address) as client:
                    yield client, wire, server, far[1]
            else:
                async with await gateway.client() as client:
                    yield client, wire, server, wire.address[1]


def http(port: int, body: bytes = b"") -> bytes:
    """Return a request; with a body a POST, which is never sent twice."""
    lines = [f"{'POST' if body else 'GET'} http://127.0.0.1:{port}/ HTTP/1.1", f"Host: 127.0.0.1:{port}"]
    lines += [f"Proxy-Authorization: {basic(*GOOD)}", f"Content-Length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode() + body


async def response(client: Client) -> bytes | None:
    """Read a response by its framing, as clients do; None if it is cut. A refusal is returned as its status."""
    try:
        reply = await client.reply()
        if reply.status != 200:
            return str(reply.status).encode()
        if reply.headers.get("transfer-encoding") != "chunked":
            return reply.body
        body = b""
        while size := int((await client.read_line()), 16):
            body += (await client.read_exactly(size + 2))[:-2]
        assert await client.read_line() == b""
        return body
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


FRAMINGS = pytest.mark.parametrize("framing", list(RESPONSES))


@PAIRS
@FRAMINGS
@pytest.mark.parametrize("fault", SLOW, ids=lambda fault: str(fault.kind))
async def test_a_slow_wire_brings_a_response_whole_and_stops_nobody_else(
    gateway: GatewayProcess, pair: str, framing: str, fault: Fault
) -> None:
    async with bad_wire_for_http(gateway, pair, framing) as (client, wire, _, port), echo_server() as other:
        wire.set(fault)
        await client.send(http(port, DATA))
        reading = asyncio.create_task(response(client))
        async with asyncio.timeout(PATIENCE_S):
            while not wire.acted:
                await asyncio.sleep(0.01)
        await neighbour_is_served(gateway, other)
        if fault.kind is Kind.STALL:
            assert not reading.done()
            wire.clear()
        assert await reading == DATA
        close = await gateway.await_audit("s1", event="close", port=port)
        assert close["reason"] == "done"
        assert close["bytes_up"] > len(DATA) < close["bytes_down"]


def can_be_told(pair: str, framing: str, place: str, kind: Kind) -> bool:
    """Tell whether a response says of its end more than that the connection has ended."""
    return framing != "endless" or place == "head" or kind is Kind.RESET or pair == "sandbox-gateway"


CUTS = [
    case
    for case in itertools.product(
        ("sandbox-gateway", "gateway-upstream"),
        RESPONSES,
        ("head", "body", "last"),
        (Kind.RESET, Kind.TRUNCATE, Kind.HALF_CLOSE),
    )
    if can_be_told(*case)
]


@pytest.mark.parametrize(("pair", "framing", "place", "kind"), CUTS)
async def test_a_response_that_the_wire_cuts_never_looks_whole(
    gateway: GatewayProcess, pair: str, framing: str, place: str, kind: Kind
) -> None:
    whole = RESPONSES[framing]
    async with bad_wire_for_http(gateway, pair, framing) as (client, wire, server, port):
        wire.set(Fault(kind, after={"head": 10, "body": 50_000, "last": len(whole) - 3}[place], way=Way.DOWN))
        await client.send(http(port))
        got = await response(client)
        if pair == "gateway-upstream":
            # What a reset overtakes is lost, the head too: then it is a refusal.
            assert got == b"502" if place == "head" else got is None or (got == b"502" and kind is Kind.RESET)
            assert (await gateway.await_audit("s1", event="close", port=port))["reason"] == "upstream_failed"
        else:
            assert got is None
        wire.clear()
        # Its slot is free again.
        async with await gateway.client() as again:
            await again.send(http(server.server.port))
            assert await response(again) == DATA


@PAIRS
@pytest.mark.parametrize("kind", [Kind.RESET, Kind.TRUNCATE, Kind.HALF_CLOSE])
async def test_a_request_that_the_wire_cuts_is_no_request_and_never_sent_again(
    gateway: GatewayProcess, pair: str, kind: Kind
) -> None:
    async with bad_wire_for_http(gateway, pair, "counted") as (client, wire, server, port):
        request = http(port, DATA)
        await client.send(request[:1_000])
        # A reset overtakes what was not read yet: there must be something of a request.
        await server.until(lambda: len(server.exchanges) == 1)
        wire.set(Fault(kind, after=50_000, way=Way.UP))
        with contextlib.suppress(ConnectionError):
            await client.send(request[1_000:])
        assert await response(client) in (None, b"502", b"400")
        await gateway.await_audit("s1", event="close", port=port)
        await server.until(lambda: server.closed == server.connections == 1)
        assert len(server.exchanges) == 1


async def test_a_host_whose_wire_stalls_for_good_is_given_up_as_idle(gateway: GatewayProcess) -> None:
    async with (
        bad_wire_for_http(gateway, "gateway-upstream", "counted") as (client, wire, _, port),
        echo_server() as other,
    ):
        wire.set(Fault(Kind.STALL, after=50_000, way=Way.DOWN))
        await client.send(http(port))
        await neighbour_is_served(gateway, other)
        assert await response(client) is None
        assert (await gateway.await_audit("s1", event="close", port=port))["reason"] == "idle"
