"""Gives a raw socket to an asyncio protocol, with the bytes that were read from it already."""

import asyncio
import logging
import socket

log = logging.getLogger("gateway.handover")


class _Opening(asyncio.Protocol):
    """Passes on what was read before, before the transport reads anything: it begins when `connection_made` returns."""

    def __init__(self, protocol: asyncio.Protocol, data: bytes) -> None:
        self._protocol = protocol
        self._data = data

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport.set_protocol(self._protocol)
        self._protocol.connection_made(transport)
        if self._data:
            self._protocol.data_received(self._data)


class Handover:
    """Holds the short tasks in which sockets change hands."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._tasks: set[asyncio.Task[None]] = set()

    def give(self, sock: socket.socket, protocol: asyncio.Protocol, data: bytes) -> None:
        """Make `protocol` the owner of `sock`, which nothing else watches; `data` is its first input."""
        self.keep(self._loop.create_task(self._give(sock, protocol, data)))

    def keep(self, task: asyncio.Task[None]) -> None:
        """Hold a task until it ends."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancel what is under way."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _give(self, sock: socket.socket, protocol: asyncio.Protocol, data: bytes) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: _Opening(protocol, data), sock)
        except OSError as error:
            log.debug("handing over a connection failed: %s", error)
            sock.close()
