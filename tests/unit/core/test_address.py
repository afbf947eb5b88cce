"""The address table: each range with its first and last address, and the addresses just outside it."""

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import pytest

from gateway.core.address import (
    IPV4_TABLE,
    IPV6_TABLE,
    AddressClass,
    address_class,
    embedded_ipv4,
    is_loopback,
)

# Range, class, and whether the addresses just below and just above are public (None: no such address).
RANGES = [
    ("0.0.0.0/8", "this_network", None, True),
    ("10.0.0.0/8", "private_use", True, True),
    ("100.64.0.0/10", "shared_address_space", True, True),
    ("127.0.0.0/8", "loopback", True, True),
    ("168.63.129.16/32", "cloud_platform", True, True),
    ("169.254.0.0/16", "link_local", True, True),
    ("172.16.0.0/12", "private_use", True, True),
    ("192.0.0.0/24", "ietf_protocol_assignments", True, True),
    ("192.0.2.0/24", "documentation", True, True),
    ("192.88.99.0/24", "6to4_relay_anycast", True, True),
    ("192.168.0.0/16", "private_use", True, True),
    ("198.18.0.0/15", "benchmarking", True, True),
    ("198.51.100.0/24", "documentation", True, True),
    ("203.0.113.0/24", "documentation", True, True),
    ("224.0.0.0/4", "multicast", True, False),
    ("255.255.255.255/32", "limited_broadcast", False, None),
    ("2001::/23", "ietf_protocol_assignments", True, True),
    ("2001:db8::/32", "documentation", True, True),
    ("2002::/16", "ipv4_in_ipv6", True, True),
    ("3fff::/20", "documentation", True, True),
    ("64:ff9b:1::/48", "local_use_translation", False, False),
    ("100::/64", "discard_only", False, False),
    ("100:0:0:1::/64", "dummy_prefix", False, False),
    ("5f00::/16", "segment_routing", False, False),
    ("fc00::/7", "unique_local", False, False),
    ("fe80::/10", "link_local", False, False),
    ("fec0::/10", "site_local", False, False),
    ("ff00::/8", "multicast", False, None),
    ("::ffff:0:0/96", "ipv4_in_ipv6", False, False),
    ("::ffff:0:0:0/96", "ipv4_in_ipv6", False, False),
    # Reserved by the IETF on both sides of global unicast space.
    ("::/3", None, None, True),
    ("4000::/2", None, True, None),
]


@pytest.mark.parametrize(("network", "name", "below", "above"), RANGES)
def test_a_range_is_refused_to_its_edges_and_not_beyond(
    network: str, name: str | None, below: bool | None, above: bool | None
) -> None:
    held = ip_network(network)
    kind = type(held.network_address)
    for address in (held.network_address, held.broadcast_address):
        found = address_class(address)
        assert found is not None
        # Ranges inside this one have names of their own, at its edges as well.
        if name not in (None, "ietf_protocol_assignments"):
            assert found.name == name
    if below is not None:
        assert (address_class(kind(int(held.network_address) - 1)) is None) is below
    if above is not None:
        assert (address_class(kind(int(held.broadcast_address) + 1)) is None) is above


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("0.0.0.0", "this_network"),
        ("10.255.255.255", "private_use"),
        ("100.100.100.200", "cloud_metadata"),
        ("100.100.100.199", "shared_address_space"),
        ("127.0.0.1", "loopback"),
        ("169.254.169.254", "cloud_metadata"),
        ("169.254.169.253", "link_local"),
        ("169.254.170.2", "cloud_metadata"),
        ("169.254.170.23", "cloud_metadata"),
        ("169.254.42.42", "cloud_metadata"),
        ("192.0.0.8", "ietf_protocol_assignments"),
        ("192.0.0.9", "ietf_protocol_assignments"),
        ("192.0.0.10", "ietf_protocol_assignments"),
        ("192.0.0.170", "ietf_protocol_assignments"),
        ("192.0.0.192", "cloud_metadata"),
        ("192.88.99.2", "6to4_relay_anycast"),
        ("224.0.0.1", "multicast"),
        ("239.255.255.255", "multicast"),
        ("240.0.0.1", "reserved"),
        ("255.255.255.254", "reserved"),
        ("::", "unspecified"),
        ("::1", "loopback"),
        ("::2", "ipv4_in_ipv6"),
        ("::a9fe:a9fe", "ipv4_in_ipv6"),
        ("::808:808", "ipv4_in_ipv6"),
        ("::ffff:169.254.169.254", "ipv4_in_ipv6"),
        ("::ffff:8.8.8.8", "ipv4_in_ipv6"),
        ("::ffff:0:8.8.8.8", "ipv4_in_ipv6"),
        ("64:ff9b::10.0.0.1", "private_use"),
        ("64:ff9b::127.0.0.1", "loopback"),
        ("64:ff9b::169.254.169.254", "cloud_metadata"),
        ("64:ff9b::168.63.129.16", "cloud_platform"),
        ("64:ff9b::1:0:0", "reserved"),
        ("64:ff9b:1::8.8.8.8", "local_use_translation"),
        ("64:ff9b:1:fffe::1", "local_use_translation"),
        ("2001:0:4136:e378:8000:63bf:3fff:fdd2", "ipv4_in_ipv6"),
        ("2001:1::1", "ietf_protocol_assignments"),
        ("2001:1::2", "ietf_protocol_assignments"),
        ("2001:1::3", "ietf_protocol_assignments"),
        ("2001:2::1", "benchmarking"),
        ("2001:10::1", "orchid"),
        ("2002:a9fe:a9fe::", "ipv4_in_ipv6"),
        ("2002:808:808::1", "ipv4_in_ipv6"),
        ("fd00:42::42", "cloud_metadata"),
        ("fd00:ec2::23", "cloud_metadata"),
        ("fd00:ec2::254", "cloud_metadata"),
        ("fd00:ec2::253", "unique_local"),
        ("fd20:ce::254", "cloud_metadata"),
        ("fe80::a9fe:a9fe", "link_local"),
        ("ff02::1", "multicast"),
        ("ff0e::1", "multicast"),
        ("4000::1", "reserved"),
        ("fe00::1", "reserved"),
    ],
)
def test_names_what_an_address_is(address: str, name: str) -> None:
    found = address_class(ip_address(address))
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize(
    "address",
    [
        "1.1.1.1",
        "8.8.8.8",
        "192.31.196.1",  # AS112, globally reachable by the registry
        "192.52.193.1",  # AMT
        "192.175.48.1",
        "223.255.255.255",
        "2001:200::1",
        "2001:3::1",
        "2001:4:112::1",
        "2001:20::1",
        "2001:30::1",
        "2001:4860:4860::8888",
        "2606:4700:4700::1111",
        "2620:4f:8000::1",
        "3ffe::1",
        "64:ff9b::8.8.8.8",
    ],
)
def test_leaves_public_addresses_alone(address: str) -> None:
    assert address_class(ip_address(address)) is None


@pytest.mark.parametrize("address", ["2001:4:111::1", "2001:4:113::1", "2001:40::1", "2001:1ff::1"])
def test_refuses_protocol_assignments_that_nothing_has_yet(address: str) -> None:
    found = address_class(ip_address(address))
    assert found is not None
    assert found.name == "ietf_protocol_assignments"


def test_every_class_says_which_document_it_is_from() -> None:
    entries = [entry for _, entry in (*IPV4_TABLE, *IPV6_TABLE) if entry is not None]
    assert all(entry.source and entry.name.replace("_", "").isalnum() for entry in entries)
    for entry in entries:
        assert entry.source.startswith("RFC ") != entry.name.startswith("cloud_")


def test_no_network_is_in_the_table_twice() -> None:
    for table in (IPV4_TABLE, IPV6_TABLE):
        networks = [network for network, _ in table]
        assert len(networks) == len(set(networks))


def test_link_local_metadata_and_transition_addresses_can_never_be_opened() -> None:
    openable = {entry.name for _, entry in (*IPV4_TABLE, *IPV6_TABLE) if entry is not None and entry.openable}
    assert openable == {
        "benchmarking",
        "documentation",
        "private_use",
        "reserved",
        "shared_address_space",
        "site_local",
        "unique_local",
    }
    # The IPv6 space that the IETF keeps is another `reserved` than IPv4's last block.
    assert address_class(IPv6Address("4000::1")) == AddressClass("reserved", "RFC 4291 §2.4")


@pytest.mark.parametrize(
    ("address", "inside"),
    [
        ("::ffff:192.0.2.1", ["192.0.2.1"]),
        ("::ffff:0:192.0.2.1", ["192.0.2.1"]),
        ("::192.0.2.1", ["192.0.2.1"]),
        ("64:ff9b::192.0.2.1", ["192.0.2.1"]),
        ("2002:c000:201::", ["192.0.2.1"]),
        # RFC 4380 §4: server 65.54.227.120, client 192.0.2.45 (inverted)
        ("2001:0:4136:e378:8000:63bf:3fff:fdd2", ["65.54.227.120", "192.0.2.45"]),
        ("::", []),
        ("::1", []),
        ("64:ff9b:1::192.0.2.1", []),
        ("2001:db8::1", []),
        ("192.0.2.1", []),
    ],
)
def test_unwraps_ipv4_addresses_inside_ipv6(address: str, inside: list[str]) -> None:
    assert embedded_ipv4(ip_address(address)) == tuple(IPv4Address(each) for each in inside)


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.255.255.255", True),
        ("126.255.255.255", False),
        ("128.0.0.0", False),
        ("0.0.0.0", False),
        ("::1", True),
        ("::", False),
        ("::2", False),
        ("::ffff:127.0.0.1", False),
        ("64:ff9b::127.0.0.1", False),
    ],
)
def test_loopback_is_only_what_stays_on_the_machine(address: str, loopback: bool) -> None:
    assert is_loopback(ip_address(address)) is loopback
