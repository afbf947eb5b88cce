"""Host rules and what they compile to: the list of registries, and a session's policy.

A rule is `host`, `*.host` (every name below it, not the host itself), or an IP literal (`192.0.2.1`,
`[2001:db8::1]`), each with `:port` or for every port. Rules are compiled once for each grant, so that a
decision is a few dictionary look-ups.
"""

import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from gateway.contract.policy import NetworkLevel
from gateway.core.address import IPAddress
from gateway.core.authority import Authority, AuthorityError, parse_authority
from gateway.core.verdict import Allow

# Stands for "every port" in the tables; no authority has it.
_ANY_PORT: Final = 0
_match_registry_name: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,31}").fullmatch
_REGISTRY_KEYS: Final = frozenset({"name", "source", "hosts", "ports"})


class RuleError(Exception):
    """A rule that cannot be read. The message quotes it and says what would be right."""


class RuleErrors(Exception):  # noqa: N818  (the plural is the point: it carries every problem at once)
    """Everything that is wrong with a set of rules or with a list of registries, one sentence each."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(self.problems))


@dataclass(frozen=True, slots=True)
class HostRule:
    """One rule. `host` is in the normal form of an Authority; `port` None means every port."""

    host: str
    wildcard: bool = False
    port: int | None = None
    address: IPAddress | None = None

    @classmethod
    def parse(cls, text: str) -> "HostRule":
        """Read `host`, `*.host`, `host:port`, `*.host:port`, `192.0.2.1:port` or `[2001:db8::1]:port`.

        Raises RuleError.
        """
        wildcard = text.startswith("*.")
        rest = text[2:] if wildcard else text
        if "*" in rest:
            raise RuleError(f"rule {text!r}: `*` can only stand for whole labels at the start, as in `*.example.com`")
        if "/" in rest:
            raise RuleError(f"rule {text!r}: a rule is a host with or without a port, neither a network nor a URL")
        try:
            authority = parse_authority(rest.encode("utf-8", "surrogatepass"), _ANY_PORT)
        except AuthorityError as error:
            hint = "; an IPv6 address stands in brackets" if rest.count(":") > 1 and "[" not in rest else ""
            raise RuleError(f"rule {text!r}: {error}{hint}") from None
        if wildcard and authority.address is not None:
            raise RuleError(f"rule {text!r}: `*.` goes with a name, not with an IP address")
        return cls(authority.host, wildcard, authority.port or None, authority.address)

    def matches(self, authority: Authority) -> bool:
        """Tell whether the rule covers a host and port."""
        if self.port is not None and self.port != authority.port:
            return False
        if self.wildcard:
            # A name's last label is never a number, so it is the end of no IP literal.
            return authority.host.endswith("." + self.host)
        return authority.host == self.host

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port is None else f":{self.port}"
        return f"{'*.' if self.wildcard else ''}{host}{port}"


class RuleTable:
    """Rules with the Allow that each stands for, found by the labels of a host."""

    __slots__ = ("_ports",)

    def __init__(self, rules: Iterable[tuple[HostRule, Allow]] = ()) -> None:
        # By `host`, or by `.host` for `*.host`; then by port.
        self._ports: dict[str, dict[int, Allow]] = {}
        for rule, allow in rules:
            key = f".{rule.host}" if rule.wildcard else rule.host
            self._ports.setdefault(key, {}).setdefault(rule.port or _ANY_PORT, allow)

    def find(self, authority: Authority) -> Allow | None:
        """Return what covers a host and port; the nearest rule if there are several."""
        key = host = authority.host
        dot = -1
        while key:
            ports = self._ports.get(key)
            if ports is not None:
                found = ports.get(authority.port) or ports.get(_ANY_PORT)
                if found is not None:
                    return found
            dot = host.find(".", dot + 1)
            key = host[dot:] if dot > 0 else ""
        return None

    def knows_host(self, authority: Authority) -> bool:
        """Tell whether a host is covered with any port at all."""
        host = authority.host
        return host in self._ports or any(
            host[dot:] in self._ports for dot, character in enumerate(host) if character == "."
        )


@dataclass(frozen=True, slots=True)
class Registry:
    """A package registry: every one of its hosts may be reached with every one of its ports."""

    name: str
    source: str
    hosts: tuple[HostRule, ...]
    ports: tuple[int, ...]


class RegistryList:
    """The hosts of the level `registries`."""

    __slots__ = ("registries", "table")

    def __init__(self, registries: Iterable[Registry] = ()) -> None:
        self.registries = tuple(registries)
        self.table = RuleTable(
            (HostRule(rule.host, rule.wildcard, port, rule.address), Allow(f"registries:{registry.name}"))
            for registry in self.registries
            for rule in registry.hosts
            for port in registry.ports
        )


@dataclass(frozen=True, slots=True)
class Policy:
    """What one session may reach, compiled from its grant. Made by `compile` only."""

    level: NetworkLevel
    allow: tuple[HostRule, ...]
    deny: tuple[HostRule, ...]
    registries: RegistryList
    allow_table: RuleTable
    deny_table: RuleTable
    denied_literals: dict[IPAddress, frozenset[int | None]]

    @classmethod
    def compile(
        cls, level: NetworkLevel, allow: Iterable[str], deny: Iterable[str], registries: RegistryList
    ) -> "Policy":
        """Compile a session's rules. Raises RuleErrors with every rule that cannot be read."""
        problems: list[str] = []
        allow_rules = _parse_rules("allow", allow, problems)
        deny_rules = _parse_rules("deny", deny, problems)
        if problems:
            raise RuleErrors(problems)
        literals: dict[IPAddress, frozenset[int | None]] = {}
        for rule in deny_rules:
            if rule.address is not None:
                literals[rule.address] = literals.get(rule.address, frozenset()) | {rule.port}
        return cls(
            level,
            allow_rules,
            deny_rules,
            registries,
            RuleTable((rule, Allow(f"allow:{rule}")) for rule in allow_rules),
            RuleTable((rule, Allow(f"deny:{rule}")) for rule in deny_rules),
            literals,
        )

    def denies_address(self, address: IPAddress, port: int) -> bool:
        """Tell whether a `deny` rule names an IP address itself."""
        ports = self.denied_literals.get(address)
        return ports is not None and (None in ports or port in ports)


def load_registries(text: str) -> RegistryList:
    """Read a list of registries (TOML, as `gateway/data/registries.toml`).

    Raises RuleErrors with every problem.
    """
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise RuleErrors([f"not TOML: {error}"]) from None
    problems = [f"unknown key {key!r}" for key in document if key != "registry"]
    entries = document.get("registry", [])
    if not isinstance(entries, list) or not entries:
        raise RuleErrors([*problems, "no [[registry]] in it"])
    registries: list[Registry] = []
    names: set[str] = set()
    owners: dict[str, str] = {}
    for number, entry in enumerate(entries, 1):
        registry = _read_registry(entry, f"registry {number}", problems)
        if registry is None:
            continue
        if registry.name in names:
            problems.append(f"registry {registry.name!r} is given twice")
        names.add(registry.name)
        for rule in registry.hosts:
            owner = owners.setdefault(str(rule), registry.name)
            if owner != registry.name:
                problems.append(f"registry {registry.name!r}: host {str(rule)!r} is in registry {owner!r} already")
        registries.append(registry)
    if problems:
        raise RuleErrors(problems)
    return RegistryList(registries)


def _parse_rules(kind: str, texts: Iterable[str], problems: list[str]) -> tuple[HostRule, ...]:
    rules = []
    for text in texts:
        try:
            rules.append(HostRule.parse(text))
        except RuleError as error:
            problems.append(f"{kind}: {error}")
    return tuple(dict.fromkeys(rules))


def _read_registry(entry: object, where: str, problems: list[str]) -> Registry | None:
    """Read one [[registry]]. What is wrong with it is added to `problems`, and None returned then."""
    before = len(problems)
    if not isinstance(entry, dict):
        problems.append(f"{where} is not a table")
        return None
    name = entry.get("name")
    if isinstance(name, str) and _match_registry_name(name):
        where = f"registry {name!r}"
    else:
        name = ""
        problems.append(f"{where}: `name` must be 1 to 32 of a-z, 0-9 and inner hyphens")
    problems.extend(f"{where}: unknown key {key!r}" for key in entry if key not in _REGISTRY_KEYS)
    source = entry.get("source")
    if not isinstance(source, str) or not source:
        source = ""
        problems.append(f"{where}: `source` must say where its hosts are documented")
    hosts = tuple(_read_hosts(entry.get("hosts"), where, problems))
    ports = entry.get("ports")
    if not isinstance(ports, list) or not ports or not all(_is_port(port) for port in ports):
        ports = []
        problems.append(f"{where}: `ports` must be a list of numbers from 1 to 65535")
    if len(problems) > before:
        return None
    return Registry(name, source, hosts, tuple(ports))


def _read_hosts(hosts: object, where: str, problems: list[str]) -> Iterator[HostRule]:
    if not isinstance(hosts, list) or not hosts or not all(isinstance(host, str) for host in hosts):
        problems.append(f"{where}: `hosts` must be a list of host names")
        return
    for host in hosts:
        try:
            rule = HostRule.parse(host)
        except RuleError as error:
            problems.append(f"{where}: {error}")
            continue
        if rule.port is not None:
            problems.append(f"{where}: host {host!r} must have no port; `ports` holds for all hosts")
        yield rule


def _is_port(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= 65535
