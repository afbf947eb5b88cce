"""Prometheus metrics of the gateway. Every label value is from a closed set of ours: no hostile string becomes a label."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from gateway.core.verdict import CloseReason, DenyReason

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class Metrics:
    """The gateway's metrics in a registry of their own."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        decisions = Counter(
            "opificia_gateway_decisions",
            "Decisions about requests from sandboxes",
            ("kind", "reason"),
            registry=registry,
        )
        kinds = ("connect", "http", "model", "runner", "request")
        # Bound once: labels() costs more than the increment.
        self.refused = {(kind, reason): decisions.labels(kind, reason.value) for kind in kinds for reason in DenyReason}
        self.allowed = {kind: decisions.labels(kind, "allowed") for kind in kinds}
        closed = Counter("opificia_gateway_tunnels_closed", "Tunnels that ended", ("reason",), registry=registry)
        self.closed = {reason: closed.labels(reason.value) for reason in CloseReason}
        self.bytes_up = Counter(
            "opificia_gateway_egress_up_bytes", "Bytes from sandboxes, counted when a tunnel ends", registry=registry
        )
        self.bytes_down = Counter(
            "opificia_gateway_egress_down_bytes", "Bytes to sandboxes, counted when a tunnel ends", registry=registry
        )
        self.connections = Counter("opificia_gateway_connections", "Connections accepted", registry=registry)
        self.overloads = Counter(
            "opificia_gateway_overloads", "Connections refused for want of room", ("what",), registry=registry
        )
        self.overload_total = self.overloads.labels("unauthenticated_total")
        self.overload_source = self.overloads.labels("unauthenticated_source")
        self.overload_descriptors = self.overloads.labels("descriptors")
        self.tunnels = Gauge("opificia_gateway_tunnels", "Tunnels open now", registry=registry)
        self.resolve_seconds = Histogram(
            "opificia_gateway_resolve_seconds", "Time of name look-ups that were not cached",
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.connect_seconds = Histogram(
            "opificia_gateway_connect_seconds", "Time to reach external hosts", buckets=_SECONDS, registry=registry
        )
        self.slot_wait_seconds = Histogram(
            "opificia_gateway_slot_wait_seconds", "Time that connections waited for a slot of their session",
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.model_requests = Counter(
            "opificia_gateway_model_requests", "Model requests by status class", ("status",), registry=registry
        )
        self.model_status = {name: self.model_requests.labels(name) for name in ("2xx", "3xx", "4xx", "5xx", "aborted")}
        self.model_first_byte_seconds = Histogram(
            "opificia_gateway_model_first_byte_seconds", "Time to the provider's first byte",
            buckets=(*_SECONDS, 60.0, 120.0), registry=registry,
        )  # fmt: skip
        self.audit_lost = Gauge(
            "opificia_gateway_audit_lines_lost", "Audit lines that the disk did not take", registry=registry
        )

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)
