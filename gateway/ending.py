"""How a gateway process ends: what can go on goes to the next process, the rest ends by itself or at a deadline."""

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping
from typing import Final

from gateway.beside import ANSWER_S, LAST_WORDS_S, START_S, TELL_S, Predecessor, Successor
from gateway.channel import SuccessionError
from gateway.net.listener import Listener
from gateway.net.parking import Parking
from gateway.net.runner import HANDOFF_S
from gateway.net.services import Services
from gateway.runtime import fdstore
from gateway.runtime.notify import more_time, notify, notify_reloading
from gateway.succession import leave_with_manager, withdraw
from gateway.unfinished import Unfinished

log = logging.getLogger("gateway.ending")

# How long a reply that goes on, or a client that is slow to take one, keeps a reload, and the HTTP connections that have
# paused for it, waiting.
FLUSH_S: Final = 0.5
# How often draining looks whether all has ended.
_POLL_S: Final = 0.05
# What an end or a reload may take beside its waits: last words, the manager's answer (fdstore.barrier), a busy machine.
_MARGIN_S: Final = 20.0


class Ending:
    """The end of one process, by one of three ways. Each leaves open what did not end; closing it is the caller's."""

    def __init__(self, services: Services, listener: Listener, parking: Parking, stopping: asyncio.Event) -> None:
        self._services = services
        self._gateway = services.gateway
        self._listener = listener
        self._parking = parking
        self._stopping = stopping
        self._drain_s = services.gateway.config.limits.drain_ms / 1000

    async def stop(self, listeners: Mapping[str, socket.socket], predecessor: Predecessor | None) -> None:
        """End because the process was told to, leaving what can go on with the service manager if it keeps it."""
        notify(f"STOPPING=1\n{more_time(self._drain_s + _MARGIN_S)}")
        # One deadline for all.
        end = self._services.loop.time() + self._drain_s
        if fdstore.is_offered():
            # New connections are served meanwhile, except for what could not go on elsewhere.
            self._listener.leave()
            self._services.end_relays(keep=True)
            self._gateway.model.hand_back()
            self._gateway.model.drain()
            await self._until(lambda: self._is_only_movable() and not _streams(predecessor), end)
            # From here on what comes waits in the listening socket: what began now would have nobody to wait for its end.
            self._listener.stop()
            # What they used, here and in the process before, belongs into the record.
            await self._services.tasks.close()
            await self._gateway.model.close()
            await self._end(predecessor)
            if leave_with_manager(self._parking, listeners, Unfinished(self._gateway.config.audit.dir)):
                return
        self._listener.stop()
        self._gateway.model.drain()
        self._services.end_relays(keep=False)
        await self._until(self._is_nothing, end)
        await self._end(predecessor)
        withdraw()

    async def be_replaced(
        self, own: Mapping[str, socket.socket], passed: Mapping[str, socket.socket]
    ) -> Successor | None:
        """Start the next process and give it all that can move; None, and nothing has changed, if it does not come."""
        notify_reloading()
        notify(more_time(START_S + HANDOFF_S + ANSWER_S + _MARGIN_S))
        try:
            successor = await Successor.start()
            end = self._services.loop.time() + HANDOFF_S
            # A runner's connection can move when it has reached control, one for plain HTTP between two requests.
            await self._until(self._is_joined, end)
            # Only now: nobody serves those that pause.
            self._services.end_relays(keep=True)
            await self._until(self._is_paused, self._services.loop.time() + FLUSH_S)
            await self._until(self._is_paused_but_for_unread, end)
            if self._stopping.is_set():
                # Who told this process may not have known of the next one, and waits for all of them to end.
                successor.close()
                raise SuccessionError("the process was told to stop")
            self._gateway.model.hand_back()
            record, descriptors = self._parking.pack(own, passed)
            successor.hand(record, descriptors)
        except SuccessionError as error:
            self._parking.take_back()
            log.error("reload: %s; this gateway goes on", error)
            notify("READY=1")
            return None
        self._let_go()
        # What is counted from here on is for the next process to hear of.
        successor.begin(self._gateway.registry)
        # At once: what pauses or is handed back from here on has nobody to take it up.
        self._gateway.model.drain()
        self._services.end_relays(keep=False)
        log.info("the next process has %d connections; this one ends with its last stream", record.connections)
        return successor

    def _let_go(self) -> None:
        """Let go of what has moved, but for its slots: nobody here may have them."""
        held = {session: session.slots.held for session in self._gateway.registry}
        for session, slots in held.items():
            session.hold_elsewhere(after=slots)
        self._parking.let_go()
        for session, slots in held.items():
            session.hold_elsewhere(after=slots - session.slots.held)

    async def drain_for(self, successor: Successor, predecessor: Predecessor | None) -> None:
        """Keep what could not move until it has ended; at most as long as a stream may last, or until told to stop.

        The successor's end is the end of all: the service manager starts no other gateway while this one lives, and nobody
        could take anything away from what goes on here.
        """
        loop = self._services.loop
        registry = self._gateway.registry
        following = loop.create_task(successor.follow(registry))
        end = loop.time() + self._gateway.config.limits.model_total_timeout_ms / 1000
        is_told = False
        why = ""
        # Last replies too: what is unread when a process ends would take them along.
        while not why and not (self._is_nothing() and not self._services.lingering and not _streams(predecessor)):
            if self._stopping.is_set() and not is_told:
                is_told = True
                end = min(end, loop.time() + self._drain_s)
            if successor.has_heard:
                successor.tell()
            await asyncio.sleep(TELL_S)
            if successor.wants_end:
                why = "the gateway that took over is ending"
            elif following.done():
                why = "the gateway that took over has ended (a crash, or killed)"
            elif loop.time() >= end:
                why = "the time to drain is over"
        if open_still := self._waited_for():
            log.warning("%s: what still went on here is cut, %d in number", why, open_still)
        await self._services.tasks.close()
        await self._gateway.model.close()
        await self._end(predecessor)
        successor.tell()
        await self._until(lambda: successor.has_heard, loop.time() + ANSWER_S)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        successor.close()
        log.info("all that this process kept has ended")

    async def _end(self, predecessor: Predecessor | None) -> None:
        """Have the process before this one end, and count what it used last."""
        if predecessor is not None and predecessor.is_there:
            predecessor.end()
            await self._until(lambda: not predecessor.is_there, self._services.loop.time() + LAST_WORDS_S)

    async def _until(self, condition: Callable[[], bool], end: float) -> None:
        """Wait until a condition holds, or for the time `end`."""
        # Hundreds of unlike things may be open, and none tells another that it ended.
        while self._services.loop.time() < end and not condition():  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)

    def _is_nothing(self) -> bool:
        return self._waited_for() == 0 and not self._has_unknown()

    def _is_only_movable(self) -> bool:
        movable = len(self._services.connects) + len(self._services.tunnels)
        return self._is_joined() and self._waited_for() <= movable and not self._has_unknown()

    def _is_joined(self) -> bool:
        return all(runner.splicer is not None for runner in self._services.runners)

    def _is_paused(self) -> bool:
        return not any(relay.will_pause or relay.has_promised for relay in self._services.relays)

    def _is_paused_but_for_unread(self) -> bool:
        return not any(relay.will_pause and relay.is_sent for relay in self._services.relays)

    def _has_unknown(self) -> bool:
        """Whether there are requests of which it is not known yet whose they are; no session counts them."""
        return bool(self._services.relays) or self._gateway.model.is_waiting

    def _waited_for(self) -> int:
        return sum(session.ending_count for session in self._gateway.registry)


def _streams(predecessor: Predecessor | None) -> bool:
    return predecessor is not None and predecessor.is_there
