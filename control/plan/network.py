"""The address plan of the sandbox network. Pure: it knows no engine and no route of the host.

One network holds all sandboxes (a network each would end after Docker's thirty default pools). The first addresses are
kept for the host's side; every sandbox gets an address of its own before it is created, which is what its grant names.
"""

import re
from collections.abc import Container
from ipaddress import IPv4Address, IPv4Network
from typing import Final

import msgspec

# The engine keeps +1 for the bridge although ours has no address; +3 to +15 are spare for the operator.
_FORWARDER_OFFSET: Final = 2
_FIRST_SANDBOX_OFFSET: Final = 16
# A /27 leaves 15 sandboxes; anything smaller is a mistake.
_MAX_PREFIX: Final = 27
_NAME: Final = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{1,62}", re.ASCII)
# IFNAMSIZ is 16 with the final NUL (linux/if.h).
_INTERFACE: Final = re.compile(r"[a-zA-Z][a-zA-Z0-9_.-]{0,14}", re.ASCII)
_HOST_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)


class NetworkSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The `[network]` table: the one network that sandboxes are members of.

    `bridge` is pinned, because firewall rules name it. `gateway_name` is both the forwarder container's name and the
    name by which sandboxes reach it.
    """

    name: str = "opificia-sandbox"
    bridge: str = "opificia0"
    subnet: str = "10.231.0.0/16"
    gateway_name: str = "opificia-gateway"
    gateway_port: int = 8900

    def problems(self) -> list[str]:
        """Return every problem as a sentence that begins with the field."""
        found = []
        if not _NAME.fullmatch(self.name):
            found.append(f"name: {self.name!r} cannot be the name of a Docker network")
        if not _INTERFACE.fullmatch(self.bridge):
            found.append(f"bridge: {self.bridge!r} cannot be the name of an interface (at most 15 characters)")
        if not _HOST_NAME.fullmatch(self.gateway_name):
            found.append(f"gateway_name: {self.gateway_name!r} must be a single lower-case host label")
        if not 1024 <= self.gateway_port <= 65535:
            found.append(f"gateway_port: {self.gateway_port} must lie between 1024 and 65535")
        try:
            subnet = IPv4Network(self.subnet)
        except ValueError as error:
            found.append(f"subnet: {error}")
        else:
            if subnet.prefixlen > _MAX_PREFIX:
                found.append(f"subnet: {subnet} has no room for sandboxes; use a /{_MAX_PREFIX} or wider")
            if not subnet.is_private or subnet.is_loopback or subnet.is_link_local:
                found.append(f"subnet: {subnet} must be private address space (RFC 1918)")
        return found

    @property
    def network(self) -> IPv4Network:
        """The subnet as a network."""
        return IPv4Network(self.subnet)

    @property
    def bridge_address(self) -> IPv4Address:
        """The address the engine keeps for the bridge; no interface has it."""
        return self.network.network_address + 1

    @property
    def forwarder(self) -> IPv4Address:
        """The forwarder's pinned address."""
        return self.network.network_address + _FORWARDER_OFFSET

    @property
    def capacity(self) -> int:
        """How many sandboxes can have an address at once."""
        return self.network.num_addresses - _FIRST_SANDBOX_OFFSET - 1

    def is_sandbox(self, address: IPv4Address) -> bool:
        """Tell whether `address` is one that a sandbox may have."""
        first = self.network.network_address + _FIRST_SANDBOX_OFFSET
        return first <= address < self.network.broadcast_address

    def free_address(self, taken: Container[IPv4Address], after: IPv4Address | None = None) -> IPv4Address | None:
        """Return the next address that is not `taken`, or None when all are.

        The search starts behind `after` (the address given last) and wraps around, so that an address rests as long as
        possible before another session gets it.
        """
        base = int(self.network.network_address) + _FIRST_SANDBOX_OFFSET
        start = 0 if after is None or not self.is_sandbox(after) else int(after) - base + 1
        for step in range(self.capacity):
            address = IPv4Address(base + (start + step) % self.capacity)
            if address not in taken:
                return address
        return None
