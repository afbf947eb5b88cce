"""The rules that leave a sandbox one way out. Pure: rules as nftables' JSON (libnftables-json(5)), and their comparison.

They stand in tables of our own. A drop in any table is final, whatever the engine, iptables or firewalld accept before or
after, and an engine's restart, which makes its own chains anew, cannot touch or reorder them. They load in one
transaction, so there is no moment without them.

Three layers, each enough for what it closes:

- `inet input`: nothing that comes in by the bridge reaches the host;
- `inet forward`: nothing passes between the bridge and any other interface;
- `bridge forward`: between members, only TCP to the forwarder's port and back. It sees frames itself, so it does not
  depend on br_netfilter. A bridge's members are known by subnet and by hardware address, because matching the bridge's
  name there needs a module (nft_meta_bridge) that not every kernel has. Frames that are neither IPv4 nor ARP fall to
  the hardware address, which control derives from the IPv4 address.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from control.plan.container import hardware_address
from control.plan.network import NetworkSettings

Rule = tuple[str, str, list[dict[str, Any]]]

# Before iptables' filter tables (0), and before ebtables' (-200).
_INET_PRIORITY: Final = -10
_BRIDGE_PRIORITY: Final = -250
_CHAINS: Final = (
    ("inet", "input", _INET_PRIORITY),
    ("inet", "forward", _INET_PRIORITY),
    ("bridge", "input", _BRIDGE_PRIORITY),
    ("bridge", "forward", _BRIDGE_PRIORITY),
)
_ACCEPT: Final[dict[str, Any]] = {"accept": None}
_DROP: Final[dict[str, Any]] = {"drop": None}


def table_name(network: NetworkSettings) -> str:
    """Return the name of our tables: the bridge's, so that two installations on a host do not share one."""
    return network.bridge


def rules(network: NetworkSettings) -> dict[str, Rule]:
    """Return every rule by what it does: family, chain, expressions; in the order in which they stand."""
    subnet = {"prefix": {"addr": str(network.network.network_address), "len": network.network.prefixlen}}
    forwarder = str(network.forwarder)
    forwarder_hardware = hardware_address(network.forwarder)
    bridge = network.bridge
    port = network.gateway_port
    member_from, member_to = _members(network, "saddr"), _members(network, "daddr")
    from_subnet, to_subnet = _payload("ip", "saddr", subnet), _payload("ip", "daddr", subnet)
    from_forwarder, to_forwarder = _payload("ip", "saddr", forwarder), _payload("ip", "daddr", forwarder)
    not_its_own = _match("!=", {"payload": {"protocol": "ether", "field": "saddr"}}, forwarder_hardware)
    return {
        "host": ("inet", "input", [_meta("==", "iifname", bridge), _DROP]),
        "out": ("inet", "forward", [_meta("==", "iifname", bridge), _meta("!=", "oifname", bridge), _DROP]),
        "in": ("inet", "forward", [_meta("!=", "iifname", bridge), _meta("==", "oifname", bridge), _DROP]),
        "host frames": ("bridge", "input", [member_from, _DROP]),
        "host packets": ("bridge", "input", [from_subnet, _DROP]),
        "host ARP": ("bridge", "input", [_payload("arp", "saddr ip", subnet), _DROP]),
        # Nobody but the forwarder speaks for its address.
        "forged packets": ("bridge", "forward", [not_its_own, from_forwarder, _DROP]),
        "forged ARP": ("bridge", "forward", [not_its_own, _payload("arp", "saddr ip", forwarder), _DROP]),
        "to forwarder": ("bridge", "forward", [from_subnet, to_forwarder, _payload("tcp", "dport", port), _ACCEPT]),
        "from forwarder": ("bridge", "forward", [from_forwarder, to_subnet, _payload("tcp", "sport", port), _ACCEPT]),
        "ask forwarder": (
            "bridge",
            "forward",
            [_payload("arp", "saddr ip", subnet), _payload("arp", "daddr ip", forwarder), _ACCEPT],
        ),
        "forwarder asks": (
            "bridge",
            "forward",
            [_payload("arp", "saddr ip", forwarder), _payload("arp", "daddr ip", subnet), _ACCEPT],
        ),
        "packets from": ("bridge", "forward", [from_subnet, _DROP]),
        "packets to": ("bridge", "forward", [to_subnet, _DROP]),
        "ARP from": ("bridge", "forward", [_payload("arp", "saddr ip", subnet), _DROP]),
        "ARP to": ("bridge", "forward", [_payload("arp", "daddr ip", subnet), _DROP]),
        "frames from": ("bridge", "forward", [member_from, _DROP]),
        "frames to": ("bridge", "forward", [member_to, _DROP]),
    }


def load_command(network: NetworkSettings, chosen: Mapping[str, Rule]) -> list[str]:
    """Return the command that puts `chosen` rules in force in place of whatever our tables held: all or nothing."""
    table = table_name(network)
    commands: list[dict[str, Any]] = []
    for family in ("inet", "bridge"):
        this = {"table": {"family": family, "name": table}}
        # Added first, so that there is one to delete.
        commands += [{"add": this}, {"delete": this}, {"add": this}]
    for family, chain, priority in _CHAINS:
        commands.append({"add": {"chain": _chain(table, family, chain, priority)}})
    for family, chain, expressions in chosen.values():
        rule = {"family": family, "table": table, "chain": chain, "expr": expressions}
        commands.append({"add": {"rule": rule}})
    return ["nft", "--json", json.dumps({"nftables": commands}, separators=(",", ":"))]


def unload_command(network: NetworkSettings) -> list[str]:
    """Return the command that removes our tables, there or not."""
    commands = []
    for family in ("inet", "bridge"):
        this = {"table": {"family": family, "name": table_name(network)}}
        commands += [{"add": this}, {"delete": this}]
    return ["nft", "--json", json.dumps({"nftables": commands}, separators=(",", ":"))]


LIST_COMMAND: Final = ("nft", "--json", "--stateless", "list", "ruleset")


def problems(listing: str, network: NetworkSettings) -> list[str]:
    """Compare what LIST_COMMAND printed with the rules; one sentence for each chain that is not as it should be."""
    table = table_name(network)
    try:
        entries = json.loads(listing)["nftables"]
        chains = {
            (entry["chain"]["family"], entry["chain"]["name"]): entry["chain"]
            for entry in entries
            if "chain" in entry and entry["chain"]["table"] == table
        }
        present: dict[tuple[str, str], list[Any]] = {}
        for entry in entries:
            rule = entry.get("rule")
            if rule and rule["table"] == table:
                present.setdefault((rule["family"], rule["chain"]), []).append(rule["expr"])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        return [f"the firewall cannot be read: {error!r}"]
    expected: dict[tuple[str, str], list[Any]] = {}
    for family, chain, expressions in rules(network).values():
        expected.setdefault((family, chain), []).append(expressions)
    found = []
    for family, chain, priority in _CHAINS:
        name = f"the firewall chain {chain} of table {family} {table}"
        actual = chains.get((family, chain))
        if actual is None:
            found.append(f"{name} is missing")
            continue
        wanted = _chain(table, family, chain, priority)
        if any(actual.get(key) != value for key, value in wanted.items()):
            found.append(f"{name} is not hooked as it should be")
        elif present.get((family, chain), []) != expected[family, chain]:
            found.append(f"{name} holds other rules than it should")
    return found


def _members(network: NetworkSettings, field: str) -> dict[str, Any]:
    """Match any member's hardware address: the bytes that all addresses of the subnet have in common."""
    mask = (0xFFFF << 32) | int(network.network.netmask)
    prefix = (0x0242 << 32) | int(network.network.network_address)
    left = {"&": [{"payload": {"protocol": "ether", "field": field}}, _hardware(mask)]}
    return _match("==", left, _hardware(prefix))


def _hardware(number: int) -> str:
    return number.to_bytes(6, "big").hex(":")


def _chain(table: str, family: str, chain: str, priority: int) -> dict[str, Any]:
    return {
        "family": family,
        "table": table,
        "name": chain,
        "type": "filter",
        "hook": chain,
        "prio": priority,
        "policy": "accept",
    }


def _match(operator: str, left: Any, right: Any) -> dict[str, Any]:
    return {"match": {"op": operator, "left": left, "right": right}}


def _meta(operator: str, key: str, value: str) -> dict[str, Any]:
    return _match(operator, {"meta": {"key": key}}, value)


def _payload(protocol: str, field: str, value: Any) -> dict[str, Any]:
    return _match("==", {"payload": {"protocol": protocol, "field": field}}, value)
