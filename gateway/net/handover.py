"""Gives a raw socket to an asyncio protocol, with the bytes that were read from it already."""

import asyncio
import logging
import socket

log = logging.getLogger("gateway.handover")


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
            await self._loop.connect_accepted_socket(lambda: protocol, sock)
        except OSError as error:
            log.debug("handing over a connection failed: %s", error)
            sock.close()
            return
        if data:
            protocol.data_received(data)
