"""Host rules, the list of registries, and a compiled policy."""

from importlib import resources
from ipaddress import IPv4Address, IPv6Address

import pytest

from gateway.contract.policy import NetworkLevel
from gateway.core.authority import parse_authority
from gateway.core.rules import HostRule, Policy, RegistryList, RuleError, RuleErrors, load_registries


def matches(rule: str, authority: str) -> bool:
    return HostRule.parse(rule).matches(parse_authority(authority.encode()))


@pytest.mark.parametrize(
    ("rule", "authority"),
    [
        ("example.com", "example.com:443"),
        ("example.com", "example.com:22"),
        ("EXAMPLE.com.", "example.com:443"),
        ("example.com", "EXAMPLE.COM.:443"),
        ("example.com:22", "example.com:22"),
        ("*.example.com", "a.example.com:443"),
        ("*.example.com", "a.b.example.com:443"),
        ("*.example.com:8443", "a.example.com:8443"),
        ("bücher.example", "xn--bcher-kva.example:443"),
        ("*.xn--bcher-kva.example", "www.bücher.example:443"),
        ("192.0.2.1", "192.0.2.1:80"),
        ("192.0.2.1:80", "192.0.2.1:80"),
        ("[2001:db8::1]", "[2001:DB8:0::1]:443"),
        ("[2001:db8::1]:443", "[2001:db8::1]:443"),
    ],
)
def test_a_rule_covers(rule: str, authority: str) -> None:
    assert matches(rule, authority)


@pytest.mark.parametrize(
    ("rule", "authority"),
    [
        ("example.com", "a.example.com:443"),
        ("example.com", "example.com.evil.example:443"),
        ("*.example.com", "example.com:443"),
        ("*.example.com", "evilexample.com:443"),
        ("*.example.com", "example.com.evil.example:443"),
        ("example.com:443", "example.com:80"),
        ("*.example.com:443", "a.example.com:80"),
        ("192.0.2.1", "192.0.2.2:80"),
        ("192.0.2.1:80", "192.0.2.1:81"),
        ("192.0.2.1", "[::ffff:192.0.2.1]:80"),
        ("[2001:db8::1]", "[2001:db8::2]:443"),
    ],
)
def test_a_rule_does_not_cover(rule: str, authority: str) -> None:
    assert not matches(rule, authority)


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("Example.COM.", "example.com"),
        ("*.Example.com:443", "*.example.com:443"),
        ("[2001:DB8::1]:22", "[2001:db8::1]:22"),
        ("[2001:db8::1]", "[2001:db8::1]"),
        ("bücher.example", "xn--bcher-kva.example"),
    ],
)
def test_a_rule_is_written_in_its_normal_form(text: str, written: str) -> None:
    assert str(HostRule.parse(text)) == written
    assert HostRule.parse(written) == HostRule.parse(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("*", "start"),
        ("*.", "empty|missing"),
        ("*.*.example.com", "start"),
        ("a.*.example.com", "start"),
        ("a*.example.com", "start"),
        ("**.example.com", "start"),
        ("*example.com", "start"),
        ("*.192.0.2.1", "IP address"),
        ("*.[2001:db8::1]", "IP address"),
        ("*.0.2.1", "IPv4"),
        ("10.0.0.0/8", "neither a network nor a URL"),
        ("https://example.com", "neither a network nor a URL"),
        ("2001:db8::1", "brackets"),
        ("::1", "brackets"),
        ("example.com:0", "port"),
        ("example.com:65536", "port"),
        ("example.com:", "port"),
        ("user@example.com", "credentials"),
        ("127.1", "IPv4"),
        (" example.com", "example.com"),
        ("example..com", "empty label"),
        ("", "''"),
        ("\ud800", "international"),
    ],
)
def test_refuses_a_rule_that_would_not_do_what_it_says(text: str, why: str) -> None:
    with pytest.raises(RuleError, match=why):
        HostRule.parse(text)


def test_reports_every_bad_rule_at_once() -> None:
    with pytest.raises(RuleErrors) as caught:
        Policy.compile(NetworkLevel.OPEN, ["*", "example.com"], ["127.1", "a/b"], RegistryList())
    assert len(caught.value.problems) == 3
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["allow", "deny", "deny"]


def test_a_rule_given_twice_counts_once() -> None:
    policy = Policy.compile(NetworkLevel.OPEN, ["a.example", "A.example."], [], RegistryList())
    assert policy.allow == (HostRule("a.example"),)


def test_knows_the_addresses_that_are_denied_themselves() -> None:
    policy = Policy.compile(
        NetworkLevel.OPEN, [], ["198.41.0.4:80", "198.41.0.4:81", "[2001:503::1]", "example.com"], RegistryList()
    )
    assert policy.denies_address(IPv4Address("198.41.0.4"), 80)
    assert policy.denies_address(IPv4Address("198.41.0.4"), 81)
    assert not policy.denies_address(IPv4Address("198.41.0.4"), 443)
    assert policy.denies_address(IPv6Address("2001:503::1"), 443)
    assert not policy.denies_address(IPv4Address("198.41.0.5"), 80)


# -- the list of registries

BUILT_IN = resources.files("gateway").joinpath("data/registries.toml").read_text(encoding="utf-8")

EXPECTED = {
    "pypi": {"pypi.org:443", "files.pythonhosted.org:443"},
    "npm": {"registry.npmjs.org:443"},
    "debian": {"deb.debian.org:80", "deb.debian.org:443", "security.debian.org:80"},
    "ubuntu": {"archive.ubuntu.com:80", "de.archive.ubuntu.com:80", "security.ubuntu.com:443"},
    "alpine": {"dl-cdn.alpinelinux.org:443"},
    "crates-io": {"index.crates.io:443", "static.crates.io:443", "crates.io:443"},
    "go": {"proxy.golang.org:443", "sum.golang.org:443"},
    "rubygems": {"rubygems.org:443", "index.rubygems.org:443"},
    "maven-central": {"repo1.maven.org:443", "repo.maven.apache.org:443"},
}


def test_the_built_in_list_has_these_registries() -> None:
    registries = load_registries(BUILT_IN)
    assert [registry.name for registry in registries.registries] == list(EXPECTED)
    for name, authorities in EXPECTED.items():
        for authority in authorities:
            allowed = registries.table.find(parse_authority(authority.encode()))
            assert allowed is not None
            assert allowed.rule == f"registries:{name}"


@pytest.mark.parametrize(
    "authority",
    [
        "github.com:443",
        "raw.githubusercontent.com:443",
        "gitlab.com:443",
        "storage.googleapis.com:443",
        "upload.pypi.org:443",
        "ppa.launchpadcontent.net:443",
        "pypi.org:80",
        "pypi.org:22",
        "deb.debian.org:22",
        "evil.pypi.org:443",
        "evilpypi.org:443",
    ],
)
def test_the_built_in_list_has_no_code_hosts_no_uploads_and_no_other_ports(authority: str) -> None:
    assert load_registries(BUILT_IN).table.find(parse_authority(authority.encode())) is None


def test_every_built_in_registry_says_where_its_hosts_are_documented() -> None:
    assert all(registry.source.startswith("https://") for registry in load_registries(BUILT_IN).registries)


def test_reports_every_problem_of_a_list_at_once() -> None:
    text = """
    version = 1
    [[registry]]
    name = "Bad Name"
    source = ""
    hosts = ["*", "a/b"]
    ports = [0]
    [[registry]]
    name = "twice"
    source = "s"
    hosts = ["a.example"]
    ports = [443]
    [[registry]]
    name = "twice"
    source = "s"
    hosts = ["b.example:443"]
    ports = [443]
    colour = "red"
    [[registry]]
    name = "other"
    source = "s"
    hosts = ["A.example."]
    ports = [443]
    [[registry]]
    name = "twice"
    source = "s"
    hosts = ["c.example"]
    ports = [443]
    """
    with pytest.raises(RuleErrors) as caught:
        load_registries(text)
    problems = "\n".join(caught.value.problems)
    for expected in (
        "unknown key 'version'",
        "registry 1: `name`",
        "registry 1: `source`",
        "registry 1: rule '*'",
        "registry 1: rule 'a/b'",
        "registry 1: `ports`",
        "registry 'twice': unknown key 'colour'",
        "host 'b.example:443' must have no port",
        "registry 'other': host 'a.example' is in registry 'twice' already",
        "registry 'twice' is given twice",
    ):
        assert expected in problems


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", r"no \[\[registry\]\]"),
        ("registry = 1", r"no \[\[registry\]\]"),
        ("registry = [1]", "registry 1 is not a table"),
        ("[[registry]", "not TOML"),
        ('[[registry]]\nname="a"\nsource="s"\nhosts=["a.example"]\nports=[true]', "`ports`"),
        ('[[registry]]\nname="a"\nsource="s"\nhosts=["a.example"]\nports=["443"]', "`ports`"),
        ('[[registry]]\nname="a"\nsource="s"\nhosts=["a.example"]\nports=[]', "`ports`"),
        ('[[registry]]\nname="a"\nsource="s"\nhosts="a.example"\nports=[443]', "`hosts`"),
        ('[[registry]]\nname="a"\nsource="s"\nhosts=[1]\nports=[443]', "`hosts`"),
        ('[[registry]]\nname="a"\nhosts=["a.example"]\nports=[443]', "`source`"),
    ],
)
def test_refuses_a_list_that_is_not_one(text: str, problem: str) -> None:
    with pytest.raises(RuleErrors, match=problem):
        load_registries(text)
