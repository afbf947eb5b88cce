"""What the connections of one gateway share on the acting side: pools, queues, resolver. Made once by `app`."""

import asyncio
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gateway.context import Gateway
from gateway.core.decide import HostFacts
from gateway.core.verdict import Deny
from gateway.net.decisions import Decisions
from gateway.net.descriptors import DescriptorBudget
from gateway.net.dial import Dialer
from gateway.net.handover import Handover
from gateway.net.idle import IdleSweep
from gateway.net.linger import Lingering
from gateway.net.pipes import PipePool
from gateway.net.poller import Poller
from gateway.net.resolve import Resolver
from gateway.registry import UNLIMITED, IPAddress, Session

if TYPE_CHECKING:
    from gateway.net.connect import Connect
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
    handover: Handover
    decisions: Decisions
    descriptors: DescriptorBudget
    facts: HostFacts
    waits: "Waits" = field(init=False)
    runner_account: RunnerAccount = field(default_factory=RunnerAccount)
    # What can go on in another process: tunnels, CONNECTs of known sessions on the way there, and runners' connections.
    tunnels: "set[Tunnel]" = field(default_factory=set)
    connects: "set[Connect]" = field(default_factory=set)
    runners: "set[RunnerHandoff]" = field(default_factory=set)
    # Plain-HTTP connections, which end between two requests when the gateway does.
    relays: "set[PlainRelay]" = field(default_factory=set)
    is_ending: bool = False
    # Routes a connection anew by the head at the start of these bytes: the listener's.
    route_again: Callable[[socket.socket, IPAddress | None, bytes], None] = field(init=False)

    def end_relays(self, *, keep: bool) -> None:
        """Have plain-HTTP connections end after their present request; with `keep` they go back to the listener then."""
        self.is_ending = not keep
        for relay in list(self.relays):
            relay.drain(keep=keep)

    def count_refusal(self, session: Session | None, kind: str, deny: Deny) -> None:
        """Count a refusal in the metrics and, when the session is known, in its usage."""
        self.gateway.metrics.refused[kind, deny.reason].inc()
        if session is not None:
            session.egress_refused += 1


def milliseconds_since(started: float) -> int:
    """Whole milliseconds from `started` (time.monotonic) to now."""
    return int((time.monotonic() - started) * 1000)
