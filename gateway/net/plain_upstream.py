"""Reaches the host of a plain-HTTP request, in DESIGN's order: slot, name, addresses, connection.

A coroutine that may be cancelled at any await: what it holds by then goes back. The decisions are those of a CONNECT.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gateway.core.authority import Authority
from gateway.core.budget import Slots
from gateway.core.decide import decide_addresses
from gateway.core.plain_head import PlainRequest
from gateway.core.verdict import Deny, DenyReason
from gateway.net.dial import DialError
from gateway.net.plain_stream import Stream
from gateway.net.resolve import ResolveError
from gateway.net.services import Services
from gateway.registry import IPAddress, Session

# A connection to a host waits this long for the next request; it holds a slot all the time. Apache waits 5 s as well.
KEEP_UPSTREAM_S: Final = 5.0
# Meanwhile it is looked this often whether somebody else waits for the slot.
LOOK_S: Final = 0.25

_CROWDED: Final = Deny(DenyReason.NO_FREE_SLOT, "too many connections of the session wait for a slot")
_NO_SLOT: Final = Deny(DenyReason.NO_FREE_SLOT, "all connections of the session are in use")


class Slot:
    """A slot of a session from the first asking: `give_back` is right whether it is held, waited for, or neither."""

    __slots__ = ("_granted", "_held", "_slots")

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._held = False
        self._granted: asyncio.Event = asyncio.Event()

    async def take(self, seconds: float) -> Deny | None:
        """Take a slot in turn, for at most `seconds`."""
        if self._slots.crowded:
            return _CROWDED
        if self._slots.acquire(self._on_grant):
            self._held = True
            return None
        try:
            async with asyncio.timeout(seconds):
                await self._granted.wait()
        except TimeoutError:
            # Granted in the very turn in which the time was over: then it is ours.
            return None if self._held else _NO_SLOT
        return None

    def _on_grant(self) -> None:
        self._held = True
        self._granted.set()

    def give_back(self) -> None:
        """Return the slot, or leave the queue."""
        if self._held:
            self._held = False
            self._slots.release()
        else:
            self._slots.cancel(self._on_grant)


class Upstream:
    """An open connection to an address that was judged, and the slot that it takes."""

    __slots__ = ("_slot", "address", "authority", "stream")

    def __init__(self, authority: Authority, address: IPAddress, stream: Stream, slot: Slot) -> None:
        self.authority = authority
        self.address = address
        self.stream = stream
        self._slot = slot

    @property
    def is_quiet(self) -> bool:
        """Whether it is open and the host has said nothing that nobody asked for."""
        return not self.stream.ended and not self.stream.data

    def close(self) -> None:
        """Close the connection and return its slot. Once or more."""
        self.stream.abort()
        self._slot.give_back()


class HeldUpstream:
    """The connection to a host that a client's connection has, if it has one: in use, or kept for the next request."""

    __slots__ = ("_kept_since", "_services", "_session", "_upstream")

    def __init__(self, services: Services) -> None:
        self._services = services
        self._session: Session | None = None
        self._upstream: Upstream | None = None
        # When it began to wait for another request, in the loop's time.
        self._kept_since = 0.0

    def put(self, session: Session, upstream: Upstream) -> None:
        """Hold a connection that was made for `session`."""
        self._session = session
        self._upstream = upstream

    def keep(self) -> None:
        """Its request is done; another may follow. A kept connection keeps its slot; not while others wait for one."""
        assert self._session is not None
        self._kept_since = self._services.loop.time()
        if self._session.slots.waiting:
            self.drop()

    def take(self, session: Session, request: PlainRequest) -> Upstream | None:
        """Return the kept connection if this request may use it; otherwise let go of it, and of its slot, first."""
        upstream = self._upstream
        if upstream is None:
            return None
        # It may be closing while we send. Only a request that can then be sent again takes the risk.
        if request.authority == upstream.authority and request.is_repeatable and upstream.is_quiet:
            # Judged again, because this host's own addresses may have changed meanwhile.
            judged = decide_addresses(session.policy, request.authority, (upstream.address,), self._services.facts)
            if not isinstance(judged, Deny):
                return upstream
        self.drop()
        return None

    def tend(self, never: float) -> float:
        """Let go of a kept connection that is of no use any more, or whose slot others wait for.

        Returns when to look again.
        """
        upstream, session = self._upstream, self._session
        if upstream is None or session is None:
            return never
        now = self._services.loop.time()
        if not upstream.is_quiet or session.slots.waiting or now >= self._kept_since + KEEP_UPSTREAM_S:
            self.drop()
            return never
        return now + LOOK_S

    def drop(self) -> None:
        """Close it, if there is one."""
        if self._upstream is not None:
            self._upstream.close()
            self._upstream = None


@dataclass(frozen=True, slots=True)
class Unreached:
    """Why a host was not reached; `address` is the first that was looked at, if it came to that."""

    deny: Deny
    address: str = ""


async def reach(
    services: Services, session: Session, authority: Authority, changed: Callable[[], None]
) -> Upstream | Unreached:
    """Connect to `authority` on behalf of `session`; `changed` is what its stream calls."""
    slot = Slot(session.slots)
    try:
        result = await _reach(services, session, authority, changed, slot)
    except BaseException:
        slot.give_back()
        raise
    if isinstance(result, Unreached):
        slot.give_back()
    return result


async def _reach(
    services: Services, session: Session, authority: Authority, changed: Callable[[], None], slot: Slot
) -> Upstream | Unreached:
    loop = services.loop
    began = loop.time()
    deny = await slot.take(services.gateway.config.limits.egress_slot_wait_ms / 1000)
    if deny is not None:
        return Unreached(deny)
    if waited := loop.time() - began:
        services.gateway.metrics.slot_wait_seconds.observe(waited)
    addresses: tuple[IPAddress, ...]
    if authority.address is not None:
        addresses = (authority.address,)
    else:
        answer = await services.resolver.look_up(authority.host, session.id)
        if isinstance(answer, ResolveError):
            return Unreached(Deny(answer.reason, answer.message))
        addresses = answer.addresses
    verdict = decide_addresses(session.policy, authority, addresses, services.facts)
    if isinstance(verdict, Deny):
        return Unreached(verdict, str(addresses[0]))
    # Connect to the addresses that were judged, never to the name again: a second look-up may answer differently
    # (DNS rebinding).
    dialled = await services.dialer.connect(addresses, authority.port)
    if isinstance(dialled, DialError):
        return Unreached(Deny(dialled.reason, dialled.message), str(addresses[0]))
    stream = Stream(loop, changed)
    try:
        await loop.create_connection(lambda: stream, sock=dialled.sock)
    except BaseException:
        dialled.sock.close()
        raise
    return Upstream(authority, dialled.address, stream, slot)
