"""Serves the gateway's metrics in Prometheus' text format."""

import socket

from aiohttp import web

from gateway.context import Gateway


class MetricsServer:
    """`GET /metrics` and `GET /health` on a socket of their own, never the sandbox port."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._runner: web.AppRunner | None = None

    async def start(self, listening: socket.socket) -> None:
        """Serve on a listening socket."""
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/health", self._health)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.SockSite(self._runner, listening).start()

    async def close(self) -> None:
        """Stop."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _metrics(self, _request: web.Request) -> web.Response:
        self._gateway.metrics.audit_lost.set(self._gateway.audit.lost)
        return web.Response(body=self._gateway.metrics.text(), content_type="text/plain", charset="utf-8")

    async def _health(self, _request: web.Request) -> web.Response:
        registry = self._gateway.registry
        return web.json_response(
            {"ready": registry.ready, "sessions": len(registry)}, status=200 if registry.ready else 503
        )
