"""Restarts of the gateway under a manager with a descriptor store: not a byte, a tunnel or a count is lost."""

import asyncio

from tests.support.gateway_process import TOKEN, GatewayProcess, gateway_process
from tests.support.sockets import Client, echo_server

GOOD = ("s1", TOKEN)


async def opened(gateway: GatewayProcess, target: str) -> Client:
    client = await gateway.client()
    assert (await client.tunnel(target, GOOD)).status == 200
    return client


async def restarted(gateway: GatewayProcess) -> None:
    """Restart without stopping the test's own loop."""
    await asyncio.to_thread(gateway.restart)


async def test_a_tunnel_goes_on_after_a_restart_and_its_end_is_logged_as_one() -> None:
    with gateway_process(stored=8) as gateway:
        async with echo_server() as server, await opened(gateway, f"127.0.0.1:{server.port}") as client:
            await client.send(b"before")
            assert await client.read_exactly(6) == b"before"
            first = gateway.pid
            await restarted(gateway)
            assert gateway.pid != first
            await client.send(b"after!!")
            assert await client.read_exactly(7) == b"after!!"
            client.end()
            assert await client.read_to_end() == b""
            line = await gateway.await_audit("s1", event="close")
            assert (line["host"], line["port"], line["reason"]) == ("127.0.0.1", server.port, "done")
            assert (line["bytes_up"], line["bytes_down"]) == (13, 13)
            assert [each["event"] for each in gateway.audit("s1")] == ["allow", "close"]
