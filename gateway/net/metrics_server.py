"""Serves the gateway's metrics in Prometheus' text format, and its health. A handful of lines instead of a web framework,
which took a fifth of the process's memory.
"""

import asyncio
import socket
from http import HTTPStatus
from typing import Final

import orjson

from gateway.context import Gateway
from gateway.core.head import HeadError, parse_head
from gateway.core.incomplete import Incomplete

# Every user of the host may connect. One too many takes the place of the first, so that a crowd keeps no scraper out for long.
MAX_CONNECTIONS: Final = 64
# From connecting to the end of the request.
REQUEST_TIMEOUT_S: Final = 10.0
_PROMETHEUS_TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"


class MetricsServer:
    """`GET /metrics` and `GET /health` on a socket of their own, never the sandbox port."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._server: asyncio.Server | None = None
        # In the order in which they came.
        self._open: dict[_Scrape, None] = {}

    async def start(self, listening: socket.socket) -> None:
        """Serve on a listening socket."""
        self._server = await asyncio.get_running_loop().create_server(lambda: _Scrape(self), sock=listening)

    async def close(self) -> None:
        """Stop."""
        if self._server is not None:
            self._server.close()
            for scrape in list(self._open):
                scrape.abort()

    def answer(self, path: bytes) -> tuple[HTTPStatus, str, bytes]:
        """Return status, content type and body for a path."""
        if path == b"/metrics":
            self._gateway.metrics.audit_lost.set(self._gateway.audit.lost)
            return HTTPStatus.OK, _PROMETHEUS_TEXT, self._gateway.metrics.text()
        if path == b"/health":
            registry = self._gateway.registry
            status = HTTPStatus.OK if registry.ready else HTTPStatus.SERVICE_UNAVAILABLE
            return status, "application/json", orjson.dumps({"ready": registry.ready, "sessions": len(registry)})
        return HTTPStatus.NOT_FOUND, "text/plain", b"/metrics and /health are here\n"

    def opened(self, scrape: "_Scrape") -> None:
        """Hold a connection."""
        if len(self._open) >= MAX_CONNECTIONS:
            first = next(iter(self._open))
            self.closed(first)
            first.abort()
        self._open[scrape] = None

    def closed(self, scrape: "_Scrape") -> None:
        """Forget a connection."""
        self._open.pop(scrape, None)


class _Scrape(asyncio.Protocol):
    """One connection: one request, one answer. A scrape every few seconds has no use for a connection that is kept."""

    def __init__(self, server: MetricsServer) -> None:
        self._server = server
        self._buffer = b""
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's transports are not derived from asyncio's
        self._timer = asyncio.get_running_loop().call_later(REQUEST_TIMEOUT_S, self.abort)
        self._server.opened(self)

    def connection_lost(self, _error: Exception | None) -> None:
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()
        self._server.closed(self)

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        try:
            head = parse_head(self._buffer)
        except HeadError as error:
            self._answer(HTTPStatus(error.status), "text/plain", error.message.encode() + b"\n")
            return
        if isinstance(head, Incomplete):
            return
        if head.method != b"GET":
            self._answer(HTTPStatus.METHOD_NOT_ALLOWED, "text/plain", b"only GET\n")
        else:
            self._answer(*self._server.answer(head.target.partition(b"?")[0]))

    def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
            "Connection: close\r\n\r\n"
        )
        self._transport.write(head.encode("ascii") + body)
        self._transport.close()
