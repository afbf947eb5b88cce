"""A crowd of connections that a client opens before it speaks on any: npm and browsers do, in one turn of their loop."""

import asyncio

import aiohttp

from tests.support.forwarded import Forwarded
from tests.support.gateway_process import TOKEN, gateway_process
from tests.support.patience import PATIENCE_S
from tests.support.sockets import Client, echo_server

# More than may wait for their heads, and more than a session has slots.
CROWD = 100


async def test_a_client_that_opens_a_hundred_connections_before_it_speaks_is_served_on_each(
    forwarded: Forwarded,
) -> None:
    with gateway_process() as gateway:
        async with echo_server() as server:
            target = f"127.0.0.1:{server.port}"
            clients = [await gateway.client() for _ in range(CROWD)]
            # However long it takes until it speaks: the kernel, too, holds a silent connection back for a while only.
            async with asyncio.timeout(PATIENCE_S):
                while await asyncio.to_thread(forwarded.waiting_for_the_forwarder):
                    await asyncio.sleep(0.02)

            async def transfer(client: Client) -> None:
                assert (await client.tunnel(target, ("s1", TOKEN))).status == 200
                await client.send(b"mine")
                assert await client.read_exactly(4) == b"mine"
                await client.close()

            await asyncio.gather(*(transfer(client) for client in clients))


async def test_who_says_nothing_or_ends_without_a_word_never_gets_to_the_gateway() -> None:
    with gateway_process() as gateway:
        silent = [await gateway.client() for _ in range(CROWD)]
        async with await gateway.client() as client:
            client.end()
            assert await client.read_to_end() == b""
        async with await gateway.client() as client:
            assert (await client.ask(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")).status == 404
        async with aiohttp.ClientSession() as http:
            async with http.get(f"http://127.0.0.1:{gateway.metrics_port}/metrics") as response:
                assert "\nopificia_gateway_connections_total 1.0\n" in await response.text()
        for client in silent:
            await client.close()
