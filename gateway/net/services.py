"""What the connections of one gateway share on the acting side: pools, queues, resolver. Made once by `app`."""

import asyncio
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gateway.context import Gateway
from gateway.core.decide import HostFacts
from gateway.core.model_refusal import ModelRefusal, encode_refusal
from gateway.core.model_request import is_for_model
from gateway.core.verdict import Deny, DenyReason
from gateway.net.decisions import Decisions
from gateway.net.descriptors import DescriptorBudget
from gateway.net.dial import Dialer
from gateway.net.idle import IdleSweep
from gateway.net.linger import Lingering
from gateway.net.pipes import PipePool
from gateway.net.poller import Poller
from gateway.net.resolve import Resolver
from gateway.net.tasks import Tasks
from gateway.registry import UNLIMITED, IPAddress, Session

if TYPE_CHECKING:
    from gateway.net.connect import Connect
    from gateway.net.paused import Paused
    from gateway.net.plain import PlainRelay
    from gateway.net.runner import RunnerHandoff
    from gateway.net.tunnel import Tunnel
    from gateway.net.waits import Waits


class RunnerAccount:
    """Runner connections pay from no budget: what a session reports about itself must always reach control."""

    __slots__ = ("bytes_down", "bytes_left", "bytes_up", "pipes")

    def __init__(self) -> None:
        self.bytes_up = 0
        self.bytes_down = 0
        self.bytes_left = UNLIMITED
        self.pipes = 0


@dataclass(slots=True)
class Services:
    """Shared by listener, tunnels and relays. `facts` is replaced whole when this host's addresses change."""

    loop: asyncio.AbstractEventLoop
    poller: Poller
    gateway: Gateway
    resolver: Resolver
    dialer: Dialer
    pipes: PipePool
    idle: IdleSweep
    lingering: Lingering
    tasks: Tasks
    decisions: Decisions
    descriptors: DescriptorBudget
    facts: HostFacts
    waits: "Waits" = field(init=False)
    runner_account: RunnerAccount = field(default_factory=RunnerAccount)
    # What can go on in another process: tunnels, CONNECTs of known sessions on the way there, and runners' connections.
    tunnels: "set[Tunnel]" = field(default_factory=set)
    connects: "set[Connect]" = field(default_factory=set)
    runners: "set[RunnerHandoff]" = field(default_factory=set)
    # Plain-HTTP connections, and those that wait for the next process to go on with them.
    relays: "set[PlainRelay]" = field(default_factory=set)
    paused: "set[Paused]" = field(default_factory=set)
    # Whether HTTP connections pause between two requests, for the next process; whether they end there.
    is_leaving: bool = False
    is_ending: bool = False
    # Routes a connection anew by the head at the start of these bytes: the listener's.
    route_again: Callable[[socket.socket, IPAddress | None, bytes, Session | None], None] = field(init=False)

    def end_relays(self, *, keep: bool) -> None:
        """Have plain-HTTP connections end after their present request; with `keep` they pause then."""
        self.is_leaving, self.is_ending = keep, not keep
        if not keep:
            for paused in list(self.paused):
                paused.close()
        for relay in list(self.relays):
            relay.drain()

    def model_refusal(self, data: bytes, reason: DenyReason, message: str) -> bytes | None:
        """Return the answer to what begins so and is no request, as a provider's SDK understands it, and count it.

        None if it is not for the model proxy.
        """
        rules = self.gateway.model.rules
        if not is_for_model(data, rules.names):
            return None
        self.gateway.metrics.refused["model", reason].inc()
        return encode_refusal(rules.default, ModelRefusal(reason, message), close=True)

    def count_refusal(self, session: Session | None, kind: str, deny: Deny) -> None:
        """Count a refusal in the metrics and, when the session is known, in its usage."""
        self.gateway.metrics.refused[kind, deny.reason].inc()
        if session is not None:
            session.egress_refused += 1


def milliseconds_since(started: float) -> int:
    """Whole milliseconds from `started` (time.monotonic) to now."""
    return int((time.monotonic() - started) * 1000)
