"""gateway.toml as frozen structs. What each setting means stands in docs/configuration.md; every problem is reported at once."""

import ipaddress
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from gateway.contract.ids import is_session_id, is_sha256, token_sha256
from gateway.contract.limits import GatewayLimits
from gateway.contract.policy import EgressBudget, Grant, ModelBudget, NetworkLevel, budget_problems
from gateway.core.authority import AuthorityError, parse_authority
from gateway.core.decide import TrustedNetwork
from gateway.core.providers import ANTHROPIC_URL, ProviderSettings, ShapeName, parse_upstream
from gateway.core.rules import HostRule, RuleError
from gateway.runtime.addresses import address_problems
from gateway.runtime.settings import Checked, load

IPNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network
DNS_PORT = 53
# Half of what credentials may have: Basic sends them in base64, with the session id before them.
_match_token = re.compile(r"[\x21-\x7e]{1,512}").fullmatch


def _network_problem(name: str, text: str) -> list[str]:
    try:
        ipaddress.ip_network(text)
    except ValueError as error:
        return [f"{name}: {error}"]
    return []


def _repeated(names: Iterable[str]) -> list[str]:
    return sorted(name for name, count in Counter(names).items() if count > 1)


class ListenSettings(Checked, frozen=True):
    """Where the gateway listens. `names` are the host names by which sandboxes know the gateway itself."""

    sandbox: str = "127.0.0.1:8900"
    contract: str = ""
    metrics: str = ""
    proxy_protocol: bool = False
    names: tuple[str, ...] = ("opificia-gateway",)

    def problems(self) -> list[str]:
        problems = address_problems("sandbox", self.sandbox)
        if self.contract:
            problems += address_problems("contract", self.contract, unix_only=True)
        if self.metrics:
            problems += address_problems("metrics", self.metrics)
        return problems


class SessionsSettings(Checked, frozen=True):
    """Sessions without a control daemon."""

    file: str = ""


class TrustedSettings(Checked, frozen=True):
    """A network that is not public but open for some hosts and ports: an internal mirror."""

    hosts: tuple[str, ...]
    ports: tuple[int, ...]
    network: str

    def problems(self) -> list[str]:
        problems = _network_problem("network", self.network)
        problems += [
            f"{name}: is empty, so the entry opens nothing" for name in ("hosts", "ports") if not getattr(self, name)
        ]
        problems += [f"ports: {port} is not a port" for port in self.ports if not 0 < port < 65536]
        for host in self.hosts:
            try:
                HostRule.parse(host)
            except RuleError as error:
                problems.append(f"hosts: {error}")
        return problems

    def compiled(self) -> TrustedNetwork:
        """Return the entry in the form that decisions use."""
        hosts = tuple(HostRule.parse(host) for host in self.hosts)
        return TrustedNetwork(hosts, frozenset(self.ports), ipaddress.ip_network(self.network))


class EgressSettings(Checked, frozen=True):
    """The operator's own part of the egress policy."""

    denied_networks: tuple[str, ...] = ()
    nameservers: tuple[str, ...] = ()
    allow_loopback: bool = False
    check_sni: bool = True
    registries_file: str = ""
    trusted: tuple[TrustedSettings, ...] = ()

    def problems(self) -> list[str]:
        problems = [line for text in self.denied_networks for line in _network_problem("denied_networks", text)]
        for text in self.nameservers:
            try:
                nameserver(text)
            except ValueError as error:
                problems.append(f"nameservers: {error}")
        return problems


def nameserver(text: str) -> tuple[str, int]:
    """Read `address` or `address:port` of a name server. Raises ValueError."""
    try:
        return str(ipaddress.ip_address(text)), DNS_PORT
    except ValueError:
        pass
    try:
        authority = parse_authority(text.encode())
    except AuthorityError as error:
        raise ValueError(f"{text!r} is neither an address nor address:port: {error}") from error
    if authority.address is None:
        raise ValueError(f"{text!r} is a name; a name server is given by its address")
    return str(authority.address), authority.port


class AuditSettings(Checked, frozen=True):
    """Where each session's egress log goes: `<dir>/<session>.log`."""

    dir: str = ""


class ModelSettings(Checked, frozen=True):
    """The default model provider and further ones."""

    upstream: str = ANTHROPIC_URL
    shape: ShapeName = "anthropic"
    api_key_file: str = ""
    ca_file: str = ""
    provider: tuple[ProviderSettings, ...] = ()

    def problems(self) -> list[str]:
        problems = []
        try:
            parse_upstream(self.upstream)
        except ValueError as error:
            problems.append(f"upstream: {error}")
        if self.shape != "anthropic" and self.upstream == ANTHROPIC_URL:
            problems.append(f"upstream: {ANTHROPIC_URL} is not of the shape {self.shape!r}; name the provider")
        problems += [f"provider: {name!r} is there twice" for name in _repeated(each.name for each in self.provider)]
        return problems


class RunnerSettings(Checked, frozen=True):
    """Where runners' connections are handed to: control's socket."""

    upstream: str = ""

    def problems(self) -> list[str]:
        return address_problems("upstream", self.upstream) if self.upstream else []


class GatewayConfig(Checked, frozen=True):
    """gateway.toml."""

    listen: ListenSettings = ListenSettings()
    sessions: SessionsSettings = SessionsSettings()
    egress: EgressSettings = EgressSettings()
    audit: AuditSettings = AuditSettings()
    limits: GatewayLimits = GatewayLimits()
    model: ModelSettings = ModelSettings()
    runner: RunnerSettings = RunnerSettings()

    def problems(self) -> list[str]:
        if not self.sessions.file and not self.listen.contract:
            return ["neither [sessions] file nor [listen] contract is set, so nobody could ever be let in"]
        return []


class SessionSettings(Checked, frozen=True):
    """One `[[session]]` of sessions.toml: a grant with either the token or its SHA-256."""

    id: str
    token: str = ""
    token_sha256: str = ""
    network: NetworkLevel = NetworkLevel.NONE
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    egress_budget: EgressBudget = EgressBudget()
    model_budget: ModelBudget = ModelBudget()
    models: tuple[str, ...] = ()
    address: str | None = None

    def problems(self) -> list[str]:
        problems = []
        if not is_session_id(self.id):
            problems.append(f"id: {self.id[:80]!r} is not 1 to 64 of a-z, 0-9 and -")
        if bool(self.token) == bool(self.token_sha256):
            problems.append("token: give exactly one of token and token_sha256")
        if self.token and _match_token(self.token) is None:
            problems.append("token: is not 1 to 512 printable ASCII characters without blanks, as clients can send it")
        if self.token_sha256 and not is_sha256(self.token_sha256):
            problems.append("token_sha256: is not 64 lower-case hex digits")
        problems += budget_problems(self.egress_budget, self.model_budget)
        for field in ("allow", "deny"):
            for text in getattr(self, field):
                try:
                    HostRule.parse(text)
                except RuleError as error:
                    problems.append(f"{field}: {error}")
        if self.address is not None:
            try:
                ipaddress.ip_address(self.address)
            except ValueError as error:
                problems.append(f"address: {error}")
        return problems

    def grant(self) -> Grant:
        """Return the session as control would grant it."""
        return Grant(
            session=self.id,
            token_sha256=self.token_sha256 or token_sha256(self.token),
            network=self.network,
            allow=self.allow,
            deny=self.deny,
            egress_budget=self.egress_budget,
            model_budget=self.model_budget,
            models=self.models,
            address=self.address,
        )


class SessionsFile(Checked, frozen=True):
    """sessions.toml."""

    session: tuple[SessionSettings, ...] = ()

    def problems(self) -> list[str]:
        twice = _repeated(each.id for each in self.session)
        shared = _repeated(str(ipaddress.ip_address(each.address)) for each in self.session if each.address is not None)
        return [f"session: {name!r} is there twice" for name in twice] + [
            f"session: address {address} is given to two sessions" for address in shared
        ]


def load_config(path: Path) -> GatewayConfig:
    """Read gateway.toml. Raises SettingsError with every problem."""
    return load(path, GatewayConfig)


def load_sessions(path: Path) -> tuple[Grant, ...]:
    """Read sessions.toml as grants. Raises SettingsError with every problem."""
    return tuple(session.grant() for session in load(path, SessionsFile).session)
