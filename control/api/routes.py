"""Which request goes where: the routes as data, from which the router and the OpenAPI document are made."""

from typing import Final

from control.api.openapi import Operation, Parameter
from control.api.types import (
    EgressCheck,
    EgressChecked,
    EventView,
    GatewayView,
    Health,
    RunLine,
    RunRequest,
    SessionPage,
    SessionView,
    StopRequest,
)
from control.plan.session import Reason, SessionState
from control.spec import SandboxSpec

_NDJSON: Final = "application/x-ndjson"
_FOLLOW: Final = Parameter("follow", "Stay and send what comes, until the session ends", {"type": "boolean"})
_COUNT: Final = {"type": "integer", "minimum": 0}

OPERATIONS: Final = (
    Operation(
        "POST",
        "/v1/sessions",
        "create",
        "Make a session; it starts nothing yet",
        201,
        body=SandboxSpec,
        answer=SessionView,
        parameters=(Parameter("Idempotency-Key", "The same key and body make one session", place="header"),),
        errors=(409, 422, 503, 507),
    ),
    Operation(
        "GET",
        "/v1/sessions",
        "list",
        "Sessions from the newest to the oldest",
        answer=SessionPage,
        parameters=(
            Parameter(
                "state",
                "Only these; may be repeated",
                {"type": "array", "items": {"type": "string", "enum": [state.value for state in SessionState]}},
            ),
            Parameter(
                "reason",
                "Only those that ended for this; may be repeated",
                {"type": "array", "items": {"type": "string", "enum": [reason.value for reason in Reason]}},
            ),
            Parameter("image", "Only those of this image, by the name that was asked for"),
            Parameter("limit", "At most this many", {"type": "integer", "minimum": 1, "maximum": 500}),
            Parameter("cursor", "`next` of the page before"),
        ),
        errors=(422, 503),
    ),
    Operation("GET", "/v1/sessions/{session}", "get", "One session", answer=SessionView, errors=(404, 503)),
    Operation(
        "PUT",
        "/v1/sessions/{session}/in",
        "put_input",
        "Upload a tar that becomes /in; before launch",
        body_type="application/x-tar",
        answer=SessionView,
        errors=(404, 409, 413, 422),
    ),
    Operation(
        "POST",
        "/v1/sessions/{session}/launch",
        "launch",
        "Queue the session for its start",
        202,
        answer=SessionView,
        errors=(404, 409, 422, 503),
    ),
    Operation(
        "POST",
        "/v1/sessions/{session}/stop",
        "stop",
        "Begin to end the session; harmless when it has ended",
        202,
        body=StopRequest,
        answer=SessionView,
        errors=(404,),
    ),
    Operation(
        "GET",
        "/v1/sessions/{session}/events",
        "events",
        "The session's events as server-sent events, each an EventView",
        answer=EventView,
        answer_type="text/event-stream",
        parameters=(
            _FOLLOW,
            Parameter("after", "Only events with a higher number", _COUNT),
            Parameter("Last-Event-ID", "As `after`; what a client sends when it comes back", place="header"),
        ),
        errors=(404, 503),
    ),
    Operation(
        "GET",
        "/v1/sessions/{session}/logs",
        "logs",
        "Output: bytes of one stream, or both merged as LogLine objects, one a line",
        answer_type=_NDJSON,
        parameters=(
            _FOLLOW,
            Parameter("stream", "stdout, stderr or merged", {"type": "string", "enum": ["stdout", "stderr", "merged"]}),
            Parameter("offset", "Skip so many bytes of the one stream, or lines of both merged", _COUNT),
        ),
        errors=(404, 422),
    ),
    Operation(
        "GET",
        "/v1/sessions/{session}/egress",
        "egress",
        "What the gateway decided for the session, one JSON object a line",
        answer_type=_NDJSON,
        parameters=(_FOLLOW, Parameter("offset", "Skip so many bytes", _COUNT)),
        errors=(404, 422),
    ),
    Operation(
        "POST",
        "/v1/egress/check",
        "check_egress",
        "What the gateway would decide about hosts, under the policy of a session or another one; nothing is connected to",
        body=EgressCheck,
        answer=EgressChecked,
        errors=(404, 422, 503),
    ),
    Operation(
        "GET",
        "/v1/gateway",
        "gateway",
        "The gateway and the sessions that it serves",
        answer=GatewayView,
    ),
    Operation(
        "POST",
        "/v1/sessions/{session}/runs",
        "run",
        "Run a command; its output and end, one JSON object a line. It is cancelled when the caller goes away",
        body=RunRequest,
        answer=RunLine,
        answer_type=_NDJSON,
        errors=(404, 409, 422),
    ),
    Operation(
        "GET",
        "/v1/sessions/{session}/out",
        "out",
        "What the session left in /out, as a tar",
        answer_type="application/x-tar",
        errors=(404, 409),
    ),
    Operation("GET", "/health", "health", "Whether all parts are there", answer=Health),
    Operation("GET", "/metrics", "metrics", "Prometheus text", answer_type="text/plain"),
    Operation("GET", "/openapi.json", "openapi", "This document", answer_type="application/json"),
)
