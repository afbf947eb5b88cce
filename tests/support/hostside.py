"""What listens on "the host" of a private engine: programs for its network namespace, and its rules taken away.

A path that is closed proves nothing unless somebody listens at its end, and unless it was open without its rule.

    python -m tests.support.hostside tcp 8000       answers every connection with GREETING
    python -m tests.support.hostside udp 8000       the same for packets
    python -m tests.support.hostside echo 8000      gives back what it is sent
    python -m tests.support.hostside dns 53         answers every name, prints each query
"""

import asyncio
import contextlib
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from control.plan.container import LABEL_ROLE, ROLE_FIREWALL
from control.plan.firewall import load_command, rules
from control.plan.network import NetworkSettings
from tests.support.dns_server import DnsServer, Records
from tests.support.engine import PrivateEngine
from tests.support.listener import StreamServer
from tests.support.paths import CHECKOUT
from tests.support.processes import spawn, stop, wait_until
from tests.support.programs import GREETING

# Which rules close the way to the host, and which the way to a neighbour.
HOST_RULES: Final = ("host", "host frames", "host packets", "host ARP")
NEIGHBOUR_RULES: Final = ("packets from", "packets to", "ARP from", "ARP to", "frames from", "frames to")
# TEST-NET-1 (RFC 5737): an answer that leads nowhere.
_ANSWER: Final = "192.0.2.1"


@contextlib.contextmanager
def listening(engine: PrivateEngine, kind: str, port: int) -> Iterator[Path]:
    """Run one of the programs above in the engine's network; yields the file with what it prints."""
    with tempfile.NamedTemporaryFile(prefix="opificia-hostside-") as output:
        argv = [sys.executable, "-m", "tests.support.hostside", kind, str(port)]
        process = spawn(engine.in_network(argv), log=output.fileno(), cwd=CHECKOUT, ends_with_us=True)
        path = Path(output.name)
        try:
            wait_until(
                lambda: "ready" in path.read_text(),
                f"{kind} server on the host",
                give_up=lambda: None if process.poll() is None else path.read_text(),
            )
            yield path
        finally:
            stop(process)


@contextlib.contextmanager
def without_rules(engine: PrivateEngine, network: NetworkSettings, names: Sequence[str]) -> Iterator[None]:
    """Take the named firewall rules of a private engine away, and put all back in place."""
    with rules_without(lambda command: _load(engine, command), network, names):
        yield


@contextlib.contextmanager
def rules_without(
    load: Callable[[list[str]], object], network: NetworkSettings, names: Sequence[str]
) -> Iterator[None]:
    """Take the named rules away by `load`, which runs a command on the host, and put all back in place."""
    chosen = rules(network)
    assert set(names) <= chosen.keys(), f"no such rules: {set(names) - chosen.keys()}"
    load(load_command(network, {name: rule for name, rule in chosen.items() if name not in names}))
    try:
        yield
    finally:
        load(load_command(network, chosen))


@contextlib.contextmanager
def bridge_address(engine: PrivateEngine, network: NetworkSettings) -> Iterator[str]:
    """Give the bridge the address that ours has not, as an ordinary Docker network has it."""
    address = f"{network.bridge_address}/{network.network.prefixlen}"
    subprocess.run(engine.in_network(["ip", "address", "add", address, "dev", network.bridge]), check=True)
    try:
        yield str(network.bridge_address)
    finally:
        subprocess.run(engine.in_network(["ip", "address", "del", address, "dev", network.bridge]), check=True)


def ask_engine_dns(engine: PrivateEngine, network: NetworkSettings, image: str, name: str) -> None:
    """Look `name` up in a plain container on the sandbox network: one without the resolver that sandboxes are given."""
    script = "import socket, sys\ntry:\n    socket.gethostbyname(sys.argv[1])\nexcept OSError:\n    pass"
    with contextlib.closing(engine.client()) as client:
        client.containers.run(image, ["python3", "-c", script, name], network=network.name, remove=True)


def _load(engine: PrivateEngine, command: list[str]) -> None:
    with contextlib.closing(engine.client()) as client:
        (helper,) = client.containers.list(filters={"label": f"{LABEL_ROLE}={ROLE_FIREWALL}"})
        code, output = helper.exec_run(command)
        assert code == 0, output


async def _tcp(port: int) -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Closing with unread bytes would send a reset.
        await reader.read(1000)
        writer.write(f"HTTP/1.0 200 OK\r\n\r\n{GREETING}\n".encode())
        writer.close()

    async with StreamServer(greet, ("0.0.0.0", port)):
        print("ready", flush=True)
        await asyncio.Event().wait()


async def _udp(port: int) -> None:
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
        own.setblocking(False)
        own.bind(("0.0.0.0", port))
        print("ready", flush=True)
        while True:
            _, whence = await loop.sock_recvfrom(own, 1000)
            await loop.sock_sendto(own, GREETING.encode(), whence)


async def _echo(port: int) -> None:
    async def give_back(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(256 * 1024):
                writer.write(data)
                await writer.drain()
        writer.close()

    async with StreamServer(give_back, ("0.0.0.0", port)):
        print("ready", flush=True)
        await asyncio.Event().wait()


async def _dns(port: int) -> None:
    async with DnsServer(port=port, otherwise=Records((_ANSWER,))) as server:
        print("ready", flush=True)
        async for query in server.arriving():
            print(f"{query.kind} {query.name}", flush=True)


if __name__ == "__main__":
    asyncio.run({"tcp": _tcp, "udp": _udp, "echo": _echo, "dns": _dns}[sys.argv[1]](int(sys.argv[2])))
