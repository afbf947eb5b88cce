"""Egress decisions: may this session reach this host, these addresses, with this ClientHello?

Each decision is a pure function to a Verdict. The gateway asks them in this order and skips none:

1. `decide_host`: the level, then `deny` (it wins), then `allow`, then what the level lists by itself.
2. `decide_addresses`: every address of the host must be one that may be dialled, or none of them is.
3. `decide_hello`, on port 443: the TLS client must ask for the host that was allowed.

Falling through never allows. Messages name no address.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, assert_never

from gateway.contract.policy import NetworkLevel
from gateway.core.address import IPAddress, IPNetwork, address_class, embedded_ipv4, is_loopback
from gateway.core.authority import Authority, AuthorityError, parse_authority
from gateway.core.clienthello import ClientHello
from gateway.core.rules import HostRule, Policy
from gateway.core.verdict import Allow, Deny, DenyReason, Verdict

# Verdicts are made once: a sandbox may ask for a million of them.
_OPEN: Final = Allow("open")
_PUBLIC: Final = Allow("public")
_TRUSTED: Final = Allow("trusted")
_LOOPBACK: Final = Allow("loopback")
_SERVER_NAME: Final = Allow("server_name")
_LITERAL: Final = Allow("ip_literal")
_ENCRYPTED: Final = Allow("encrypted_hello")

_NETWORK_DISABLED: Final = Deny(DenyReason.NETWORK_DISABLED, "this session has no network access")
_HOST_DENIED: Final = Deny(DenyReason.HOST_DENIED, "a rule of this session denies this host")
_HOST_NOT_LISTED: Final = Deny(DenyReason.HOST_NOT_LISTED, "this host is not on the list of this session")
_LITERAL_NOT_LISTED: Final = Deny(
    DenyReason.HOST_NOT_LISTED, "this session may reach listed hosts by name, not by IP address"
)
_PORT_NOT_LISTED: Final = Deny(
    DenyReason.PORT_NOT_LISTED, "this host is on the list of this session, but not with this port"
)
_NO_ADDRESS: Final = Deny(DenyReason.NAME_NOT_FOUND, "the host name has no address")
_OWN_ADDRESS: Final = Deny(DenyReason.ADDRESS_NOT_PUBLIC, "the host leads to the machine that the sandbox runs on")
_NOT_PUBLIC: Final = Deny(
    DenyReason.ADDRESS_NOT_PUBLIC, "the host leads to an address that is not on the public internet"
)
_NETWORK_DENIED: Final = Deny(DenyReason.ADDRESS_DENIED, "the host leads to a network that the operator denies")
_ADDRESS_DENIED: Final = Deny(
    DenyReason.ADDRESS_DENIED, "the host leads to an address that a rule of this session denies"
)
_ENCRYPTED_HELLO: Final = Deny(
    DenyReason.ENCRYPTED_HELLO, "the ClientHello is encrypted, so the host it asks for cannot be checked"
)
_SNI_MISSING: Final = Deny(DenyReason.SNI_MISSING, "the TLS client names no server; it must name the CONNECT host")
_SNI_MISMATCH: Final = Deny(DenyReason.SNI_MISMATCH, "the TLS client names another server than the CONNECT host")


@dataclass(frozen=True, slots=True)
class TrustedNetwork:
    """A network that is not public, opened by the operator for named hosts with named ports only."""

    hosts: tuple[HostRule, ...]
    ports: frozenset[int]
    network: IPNetwork


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What the operator and the machine say about addresses.

    `own_addresses` are all addresses of this machine, `own_ports` the gateway's own listening TCP ports.
    `allow_loopback` opens loopback addresses, though never with one of `own_ports`.
    """

    denied_networks: tuple[IPNetwork, ...] = ()
    trusted: tuple[TrustedNetwork, ...] = ()
    own_addresses: frozenset[IPAddress] = frozenset()
    own_ports: frozenset[int] = frozenset()
    allow_loopback: bool = False


def decide_host(policy: Policy, authority: Authority) -> Verdict:
    """Decide on a host and port, before anything is resolved."""
    level = policy.level
    if level is NetworkLevel.NONE:
        return _NETWORK_DISABLED
    if policy.deny and policy.deny_table.find(authority) is not None:
        return _HOST_DENIED
    if policy.allow:
        allowed = policy.allow_table.find(authority)
        if allowed is not None:
            return allowed
    if level is NetworkLevel.OPEN:
        return _OPEN
    if level is NetworkLevel.REGISTRIES:
        allowed = policy.registries.table.find(authority)
        if allowed is not None:
            return allowed
        if policy.allow_table.knows_host(authority) or policy.registries.table.knows_host(authority):
            return _PORT_NOT_LISTED
        return _HOST_NOT_LISTED if authority.address is None else _LITERAL_NOT_LISTED
    assert_never(level)


def decide_addresses(policy: Policy, authority: Authority, addresses: Sequence[IPAddress], facts: HostFacts) -> Verdict:
    """Decide on all addresses that a host has. One that is refused refuses them all, and so does having none.

    A name that mixes good and bad answers is either broken or an attack; dialling the good ones would let the
    attacker move the bad one in later (DNS rebinding).
    """
    verdict: Verdict = _NO_ADDRESS
    for address in addresses:
        judged = _decide_address(policy, authority, address, facts)
        if isinstance(judged, Deny):
            return judged
        if verdict is _NO_ADDRESS or judged is not _PUBLIC:
            verdict = judged
    return verdict


def decide_hello(policy: Policy, authority: Authority, hello: ClientHello) -> Verdict:
    """Decide on the ClientHello that a client sends through a tunnel to port 443.

    Without this an allowed host of a content network is a door to every other host on it (domain fronting).
    """
    name = hello.server_name
    if hello.encrypted and policy.level is not NetworkLevel.OPEN:
        return _ENCRYPTED_HELLO
    if authority.address is not None:
        # RFC 6066 §3: "Literal IPv4 and IPv6 addresses are not permitted" as names, so who dials one sends
        # none.
        return _LITERAL if name is None else _SNI_MISMATCH
    if name is None:
        return _SNI_MISSING
    if name.lower().removesuffix(".") == authority.host:
        return _SERVER_NAME
    # The outer name of an encrypted ClientHello is the provider's, by design another than the host (RFC 9849
    # §6.1). It must be a host that this session may reach as well, so that the extension alone is no way to a
    # host that a rule denies.
    if hello.encrypted and _may_reach(policy, name, authority.port):
        return _ENCRYPTED
    return _SNI_MISMATCH


def _may_reach(policy: Policy, name: str, port: int) -> bool:
    try:
        authority = parse_authority(name.encode("ascii"), port)
    except AuthorityError:
        return False
    return isinstance(decide_host(policy, authority), Allow)


def _decide_address(policy: Policy, authority: Authority, address: IPAddress, facts: HostFacts) -> Verdict:
    port = authority.port
    embedded = embedded_ipv4(address)
    # What an address carries inside is judged as well: a translator on the way would take the connection
    # there.
    for form in (address, *embedded):
        if form in facts.own_addresses and not is_loopback(form):
            return _OWN_ADDRESS
        for network in facts.denied_networks:
            if form in network:
                return _NETWORK_DENIED
        if policy.denied_literals and policy.denies_address(form, port):
            return _ADDRESS_DENIED
    found = address_class(address)
    if found is None:
        return _PUBLIC
    if embedded:
        return _NOT_PUBLIC
    if is_loopback(address):
        return _LOOPBACK if facts.allow_loopback and port not in facts.own_ports else _OWN_ADDRESS
    if found.openable:
        for trusted in facts.trusted:
            if (
                port in trusted.ports
                and address in trusted.network
                and any(rule.matches(authority) for rule in trusted.hosts)
            ):
                return _TRUSTED
    return _NOT_PUBLIC
