"""A sandbox's place on the network: connections that start in a container and reach the gateway through the forwarder.

The tests of the sandbox port run a second time from here. The client's socket is made in the container's network namespace, so
that bridge, firewall, HAProxy and the door are all in the way, while the test itself stays where it is.
"""

import asyncio
import ctypes
import os
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any, Final

from control.docker.service import DockerService
from control.images.store import install
from control.plan.container import DockerSettings, ImageSettings
from control.plan.host import ForwarderSettings, HostPlan
from control.plan.network import NetworkSettings
from gateway.contract.limits import ControlLimits
from tests.support import identities
from tests.support.engine import PrivateEngine
from tests.support.paths import IMAGES
from tests.support.sockets import Client

_CLONE_NEWNET: Final = 0x40000000  # sched.h
# As /proc/net/tcp has them.
_ESTABLISHED: Final = "01"
_SYN_RECEIVED: Final = "03"
_HOST_ID: Final = "forwarded-tests"
# How many sessions one test may have: each is bound to an address of its own.
ADDRESSES: Final = 8


class Forwarded:
    """One prepared host, and one container whose addresses are those of the sessions under test."""

    def __init__(self, engine: PrivateEngine) -> None:
        self._engine = engine
        self.network: Final = NetworkSettings()
        self.folder: Final = Path(tempfile.mkdtemp(prefix="opificia-door-"))
        self._listening: list[Path] = []
        first = self.network.network.network_address + 16
        self.addresses: Final[Sequence[IPv4Address]] = [first + offset for offset in range(ADDRESSES)]
        self._container: Any = None

    def start(self) -> None:
        """Prepare the host and start the container."""
        os.chown(self.folder, identities.GATEWAY, identities.FORWARDER)
        self.folder.chmod(0o2750)
        forwarder = ForwarderSettings(user=f"{identities.FORWARDER}:{identities.FORWARDER}")
        plan = HostPlan(network=self.network, images=ImageSettings(), forwarder=forwarder, door=str(self.folder))

        async def prepare() -> None:
            service = DockerService(DockerSettings(socket=str(self._engine.socket)), _HOST_ID, limits=ControlLimits())
            try:
                await install(service.images, plan.images, IMAGES)
                await service.prepare_host(plan)
            finally:
                await service.close()

        asyncio.run(prepare())
        client = self._engine.client()
        try:
            self._container = client.containers.create(
                plan.images.sandbox,
                ["sleep", "infinity"],
                init=True,
                cap_drop=["ALL"],
                user=f"{identities.SANDBOX}",
                network=self.network.name,
                networking_config={
                    self.network.name: client.api.create_endpoint_config(ipv4_address=str(self.addresses[0]))
                },
            )
            self._container.start()
            self._container.reload()
        finally:
            client.close()
        for address in self.addresses[1:]:
            more = f"{address}/{self.network.network.prefixlen}"
            inside = ["nsenter", f"--net=/proc/{self.pid}/ns/net", "ip", "address", "add", more, "dev", "eth0"]
            subprocess.run(inside, check=True)

    @property
    def pid(self) -> int:
        """The container's first process."""
        return int(self._container.attrs["State"]["Pid"])

    def stop(self) -> None:
        """Remove the container and the door."""
        if self._container is not None:
            self._container.remove(force=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def open_for(self, socket_path: Path) -> None:
        """Lead the door to a gateway that listens in its folder; the one before waits until this one has gone."""
        self._listening.append(socket_path)
        self._lead()

    def close_for(self, socket_path: Path) -> None:
        """Lead the door back to the gateway before."""
        self._listening.remove(socket_path)
        self._lead()

    def _lead(self) -> None:
        link = self.folder / "sandbox.sock"
        link.unlink(missing_ok=True)
        if self._listening:
            link.symlink_to(self._listening[-1].name)

    async def client(self, source: IPv4Address) -> Client:
        """Return a raw connection to the forwarder from one of the container's addresses."""
        sock = await asyncio.to_thread(self._socket_inside)
        sock.setblocking(False)
        sock.bind((str(source), 0))
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, (str(self.network.forwarder), self.network.gateway_port))
        return Client(*await asyncio.open_connection(sock=sock))

    def waiting_for_the_forwarder(self) -> int:
        """Return how many connections to the forwarder it has not accepted yet."""
        client = self._engine.client()
        try:
            pid = client.containers.get(self.network.gateway_name).attrs["State"]["Pid"]
        finally:
            client.close()
        port = f":{self.network.gateway_port:04X}"
        count = 0
        for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
            # proc(5): number, both addresses, state, queues, timers, retransmissions, uid, timeouts, inode.
            _, local, _, state, *_, inode = line.split()[:10]
            if local.endswith(port):
                count += state == _SYN_RECEIVED or (state == _ESTABLISHED and inode == "0")
        return count

    def _socket_inside(self) -> socket.socket:
        made: list[socket.socket | OSError] = []
        thread = threading.Thread(target=self._make_socket, args=(made,))
        # A thread of its own: it ends in the container's namespace and is never used again.
        thread.start()
        thread.join()
        if isinstance(made[0], OSError):
            raise made[0]
        return made[0]

    def _make_socket(self, made: list[socket.socket | OSError]) -> None:
        try:
            with Path(f"/proc/{self.pid}/ns/net").open("rb") as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            made.append(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        except OSError as error:
            made.append(error)
