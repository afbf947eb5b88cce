"""Parks what is open, for the process that comes next: says what it is, and lets go of it once that process has it.

`pack` changes nothing, so that a hand-over that fails is only a stop that drains. Between it and `let_go` the event loop must
not run: a byte moved after the record was made would be moved twice.
"""

import socket
from collections import Counter
from collections.abc import Mapping

from gateway.core.parked import (
    Parked,
    ParkedArrival,
    ParkedAsking,
    ParkedEnding,
    ParkedFlow,
    ParkedGreeting,
    ParkedHttp,
    ParkedPair,
    ParkedRunner,
    ParkedTunnel,
)
from gateway.net.connect import Connect
from gateway.net.listener import Listener
from gateway.net.plain import PlainRelay
from gateway.net.services import Services
from gateway.net.splice import Flow, Splicer
from gateway.net.tunnel import Tunnel


class Parking:
    """What one gateway can hand over."""

    def __init__(self, services: Services, listener: Listener, epoch: str) -> None:
        self._services = services
        self._listener = listener
        self._epoch = epoch
        self._descriptors: list[int] = []

    def pack(
        self, listeners: Mapping[str, socket.socket], passed: Mapping[str, socket.socket]
    ) -> tuple[Parked, list[int]]:
        """Return the record and its descriptors, the listening sockets among them. Both are of this very moment."""
        self._descriptors = []
        services = self._services
        connects = services.connects | set(services.waits.ready)
        greetings = [each for each in connects if each.upstream is not None]
        asking = [each for each in connects if each.upstream is None]
        moving_slots = Counter(each.session.id for each in services.tunnels)
        moving_slots.update(each.session.id for each in connects if each.has_slot and each.session is not None)
        record = Parked(
            epoch=self._epoch,
            listeners={name: self._place(sock) for name, sock in listeners.items()},
            passed={name: self._place(sock) for name, sock in passed.items()},
            sessions=tuple(session.parked(moving_slots[session.id]) for session in services.gateway.registry),
            tunnels=tuple(self._tunnel(each) for each in services.tunnels),
            greetings=tuple(self._greeting(each) for each in sorted(greetings, key=lambda each: each.left_s or 0)),
            asking=tuple(self._asking(each) for each in sorted(asking, key=_turn)),
            runners=tuple(
                ParkedRunner(each.session.id, self._pair(each.splicer))
                for each in services.runners
                if each.session is not None and each.splicer is not None
            ),
            http=tuple(
                ParkedHttp(
                    each.session.id,
                    str(each.authority) if each.authority is not None else None,
                    str(each.caller) if each.caller is not None else None,
                    each.left_s,
                    self._place(each.sock),
                    each.data,
                )
                for each in services.paused
            ),
            arrivals=tuple(
                ParkedArrival(
                    self._place(each.sock),
                    str(each.caller) if each.caller is not None else None,
                    each.proxied,
                    each.started,
                    left_s,
                    each.buffer,
                )
                for each, left_s in self._listener.waiting()
            ),
            endings=tuple(
                ParkedEnding(self._place(sock), left_s, discarded)
                for sock, left_s, discarded in services.lingering.parked()
            ),
        )
        return record, self._descriptors

    def let_go(self) -> None:
        """Forget all that was packed: it is another's now. Nobody is told, and nothing is logged."""
        services = self._services
        connects = services.connects | set(services.waits.ready)
        # First those that wait for a slot: the slots of the others would become theirs.
        for connect in sorted(connects, key=lambda each: each.has_slot):
            connect.let_go()
        for tunnel in list(services.tunnels):
            tunnel.let_go()
        for runner in list(services.runners):
            # One that has not reached control yet is cut with the process, and its client connects again.
            if runner.splicer is not None:
                runner.let_go()
        for paused in list(services.paused):
            paused.forget().close()
        self._listener.let_go()
        services.lingering.let_go()

    def take_back(self) -> None:
        """Go on with what was paused for a process that did not come."""
        services = self._services
        services.is_leaving = False
        for paused in list(services.paused):
            relay = PlainRelay(services, paused.caller, paused.session, paused.authority)
            relay.start(paused.forget(), paused.data, paused.left_s)

    def _place(self, sock: socket.socket) -> int:
        return self._place_descriptor(sock.fileno())

    def _place_descriptor(self, descriptor: int) -> int:
        self._descriptors.append(descriptor)
        return len(self._descriptors) - 1

    def _tunnel(self, tunnel: Tunnel) -> ParkedTunnel:
        return ParkedTunnel(
            tunnel.session.id,
            str(tunnel.authority),
            tunnel.address,
            tunnel.started,
            self._services.idle.still(tunnel.splicer),
            self._pair(tunnel.splicer),
        )

    def _greeting(self, connect: Connect) -> ParkedGreeting:
        session, upstream = connect.session, connect.upstream
        assert session is not None
        assert upstream is not None
        return ParkedGreeting(
            session.id,
            str(connect.authority),
            connect.address,
            connect.rule,
            connect.started,
            connect.left_s or 0.0,
            self._place(connect.sock),
            self._place(upstream),
            connect.buffer,
        )

    def _asking(self, connect: Connect) -> ParkedAsking:
        if connect.session is not None:
            session_id, token_sha256 = connect.session.id, connect.session.grant.token_sha256
        else:
            assert connect.credentials is not None
            session_id, token_sha256 = connect.credentials[0], connect.credentials[1].hex()
        return ParkedAsking(
            session_id,
            token_sha256,
            str(connect.caller) if connect.caller is not None else None,
            str(connect.authority),
            connect.started,
            connect.session is not None,
            connect.left_s,
            self._place(connect.sock),
            connect.buffer,
        )

    def _pair(self, splicer: Splicer) -> ParkedPair:
        up, down = splicer.up, splicer.down
        return ParkedPair(self._place(up.source), self._place(up.destination), self._flow(up), self._flow(down))

    def _flow(self, flow: Flow) -> ParkedFlow:
        pipe = None
        if flow.in_pipe:
            assert flow.pipe is not None
            pipe = (self._place_descriptor(flow.pipe[0]), self._place_descriptor(flow.pipe[1]))
        return ParkedFlow(flow.count, bytes(flow.held), flow.in_pipe, pipe, flow.ended, flow.shut)


def _turn(connect: Connect) -> tuple[bool, float, float]:
    """Tell whose turn comes before whose: those that have a slot, then those that wait for one, the first come first."""
    return not connect.has_slot, connect.left_s or 0, connect.started
