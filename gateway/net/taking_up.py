"""Takes up what the process before parked, and goes on with it: counts, deadlines and audit lines included.

What cannot go on (its session's grant is refused, its client has left) is closed, and the others go on.
"""

import ipaddress
import logging
import os
import socket
from collections.abc import Sequence

from gateway.core.authority import Authority, parse_authority
from gateway.core.parked import (
    Parked,
    ParkedArrival,
    ParkedAsking,
    ParkedFlow,
    ParkedGreeting,
    ParkedHttp,
    ParkedPair,
    ParkedRunner,
    ParkedTunnel,
)
from gateway.core.verdict import CloseReason
from gateway.net.arrival import Arrival
from gateway.net.connect import Connect
from gateway.net.listener import Listener
from gateway.net.plain import PlainRelay
from gateway.net.runner import RunnerHandoff
from gateway.net.services import Services, milliseconds_since
from gateway.net.splice import Account, Flow, Splicer
from gateway.net.tunnel import Tunnel
from gateway.registry import IPAddress, Registry

log = logging.getLogger("gateway.taking_up")


def take_up_sessions(registry: Registry, record: Parked) -> None:
    """Put the grants of the process before in force, with what was used, and no others.

    What is granted now, by the sessions' file or by control, replaces them when all is taken up: what was open under a grant
    is judged by how that one changed. Both pictures at once may contradict each other.
    """
    for known in registry:
        registry.revoke(known.id)
    for parked in record.sessions:
        problems = registry.put(parked.grant)
        session = registry.get(parked.grant.session)
        if problems or session is None:
            log.error("a session of the process before is not taken up: %s", "; ".join(problems))
        else:
            session.take_up(parked)


class TakingUp:
    """Takes up the connections of one record. The sessions are in force already."""

    def __init__(self, services: Services, listener: Listener, descriptors: Sequence[int]) -> None:
        self._services = services
        self._listener = listener
        self._descriptors = descriptors

    def run(self, record: Parked) -> None:
        """Go on with everything: first what holds a slot, then what wants one."""
        for tunnel in record.tunnels:
            self._tunnel(tunnel)
        for greeting in record.greetings:
            self._greeting(greeting)
        for runner in record.runners:
            self._runner(runner)
        for http in record.http:
            self._http(http)
        for ending in record.endings:
            self._services.lingering.take_up(self._socket(ending.client), ending.left_s, ending.discarded)
        for asking in record.asking:
            self._asking(asking)
        for arrival in record.arrivals:
            self._arrival(arrival)

    def _socket(self, place: int) -> socket.socket:
        sock = socket.socket(fileno=self._descriptors[place])
        sock.setblocking(False)
        return sock

    def _seat(self, client: int, caller: str | None, started: float) -> Arrival:
        """Return the arrival that a connection began as, in this process."""
        arrival = Arrival(self._listener, self._socket(client), None)
        arrival.caller = _address(caller)
        arrival.started = started
        arrival.proxied = True
        return arrival

    def _tunnel(self, parked: ParkedTunnel) -> None:
        services, pair = self._services, parked.pair
        authority = _authority(parked.authority)
        session = services.gateway.registry.get(parked.session)
        if session is None:
            self._discard(pair)
            services.gateway.audit.write(
                parked.session, "close", "connect", authority.host, authority.port, parked.address,
                CloseReason.REVOKED, pair.up.count, pair.down.count, milliseconds_since(parked.started),
            )  # fmt: skip
            return
        session.slots.hold()
        ends = self._socket(pair.client), self._socket(pair.upstream)
        tunnel = Tunnel(services, session, authority, parked.address, parked.started, *ends)
        self._flows(tunnel.splicer, pair, session)
        tunnel.go_on(parked.still)

    def _greeting(self, parked: ParkedGreeting) -> None:
        services = self._services
        connect = Connect(services, self._seat(parked.client, None, parked.started), parked.early, b"")
        connect.authority = _authority(parked.authority)
        connect.address = parked.address
        connect.rule = parked.rule
        connect.upstream = self._socket(parked.upstream)
        session = services.gateway.registry.get(parked.session)
        if session is None:
            connect.revoke(CloseReason.REVOKED)
            return
        connect.adopt(session)
        connect.await_hello(parked.left_s)

    def _asking(self, parked: ParkedAsking) -> None:
        connect = Connect(self._services, self._seat(parked.client, parked.caller, parked.started), parked.early, b"")
        credentials = (parked.session, bytes.fromhex(parked.token_sha256))
        connect.ask_again(_authority(parked.authority), credentials, parked.left_s, admitted=parked.admitted)

    def _runner(self, parked: ParkedRunner) -> None:
        services, pair = self._services, parked.pair
        session = services.gateway.registry.get(parked.session)
        if session is None:
            self._discard(pair)
            return
        client, account = self._socket(pair.client), services.runner_account
        runner = RunnerHandoff(services, None, client)
        splicer = Splicer(
            services.poller, services.pipes, account, client, self._socket(pair.upstream), runner.on_close
        )
        self._flows(splicer, pair, account)
        runner.take_up(session, splicer)

    def _http(self, parked: ParkedHttp) -> None:
        session = self._services.gateway.registry.get(parked.session)
        if session is None:
            os.close(self._descriptors[parked.client])
            return
        tunnel = None if parked.authority is None else _authority(parked.authority)
        relay = PlainRelay(self._services, _address(parked.caller), session, tunnel)
        relay.start(self._socket(parked.client), parked.data, parked.left_s)

    def _arrival(self, parked: ParkedArrival) -> None:
        arrival = self._seat(parked.client, parked.caller, parked.started)
        arrival.proxied = parked.proxied
        arrival.buffer = parked.data
        try:
            # One of which only the PROXY header has come is counted when its head begins.
            if parked.data or not parked.caller:
                arrival.source = self._listener.source_again(arrival)
        except OSError:
            # Its client has left meanwhile.
            arrival.drop()
            return
        self._listener.take_up(arrival, parked.left_s)

    def _flows(self, splicer: Splicer, pair: ParkedPair, account: Account) -> None:
        self._flow(splicer.up, pair.up, account)
        self._flow(splicer.down, pair.down, account)

    def _flow(self, flow: Flow, parked: ParkedFlow, account: Account) -> None:
        flow.count = parked.count
        flow.held = parked.held
        flow.ended = parked.ended
        flow.shut = parked.shut
        if parked.pipe is not None:
            flow.pipe = (self._descriptors[parked.pipe[0]], self._descriptors[parked.pipe[1]])
            flow.in_pipe = parked.in_pipe
            flow.bulk = True
            self._services.pipes.adopt(flow.pipe, account)

    def _discard(self, pair: ParkedPair) -> None:
        """Close all of a pair."""
        for place in (pair.client, pair.upstream, *(pair.up.pipe or ()), *(pair.down.pipe or ())):
            os.close(self._descriptors[place])


def _authority(text: str) -> Authority:
    return parse_authority(text.encode())


def _address(text: str | None) -> IPAddress | None:
    return None if text is None else ipaddress.ip_address(text)
