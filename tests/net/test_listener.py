"""What the sandbox port makes of the connections that it accepts."""

import asyncio
import subprocess
from pathlib import Path

from tests.support.gateway_process import TOKEN, gateway_process
from tests.support.sockets import echo_server, proxy_v2


async def test_connections_of_sandboxes_are_not_paced_and_those_to_the_internet_as_the_host_has_it() -> None:
    with gateway_process() as gateway:
        async with echo_server() as server, await gateway.client() as client:
            assert (await client.tunnel(f"127.0.0.1:{server.port}", ("s1", TOKEN))).status == 200
            assert "reno" in congestion_control(f"sport = :{gateway.port}")
            default = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
            assert default in congestion_control(f"dport = :{server.port}")


async def test_closes_a_connection_that_says_nothing_at_the_deadline() -> None:
    with gateway_process({"limits": {"head_timeout_ms": 300}}) as gateway:
        async with await gateway.client() as client:
            assert await client.read_to_end() == b""


async def test_many_that_a_forwarder_leads_here_at_once_are_served_also_when_all_their_headers_come_before_their_heads() -> (
    None
):
    config = {"listen": {"proxy_protocol": True}, "limits": {"unauthenticated_per_source": 4}}
    with gateway_process(config, [{"id": "s1", "address": "10.231.0.16"}]) as gateway:
        async with echo_server() as server:
            clients = [await gateway.client(proxy=proxy_v2("10.231.0.16")) for _ in range(12)]
            # Those before it have been accepted, and read, when this one is answered.
            async with await gateway.client(proxy=proxy_v2("10.231.0.17")) as last:
                assert (await last.ask(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")).status == 404
            for client in clients:
                assert (await client.tunnel(f"127.0.0.1:{server.port}", ("s1", TOKEN))).status == 200
                await client.close()
            # A head that has begun counts.
            begun = [await gateway.client(proxy=proxy_v2("10.231.0.16")) for _ in range(5)]
            for client in begun:
                await client.send(b"CONN")
            ends = [asyncio.create_task(client.reader.read()) for client in begun]
            done, waiting = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            assert (len(done), len(waiting)) == (1, 4)
            for client in begun:
                await client.close()
            await asyncio.wait(ends)


def congestion_control(sockets: str) -> list[str]:
    """Return the words that ss(8) has for the TCP sockets of a filter, their congestion control among them."""
    return subprocess.run(["ss", "-tinH", sockets], check=True, capture_output=True, text=True).stdout.split()
