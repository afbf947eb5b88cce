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
    return tuple(
        {"hosts": [host], "ports": registry["ports"], "network": str(ipaddress.ip_network(address))}
        for registry in _registries()
        for host in registry["hosts"]
        for address in registry_addresses()[host]
        if address_class(ipaddress.ip_address(address)) is not None
    )


@cache
def registry_addresses() -> dict[str, tuple[str, ...]]:
    """Return what the hosts of the registries resolve to here; nothing for a name that does not resolve."""
    return {host: _addresses(host) for registry in _registries() for host in registry["hosts"]}


def _registries() -> list[dict[str, Any]]:
    listed = tomllib.loads((CHECKOUT / "gateway/data/registries.toml").read_text())["registry"]
    return [registry for registry in listed if registry["name"] in _USED]


def _addresses(host: str) -> tuple[str, ...]:
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, 443, type=socket.SOCK_STREAM)}
    except socket.gaierror:
        return ()
    return tuple(sorted(found))
