"""Clients that mean no good are open in every state while the gateway is replaced again and again, beside honest ones."""

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from tests.net.test_handover import restarted
from tests.net.test_hostile_mix import attack, garbled, requests
from tests.net.test_metrics_server import ask as ask_metrics
from tests.net.test_metrics_server import get
from tests.net.test_plain import GOOD, HTTP_ADDRESS, ask
from tests.net.test_reload import reloaded
from tests.net.test_tunnel import HTTPS_ADDRESS, server_on
from tests.support.gateway_process import TOKEN, GatewayProcess, gateway_process
from tests.support.origin import HELLO, Exchange, Origin, origin
from tests.support.patience import PATIENCE_S, until
from tests.support.sockets import Client, Server, basic, echo_server

HONEST: Final = ("honest", TOKEN)
IDLE: Final = 300
AT_ONCE: Final = 20
BIG: Final = b"HTTP/1.1 200 OK\r\nContent-Length: 50000000\r\n\r\n" + bytes(10_000_000)


async def held(gateway: GatewayProcess) -> tuple[list[str], int]:
    """Return how many slots and pipes are held, and how many sockets are open."""
    lines = (await ask_metrics(gateway, get("/metrics"))).body.decode().splitlines()
    names = ("opificia_gateway_slots_held ", "opificia_gateway_pipes_held ", "opificia_gateway_tunnels ")
    sockets = 0
    for descriptor in Path(f"/proc/{gateway.pid}/fd").iterdir():
        # One may close as we look.
        with contextlib.suppress(FileNotFoundError):
            sockets += str(descriptor.readlink()).startswith("socket:")
    return [line for line in lines if line.startswith(names)], sockets


@asynccontextmanager
async def hostile(gateway: GatewayProcess, server: Origin, silent: Server) -> AsyncIterator[list[Client]]:
    """Clients of the session s1 in all the states that there are; the first ones are idle between two requests."""
    clients: list[Client] = []

    async def connect(data: bytes = b"") -> Client:
        client = await gateway.client()
        clients.append(client)
        await client.send(data)
        return client

    async def stay_idle() -> None:
        for _ in range(IDLE // AT_ONCE):
            assert (await (await connect(ask(server))).reply()).status == 200

    await asyncio.gather(*(stay_idle() for _ in range(AT_ONCE)))
    for _ in range(10):
        await connect(ask(server)[:-20])
        await connect(b"CONNECT ")
        half_closed = await connect()
        assert (await half_closed.tunnel(f"127.0.0.1:{silent.port}", GOOD, early=b"x")).status == 200
        half_closed.end()
        (await connect(ask(server))).end()
        await connect(ask(server) * 20)
        assert (await (await connect()).tunnel(f"{HTTP_ADDRESS}:80", GOOD, early=b"GET ")).status == 200
        assert (
            await (await connect()).tunnel(f"{HTTPS_ADDRESS}:443", GOOD, early=b"\x16\x03\x01\x02\x00\x01")
        ).status == 200
    for name in ("Not An Id", "", "s1\0", "x" * 300, "\u00e9", "../s1", "S1"):
        head = f"CONNECT 127.0.0.1:9 HTTP/1.1\r\nHost: 127.0.0.1:9\r\nProxy-Authorization: {basic(name, TOKEN)}\r\n\r\n"
        await connect(head.encode())
    try:
        yield clients
    finally:
        for client in clients:
            leave(client)


def leave(client: Client) -> None:
    """Reset a connection that may be closed already."""
    with contextlib.suppress(OSError):
        client.reset()


def big(server: Origin) -> int:
    """Return how many have asked for what does not end."""
    return sum(b" /big " in head for head in server.heads)


async def storm(gateway: GatewayProcess, server: Origin, over: asyncio.Event, chance: random.Random) -> None:
    """Send what is garbled, and leave at any point."""
    kinds = requests(b"127.0.0.1:%d" % server.server.port)
    while not over.is_set():
        await attack(gateway.port, garbled(chance.choice(kinds), kinds, chance), chance)


async def talk(gateway: GatewayProcess, far: Server, over: asyncio.Event) -> int:
    """Send through one tunnel; every byte must come back."""
    count = 0
    async with await gateway.client("honest") as client:
        assert (await client.tunnel(f"127.0.0.1:{far.port}", HONEST)).status == 200
        while not over.is_set():
            data = os.urandom(40_000)
            client.writer.write(data)
            assert await client.read_exactly(len(data)) == data
            count += 1
        client.end()
        assert await client.read_to_end() == b""
    return count


async def keep_asking(gateway: GatewayProcess, server: Origin, over: asyncio.Event) -> int:
    """Ask on one connection until it is said to end, then on another; every request must be answered."""
    count = 0
    while not over.is_set():
        async with await gateway.client("honest") as client:
            is_open = True
            while is_open and not over.is_set():
                reply = await client.ask(ask(server, credentials=HONEST))
                assert (reply.status, reply.body) == (200, b"hello")
                is_open = reply.headers.get("connection") != "close"
                count += 1
    return count


async def ask_anew(gateway: GatewayProcess, server: Origin, over: asyncio.Event) -> int:
    """Ask on one new connection after the other."""
    count = 0
    while not over.is_set():
        async with await gateway.client("honest") as client:
            assert (await client.ask(ask(server, credentials=HONEST))).body == b"hello"
            count += 1
    return count


async def test_hostile_clients_in_every_state_cost_honest_ones_nothing_in_three_restarts_and_two_reloads() -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.answer(BIG if b" /big " in exchange.head else HELLO)

    sessions = [
        {"id": "s1", "egress_budget": {"connections": 400}},
        {"id": "honest", "egress_budget": {"connections": 16}},
    ]
    chance = random.Random(20261130)
    over = asyncio.Event()

    async def say_nothing(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()
        await over.wait()

    with gateway_process({"limits": {"drain_ms": 10_000}}, sessions, stored=8) as gateway:
        async with (
            origin(answer) as server,
            echo_server() as far,
            server_on(say_nothing) as silent,
            server_on(say_nothing, 443),
        ):
            before = await held(gateway)
            async with hostile(gateway, server, silent) as clients, asyncio.TaskGroup() as group:
                for _ in range(2):
                    group.create_task(storm(gateway, server, over, chance))
                honest = [
                    group.create_task(work)
                    for work in (
                        talk(gateway, far, over),
                        keep_asking(gateway, server, over),
                        ask_anew(gateway, server, over),
                    )
                ]
                for number in range(5):
                    if number % 2:
                        # It takes nothing of a reply that does not end: a reload need not wait for it, a restart would.
                        deaf = await gateway.client()
                        await deaf.send(ask(server, "/big"))
                        deaf.writer.transport.pause_reading()  # type: ignore[attr-defined]
                        await server.until(lambda so_many=number // 2: big(server) > so_many)  # type: ignore[misc]
                        await reloaded(gateway)
                        leave(deaf)
                    else:
                        await restarted(gateway)
                    for client in chance.sample(clients[IDLE:], 10):
                        leave(client)
                over.set()
                assert min(await asyncio.gather(*honest)) > 0
                # Those of the idle ones that nobody took up would not be answered.
                for client in clients[:IDLE]:
                    assert (await client.ask(ask(server))).status == 200
            assert gateway.manager is not None
            await until(gateway.manager.drained)
            async with asyncio.timeout(PATIENCE_S):
                while await held(gateway) != before:
                    await asyncio.sleep(0.05)
        assert {line["event"] for line in gateway.audit("honest")} == {"allow", "close"}
        assert "Traceback" not in gateway.log(), gateway.log()[gateway.log().index("Traceback") - 400 :][:3000]
        assert "ERROR" not in gateway.log()
