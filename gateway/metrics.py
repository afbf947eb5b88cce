"""Prometheus metrics of the gateway. Every label value is from a closed set of ours: no hostile string becomes a label.

Counts are plain numbers that only the event loop's thread changes, and become metric families when somebody asks:
prometheus_client's own counters take a lock and two checks each time, which eight times a connection was 4 % of its cost.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.core.verdict import CloseReason, DenyReason

_PREFIX: Final = "opificia_gateway_"
_SECONDS: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_KINDS: Final = ("connect", "http", "model", "runner", "request")


class Count:
    """A number that goes up; a gauge's goes down too."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def inc(self, amount: int = 1) -> None:
        """Add."""
        self.value += amount

    def dec(self) -> None:
        """Take one away."""
        self.value -= 1

    def set(self, value: int) -> None:
        """Replace."""
        self.value = value


class Distribution:
    """How many values lie up to each bound, and their sum: a histogram."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...] = _SECONDS) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, name: str, text: str) -> Metric:
        """Return it as Prometheus has it: every bucket holds the ones before."""
        buckets = []
        total = 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        family = HistogramMetricFamily(_PREFIX + name, text)
        family.add_metric([], buckets, self._sum)
        return family


# Label values, and the count that has them.
_Labelled = dict[tuple[str, ...], Count]


class Metrics(Collector):
    """The gateway's metrics in a registry of their own."""

    def __init__(self) -> None:
        self.refused = {(kind, reason): Count() for kind in _KINDS for reason in DenyReason}
        self.allowed = {kind: Count() for kind in _KINDS}
        self.closed = {reason: Count() for reason in CloseReason}
        self.bytes_up = Count()
        self.bytes_down = Count()
        self.connections = Count()
        self.overload_total = Count()
        self.overload_source = Count()
        self.overload_descriptors = Count()
        self.tunnels = Count()
        # Connection slots and pipes that sessions hold now: theirs to tell.
        self.held: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self.resolve_seconds = Distribution()
        self.connect_seconds = Distribution()
        self.slot_wait_seconds = Distribution()
        self.model_status = {name: Count() for name in ("2xx", "3xx", "4xx", "5xx", "aborted")}
        self.model_first_byte_seconds = Distribution((*_SECONDS, 60.0, 120.0))
        self.audit_lost = Count()
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics as families."""
        decisions: _Labelled = {(kind, "allowed"): count for kind, count in self.allowed.items()}
        decisions |= {(kind, reason.value): count for (kind, reason), count in self.refused.items()}
        yield _counter("decisions", "Decisions about requests from sandboxes", ("kind", "reason"), decisions)
        closed: _Labelled = {(reason.value,): count for reason, count in self.closed.items()}
        yield _counter("tunnels_closed", "Tunnels that ended", ("reason",), closed)
        yield _counter("egress_up_bytes", "Bytes from sandboxes, counted when a tunnel ends", (), {(): self.bytes_up})
        yield _counter("egress_down_bytes", "Bytes to sandboxes, counted when a tunnel ends", (), {(): self.bytes_down})
        yield _counter("connections", "Connections accepted", (), {(): self.connections})
        overloads: _Labelled = {
            ("unauthenticated_total",): self.overload_total,
            ("unauthenticated_source",): self.overload_source,
            ("descriptors",): self.overload_descriptors,
        }
        yield _counter("overloads", "Connections refused for want of room", ("what",), overloads)
        yield GaugeMetricFamily(_PREFIX + "tunnels", "Tunnels open now", value=self.tunnels.value)
        slots, pipes = self.held()
        yield GaugeMetricFamily(_PREFIX + "slots_held", "Connection slots that sessions hold now", value=slots)
        yield GaugeMetricFamily(_PREFIX + "pipes_held", "Pipes with bytes of sessions in flight now", value=pipes)
        yield self.resolve_seconds.family("resolve_seconds", "Time of name look-ups that were not cached")
        yield self.connect_seconds.family("connect_seconds", "Time to reach external hosts")
        yield self.slot_wait_seconds.family(
            "slot_wait_seconds", "Time that connections waited for a slot of their session"
        )
        statuses: _Labelled = {(name,): count for name, count in self.model_status.items()}
        yield _counter("model_requests", "Model requests by status class", ("status",), statuses)
        yield self.model_first_byte_seconds.family("model_first_byte_seconds", "Time to the provider's first byte")
        yield GaugeMetricFamily(
            _PREFIX + "audit_lines_lost", "Audit lines that the disk did not take", value=self.audit_lost.value
        )


def _counter(name: str, text: str, labels: tuple[str, ...], counts: _Labelled) -> CounterMetricFamily:
    family = CounterMetricFamily(_PREFIX + name, text, labels=labels)
    for values, count in counts.items():
        family.add_metric(values, count.value)
    return family
