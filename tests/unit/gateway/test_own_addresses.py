"""This host's own addresses, read from the kernel's tables."""

import subprocess
from ipaddress import IPv4Address, IPv6Address, ip_address

from gateway.net.own_addresses import parse_fib_trie, parse_if_inet6, read_own_addresses

FIB_TRIE = """\
Main:
  +-- 0.0.0.0/0 3 0 5
     |-- 0.0.0.0
        /0 universe UNICAST
     +-- 10.0.2.0/24 2 0 1
        |-- 10.0.2.0
           /24 link UNICAST
        |-- 10.0.2.15
           /32 host LOCAL
        |-- 10.0.2.255
           /32 link BROADCAST
Local:
     +-- 127.0.0.0/8 2 0 2
        |-- 127.0.0.0
           /8 host LOCAL
        |-- 127.0.0.1
           /32 host LOCAL
"""


def test_reads_local_ipv4_addresses_and_no_networks_or_broadcasts() -> None:
    assert parse_fib_trie(FIB_TRIE) == {IPv4Address("10.0.2.15"), IPv4Address("127.0.0.1")}


def test_reads_local_ipv6_addresses() -> None:
    text = (
        "fe800000000000000000000000000001 02 40 20 80     eth0\n00000000000000000000000000000001 01 80 10 80       lo\n"
    )
    assert parse_if_inet6(text) == {IPv6Address("fe80::1"), IPv6Address("::1")}


def test_agrees_with_iproute2_on_this_host() -> None:
    shown = subprocess.run(["ip", "-o", "addr"], capture_output=True, text=True, check=True).stdout
    expected = {
        ip_address(line.split()[3].split("/")[0]) for line in shown.splitlines() if line.split()[2] in ("inet", "inet6")
    }
    assert read_own_addresses() == expected
