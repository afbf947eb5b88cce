"""Errors of the API as problem details (RFC 9457): what went wrong, and what to do about it."""

import logging
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from control.api.types import Problem
from control.db.database import StoreUnavailableError
from control.db.store import KeyReusedError, SessionExistsError
from control.docker.types import EngineError
from control.link import GatewayUnavailableError, GrantRefusedError
from control.plan.admission import AdmissionError
from control.runner.channel import NotAllowedError
from control.sessions.folders import InputError
from control.sessions.refusals import InvalidSpecError, NoSuchSessionError, WrongStateError

log = logging.getLogger(__name__)

CONTENT_TYPE = "application/problem+json"


class ProblemError(Exception):
    """A problem that a handler found itself."""

    def __init__(
        self, status: int, reason: str, detail: str, *, problems: tuple[str, ...] = (), remedy: str = ""
    ) -> None:
        super().__init__(detail)
        self.problem = _problem(status, reason, detail, problems, remedy)


def _problem(status: int, reason: str, detail: str, problems: tuple[str, ...] = (), remedy: str = "") -> Problem:
    return Problem(
        type=f"urn:opificia:problem:{reason}",
        title=reason.replace("_", " "),
        status=status,
        detail=detail,
        reason=reason,
        problems=problems,
        remedy=remedy,
    )


def describe(error: Exception) -> Problem | None:
    """Return the problem that an error stands for, None if it is none of the caller's or operator's."""
    match error:
        case ProblemError():
            return error.problem
        case InvalidSpecError():
            return _problem(422, "invalid_spec", "the session cannot be made as asked", tuple(error.problems))
        case NoSuchSessionError():
            return _problem(404, "no_such_session", f"there is no session {error}", remedy="see `opificia sessions`")
        case SessionExistsError():
            return _problem(409, "session_exists", "there is a session with this id already")
        case KeyReusedError():
            return _problem(422, "idempotency_key_reused", "this idempotency key was used for another request")
        case WrongStateError() | NotAllowedError():
            return _problem(409, "wrong_state", str(error))
        case AdmissionError():
            return _problem(503 if error.later else 422, "no_room", str(error))
        case GrantRefusedError():
            return _problem(422, "invalid_policy", "the gateway refuses the policy", error.problems)
        case GatewayUnavailableError():
            return _problem(503, "gateway_unavailable", str(error), remedy="check opificia-gateway")
        case InputError():
            return _problem(422, "invalid_input", str(error))
        case StoreUnavailableError():
            return _problem(
                503, "store_unavailable", str(error), remedy="check the database; sessions that run are not affected"
            )
        case EngineError():
            return _problem(503, "engine_error", error.message, remedy=error.remedy)
        case OSError():
            return _problem(507, "storage", f"the host cannot store it: {error.strerror or error}")
        case web.RequestPayloadError():
            return _problem(400, "bad_request", "the body does not arrive as its head says it would")
        case web.HTTPException():
            detail = (error.text or error.reason).strip()
            return _problem(error.status, error.reason.lower().replace(" ", "_"), detail)
        case _:
            return None


@web.middleware
async def problem_middleware(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Turn every error into problem details."""
    try:
        return await handler(request)
    except Exception as error:
        transport = request.transport
        if transport is None or transport.is_closing():
            # The caller went away; there is nobody to tell. (Raised again, it would be logged as a failure of ours.)
            return web.Response()
        problem = describe(error)
        if problem is None:
            log.exception("%s %s failed", request.method, request.path)
            problem = _problem(500, "internal", "the control daemon failed; its log says how")
        if request.writer.output_size:
            # A stream has begun, and a second answer in it would be taken for its data: broken off, it is not whole.
            log.warning("%s %s is broken off: %s", request.method, request.path, problem.detail)
            transport.abort()
            return web.Response()
        headers = {"Retry-After": "5"} if problem.status == 503 else {}
        if isinstance(error, web.HTTPMethodNotAllowed):
            headers["Allow"] = error.headers.get("Allow", "")
        return web.Response(
            status=problem.status, body=msgspec.json.encode(problem), content_type=CONTENT_TYPE, headers=headers
        )
