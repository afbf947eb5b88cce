"""Decisions on hosts, addresses and ClientHellos, each with its reason."""

from ipaddress import ip_address, ip_network
from typing import Any

import pytest

from gateway.contract.policy import NetworkLevel
from gateway.core.address import IPAddress
from gateway.core.authority import Authority, parse_authority
from gateway.core.clienthello import ClientHello
from gateway.core.decide import HostFacts, TrustedNetwork, decide_addresses, decide_hello, decide_host
from gateway.core.rules import HostRule, Policy, load_registries
from gateway.core.verdict import Allow, Deny, DenyReason, Verdict

REGISTRIES = load_registries(
    """
    [[registry]]
    name = "packages"
    source = "test"
    hosts = ["packages.example", "*.mirror.example"]
    ports = [443]
    [[registry]]
    name = "distribution"
    source = "test"
    hosts = ["deb.example"]
    ports = [80, 443]
    """
)


def policy(level: NetworkLevel = NetworkLevel.OPEN, allow: tuple[str, ...] = (), deny: tuple[str, ...] = ()) -> Policy:
    return Policy.compile(level, allow, deny, REGISTRIES)


def authority(text: str) -> Authority:
    return parse_authority(text.encode())


def reason(verdict: Verdict) -> DenyReason | str:
    """Return why a host is refused, or the rule that allows it."""
    return verdict.rule if isinstance(verdict, Allow) else verdict.reason


# -- hosts


def host(text: str, *args: Any) -> DenyReason | str:
    return reason(decide_host(policy(*args), authority(text)))


def test_level_none_refuses_all_even_what_is_listed() -> None:
    none = NetworkLevel.NONE
    assert host("packages.example:443", none) is DenyReason.NETWORK_DISABLED
    assert host("a.example:443", none, ("a.example",)) is DenyReason.NETWORK_DISABLED
    assert host("[2001:db8::1]:443", none) is DenyReason.NETWORK_DISABLED


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("packages.example:443", "registries:packages"),
        ("PACKAGES.example.:443", "registries:packages"),
        ("a.b.mirror.example:443", "registries:packages"),
        ("deb.example:80", "registries:distribution"),
        ("packages.example:80", DenyReason.PORT_NOT_LISTED),
        ("deb.example:22", DenyReason.PORT_NOT_LISTED),
        ("mirror.example:443", DenyReason.HOST_NOT_LISTED),
        ("evilmirror.example:443", DenyReason.HOST_NOT_LISTED),
        ("evil.packages.example:443", DenyReason.HOST_NOT_LISTED),
        ("packages.example.evil.example:443", DenyReason.HOST_NOT_LISTED),
        ("other.example:443", DenyReason.HOST_NOT_LISTED),
        ("192.0.2.1:443", DenyReason.HOST_NOT_LISTED),
        ("[2001:db8::1]:443", DenyReason.HOST_NOT_LISTED),
    ],
)
def test_level_registries_allows_the_list_with_its_ports(text: str, expected: DenyReason | str) -> None:
    assert host(text, NetworkLevel.REGISTRIES) == expected


@pytest.mark.parametrize("text", ["other.example:443", "other.example:22", "192.0.2.1:443", "[2001:db8::1]:1"])
def test_level_open_allows_any_host_and_literal(text: str) -> None:
    assert host(text, NetworkLevel.OPEN) == "open"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.corp.example:443", "allow:*.corp.example"),
        ("corp.example:443", DenyReason.HOST_NOT_LISTED),
        ("git.example:22", "allow:git.example:22"),
        ("git.example:443", DenyReason.PORT_NOT_LISTED),
        ("192.0.2.1:8080", "allow:192.0.2.1"),
        ("192.0.2.2:8080", DenyReason.HOST_NOT_LISTED),
        ("[2001:db8::1]:443", "allow:[2001:db8::1]:443"),
        ("[2001:db8::1]:444", DenyReason.PORT_NOT_LISTED),
        ("packages.example:8443", "allow:packages.example:8443"),
        ("packages.example:443", "registries:packages"),
    ],
)
def test_a_session_may_add_rules_to_the_list(text: str, expected: DenyReason | str) -> None:
    allow = ("*.corp.example", "git.example:22", "192.0.2.1", "[2001:db8::1]:443", "packages.example:8443")
    assert host(text, NetworkLevel.REGISTRIES, allow) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("packages.example:443", DenyReason.HOST_DENIED),
        ("a.corp.example:443", DenyReason.HOST_DENIED),
        ("b.corp.example:443", "allow:*.corp.example"),
        ("evil.example:443", DenyReason.HOST_DENIED),
        ("sub.evil.example:443", DenyReason.HOST_DENIED),
        ("mail.example:25", DenyReason.HOST_DENIED),
        ("mail.example:443", "open"),
        ("192.0.2.1:80", DenyReason.HOST_DENIED),
    ],
)
def test_deny_wins_over_everything(text: str, expected: DenyReason | str) -> None:
    allow = ("*.corp.example", "packages.example")
    deny = ("packages.example", "a.corp.example", "evil.example", "*.evil.example", "mail.example:25", "192.0.2.1")
    assert host(text, NetworkLevel.OPEN, allow, deny) == expected


def test_the_nearest_of_several_rules_is_named() -> None:
    allow = ("*.example", "*.corp.example", "a.corp.example")
    assert host("a.corp.example:443", NetworkLevel.REGISTRIES, allow) == "allow:a.corp.example"
    assert host("b.corp.example:443", NetworkLevel.REGISTRIES, allow) == "allow:*.corp.example"
    assert host("b.example:443", NetworkLevel.REGISTRIES, allow) == "allow:*.example"


def test_a_host_of_many_labels_is_looked_up_by_each() -> None:
    deep = ".".join(["a"] * 120)
    assert host(f"{deep}.corp.example:443", NetworkLevel.REGISTRIES, ("*.corp.example",)) == "allow:*.corp.example"


# -- addresses

PUBLIC_V4 = "8.8.8.8"
PUBLIC_V6 = "2001:4860:4860::8888"


def addresses(*texts: str, to: str = "a.example:443", facts: HostFacts | None = None, **rules: Any) -> DenyReason | str:
    judged: list[IPAddress] = [ip_address(text) for text in texts]
    return reason(decide_addresses(policy(**rules), authority(to), judged, facts or HostFacts()))


def test_public_addresses_are_allowed() -> None:
    assert addresses(PUBLIC_V4) == "public"
    assert addresses(PUBLIC_V4, PUBLIC_V6, "64:ff9b::8.8.8.8") == "public"


def test_no_address_is_a_refusal() -> None:
    assert addresses() is DenyReason.NAME_NOT_FOUND


@pytest.mark.parametrize(
    "hidden",
    [
        "169.254.169.254",
        "10.0.0.1",
        "127.0.0.1",
        "::1",
        "0.0.0.0",
        "::ffff:169.254.169.254",
        "64:ff9b::a9fe:a9fe",
        "64:ff9b:1::a9fe:a9fe",
        "2002:a9fe:a9fe::",
        "2001:0:a9fe:a9fe::1",
        "::169.254.169.254",
        "100.64.0.1",
        "198.18.0.1",
        "240.0.0.1",
        "192.0.0.1",
        "168.63.129.16",
        "100.100.100.200",
        "fd00:ec2::254",
        "fe80::1",
        "ff02::1",
    ],
)
@pytest.mark.parametrize("level", [NetworkLevel.REGISTRIES, NetworkLevel.OPEN])
def test_one_address_that_is_not_public_refuses_the_name(hidden: str, level: NetworkLevel) -> None:
    assert addresses(hidden, level=level) is DenyReason.ADDRESS_NOT_PUBLIC
    assert addresses(PUBLIC_V4, hidden, level=level) is DenyReason.ADDRESS_NOT_PUBLIC
    assert addresses(hidden, PUBLIC_V6, level=level) is DenyReason.ADDRESS_NOT_PUBLIC


def test_denies_metadata_address_even_when_allowed_by_rule() -> None:
    listed = "169.254.169.254"
    assert addresses(listed, to=f"{listed}:80", allow=(listed,)) is DenyReason.ADDRESS_NOT_PUBLIC


def test_messages_name_no_address() -> None:
    for text in ("169.254.169.254", "10.1.2.3", "127.0.0.1", "fd00:ec2::254"):
        verdict = decide_addresses(policy(), authority("a.example:443"), [ip_address(text)], HostFacts())
        assert isinstance(verdict, Deny)
        assert not any(character.isdigit() for character in verdict.message)


def test_refuses_a_thousand_answers_by_the_one_that_is_not_public() -> None:
    many = [f"8.8.{high}.{low}" for high in range(4) for low in range(250)]
    assert addresses(*many) == "public"
    assert addresses(*many, "10.0.0.1") is DenyReason.ADDRESS_NOT_PUBLIC


# -- this machine's own addresses

OWN = HostFacts(
    own_addresses=frozenset(ip_address(each) for each in ("8.8.4.4", "10.0.0.5", "2001:4860::5", "127.0.0.1", "::1")),
    own_ports=frozenset({8900, 8901}),
)


@pytest.mark.parametrize("address", ["8.8.4.4", "10.0.0.5", "2001:4860::5", "127.0.0.1", "127.9.9.9", "::1"])
@pytest.mark.parametrize("port", [22, 443, 8900])
def test_own_addresses_are_refused_on_any_port(address: str, port: int) -> None:
    verdict = decide_addresses(policy(), authority(f"a.example:{port}"), [ip_address(address)], OWN)
    assert isinstance(verdict, Deny)
    assert verdict.reason is DenyReason.ADDRESS_NOT_PUBLIC
    assert "machine" in verdict.message


def test_an_own_address_inside_another_is_refused() -> None:
    assert addresses("64:ff9b::8.8.4.4", facts=OWN) is DenyReason.ADDRESS_NOT_PUBLIC
    assert addresses("64:ff9b::8.8.4.5", facts=OWN) == "public"


LOOPBACK = HostFacts(own_addresses=OWN.own_addresses, own_ports=OWN.own_ports, allow_loopback=True)


def test_loopback_is_opened_for_benchmarks_except_the_gateway_itself() -> None:
    assert addresses("127.0.0.1", to="a.example:443", facts=LOOPBACK) == "loopback"
    assert addresses("::1", to="[::1]:9000", facts=LOOPBACK) == "loopback"
    assert addresses("127.0.0.1", to="a.example:8900", facts=LOOPBACK) is DenyReason.ADDRESS_NOT_PUBLIC
    assert addresses("127.1.2.3", to="a.example:8901", facts=LOOPBACK) is DenyReason.ADDRESS_NOT_PUBLIC
    assert addresses("::1", to="a.example:8901", facts=LOOPBACK) is DenyReason.ADDRESS_NOT_PUBLIC


@pytest.mark.parametrize(
    "address",
    ["0.0.0.0", "::", "::ffff:127.0.0.1", "64:ff9b::127.0.0.1", "::127.0.0.1", "8.8.4.4", "10.0.0.5", "10.0.0.6"],
)
def test_opening_loopback_opens_nothing_else(address: str) -> None:
    assert addresses(address, facts=LOOPBACK) is DenyReason.ADDRESS_NOT_PUBLIC


# -- the operator's own networks


def test_denied_networks_are_refused_though_public() -> None:
    facts = HostFacts(denied_networks=(ip_network("8.8.0.0/16"), ip_network("2001:4860::/32")))
    assert addresses(PUBLIC_V4, facts=facts) is DenyReason.ADDRESS_DENIED
    assert addresses(PUBLIC_V6, facts=facts) is DenyReason.ADDRESS_DENIED
    assert addresses("8.9.0.1", facts=facts) == "public"
    assert addresses("64:ff9b::8.8.8.8", facts=facts) is DenyReason.ADDRESS_DENIED


def trusting(network: str, *hosts: str, ports: tuple[int, ...] = (443,), denied: tuple[str, ...] = ()) -> HostFacts:
    return HostFacts(
        denied_networks=tuple(ip_network(each) for each in denied),
        trusted=(TrustedNetwork(tuple(HostRule.parse(each) for each in hosts), frozenset(ports), ip_network(network)),),
        own_addresses=frozenset({ip_address("10.20.0.5")}),
        own_ports=frozenset({8900}),
    )


MIRROR = trusting("10.20.0.0/16", "*.mirror.example")


@pytest.mark.parametrize(
    ("to", "answers", "expected"),
    [
        ("a.mirror.example:443", ["10.20.1.1"], "trusted"),
        ("a.mirror.example:443", ["10.20.1.1", "10.20.1.2"], "trusted"),
        ("a.mirror.example:443", [PUBLIC_V4], "public"),
        ("a.mirror.example:443", [PUBLIC_V4, "10.20.1.1"], "trusted"),
        ("a.mirror.example:443", ["10.20.1.1", PUBLIC_V4], "trusted"),
        ("a.mirror.example:443", ["10.21.0.0"], DenyReason.ADDRESS_NOT_PUBLIC),
        ("a.mirror.example:443", ["10.20.1.1", "10.21.0.0"], DenyReason.ADDRESS_NOT_PUBLIC),
        ("a.mirror.example:443", ["10.20.0.5"], DenyReason.ADDRESS_NOT_PUBLIC),  # this machine itself
        ("a.mirror.example:80", ["10.20.1.1"], DenyReason.ADDRESS_NOT_PUBLIC),
        ("mirror.example:443", ["10.20.1.1"], DenyReason.ADDRESS_NOT_PUBLIC),
        ("other.example:443", ["10.20.1.1"], DenyReason.ADDRESS_NOT_PUBLIC),
        ("10.20.1.1:443", ["10.20.1.1"], DenyReason.ADDRESS_NOT_PUBLIC),
        ("a.mirror.example:443", ["::ffff:10.20.1.1"], DenyReason.ADDRESS_NOT_PUBLIC),
        ("a.mirror.example:443", ["64:ff9b::10.20.1.1"], DenyReason.ADDRESS_NOT_PUBLIC),
    ],
)
def test_a_trusted_network_is_open_for_its_hosts_and_ports_only(
    to: str, answers: list[str], expected: DenyReason | str
) -> None:
    assert addresses(*answers, to=to, facts=MIRROR) == expected


@pytest.mark.parametrize(
    ("network", "address"),
    [
        ("169.254.0.0/16", "169.254.1.1"),
        ("169.254.169.254/32", "169.254.169.254"),
        ("100.64.0.0/10", "100.100.100.200"),
        ("168.63.129.16/32", "168.63.129.16"),
        ("192.0.0.0/24", "192.0.0.192"),
        ("0.0.0.0/0", "0.0.0.0"),
        ("0.0.0.0/0", "127.0.0.1"),
        ("0.0.0.0/0", "224.0.0.1"),
        ("::/0", "fe80::1"),
        ("::/0", "fd00:ec2::254"),
        ("::/0", "::1"),
        ("::/0", "::ffff:169.254.169.254"),
        ("::/0", "::ffff:10.0.0.1"),
        ("::/0", "64:ff9b::10.0.0.1"),
        ("::/0", "64:ff9b:1::1"),
        ("::/0", "2002:a00:1::"),
        ("::/0", "ff02::1"),
    ],
)
def test_no_trust_opens_link_local_metadata_loopback_or_disguises(network: str, address: str) -> None:
    facts = trusting(network, "a.example")
    assert addresses(address, facts=facts) is DenyReason.ADDRESS_NOT_PUBLIC


@pytest.mark.parametrize(
    ("network", "address"),
    [
        ("fd00::/8", "fd00::1"),
        ("100.64.0.0/10", "100.64.0.1"),
        ("198.18.0.0/15", "198.18.0.1"),
        ("240.0.0.0/4", "240.1.1.1"),
    ],
)
def test_trust_opens_what_companies_use_inside(network: str, address: str) -> None:
    assert addresses(address, facts=trusting(network, "a.example")) == "trusted"
    assert addresses(address, facts=HostFacts()) is DenyReason.ADDRESS_NOT_PUBLIC


def test_trust_can_name_an_address_literal() -> None:
    facts = trusting("10.20.0.0/16", "10.20.1.1")
    assert addresses("10.20.1.1", to="10.20.1.1:443", facts=facts) == "trusted"
    assert addresses("10.20.1.2", to="10.20.1.2:443", facts=facts) is DenyReason.ADDRESS_NOT_PUBLIC


def test_a_denied_network_wins_over_a_trusted_one() -> None:
    facts = trusting("10.20.0.0/16", "a.example", denied=("10.20.9.0/24",))
    assert addresses("10.20.8.1", facts=facts) == "trusted"
    assert addresses("10.20.9.1", facts=facts) is DenyReason.ADDRESS_DENIED


def test_trust_opens_an_address_and_not_a_host() -> None:
    # The session's level and rules must allow the host as well; no entry of the operator stands in for them.
    assert host("a.mirror.example:443", NetworkLevel.NONE) is DenyReason.NETWORK_DISABLED
    assert host("other.example:443", NetworkLevel.REGISTRIES) is DenyReason.HOST_NOT_LISTED


def test_a_session_that_denies_an_address_is_not_led_there_by_a_name() -> None:
    deny = ("8.8.8.8:443", "[2001:4860:4860::8888]")
    assert addresses(PUBLIC_V4, deny=deny) is DenyReason.ADDRESS_DENIED
    assert addresses("64:ff9b::8.8.8.8", deny=deny) is DenyReason.ADDRESS_DENIED
    assert addresses(PUBLIC_V4, to="a.example:80", deny=deny) == "public"
    assert addresses(PUBLIC_V6, to="a.example:80", deny=deny) is DenyReason.ADDRESS_DENIED
    assert addresses("8.8.8.9", deny=deny) == "public"


# -- ClientHellos


def greeting(name: str | None, to: str = "a.example:443", *, encrypted: bool = False, **rules: Any) -> DenyReason | str:
    return reason(decide_hello(policy(**rules), authority(to), ClientHello(name, encrypted, ())))


@pytest.mark.parametrize("level", [NetworkLevel.REGISTRIES, NetworkLevel.OPEN])
def test_the_server_name_must_be_the_connect_host(level: NetworkLevel) -> None:
    assert greeting("a.example", level=level) == "server_name"
    assert greeting("A.Example", level=level) == "server_name"
    assert greeting("a.example.", level=level) == "server_name"
    assert greeting("b.example", level=level) is DenyReason.SNI_MISMATCH
    assert greeting("a.example..", level=level) is DenyReason.SNI_MISMATCH
    assert greeting("sub.a.example", level=level) is DenyReason.SNI_MISMATCH
    assert greeting("example", level=level) is DenyReason.SNI_MISMATCH
    assert greeting(None, level=level) is DenyReason.SNI_MISSING


def test_an_international_host_is_compared_by_its_a_label() -> None:
    assert greeting("xn--bcher-kva.example", "bücher.example:443") == "server_name"


@pytest.mark.parametrize("to", ["192.0.2.1:443", "[2001:db8::1]:443"])
def test_who_dials_an_address_sends_no_name(to: str) -> None:
    assert greeting(None, to) == "ip_literal"
    assert greeting("192.0.2.1", to) is DenyReason.SNI_MISMATCH
    assert greeting("a.example", to) is DenyReason.SNI_MISMATCH


def test_an_encrypted_hello_is_refused_below_level_open() -> None:
    registries = NetworkLevel.REGISTRIES
    assert greeting("a.example", encrypted=True, level=registries) is DenyReason.ENCRYPTED_HELLO
    assert greeting(None, "192.0.2.1:443", encrypted=True, level=registries) is DenyReason.ENCRYPTED_HELLO


def test_at_level_open_an_encrypted_hello_names_a_host_that_may_be_reached() -> None:
    deny = ("evil.example", "*.evil.example")
    assert greeting("a.example", encrypted=True, deny=deny) == "server_name"
    assert greeting("outer.example", encrypted=True, deny=deny) == "encrypted_hello"
    assert greeting("evil.example", encrypted=True, deny=deny) is DenyReason.SNI_MISMATCH
    assert greeting("x.EVIL.example.", encrypted=True, deny=deny) is DenyReason.SNI_MISMATCH
    assert greeting("127.1", encrypted=True) is DenyReason.SNI_MISMATCH
    assert greeting("", encrypted=True) is DenyReason.SNI_MISMATCH
    assert greeting(None, encrypted=True) is DenyReason.SNI_MISSING
    assert greeting(None, "192.0.2.1:443", encrypted=True) == "ip_literal"
