"""This host's own addresses, from the kernel's tables in /proc (proc(5)), kept current.

A sandbox must not reach a service of this host by the host's public address: no registry of special addresses knows it.
"""

import logging
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Final

log = logging.getLogger("gateway.own_addresses")

REFRESH_S: Final = 5.0


def parse_fib_trie(text: str) -> frozenset[IPv4Address]:
    """Return the local IPv4 addresses in /proc/net/fib_trie: a leaf `|-- a.b.c.d`, then a line `/32 host LOCAL`."""
    found = set()
    leaf = ""
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("|-- "):
            leaf = stripped[4:]
        elif stripped == "/32 host LOCAL":
            found.add(IPv4Address(leaf))
    return frozenset(found)


def parse_if_inet6(text: str) -> frozenset[IPv6Address]:
    """Return the local IPv6 addresses in /proc/net/if_inet6: 32 hex digits at the start of each line."""
    return frozenset(IPv6Address(int(line.split()[0], 16)) for line in text.splitlines() if line.strip())


def read_own_addresses(proc: Path = Path("/proc/self/net")) -> frozenset[IPv4Address | IPv6Address]:
    """Read both tables. Raises OSError: without them the gateway must not start, it could not refuse its own host."""
    four = parse_fib_trie((proc / "fib_trie").read_text())
    try:
        six = parse_if_inet6((proc / "if_inet6").read_text())
    except FileNotFoundError:
        # A kernel without IPv6 has no such file and no such addresses.
        six = frozenset()
    return four | six
