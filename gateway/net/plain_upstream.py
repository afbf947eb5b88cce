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
from gateway.core.verdict import Deny, DenyReason
from gateway.net.dial import DialError
from gateway.net.plain_stream import Stream
from gateway.net.resolve import ResolveError
from gateway.net.services import Services
from gateway.registry import IPAddress, Session

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

    __slots__ = ("_slot", "address", "authority", "kept_since", "stream")

    def __init__(self, authority: Authority, address: IPAddress, stream: Stream, slot: Slot) -> None:
        self.authority = authority
        self.address = address
        self.stream = stream
        # When it began to wait for another request, in the loop's time.
        self.kept_since = 0.0
        self._slot = slot

    @property
    def is_quiet(self) -> bool:
        """Whether it is open and the host has said nothing that nobody asked for."""
        return not self.stream.ended and not self.stream.data

    def close(self) -> None:
        """Close the connection and return its slot. Once or more."""
        self.stream.abort()
        self._slot.give_back()


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
