"""Handlers of the API that create, show and end sessions."""

import asyncio
import enum
import secrets
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from aiohttp import web

from control.api.problems import ProblemError
from control.api.types import SessionPage, SessionView, StopRequest
from control.api.views import session_view
from control.db.rows import Selection, StoredSession
from control.db.store import request_digest
from control.plan.session import Reason, SessionState
from control.sessions.manager import SessionManager
from control.sessions.refusals import WrongStateError
from control.spec import SandboxSpec, is_image
from gateway.contract.ids import is_session_id
from gateway.contract.policy import Usage
from gateway.runtime.settings import SettingsError, convert

MAX_PAGE: Final = 500
DEFAULT_PAGE: Final = 100
# An answer stays readable whatever was sent: a body of 2 MiB can hold half a million wrong items.
MAX_PROBLEMS: Final = 100
MAX_PROBLEM_CHARACTERS: Final = 300
_UPLOAD_CHUNK: Final = 256 * 1024

Body = TypeVar("Body", bound=msgspec.Struct)
Choice = TypeVar("Choice", bound=enum.StrEnum)


def json_response(value: object, status: int = 200) -> web.Response:
    """Return a value as JSON."""
    return web.Response(status=status, body=msgspec.json.encode(value), content_type="application/json")


async def read_body(request: web.Request, kind: type[Body]) -> Body:
    """Read the request's JSON body as a `kind`. Raises ProblemError with everything that is wrong with its shape."""
    return decode_body(await request.read(), kind)


def decode_body(raw: bytes, kind: type[Body]) -> Body:
    """Take a JSON body as a `kind`. Raises ProblemError."""
    try:
        return convert(msgspec.json.decode(raw or b"{}"), kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProblemError(422, "invalid_body", f"the body is not JSON: {error}") from error
    except SettingsError as error:
        problems = tuple(str(each)[:MAX_PROBLEM_CHARACTERS] for each in error.problems[:MAX_PROBLEMS])
        raise ProblemError(422, "invalid_body", "the body is not what is expected", problems=problems) from error


def session_id(request: web.Request) -> str:
    """Return the session named by the path. Raises ProblemError."""
    session = request.match_info["session"]
    if not is_session_id(session):
        raise ProblemError(404, "no_such_session", "a session id is 1 to 64 of a-z, 0-9 and '-'")
    return session


def query_int(request: web.Request, name: str, default: int, least: int, most: int) -> int:
    """Return a number from the query string. Raises ProblemError."""
    text = request.query.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and least <= int(text) <= most):
        raise ProblemError(422, "invalid_query", f"{name} must be a number from {least} to {most}")
    return int(text)


def _query_choices(request: web.Request, name: str, kind: type[Choice]) -> tuple[Choice, ...]:
    """Return what a parameter that may be repeated names. Raises ProblemError."""
    try:
        return tuple(kind(text) for text in request.query.getall(name, []))
    except ValueError as error:
        raise ProblemError(422, "invalid_query", f"{name} must be one of {', '.join(kind)}") from error


class SessionHandlers:
    """Create, launch, list, get, stop."""

    def __init__(self, manager: SessionManager) -> None:
        self._manager = manager
        self._tasks: set[asyncio.Task[StoredSession]] = set()

    async def _whole(self, work: Coroutine[Any, Any, StoredSession]) -> StoredSession:
        """Do `work` to its end, also when the caller goes away and the handler is cancelled."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    def _forget(self, task: asyncio.Task[StoredSession]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            # Told to the caller, if there still is one.
            task.exception()

    def view(self, stored: StoredSession, usage: Usage | None = None) -> SessionView:
        """Return a session as the API shows it; where no usage is given, what is at hand of it."""
        if usage is None and self._manager.record(stored.id) is not None:
            usage = self._manager.used(stored.id)
        return session_view(stored, self._manager.admission.position(stored.id), usage)

    async def create(self, request: web.Request) -> web.Response:
        """POST /v1/sessions"""
        key = request.headers.get("Idempotency-Key", "")
        if len(key) > 255 or not (key.isascii() and key.isprintable()):
            raise ProblemError(422, "invalid_key", "an Idempotency-Key is at most 255 printable ASCII characters")
        spec = await read_body(request, SandboxSpec)
        stored = await self._whole(self._manager.create(spec, key, request_digest(await request.read())))
        return json_response(self.view(stored), 201)

    async def put_input(self, request: web.Request) -> web.Response:
        """PUT /v1/sessions/{session}/in"""
        session = session_id(request)
        life = (await self._manager.get(session)).life
        if life.state is not SessionState.CREATED or life.waiting:
            # Told before gigabytes are taken, and again by who unpacks them.
            raise WrongStateError(f"input comes before launch; the session is {life.state}")
        archive = self._manager.folder(session) / f"in-{secrets.token_hex(8)}.tar"
        try:
            await self._receive(request, archive)
            await self._manager.unpack_input(session, archive)
        finally:
            archive.unlink(missing_ok=True)
        return json_response(self.view(await self._manager.get(session)))

    async def _receive(self, request: web.Request, archive: Path) -> None:
        limit = self._manager.in_limit
        taken = 0
        with archive.open("xb", buffering=0) as file:
            async for chunk in request.content.iter_chunked(_UPLOAD_CHUNK):
                taken += len(chunk)
                if taken > limit:
                    raise ProblemError(413, "input_too_large", f"the input is larger than {limit} bytes")
                file.write(chunk)

    async def launch(self, request: web.Request) -> web.Response:
        """POST /v1/sessions/{session}/launch"""
        return json_response(self.view(await self._whole(self._manager.launch(session_id(request)))), 202)

    async def stop(self, request: web.Request) -> web.Response:
        """POST /v1/sessions/{session}/stop"""
        wanted = await read_body(request, StopRequest)
        stopping = self._manager.stop(session_id(request), wanted.grace_ms)
        return json_response(self.view(await self._whole(stopping)), 202)

    async def get(self, request: web.Request) -> web.Response:
        """GET /v1/sessions/{session}"""
        session = session_id(request)
        stored = await self._manager.get(session)
        return json_response(self.view(stored, await self._manager.usage(session)))

    async def page(self, request: web.Request) -> web.Response:
        """GET /v1/sessions"""
        image = request.query.get("image", "")
        if image and not is_image(image):
            raise ProblemError(422, "invalid_query", "image must be an image reference such as opificia-sandbox:latest")
        states = _query_choices(request, "state", SessionState)
        selection = Selection(states, _query_choices(request, "reason", Reason), image)
        limit = query_int(request, "limit", DEFAULT_PAGE, 1, MAX_PAGE)
        before = query_int(request, "cursor", 0, 1, 2**62) or None
        found = await self._manager.page(selection, before, limit)
        cursor = str(found[-1].position) if len(found) == limit else None
        return json_response(SessionPage(tuple(self.view(each) for each in found), cursor))
