"""The token that the API wants on TCP, and the connections whose caller has not shown it: bounded in number and in time."""

import asyncio
import hmac
from collections.abc import Callable
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from aiohttp.web_protocol import RequestHandler

from control.api.problems import ProblemError

# aiohttp itself waits for a request for ever.
TOKEN_WITHIN_S: Final = 10.0
MAX_STRANGERS: Final = 256


class Bearer:
    """Lets callers in who show `token` in time.

    One stranger too many takes the place of the first of them, so that a crowd keeps out nobody who has the token.
    """

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()
        self._strangers: dict[asyncio.BaseProtocol, asyncio.TimerHandle] = {}

    def connections(self, make: Callable[[], RequestHandler]) -> Callable[[], RequestHandler]:
        """Return a protocol factory that counts what `make` makes."""

        def counted() -> RequestHandler:
            if len(self._strangers) >= MAX_STRANGERS:
                self._cut(next(iter(self._strangers)))
            connection = make()
            loop = asyncio.get_running_loop()
            self._strangers[connection] = loop.call_later(TOKEN_WITHIN_S, self._cut, connection)
            return connection

        return counted

    def middleware(self) -> Middleware:
        """Return what refuses a request without the token."""

        @web.middleware
        async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
            given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
            if not hmac.compare_digest(given, self._expected):
                raise ProblemError(401, "unauthorized", "this address needs the bearer token of [listen] token_file")
            timer = self._strangers.pop(request.protocol, None)
            if timer is not None:
                timer.cancel()
            return await handler(request)

        return check

    def _cut(self, connection: asyncio.BaseProtocol) -> None:
        timer = self._strangers.pop(connection)
        timer.cancel()
        transport = getattr(connection, "transport", None)
        if transport is not None:
            transport.abort()
