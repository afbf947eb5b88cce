"""An open CONNECT: what is spliced between a sandbox and a host, in whose name, and how its end is counted and logged."""

import socket

from gateway.core.authority import Authority
from gateway.core.verdict import CloseReason
from gateway.net.services import Services, milliseconds_since
from gateway.net.splice import Splicer
from gateway.registry import Session


class Tunnel:
    """Owns both sockets and a slot of the session until it ends. `started` is when its connection came (time.monotonic)."""

    __slots__ = ("_services", "address", "authority", "session", "splicer", "started")

    def __init__(
        self,
        services: Services,
        session: Session,
        authority: Authority,
        address: str,
        started: float,
        client: socket.socket,
        upstream: socket.socket,
    ) -> None:
        self._services = services
        self.session = session
        self.authority = authority
        self.address = address
        self.started = started
        self.splicer = Splicer(services.poller, services.pipes, session, client, upstream, self._on_close)
        session.add_closer(self.close)
        services.tunnels.add(self)
        services.gateway.metrics.tunnels.inc()

    def start(self, early: bytes) -> None:
        """Begin. `early` was read from the client before, and goes up first as far as the budget allows."""
        session, splicer = self.session, self.splicer
        self._services.idle.add(splicer)
        if early:
            # Read elsewhere, not by the splicer, so counted here.
            early = early[: max(0, session.bytes_left)]
            session.bytes_up += len(early)
            session.bytes_left -= len(early)
        splicer.start(early)

    def go_on(self, still: int) -> None:
        """Begin where an earlier process stopped, idle for `still` sweeps."""
        self._services.idle.add(self.splicer, still)
        self.splicer.go_on()

    def close(self, reason: CloseReason) -> None:
        """End at once."""
        self.splicer.close(reason)

    def let_go(self) -> None:
        """Forget it without an audit line: another process goes on with it."""
        self._forget()
        self.splicer.let_go()

    def _on_close(self, reason: CloseReason) -> None:
        self._forget()
        splicer, authority, gateway = self.splicer, self.authority, self._services.gateway
        up, down = splicer.up.count, splicer.down.count
        metrics = gateway.metrics
        metrics.closed[reason].inc()
        metrics.bytes_up.inc(up)
        metrics.bytes_down.inc(down)
        gateway.audit.write(
            self.session.id, "close", "connect", authority.host, authority.port, self.address, reason,
            up, down, milliseconds_since(self.started),
        )  # fmt: skip

    def _forget(self) -> None:
        services, session = self._services, self.session
        services.idle.discard(self.splicer)
        services.tunnels.discard(self)
        session.remove_closer(self.close)
        session.slots.release()
        services.gateway.metrics.tunnels.dec()
