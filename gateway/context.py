"""What every part of a running gateway shares: one object, passed explicitly, no globals."""

from collections.abc import Callable
from dataclasses import InitVar, dataclass, field

from gateway.access import AuditLog
from gateway.config import GatewayConfig
from gateway.metrics import Metrics
from gateway.net.model_proxy import ModelProxy
from gateway.registry import Registry


@dataclass(slots=True)
class Gateway:
    """The running gateway. `model_key` returns the operator's key of the default provider (never logged)."""

    config: GatewayConfig
    registry: Registry
    audit: AuditLog
    metrics: Metrics
    model_key: InitVar[Callable[[], bytes]]
    # The names by which sandboxes know the gateway itself.
    names: frozenset[str] = field(init=False)
    # What model connections share: providers, upstream pools, their clock.
    model: ModelProxy = field(init=False)

    def __post_init__(self, model_key: Callable[[], bytes]) -> None:
        self.names = frozenset(name.lower() for name in self.config.listen.names)
        self.model = ModelProxy(self.config, self.audit, self.metrics, model_key)
