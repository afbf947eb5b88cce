"""Package registries as this machine sees them.

Behind a company's mirror a registry's name resolves to an address that is not globally reachable, which a correct
gateway refuses until the operator opens it by `[[egress.trusted]]`. The entries are derived when a test runs, so no
machine's network is ever written down.
"""

import ipaddress
import socket
import tomllib
from functools import cache
from typing import Any, Final

from gateway.core.address import address_class
from tests.support.paths import CHECKOUT

# The registries whose clients the tests and the demo run.
_USED: Final = frozenset({"pypi", "npm", "debian"})


@cache
def trusted_mirrors() -> tuple[dict[str, Any], ...]:
    """Return tables of `[[egress.trusted]]`, none where the registries are reached directly."""
    registries = tomllib.loads((CHECKOUT / "gateway/data/registries.toml").read_text())["registry"]
    return tuple(
        {"hosts": [host], "ports": registry["ports"], "network": network}
        for registry in registries
        if registry["name"] in _USED
        for host in registry["hosts"]
        for network in _private_addresses(host)
    )


def _private_addresses(host: str) -> list[str]:
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(host, 443, type=socket.SOCK_STREAM)}
    except socket.gaierror:
        return []
    addresses = [ipaddress.ip_address(text) for text in sorted(str(each) for each in found)]
    return [str(ipaddress.ip_network(address)) for address in addresses if address_class(address) is not None]
