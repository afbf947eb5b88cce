"""What all model connections of one gateway share: providers with their keys and pools, limits, the clock, the reports."""

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

from gateway.access import AuditLog, ModelCost
from gateway.config import GatewayConfig
from gateway.contract.limits import GatewayLimits
from gateway.core.model_refusal import ModelRefusal
from gateway.core.model_request import RequestRules
from gateway.core.providers import SHAPES, Shape, parse_upstream
from gateway.core.verdict import CloseReason, DenyReason
from gateway.credentials import ModelKey
from gateway.metrics import Metrics
from gateway.net.poller import Poller
from gateway.net.upstream_pool import UpstreamPool, client_context

if TYPE_CHECKING:
    from gateway.net.model_ask import Ask

# Connections that wait for their clients to read a last reply; more are closed at once, as a flood of refusals would be.
MAX_LINGERING: Final = 1024
# Parts of the shortest limit that a deadline may be late.
_TICKS_PER_LIMIT: Final = 8
_MAX_TICK_S: Final = 0.25
# By the first digit of a status; what is above 599 is no better than a 5xx.
_CLASSES: Final = ("aborted", "aborted", "2xx", "3xx", "4xx", "5xx")


class ProviderError(Exception):
    """A provider cannot be used as configured; the message is one sentence with the setting's name."""


class Ticking(Protocol):
    """A client connection, as the clock sees it."""

    def tick(self, now: float) -> None:
        """Look at the deadlines."""

    def drain(self) -> None:
        """End when the present request has ended."""

    def hand_back(self) -> None:
        """Go back to the router, if it is between two requests."""

    def abort(self, reason: CloseReason) -> None:
        """End now."""


class Provider:
    """One provider at work."""

    def __init__(self, shape: Shape, upstream: str, pool: UpstreamPool, key: Callable[[], bytes]) -> None:
        self.shape = shape
        self.url = parse_upstream(upstream)
        self.pool = pool
        self.key = key
        self._fixed_for: bytes | None = None
        self._fixed = b""

    def fixed_headers(self) -> bytes:
        """Return the header lines that every request to the provider gets. They hold the key."""
        key = self.key()
        if key != self._fixed_for:
            self._fixed_for = key
            lines = [b"host: " + self.url.host_header, b"accept-encoding: identity"]
            # A local model server may want no key at all.
            if key:
                lines.append(self.shape.key_header + b": " + self.shape.key_prefix + key)
            self._fixed = b"".join(line + b"\r\n" for line in lines)
        return self._fixed


class ModelProxy:
    """Made once for a gateway. Raises ProviderError or ModelKeyError."""

    def __init__(
        self, config: GatewayConfig, audit: AuditLog, metrics: Metrics, default_key: Callable[[], bytes]
    ) -> None:
        self.limits: GatewayLimits = config.limits
        self.draining = False
        # Requests that are being served, from their head to the end of their reply.
        self.running = 0
        self._audit = audit
        self._metrics = metrics
        self._held_bytes = 0
        self._lingering = 0
        self._waiting = 0
        # Counted, and not yet in the metrics.
        self._allowed = 0
        self._statuses = dict.fromkeys(metrics.model_status, 0)
        self._clients: set[Ticking] = set()
        self._timer: asyncio.TimerHandle | None = None
        model = config.model
        self.default = Provider(
            SHAPES[model.shape], model.upstream, self._pool(model.upstream, model.ca_file), default_key
        )
        # A further provider has a key file or, as a local model server may, no key.
        self.keys = {each.name.encode(): ModelKey(each.api_key_file, {}) for each in model.provider}
        self.providers = {
            each.name.encode(): Provider(
                SHAPES[each.shape],
                each.upstream,
                self._pool(each.upstream, each.ca_file),
                self.keys[each.name.encode()],
            )
            for each in model.provider
        }
        self.rules = RequestRules(
            names=frozenset(name.lower() for name in config.listen.names),
            default=self.default.shape,
            others={name: provider.shape for name, provider in self.providers.items()},
            max_head_bytes=self.limits.head_bytes,
        )
        shortest = min(
            self.limits.head_timeout_ms,
            self.limits.model_connect_timeout_ms,
            self.limits.model_first_byte_timeout_ms,
            self.limits.model_idle_timeout_ms,
            self.limits.model_total_timeout_ms,
        )
        self._tick_s = min(_MAX_TICK_S, max(0.005, shortest / 1000 / _TICKS_PER_LIMIT))

    def start(self, poller: Poller) -> None:
        """Connect to providers from now on."""
        for provider in (self.default, *self.providers.values()):
            provider.pool.start(poller)

    def provider(self, name: bytes) -> Provider:
        """Return a provider by its configured name, the default one by the empty name."""
        return self.providers[name] if name else self.default

    def _pool(self, upstream: str, ca_file: str) -> UpstreamPool:
        url = parse_upstream(upstream)
        try:
            tls = client_context(ca_file) if url.tls else None
        except OSError as error:
            # ssl's errors are OSErrors too; neither kind names the file.
            what = f"ca_file {ca_file}" if ca_file else "the system's certificate authorities"
            raise ProviderError(f"[model] {what} cannot be used: {error.strerror or 'not PEM'}") from error
        return UpstreamPool(
            url,
            tls,
            limit=self.limits.model_upstream_connections,
            connect_timeout_s=self.limits.model_connect_timeout_ms / 1000,
        )

    # --- clients and their clock

    @property
    def client_count(self) -> int:
        """Client connections that are open."""
        return len(self._clients)

    def add(self, client: Ticking) -> None:
        """Look after a client connection's deadlines."""
        self._clients.add(client)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._tick)

    def discard(self, client: Ticking) -> None:
        """A client connection is gone."""
        self._clients.discard(client)

    def begin_wait(self) -> bool:
        """Let a request wait for the sessions to be known; False when too many do."""
        if self._waiting >= self.limits.unauthenticated_total:
            return False
        self._waiting += 1
        return True

    def end_wait(self) -> None:
        """A request waits no more."""
        self._waiting -= 1

    @property
    def is_waiting(self) -> bool:
        """Whether requests wait for the sessions to be known."""
        return self._waiting > 0

    def begin_linger(self) -> bool:
        """Let a connection that got its last reply wait for its client; False when too many do."""
        if self._lingering >= MAX_LINGERING:
            return False
        self._lingering += 1
        return True

    def end_linger(self) -> None:
        """A connection that waited is gone."""
        self._lingering -= 1

    def drain(self) -> None:
        """Take no further requests: connections end when their present request has."""
        self.draining = True
        for client in list(self._clients):
            client.drain()

    def hand_back(self) -> None:
        """Give the connections that are between two requests back to the router."""
        for client in list(self._clients):
            client.hand_back()

    async def close(self) -> None:
        """End everything at once."""
        for client in list(self._clients):
            client.abort(CloseReason.SHUTDOWN)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for provider in (self.default, *self.providers.values()):
            await provider.pool.close()
        self.flush_metrics()

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        self.flush_metrics()
        now = time.monotonic()
        for client in list(self._clients):
            try:
                client.tick(now)
            except Exception as error:
                # A fault with one of them must not take the clock from all others.
                loop.call_exception_handler({"message": "the clock of a model client failed", "exception": error})
                client.abort(CloseReason.CLIENT_GONE)
        idle = 0
        for provider in (self.default, *self.providers.values()):
            provider.pool.expire(now)
            idle += provider.pool.idle_count
        # The clock stands while there is nothing to look after.
        again = self._clients or idle
        self._timer = loop.call_later(self._tick_s, self._tick) if again else None

    def flush_metrics(self) -> None:
        """Pass on what was counted since the last time: Prometheus's counters take a lock for each increment."""
        self._metrics.allowed["model"].inc(self._allowed)
        self._allowed = 0
        for name, count in self._statuses.items():
            if count:
                self._metrics.model_status[name].inc(count)
                self._statuses[name] = 0

    # --- bodies that are held

    def hold(self, count: int) -> bool:
        """Count `count` body bytes as held; False when all requests together would hold too many."""
        if self._held_bytes + count > self.limits.max_held_body_bytes:
            return False
        self._held_bytes += count
        return True

    def unhold(self, count: int) -> None:
        """Count held bytes as let go."""
        self._held_bytes -= count

    @property
    def held_bytes(self) -> int:
        """Body bytes that are held now."""
        return self._held_bytes

    # --- replies and reports

    def too_large(self) -> ModelRefusal:
        """Return the refusal of a request body that is over the limit."""
        limit = self.limits.max_request_bytes
        return ModelRefusal(DenyReason.REQUEST_TOO_LARGE, f"The request is larger than {limit} bytes")

    def report_allowed(self, ask: "Ask") -> None:
        """Log the decision to pass a request on."""
        self._allowed += 1
        url = ask.provider.url
        self._audit.write(ask.session.id, "allow", "model", url.host, url.port, "", "model")

    def report_refused(self, ask: "Ask", reason: DenyReason) -> None:
        """Log the decision not to."""
        url = ask.provider.url
        self._audit.write(ask.session.id, "refuse", "model", url.host, url.port, "", reason)

    def report_closed(
        self,
        ask: "Ask",
        reason: CloseReason | DenyReason,
        cost: ModelCost,
        bytes_up: int,
        bytes_down: int,
        seconds: float,
        first_byte_s: float | None,
    ) -> None:
        """Log the end of a request that was passed on: what it cost, never what was said.

        `first_byte_s` is None when no reply began.
        """
        url = ask.provider.url
        self._statuses[_CLASSES[min(cost.status // 100, 5)] if reason is CloseReason.DONE else "aborted"] += 1
        if first_byte_s is not None:
            self._metrics.model_first_byte_seconds.observe(first_byte_s)
        self._audit.write(
            ask.session.id, "close", "model", url.host, url.port, "", reason,
            bytes_up, bytes_down, int(seconds * 1000), cost,
        )  # fmt: skip
