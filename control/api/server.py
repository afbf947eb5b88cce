"""The API's application: handlers by the names of their routes, errors as problems, a bearer token where it is on TCP."""

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from prometheus_client import CollectorRegistry, generate_latest

from control.api.bearer import Bearer
from control.api.gateway import GatewayHandlers
from control.api.openapi import document
from control.api.problems import problem_middleware
from control.api.routes import OPERATIONS
from control.api.sessions import SessionHandlers, json_response
from control.api.streams import StreamHandlers
from control.api.types import Health
from control.link import GatewayLink
from control.sessions.manager import SessionManager

# A spec with its environment, command and rules at their limits is about 600 KB.
MAX_BODY_BYTES: Final = 2 * 1024 * 1024


def api_application(
    manager: SessionManager,
    link: GatewayLink,
    health: Callable[[], Awaitable[Health]],
    metrics: CollectorRegistry,
    egress_logs: Path,
    bearer: Bearer | None = None,
) -> web.Application:
    """Return the API; with `bearer`, every request must carry its token."""
    sessions = SessionHandlers(manager)
    streams = StreamHandlers(manager, egress_logs)
    gateway = GatewayHandlers(manager, link)
    openapi = msgspec.json.encode(document(OPERATIONS))

    async def show_health(_request: web.Request) -> web.StreamResponse:
        found = await health()
        return json_response(found, 200 if found.status == "ok" else 503)

    async def show_metrics(_request: web.Request) -> web.StreamResponse:
        return web.Response(body=generate_latest(metrics), headers={"Content-Type": "text/plain; version=0.0.4"})

    async def show_openapi(_request: web.Request) -> web.StreamResponse:
        return web.Response(body=openapi, content_type="application/json")

    handlers: Mapping[str, Handler] = {
        "create": sessions.create,
        "list": sessions.page,
        "get": sessions.get,
        "put_input": sessions.put_input,
        "launch": sessions.launch,
        "stop": sessions.stop,
        "events": streams.events,
        "logs": streams.logs,
        "egress": streams.egress,
        "run": streams.run,
        "out": streams.out,
        "check_egress": gateway.check,
        "gateway": gateway.status,
        "health": show_health,
        "metrics": show_metrics,
        "openapi": show_openapi,
    }
    middlewares: list[Middleware] = [problem_middleware, *([bearer.middleware()] if bearer else [])]
    app = web.Application(middlewares=middlewares, client_max_size=MAX_BODY_BYTES)
    for operation in OPERATIONS:
        app.router.add_route(operation.method, operation.path, handlers[operation.name])
    return app
