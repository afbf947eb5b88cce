"""Overload: who is in stays served, newcomers are refused or wait, and the process recovers by itself."""

import asyncio
import contextlib

import pytest

from tests.support.gateway_process import TOKEN, GatewayProcess, gateway_process
from tests.support.patience import PATIENCE_S
from tests.support.sockets import Client, echo_server

GOOD = ("s1", TOKEN)
SESSION = {"id": "s1", "egress_budget": {"bytes": 0, "connections": 1000}}


async def try_tunnel(gateway: GatewayProcess, target: str) -> Client | None:
    """Open a tunnel if there is room."""
    client = await gateway.client()
    try:
        if (await client.tunnel(target, GOOD)).status == 200:
            return client
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    await client.close()
    return None


async def test_running_out_of_descriptors_refuses_newcomers_and_keeps_every_tunnel() -> None:
    config = {"limits": {"unauthenticated_per_source": 1000}}
    with gateway_process(config, [SESSION], nofile=160) as gateway:
        async with echo_server() as server:
            target = f"127.0.0.1:{server.port}"
            tunnels: list[Client] = []
            while (client := await try_tunnel(gateway, target)) is not None:
                tunnels.append(client)
                assert len(tunnels) < 80
            assert len(tunnels) > 20
            # A storm of newcomers while it is full.
            storm = await asyncio.gather(*(try_tunnel(gateway, target) for _ in range(100)))
            tunnels += [client for client in storm if client is not None]
            for client in tunnels:
                await client.send(b"alive")
                assert await client.read_exactly(5) == b"alive"
            opened = len(tunnels)
            for client in tunnels:
                await client.close()

            again = None
            async with asyncio.timeout(PATIENCE_S):
                while (again := await try_tunnel(gateway, target)) is None:
                    await asyncio.sleep(0.02)
            await again.close()

            closed: list[object] = []
            async with asyncio.timeout(PATIENCE_S):
                while len(closed) < opened + 1:
                    closed = [line for line in gateway.audit("s1") if line["event"] == "close"]
                    await asyncio.sleep(0.02)
            # Nothing that was served is missing in the log.
            assert len([line for line in gateway.audit("s1") if line["event"] == "allow"]) == opened + 1
        assert "Traceback" not in gateway.log()


async def test_slow_heads_take_only_their_own_share() -> None:
    with gateway_process(
        {"limits": {"unauthenticated_total": 50, "unauthenticated_per_source": 50}}, [SESSION]
    ) as gateway:
        async with echo_server() as server:
            slow = [await gateway.client() for _ in range(49)]
            for client in slow:
                await client.send(b"CONNECT ")
            async with await gateway.client() as client:
                assert (await client.tunnel(f"127.0.0.1:{server.port}", GOOD)).status == 200
                await client.send(b"x")
                assert await client.read_exactly(1) == b"x"
            for client in slow:
                await client.close()


async def test_a_sandbox_that_opens_very_many_connections_is_held_to_its_share_and_others_are_served() -> None:
    share, storm_size = 20, 300
    with gateway_process(
        {"limits": {"unauthenticated_per_source": share}}, [SESSION, {**SESSION, "id": "s2"}]
    ) as gateway:
        async with echo_server() as server:
            target = f"127.0.0.1:{server.port}"
            tunnel = await gateway.client()
            assert (await tunnel.tunnel(target, GOOD)).status == 200

            async def ask_for_nothing() -> None:
                client = await gateway.client()
                storm.append(client)
                with contextlib.suppress(ConnectionError):
                    await client.send(b"CONNECT ")
                    await client.reader.read()

            storm: list[Client] = []
            tasks = {asyncio.create_task(ask_for_nothing()) for _ in range(storm_size)}
            waiting = tasks
            async with asyncio.timeout(PATIENCE_S):
                while len(waiting) > share:
                    _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)

            await tunnel.send(b"still")
            assert await tunnel.read_exactly(5) == b"still"
            async with await gateway.client("s2") as other:
                assert (await other.tunnel(target, ("s2", TOKEN))).status == 200
            # The others of the share wait for the rest of their heads.
            assert len(waiting) == share
            for client in storm:
                await client.close()
            await asyncio.wait(tasks)
            again = None
            async with asyncio.timeout(PATIENCE_S):
                while (again := await try_tunnel(gateway, target)) is None:
                    await asyncio.sleep(0.02)
            await again.close()
            await tunnel.close()


async def test_a_sandbox_that_makes_very_many_refused_requests_leaves_memory_flat_and_its_log_bounded() -> None:
    with gateway_process({"limits": {"max_egress_log_lines": 100}}, [SESSION]) as gateway:

        async def refused(count: int) -> None:
            for _ in range(count):
                async with await gateway.client() as client:
                    assert (await client.tunnel("169.254.169.254:5000", GOOD)).status == 403

        await refused(300)
        before = gateway.rss_bytes()
        await asyncio.gather(*(refused(250) for _ in range(8)))
        assert gateway.rss_bytes() - before < 8 * 1024 * 1024
        await gateway.await_audit("s1", event="log_full")
        assert len(gateway.audit("s1")) == 101


@pytest.mark.parametrize("name", ["a" * 253, "xn--nxasmq6b.example", "x.example"])
async def test_no_name_from_a_sandbox_becomes_a_metric_label(gateway: GatewayProcess, name: str) -> None:
    import aiohttp

    async with await gateway.client("listed") as client:
        await client.tunnel(f"{name}:443", ("listed", TOKEN))
    async with aiohttp.ClientSession() as http:
        async with http.get(f"http://127.0.0.1:{gateway.metrics_port}/metrics") as response:
            text = await response.text()
    assert 'opificia_gateway_decisions_total{kind="connect",reason="host_not_listed"}' in text
    assert name not in text
