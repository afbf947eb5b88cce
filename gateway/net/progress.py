"""Proves that the gateway makes progress: what the watchdog asks for before it says that all is well."""

import asyncio
import socket

from gateway.net.poller import Poller


class Progress:
    """Sends bytes to itself by the way that every tunnel's bytes take.

    The loop's timers alone would prove nothing: they may run while the poller delivers nothing. The two sockets are kept,
    so that running out of descriptors is not taken for a hang.
    """

    def __init__(self, poller: Poller) -> None:
        self._poller = poller
        self._near, self._far = socket.socketpair()
        self._near.setblocking(False)
        self._arrived = asyncio.Event()
        poller.add_reader(self._near.fileno(), self._on_readable)

    async def prove(self) -> None:
        """Return when a byte has come through the poller."""
        self._arrived.clear()
        self._far.send(b"?")
        await self._arrived.wait()

    def close(self) -> None:
        """Watch no more."""
        self._poller.forget(self._near.fileno())
        self._near.close()
        self._far.close()

    def _on_readable(self) -> None:
        self._near.recv(64)
        self._arrived.set()
