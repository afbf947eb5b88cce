"""The deadline queues of connections that are not tunnels yet."""

from typing import TYPE_CHECKING

from gateway.net.deadlines import Deadlines
from gateway.net.services import Services

if TYPE_CHECKING:
    from gateway.net.connect import Connect


class Waits:
    """What a CONNECT may wait for, each with its own limit."""

    def __init__(self, services: Services) -> None:
        limits = services.gateway.config.limits
        loop = services.loop
        self.ready: Deadlines[Connect] = Deadlines(loop, limits.resync_wait_ms / 1000, lambda each: each.not_ready())
        self.slot: Deadlines[Connect] = Deadlines(loop, limits.egress_slot_wait_ms / 1000, lambda each: each.no_slot())
        self.hello: Deadlines[Connect] = Deadlines(loop, limits.hello_timeout_ms / 1000, lambda each: each.no_hello())

    def close(self) -> None:
        """Stop the timers."""
        for queue in (self.ready, self.slot, self.hello):
            queue.close()
