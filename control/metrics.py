"""Control's metrics, read from the daemon when they are asked for."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


@dataclass(frozen=True, slots=True)
class Figures:
    """What is counted, at one moment."""

    live_by_state: dict[str, int]
    waiting: int
    admitted: int
    addresses_held: int
    gateway_connected: bool
    sessions_behind: int


class ControlCollector(Collector):
    """Brings `Figures` into Prometheus' form."""

    def __init__(self, read: Callable[[], Figures]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        """Return all metrics."""
        figures = self._read()
        live = GaugeMetricFamily("opificia_control_sessions", "Sessions not yet cleaned up, by state", labels=["state"])
        for state, count in figures.live_by_state.items():
            live.add_metric([state], count)
        yield live
        for name, text, value in (
            ("waiting", "Sessions that wait for room", figures.waiting),
            ("admitted", "Sessions that hold room on the host", figures.admitted),
            ("addresses_held", "Sandbox addresses that may still be granted", figures.addresses_held),
            (
                "gateway_connected",
                "Whether the gateway knows all grants (1) or not (0)",
                int(figures.gateway_connected),
            ),
            ("sessions_behind", "Sessions whose journal is ahead of the database", figures.sessions_behind),
        ):
            yield GaugeMetricFamily(f"opificia_control_{name}", text, value=value)


def registry(read: Callable[[], Figures]) -> CollectorRegistry:
    """Return a registry with control's metrics."""
    registry = CollectorRegistry()
    registry.register(ControlCollector(read))
    return registry
