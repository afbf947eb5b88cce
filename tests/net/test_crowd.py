"""A crowd of connections that a client opens before it speaks on any: npm and browsers do, in one turn of their loop."""

import asyncio

from tests.support.gateway_process import TOKEN, gateway_process
from tests.support.sockets import Client, echo_server

# More than may wait for their heads. So few that they are all open within the second for which the forwarder waits for each.
CROWD = 16
WAITING = 4


async def test_a_client_that_opens_many_connections_before_it_speaks_is_served_on_each() -> None:
    with gateway_process({"limits": {"unauthenticated_per_source": WAITING}}) as gateway:
        async with echo_server() as server:
            target = f"127.0.0.1:{server.port}"
            clients = [await gateway.client() for _ in range(CROWD)]

            async def transfer(client: Client) -> None:
                assert (await client.tunnel(target, ("s1", TOKEN))).status == 200
                await client.send(b"mine")
                assert await client.read_exactly(4) == b"mine"
                await client.close()

            await asyncio.gather(*(transfer(client) for client in clients))
