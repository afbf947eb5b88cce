"""What holds for every decision: deny only takes away, and no level opens an address that is not public."""

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from hypothesis import assume, given
from hypothesis import strategies as st

from gateway.contract.policy import NetworkLevel
from gateway.core.address import IPV4_TABLE, IPV6_TABLE, IPAddress, address_class, embedded_ipv4
from gateway.core.authority import Authority, parse_authority
from gateway.core.clienthello import ClientHello
from gateway.core.decide import HostFacts, TrustedNetwork, decide_addresses, decide_hello, decide_host
from gateway.core.rules import HostRule, Policy, load_registries
from gateway.core.verdict import Allow

REGISTRIES = load_registries(
    """
    [[registry]]
    name = "r"
    source = "test"
    hosts = ["b.a", "*.c"]
    ports = [1, 2]
    """
)
# Few labels, ports and addresses, so that rules and hosts meet often.
NAMES = st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map(".".join)
LITERALS = st.sampled_from(["8.8.8.8", "9.9.9.9", "[2606::1]", "[2606::2]"])
RULE_HOSTS = st.one_of(NAMES, NAMES.map(lambda name: f"*.{name}"), LITERALS)
RULES = st.one_of(RULE_HOSTS, st.tuples(RULE_HOSTS, st.integers(1, 3)).map(lambda pair: f"{pair[0]}:{pair[1]}"))
RULE_LISTS = st.lists(RULES, max_size=5)
LEVELS = st.sampled_from(NetworkLevel)
AUTHORITIES = st.tuples(st.one_of(NAMES, LITERALS), st.integers(1, 3)).map(
    lambda pair: parse_authority(f"{pair[0]}:{pair[1]}".encode())
)

_FAMOUS = [
    "8.8.8.8 9.9.9.9 2606::1 2606::2 10.0.0.1 127.0.0.1 169.254.169.254 64:ff9b::a00:1 64:ff9b::808:808",
    "::1 ::ffff:8.8.8.8 fd00::1 fd00:ec2::254 100.100.100.200 168.63.129.16",
]
EDGES = [
    ip_address(int(edge)) if network.version == 4 else IPv6Address(int(edge))
    for table in (IPV4_TABLE, IPV6_TABLE)
    for network in (ip_network(text) for text, _ in table)
    for edge in (network.network_address, network.broadcast_address)
]
ADDRESSES: st.SearchStrategy[IPAddress] = st.one_of(
    st.sampled_from([ip_address(text) for line in _FAMOUS for text in line.split()]),
    st.sampled_from(EDGES),
    st.integers(0, 2**32 - 1).map(IPv4Address),
    st.integers(0, 2**128 - 1).map(IPv6Address),
    st.integers(0, 2**32 - 1).map(lambda value: IPv6Address(int(IPv6Address("64:ff9b::")) + value)),
)
ANSWERS = st.lists(ADDRESSES, max_size=4)


def compiled(level: NetworkLevel, allow: list[str], deny: list[str]) -> Policy:
    return Policy.compile(level, allow, deny, REGISTRIES)


@st.composite
def facts(draw: st.DrawFn) -> HostFacts:
    """An operator's settings, trust included."""
    network = st.sampled_from(
        ["0.0.0.0/0", "::/0", "10.0.0.0/8", "fd00::/8", "127.0.0.0/8", "169.254.0.0/16", "8.0.0.0/8"]
    )
    trusted = [
        TrustedNetwork(
            tuple(HostRule.parse(rule) for rule in draw(RULE_LISTS)),
            frozenset(draw(st.lists(st.integers(1, 3), max_size=3))),
            ip_network(draw(network)),
        )
        for _ in range(draw(st.integers(0, 2)))
    ]
    return HostFacts(
        denied_networks=tuple(ip_network(each) for each in draw(st.lists(network, max_size=1))),
        trusted=tuple(trusted),
        own_addresses=frozenset(draw(st.lists(ADDRESSES, max_size=2))),
        own_ports=frozenset(draw(st.lists(st.integers(1, 3), max_size=1))),
        allow_loopback=draw(st.booleans()),
    )


@given(LEVELS, RULE_LISTS, RULE_LISTS, RULES, AUTHORITIES)
def test_adding_a_deny_never_allows(
    level: NetworkLevel, allow: list[str], deny: list[str], added: str, authority: Authority
) -> None:
    before = decide_host(compiled(level, allow, deny), authority)
    after = decide_host(compiled(level, allow, [*deny, added]), authority)
    assert isinstance(before, Allow) or not isinstance(after, Allow)


@given(LEVELS, RULE_LISTS, RULE_LISTS, RULES, AUTHORITIES)
def test_adding_an_allow_never_refuses(
    level: NetworkLevel, allow: list[str], deny: list[str], added: str, authority: Authority
) -> None:
    before = decide_host(compiled(level, allow, deny), authority)
    after = decide_host(compiled(level, [*allow, added], deny), authority)
    assert isinstance(after, Allow) or not isinstance(before, Allow)


@given(LEVELS, RULE_LISTS, RULE_LISTS, AUTHORITIES)
def test_the_compiled_decision_is_the_one_that_the_rules_say(
    level: NetworkLevel, allow: list[str], deny: list[str], authority: Authority
) -> None:
    def covered(rules: list[str]) -> bool:
        return any(HostRule.parse(rule).matches(authority) for rule in rules)

    listed = level is NetworkLevel.REGISTRIES and covered(["b.a:1", "b.a:2", "*.c:1", "*.c:2"])
    expected = level is not NetworkLevel.NONE and not covered(deny)
    expected = expected and (level is NetworkLevel.OPEN or listed or covered(allow))
    assert isinstance(decide_host(compiled(level, allow, deny), authority), Allow) is expected


@given(LEVELS, AUTHORITIES, RULE_LISTS, RULE_LISTS)
def test_the_order_of_rules_changes_nothing(
    level: NetworkLevel, authority: Authority, allow: list[str], deny: list[str]
) -> None:
    assert decide_host(compiled(level, allow, deny), authority) == decide_host(
        compiled(level, allow[::-1], deny[::-1]), authority
    )


@given(AUTHORITIES, ANSWERS, st.lists(RULES, max_size=5))
def test_a_refused_address_class_is_refused_at_every_level(
    authority: Authority, answers: list[IPAddress], allow: list[str]
) -> None:
    refused = any(address_class(address) is not None for address in answers) or not answers
    for level in NetworkLevel:
        verdict = decide_addresses(compiled(level, allow, []), authority, answers, HostFacts())
        assert isinstance(verdict, Allow) is not refused


@given(AUTHORITIES, ANSWERS, facts(), RULE_LISTS)
def test_one_refused_address_refuses_them_all(
    authority: Authority, answers: list[IPAddress], given_facts: HostFacts, deny: list[str]
) -> None:
    policy = compiled(NetworkLevel.OPEN, [], deny)
    single = [isinstance(decide_addresses(policy, authority, [each], given_facts), Allow) for each in answers]
    together = isinstance(decide_addresses(policy, authority, answers, given_facts), Allow)
    assert together is (bool(answers) and all(single))
    assert together is isinstance(decide_addresses(policy, authority, answers[::-1], given_facts), Allow)


@given(AUTHORITIES, ANSWERS, facts(), RULE_LISTS, RULES)
def test_adding_a_deny_never_allows_an_address(
    authority: Authority, answers: list[IPAddress], given_facts: HostFacts, deny: list[str], added: str
) -> None:
    before = decide_addresses(compiled(NetworkLevel.OPEN, [], deny), authority, answers, given_facts)
    after = decide_addresses(compiled(NetworkLevel.OPEN, [], [*deny, added]), authority, answers, given_facts)
    assert isinstance(before, Allow) or not isinstance(after, Allow)


@given(AUTHORITIES, ADDRESSES, facts())
def test_no_setting_opens_what_must_stay_closed(
    authority: Authority, address: IPAddress, given_facts: HostFacts
) -> None:
    found = address_class(address)
    assume(found is not None and not found.openable)
    assert found is not None
    verdict = decide_addresses(compiled(NetworkLevel.OPEN, [], []), authority, [address], given_facts)
    if isinstance(verdict, Allow):
        assert found.name == "loopback"
        assert given_facts.allow_loopback
        assert authority.port not in given_facts.own_ports
        assert not embedded_ipv4(address)


@given(
    AUTHORITIES,
    st.sampled_from([NetworkLevel.REGISTRIES, NetworkLevel.OPEN]),
    st.none() | st.text("abc.ABC", min_size=1, max_size=6),
    st.booleans(),
    RULE_LISTS,
)
def test_a_hello_never_names_another_host_without_encryption_at_level_open(
    authority: Authority, level: NetworkLevel, name: str | None, encrypted: bool, deny: list[str]
) -> None:
    policy = compiled(level, [], deny)
    verdict = decide_hello(policy, authority, ClientHello(name, encrypted, ()))
    if not isinstance(verdict, Allow):
        return
    if authority.address is not None:
        assert name is None
    else:
        assert name is not None
        if name.lower().removesuffix(".") != authority.host:
            assert encrypted
            assert level is NetworkLevel.OPEN
            outer = parse_authority(name.encode(), authority.port)
            assert isinstance(decide_host(policy, outer), Allow)
    assert level is NetworkLevel.OPEN or not encrypted
