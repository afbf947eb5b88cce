"""What the sandbox port makes of the connections that it accepts."""

import subprocess
from pathlib import Path

from tests.support.gateway_process import TOKEN, gateway_process
from tests.support.sockets import echo_server


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


def congestion_control(sockets: str) -> list[str]:
    """Return the words that ss(8) has for the TCP sockets of a filter, their congestion control among them."""
    return subprocess.run(["ss", "-tinH", sockets], check=True, capture_output=True, text=True).stdout.split()
