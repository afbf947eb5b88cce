"""control.toml as frozen structs; every problem is reported at once, with key and line."""

from pathlib import Path
from typing import Final

from control.plan.admission import Capacity
from control.plan.container import DockerSettings, ImageSettings, SandboxSettings
from control.plan.host import ForwarderSettings, HostPlan
from control.plan.network import NetworkSettings
from control.spec import Bounds
from gateway.contract.limits import GIB, ControlLimits
from gateway.contract.policy import MAX_NUMBER
from gateway.runtime.addresses import UnixAddress, address_problems, parse_address
from gateway.runtime.settings import Checked, load

DEFAULT_PATH: Final = Path("/etc/opificia/control.toml")
# Kept for the host itself and the daemons when the operator does not say how much sandboxes may take.
RESERVED_MEMORY_BYTES: Final = 2 * GIB
# CPU shares can be overbooked, memory cannot: agents wait for models and networks most of the time.
CPU_OVERBOOKING: Final = 4


class StoreSettings(Checked, frozen=True):
    """`[store]`: the database."""

    url: str = "sqlite:////var/lib/opificia/control.db"

    def problems(self) -> list[str]:
        if not self.url.startswith(("sqlite:///", "postgresql://")):
            return ["url: must begin with sqlite:/// or postgresql://"]
        return []


class PathSettings(Checked, frozen=True):
    """`[paths]`: where sessions' folders lie, where the gateway writes egress logs, the folder with the gateway's door."""

    data: str = "/var/lib/opificia"
    egress_logs: str = "/var/log/opificia/egress"
    door: str = "/run/opificia/door"

    def problems(self) -> list[str]:
        return [
            f"{name}: {getattr(self, name)!r} is not an absolute path"
            for name in self.__struct_fields__
            if not getattr(self, name).startswith("/")
        ]


class ListenSettings(Checked, frozen=True):
    """`[listen]`: the API, and the socket to which the gateway hands runners. `tcp` needs a file with a bearer token."""

    api: str = "unix:/run/opificia/api/control.sock"
    runner: str = "unix:/run/opificia/runner/control.sock"
    tcp: str = ""
    token_file: str = ""

    def problems(self) -> list[str]:
        problems = [
            *address_problems("api", self.api, unix_only=True),
            *address_problems("runner", self.runner, unix_only=True),
        ]
        if self.tcp:
            problems += address_problems("tcp", self.tcp)
            if not self.token_file:
                problems.append(
                    "token_file: is needed when tcp is set, or anyone who can connect could start containers"
                )
        return problems


class GatewaySettings(Checked, frozen=True):
    """`[gateway]`: the contract socket."""

    contract: str = "unix:/run/opificia/contract/gateway.sock"

    def problems(self) -> list[str]:
        return address_problems("contract", self.contract, unix_only=True)


class AdmissionSettings(Checked, frozen=True):
    """`[admission]`: what all sandboxes together may take; 0: derived from the host (see `capacity`)."""

    memory_bytes: int = 0
    cpus: float = 0

    def problems(self) -> list[str]:
        # TOML has inf and nan; nan is neither below nor above anything.
        return [
            f"{name}: must be between 0 and 2^53"
            for name in self.__struct_fields__
            if not 0 <= getattr(self, name) <= MAX_NUMBER
        ]


class _Sandbox(SandboxSettings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    def __post_init__(self) -> None:
        if problems := self.problems():
            raise ValueError("\n".join(problems))


class _Network(NetworkSettings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    def __post_init__(self) -> None:
        if problems := self.problems():
            raise ValueError("\n".join(problems))


class _Forwarder(ForwarderSettings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    def __post_init__(self) -> None:
        if problems := self.problems():
            raise ValueError("\n".join(problems))


class _Docker(DockerSettings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    def __post_init__(self) -> None:
        if problems := self.problems():
            raise ValueError("\n".join(problems))


class ControlConfig(Checked, frozen=True):
    """control.toml."""

    store: StoreSettings = StoreSettings()
    paths: PathSettings = PathSettings()
    docker: _Docker = _Docker()
    network: _Network = _Network()
    forwarder: _Forwarder = _Forwarder()
    images: ImageSettings = ImageSettings()
    listen: ListenSettings = ListenSettings()
    gateway: GatewaySettings = GatewaySettings()
    sandbox: _Sandbox = _Sandbox()
    admission: AdmissionSettings = AdmissionSettings()
    limits: ControlLimits = ControlLimits()

    def capacity(self, host_memory_bytes: int, host_cpus: int) -> Capacity:
        """Return what all sandboxes together may take on a host of this size."""
        memory = self.admission.memory_bytes or max(host_memory_bytes - RESERVED_MEMORY_BYTES, host_memory_bytes // 2)
        return Capacity(
            memory_bytes=memory,
            cpus=self.admission.cpus or host_cpus * CPU_OVERBOOKING,
            sessions=self.limits.max_running,
            waiting=self.limits.max_waiting,
        )

    def bounds(self, capacity: Capacity) -> Bounds:
        """Return what one session may ask for at most."""
        scratch = self.sandbox.work_bytes + self.sandbox.tmp_bytes + self.sandbox.home_bytes
        return Bounds(
            memory_bytes=max(capacity.memory_bytes, self.sandbox.memory_bytes),
            min_memory_bytes=scratch + 1,
            cpus=max(capacity.cpus, self.sandbox.cpus),
            pids=self.sandbox.pids,
            session_time_ms=self.limits.session_time_ms,
            in_roots=self.sandbox.in_roots,
            runtimes=self.sandbox.runtimes,
        )

    @property
    def host_plan(self) -> HostPlan:
        """What the host is to have: network, forwarder, helpers."""
        return HostPlan(network=self.network, images=self.images, forwarder=self.forwarder, door=self.paths.door)

    @property
    def data(self) -> Path:
        """The folder that holds everything control keeps."""
        return Path(self.paths.data)


def unix_path(text: str) -> UnixAddress:
    """Return a checked `unix:` setting as an address."""
    address = parse_address(text)
    assert isinstance(address, UnixAddress)
    return address


def load_config(path: Path) -> ControlConfig:
    """Read control.toml. Raises SettingsError with every problem."""
    return load(path, ControlConfig)
