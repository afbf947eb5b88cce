"""Which addresses are not the public internet, and why.

The table is data: the IANA special-purpose registries (RFC 6890, RFC 8190) for IPv4 and IPv6, then what they
leave out and an attacker knows: multicast, transition forms that carry an IPv4 address inside an IPv6 one,
and the addresses at which clouds serve credentials and control to their machines, some of which look public.
"""

from bisect import bisect_right
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network
from typing import Final

IPAddress = IPv4Address | IPv6Address
IPNetwork = IPv4Network | IPv6Network


@dataclass(frozen=True, slots=True)
class AddressClass:
    """Why an address is not public. `source` is the document that says so.

    `openable` tells whether an operator may open a network of this class for named hosts. Link-local,
    metadata and platform addresses never are: whatever answers there answers to the machine, not to the
    sandbox.
    """

    name: str
    source: str
    openable: bool = False


def _openable(name: str, source: str) -> AddressClass:
    return AddressClass(name, source, openable=True)


_LOOPBACK: Final = "loopback"
_METADATA: Final = "cloud_metadata"
_PLATFORM: Final = "cloud_platform"
_PRIVATE: Final = _openable("private_use", "RFC 1918")
_EMBEDDED: Final = "ipv4_in_ipv6"

# A more specific network wins over the one around it. None: globally reachable inside a network that is not.
IPV4_TABLE: Final[tuple[tuple[str, AddressClass | None], ...]] = (
    # IANA IPv4 Special-Purpose Address Registry, in its order
    ("0.0.0.0/8", AddressClass("this_network", "RFC 791 §3.2")),  # Linux connects 0.0.0.0 to itself
    ("10.0.0.0/8", _PRIVATE),
    ("100.64.0.0/10", _openable("shared_address_space", "RFC 6598")),
    ("127.0.0.0/8", AddressClass(_LOOPBACK, "RFC 1122 §3.2.1.3")),
    ("169.254.0.0/16", AddressClass("link_local", "RFC 3927")),
    ("172.16.0.0/12", _PRIVATE),
    # The registry calls 192.0.0.9 (PCP, RFC 7723) and 192.0.0.10 (TURN, RFC 8155) globally reachable. They
    # are anycast to the nearest NAT and relay, which is this network's own equipment, so they stay refused
    # with the rest.
    ("192.0.0.0/24", AddressClass("ietf_protocol_assignments", "RFC 6890 §2.1")),
    # Labs and closed networks use the documentation blocks inside; an operator may open them by name as any private one.
    ("192.0.2.0/24", _openable("documentation", "RFC 5737")),
    ("192.88.99.0/24", AddressClass("6to4_relay_anycast", "RFC 7526")),
    ("192.168.0.0/16", _PRIVATE),
    ("198.18.0.0/15", _openable("benchmarking", "RFC 2544")),
    ("198.51.100.0/24", _openable("documentation", "RFC 5737")),
    ("203.0.113.0/24", _openable("documentation", "RFC 5737")),
    ("240.0.0.0/4", _openable("reserved", "RFC 1112 §4")),  # networks that ran out of RFC 1918 use it inside
    ("255.255.255.255/32", AddressClass("limited_broadcast", "RFC 919 §7")),
    # IANA IPv4 Multicast Address Space Registry
    ("224.0.0.0/4", AddressClass("multicast", "RFC 1112 §4")),
    # Clouds
    ("100.100.100.200/32", AddressClass(_METADATA, "Alibaba Cloud instance metadata")),
    ("168.63.129.16/32", AddressClass(_PLATFORM, "Azure platform resources (WireServer, DNS, health)")),
    (
        "169.254.169.254/32",
        AddressClass(_METADATA, "AWS, Azure, Google Cloud, Oracle, OpenStack instance metadata"),
    ),
    ("169.254.170.2/32", AddressClass(_METADATA, "AWS ECS task credentials")),
    ("169.254.170.23/32", AddressClass(_METADATA, "AWS EKS pod identity")),
    ("169.254.42.42/32", AddressClass(_METADATA, "Scaleway instance metadata")),
    ("192.0.0.192/32", AddressClass(_METADATA, "Oracle Cloud Classic instance metadata")),
)

IPV6_TABLE: Final[tuple[tuple[str, AddressClass | None], ...]] = (
    # Only 2000::/3 is assigned for global unicast (IANA IPv6 Address Space Registry); the rest has no public
    # meaning.
    ("::/0", AddressClass("reserved", "RFC 4291 §2.4")),
    ("2000::/3", None),
    # IANA IPv6 Special-Purpose Address Registry, in its order
    ("::1/128", AddressClass(_LOOPBACK, "RFC 4291 §2.5.3")),
    ("::/128", AddressClass("unspecified", "RFC 4291 §2.5.2")),
    ("::ffff:0:0/96", AddressClass(_EMBEDDED, "RFC 4291 §2.5.5.2 (IPv4-mapped)")),
    ("64:ff9b:1::/48", AddressClass("local_use_translation", "RFC 8215")),
    ("100::/64", AddressClass("discard_only", "RFC 6666")),
    ("100:0:0:1::/64", AddressClass("dummy_prefix", "RFC 9780")),
    ("2001::/23", AddressClass("ietf_protocol_assignments", "RFC 2928")),
    ("2001::/32", AddressClass(_EMBEDDED, "RFC 4380 (Teredo)")),
    # 2001:1::1 (PCP, RFC 7723), ::2 (TURN, RFC 8155), ::3 (DNS-SD, RFC 9665): anycast to this network's own
    # equipment, as for IPv4 above; refused with 2001::/23.
    ("2001:2::/48", AddressClass("benchmarking", "RFC 5180")),
    ("2001:3::/32", None),  # AMT, RFC 7450
    ("2001:4:112::/48", None),  # AS112-v6, RFC 7535
    ("2001:10::/28", AddressClass("orchid", "RFC 4843")),
    ("2001:20::/28", None),  # ORCHIDv2, RFC 7343
    ("2001:30::/28", None),  # drone remote id, RFC 9374
    ("2001:db8::/32", _openable("documentation", "RFC 3849")),
    ("2002::/16", AddressClass(_EMBEDDED, "RFC 3056 (6to4)")),
    ("3fff::/20", _openable("documentation", "RFC 9637")),
    ("5f00::/16", AddressClass("segment_routing", "RFC 9602")),
    ("fc00::/7", _openable("unique_local", "RFC 4193")),
    ("fe80::/10", AddressClass("link_local", "RFC 4291 §2.5.6")),
    # Withdrawn forms that systems still route
    ("::/96", AddressClass(_EMBEDDED, "RFC 4291 §2.5.5.1 (IPv4-compatible)")),
    ("::ffff:0:0:0/96", AddressClass(_EMBEDDED, "RFC 2765 §2.1 (IPv4-translated)")),
    ("fec0::/10", _openable("site_local", "RFC 3879")),
    # IANA IPv6 Multicast Address Space Registry
    ("ff00::/8", AddressClass("multicast", "RFC 4291 §2.7")),
    # Clouds
    ("fd00:42::42/128", AddressClass(_METADATA, "Scaleway instance metadata")),
    ("fd00:ec2::23/128", AddressClass(_METADATA, "AWS EKS pod identity")),
    ("fd00:ec2::254/128", AddressClass(_METADATA, "AWS instance metadata")),
    ("fd20:ce::254/128", AddressClass(_METADATA, "Google Cloud instance metadata")),
)

# RFC 6052 §2.1: globally reachable exactly if the IPv4 address inside is.
_NAT64: Final = int(IPv6Address("64:ff9b::")) >> 32
_MAPPED: Final = int(IPv6Address("::ffff:0:0")) >> 32
_TRANSLATED: Final = int(IPv6Address("::ffff:0:0:0")) >> 32
_LOW_32: Final = 0xFFFF_FFFF


class _Ranges:
    """The table as disjoint ranges, for a look-up by bisection."""

    __slots__ = ("_classes", "_starts")

    def __init__(self, table: tuple[tuple[str, AddressClass | None], ...], bits: int) -> None:
        networks = sorted(((ip_network(text), entry) for text, entry in table), key=lambda item: item[0].prefixlen)
        edges = {0}
        for network, _ in networks:
            first = int(network.network_address)
            edges |= {first, first + network.num_addresses}
        edges.discard(1 << bits)
        self._starts = sorted(edges)
        self._classes: list[AddressClass | None] = []
        for start in self._starts:
            found: AddressClass | None = None
            for network, entry in networks:  # widest first, so the last that holds it is the most specific
                first = int(network.network_address)
                if first <= start < first + network.num_addresses:
                    found = entry
            self._classes.append(found)

    def find(self, value: int) -> AddressClass | None:
        return self._classes[bisect_right(self._starts, value) - 1]


_IPV4: Final = _Ranges(IPV4_TABLE, 32)
_IPV6: Final = _Ranges(IPV6_TABLE, 128)


def address_class(address: IPAddress) -> AddressClass | None:
    """Tell why an address is not public; None if it is globally reachable.

    An address behind the well-known NAT64 prefix is judged by the IPv4 address inside; every other form that
    carries an IPv4 address is refused whole.
    """
    value = int(address)
    if address.version == 4:
        return _IPV4.find(value)
    if value >> 32 == _NAT64:
        return _IPV4.find(value & _LOW_32)
    return _IPV6.find(value)


def is_loopback(address: IPAddress) -> bool:
    """Tell whether an address is loopback itself; one that only carries a loopback address is not."""
    value = int(address)
    return value >> 24 == 127 if address.version == 4 else value == 1


def embedded_ipv4(address: IPAddress) -> tuple[IPv4Address, ...]:
    """Return the IPv4 addresses that an IPv6 address carries to those who translate or tunnel it; most carry
    none.

    Covers IPv4-mapped, -compatible and -translated, NAT64's well-known prefix, 6to4, and Teredo's server and
    client.
    """
    if address.version == 4:
        return ()
    value = int(address)
    prefix = value >> 32
    if prefix in (_MAPPED, _TRANSLATED, _NAT64):
        return (IPv4Address(value & _LOW_32),)
    if prefix == 0:
        # `::` and `::1` are no IPv4-compatible addresses (RFC 4291 §2.5.5.1).
        return (IPv4Address(value),) if value > 1 else ()
    if value >> 112 == 0x2002:
        return (IPv4Address(value >> 80 & _LOW_32),)
    if value >> 96 == 0x2001_0000:
        # RFC 4380 §4: the client's address is stored with every bit inverted.
        return (IPv4Address(value >> 64 & _LOW_32), IPv4Address(~value & _LOW_32))
    return ()
