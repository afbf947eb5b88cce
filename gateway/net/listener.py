"""The sandbox port: accepts, admits within bounds, and routes each connection by its head.

Accepting is raw: a CONNECT stays a raw socket from end to end, because a socket once given to a transport is the loop's.
"""

import asyncio
import collections
import contextlib
import errno
import logging
import socket
from typing import Final

from gateway.core.authority import AuthorityError, parse_absolute_http
from gateway.core.head import Head, HeadError
from gateway.core.verdict import DenyReason
from gateway.net.arrival import Arrival
from gateway.net.connect import Connect
from gateway.net.deadlines import Deadlines
from gateway.net.decisions import Decision
from gateway.net.model import ModelClient
from gateway.net.plain import PlainRelay
from gateway.net.runner import RunnerHandoff
from gateway.net.services import Services
from gateway.registry import IPAddress, Session

log = logging.getLogger("gateway.listener")

# Connections accepted before everything else gets its turn.
ACCEPTS_PER_TURN: Final = 16
# When the process has no descriptor left, accepting pauses: existing tunnels go on and free some.
PAUSE_S: Final = 0.1
# RFC 5681; every Linux has it and lets every user choose it (tcp(7), tcp_allowed_congestion_control).
LOCAL_CONGESTION_CONTROL: Final = b"reno"
_EXHAUSTED: Final = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class Listener:
    """Serves one listening socket."""

    def __init__(self, services: Services, server: socket.socket) -> None:
        config = services.gateway.config
        self.services = services
        self.loop = services.loop
        self.poller = services.poller
        self.proxy_protocol = config.listen.proxy_protocol
        self.head_bytes = config.limits.head_bytes
        if server.family != socket.AF_UNIX:
            # What is accepted inherits it: an event of a stream must not wait for the acknowledgement of the one before.
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A sandbox is on this machine. What paces packets for the internet (BBR, where it is the host's default) takes
            # half of the rate on loopback or a bridge, at twice the CPU. Upstream the host's choice stays.
            with contextlib.suppress(OSError):
                server.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, LOCAL_CONGESTION_CONTROL)
        self._server = server
        self._family = server.family
        self._per_source = config.limits.unauthenticated_per_source
        self._total = config.limits.unauthenticated_total
        self._below = services.descriptors.client_below
        self._open: set[Arrival] = set()
        # Whole heads that the next process shall answer, because what they ask for cannot move once it has begun.
        self._kept: set[Arrival] = set()
        self._kept_sources: collections.Counter[object] = collections.Counter()
        self._is_leaving = False
        self._sources: dict[object, int] = {}
        self._head_s = config.limits.head_timeout_ms / 1000
        self._deadlines: Deadlines[Arrival] = Deadlines(self.loop, self._head_s, lambda arrival: arrival.expire())
        self._resume: asyncio.TimerHandle | None = None
        self._listening = False
        services.route_again = self.route_again

    def start(self) -> None:
        """Begin to accept."""
        self._listening = True
        self.poller.add_reader(self._server.fileno(), self._on_acceptable)

    def stop(self) -> None:
        """Accept no more; what is open goes on. The listening socket itself stays open (its queue is not lost)."""
        if self._listening:
            self._listening = False
            self.poller.remove_reader(self._server.fileno())
        if self._resume is not None:
            self._resume.cancel()
            self._resume = None

    def leave(self) -> None:
        """From now on begin only what can go on in the next process; the rest is kept for it."""
        self._is_leaving = True

    def waiting(self) -> list[tuple[Arrival, float]]:
        """Return what is not routed yet, with the seconds that each has left for its head."""
        waiting = [(arrival, self._deadlines.left_s(arrival)) for arrival in self._deadlines]
        return waiting + [(arrival, self._head_s) for arrival in self._kept]

    def take_up(self, arrival: Arrival, left_s: float) -> None:
        """Go on with a connection that an earlier process had not routed."""
        if not (arrival.buffer and arrival.read()):
            self.hold(arrival, left_s)

    def let_go(self) -> None:
        """Forget what is not routed: another process goes on with it."""
        for arrival, _ in self.waiting():
            arrival.let_go()
        self._kept.clear()

    def close(self) -> None:
        """Stop and close what has no head yet."""
        self.stop()
        for arrival in [*self._open, *self._kept]:
            arrival.drop()
        self._deadlines.close()
        self._server.close()

    def _on_acceptable(self) -> None:
        metrics = self.services.gateway.metrics
        for _ in range(ACCEPTS_PER_TURN):
            try:
                # What `accept` does, without asking for the listening socket's family and type as enumerations each time.
                fd, address = self._server._accept()  # type: ignore[attr-defined]  # typeshed leaves it out
                sock = socket.socket(self._family, socket.SOCK_STREAM, 0, fd)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    metrics.overload_descriptors.inc()
                    self._pause()
                    return
                # The connection died in the queue (accept(2): treat as EAGAIN).
                continue
            metrics.connections.inc()
            if sock.fileno() >= self._below:
                metrics.overload_descriptors.inc()
                sock.close()
                self._pause()
                return
            sock.setblocking(False)
            Arrival(self, sock, self.source_of(address)).begin()

    def source_of(self, address: object) -> object:
        """Return whose share of waiting connections one from this address is; None where that is not known yet."""
        # Behind the forwarder all come from one address; there the PROXY header says it.
        return address[0] if isinstance(address, tuple) and not self.proxy_protocol else None

    def source_again(self, arrival: Arrival) -> object:
        """Return whose share a connection is that was not counted for a while. Raises OSError if its client has left."""
        return arrival.caller or self.source_of(arrival.sock.getpeername())

    def _pause(self) -> None:
        self.stop()
        self._resume = self.loop.call_later(PAUSE_S, self.start)

    def hold(self, arrival: Arrival, left_s: float | None = None) -> None:
        """Have an arrival wait for the rest of its head: counted, timed and watched. Drops it where too many wait."""
        if len(self._open) >= self._total:
            self.services.gateway.metrics.overload_total.inc()
            arrival.drop()
        elif not self.share(arrival):
            arrival.drop()
        else:
            self._open.add(arrival)
            self._deadlines.add(arrival, left_s)
            arrival.watching = True
            self.poller.add_reader(arrival.sock.fileno(), arrival.on_readable)

    def share(self, arrival: Arrival) -> bool:
        """Count an arrival to its source, if that is known; False when too many of the source wait."""
        source = arrival.source
        if source is None:
            return True
        count = self._sources.get(source, 0)
        if count >= self._per_source:
            self.services.gateway.metrics.overload_source.inc()
            arrival.source = None
            return False
        self._sources[source] = count + 1
        return True

    def forget(self, arrival: Arrival) -> None:
        """Forget an arrival that waited: it is routed or gone."""
        self._open.discard(arrival)
        self._deadlines.discard(arrival)
        source, arrival.source = arrival.source, None
        if source is not None:
            count = self._sources[source] - 1
            if count:
                self._sources[source] = count
            else:
                del self._sources[source]

    def resume(self, arrival: Arrival, decision: Decision, early: bytes, key: bytes) -> None:
        """Go on with a CONNECT that was judged before; `early` is what was read beyond its head."""
        Connect(self.services, arrival, early, key).resume(decision)

    def route_again(
        self, sock: socket.socket, caller: IPAddress | None, data: bytes, session: Session | None = None
    ) -> None:
        """Go on with a connection whose next request is not for whoever served the one before; `data` begins with it.

        Clients keep one connection to a proxy for all plain-HTTP hosts, the gateway itself among them. `session`: whose
        connection it is.
        """
        if self.services.is_leaving and session is not None:
            PlainRelay(self.services, caller, session).start(sock, data)
            return
        arrival = Arrival(self, sock, caller)
        arrival.caller = caller
        arrival.proxied = True
        arrival.buffer = data
        self.take_up(arrival, self._head_s)

    def route(self, arrival: Arrival, head: Head, data: bytes, key: bytes) -> None:
        """Hand the connection to what its head asks for.

        `data` is all that was read, the head first; `key` is that of `decisions`, if the head asks for a CONNECT.
        """
        if head.method == b"CONNECT":
            Connect(self.services, arrival, data[head.size :], key).start(head)
            return
        if self._is_leaving and self._keep(arrival):
            return
        target = head.target
        if target[:7].lower() == b"http://":
            try:
                authority, origin = parse_absolute_http(target)
            except AuthorityError as error:
                arrival.refuse(400, DenyReason.MALFORMED_AUTHORITY, str(error))
                return
            if authority.host not in self.services.gateway.names:
                arrival.release()
                PlainRelay(self.services, arrival.caller).start(arrival.sock, data)
                return
            # A client with HTTP_PROXY and no NO_PROXY asks the proxy for the proxy itself: as if addressed directly.
            target = origin
        if target.startswith(b"/model/"):
            arrival.release()
            client = ModelClient(self.services.gateway, self.poller, arrival.sock, arrival.caller, self.route_again)
            client.received(data)
        elif target == b"/runner" or target.startswith(b"/runner?"):
            try:
                handoff = RunnerHandoff(self.services, arrival.caller, arrival.sock)
                arrival.release()
                self.services.tasks.keep(handoff.start(head, target, data[head.size :]))
            except HeadError as error:
                arrival.refuse(error.status, error.reason, error.message)
        else:
            arrival.refuse(404, DenyReason.NOT_FOUND, "there is nothing of this name at the sandbox port")

    def _keep(self, arrival: Arrival) -> bool:
        """Leave a request unanswered for the next process, which reads its head again.

        False where too many are left already, or too many of its source: it is served here, for as long as that may last.
        """
        try:
            source = self.source_again(arrival)
        except OSError:
            return False
        if len(self._kept) >= self._total or self._kept_sources[source] >= self._per_source:
            return False
        arrival.release()
        self._kept.add(arrival)
        self._kept_sources[source] += 1
        return True
