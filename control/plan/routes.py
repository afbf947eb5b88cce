"""Whether the sandbox subnet is free on a host. Pure: reads what `ip -json route` printed.

The engine accepts a subnet that a route of the host already covers, without a word; whatever lies behind that route is
then unreachable from the host, or the sandboxes are.
"""

import json
from ipaddress import IPv4Network
from typing import Any, Final

from control.plan.network import NetworkSettings

ROUTES_COMMAND: Final = ("ip", "-json", "-4", "route", "show", "table", "all")
# Loopback and broadcast entries of the kernel's local table follow from addresses, which have routes of their own.
_IGNORED_TYPES: Final = frozenset({"local", "broadcast", "anycast", "multicast"})


def problems(listing: str, network: NetworkSettings) -> list[str]:
    """Return a sentence for each route of the host that overlaps the sandbox subnet; our own bridge's is none."""
    subnet = network.network
    try:
        routes: list[dict[str, Any]] = json.loads(listing or "[]")
        if not isinstance(routes, list):
            raise TypeError("no list")
        overlapping = [
            (destination, str(route.get("dev") or route.get("type") or "?"))
            for route in routes
            if route.get("type") not in _IGNORED_TYPES
            and route.get("dev") != network.bridge
            # The default route covers everything and claims nothing.
            and (destination := _destination(str(route["dst"]))) is not None
            and destination.overlaps(subnet)
        ]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        return [f"the routes of this host cannot be read: {error!r}"]
    return [
        f"the sandbox subnet {subnet} overlaps the host's route to {destination} ({device}): choose another "
        "[network] subnet"
        for destination, device in overlapping
    ]


def _destination(text: str) -> IPv4Network | None:
    return None if text == "default" else IPv4Network(text)
