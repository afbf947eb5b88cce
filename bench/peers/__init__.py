"""The peers of the gateway, each started on loopback with a configuration that is checked, and stopped again."""

from collections.abc import Sequence

from bench.peers.base import Direct, Peer
from bench.peers.gateway import ForwardedGateway, GatewayPeer
from bench.peers.proxies import CommandPeer, HAProxy, Splicer, Squid, Tinyproxy

ALL: tuple[type[Peer], ...] = (Direct, Splicer, HAProxy, GatewayPeer, ForwardedGateway, Squid, Tinyproxy)


def choose(names: Sequence[str], commands: Sequence[str]) -> tuple[list[Peer], list[str]]:
    """Return the peers that can run here, and a sentence for each that cannot.

    `names` picks from ALL (empty: all), `commands` adds others as `NAME=COMMAND` with `{port}` in the command. Raises
    ValueError for a name that no peer has.
    """
    known = {peer.name for peer in ALL}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"no such peer: {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    found: list[Peer] = []
    missing: list[str] = []
    for kind in ALL:
        if names and kind.name not in names:
            continue
        reason = kind.missing()
        if reason:
            missing.append(f"{kind.name}: {reason}")
        else:
            found.append(kind())
    for text in commands:
        name, separator, line = text.partition("=")
        if not separator or "{port}" not in line:
            raise ValueError(f"{text!r} is not NAME=COMMAND with {{port}} in it")
        found.append(CommandPeer(name, line))
    return found, missing


__all__ = ["ALL", "Peer", "choose"]
