"""An aiohttp application whose connections end with it: aiohttp closes those that it was given, and a `Listener` the rest."""

import ssl
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.support.listener import Listener


class AppServer:
    """One application; it may listen at several places."""

    def __init__(self, app: web.Application, **options: Any) -> None:
        """`options` are those of `web.AppRunner`."""
        self._runner = web.AppRunner(app, **options)
        self._listeners: list[Listener] = []

    async def listen(self, place: tuple[str, int] | Path, tls: ssl.SSLContext | None = None) -> int:
        """Listen at one more place; returns the port (0 for a path)."""
        if self._runner.server is None:
            await self._runner.setup()
        assert self._runner.server is not None
        listener = Listener(place, self._runner.server, tls=tls)
        self._listeners.append(listener)
        return 0 if isinstance(place, Path) else listener.port

    async def close(self) -> None:
        """Stop. Harmless when repeated."""
        for listener in self._listeners:
            listener.close()
        await self._runner.cleanup()
        while self._listeners:
            await self._listeners.pop().stop()
