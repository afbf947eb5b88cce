"""Asynchronous client of the control API, for the CLI and for programs.

async with ControlClient("unix:/run/opificia/api/control.sock") as control:
    session = await control.create(SandboxSpec(image="opificia-sandbox:latest", command=("id",)))
    await control.launch(session.id)
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, BinaryIO, Final, Self, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from control.api.types import (
    EgressCheck,
    EgressChecked,
    EventView,
    GatewayView,
    Health,
    LogLine,
    Problem,
    RunLine,
    RunRequest,
    SessionPage,
    SessionView,
)
from control.exchange import Address, Answer, ExchangeError, exchange
from control.plan.session import Reason, SessionState
from control.spec import SandboxSpec

DEFAULT_ADDRESS: Final = "unix:/run/opificia/api/control.sock"
_ANSWER_S: Final = 60.0
_RETRY_S: Final = 0.3
# A page of the largest sessions is some megabytes; an answer that has no end is none.
_MAX_ANSWER_BYTES: Final = 512 * 1024 * 1024
_MAX_PROBLEM_BYTES: Final = 1024 * 1024

T = TypeVar("T")
# Called when an answer has begun.
_Opened = Callable[[], None]
_Take = Callable[[Answer], AsyncIterator[bytes]]


class ControlError(Exception):
    """The API refused; `problem` is its answer."""

    def __init__(self, problem: Problem) -> None:
        super().__init__("; ".join((problem.detail, *problem.problems)))
        self.problem = problem


class ControlUnavailableError(Exception):
    """There is no API at the address, or its connection broke."""


class ControlClient:
    """The API as typed calls. All raise ControlError and ControlUnavailableError."""

    def __init__(self, address: str = DEFAULT_ADDRESS, token: str = "") -> None:
        """Take `unix:/path`, or `http://host:port` with a bearer token."""
        self._name = address
        self._token = token
        self._address: Address | None = None

    async def __aenter__(self) -> Self:
        try:
            self._address = Address.parse(self._name)
        except ValueError as error:
            raise ControlUnavailableError(f"{self._name!r} is neither unix:/path nor http://host:port") from error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave nothing open: a connection ends with its request."""

    async def create(self, spec: SandboxSpec, idempotency_key: str = "") -> SessionView:
        """Make a session. The same key and spec make one session, however often they are sent."""
        headers = {"Idempotency-Key": idempotency_key} if idempotency_key else {}
        return await self._call("POST", "/v1/sessions", SessionView, body=spec, headers=headers)

    async def put_input(self, session: str, archive: BinaryIO) -> SessionView:
        """Upload a tar that becomes /in."""
        async with self._request("PUT", f"{_path(session)}/in", data=archive) as answer:
            return _decoded(await answer.read(_MAX_ANSWER_BYTES), SessionView)

    async def launch(self, session: str) -> SessionView:
        """Queue a session for its start."""
        return await self._call("POST", f"{_path(session)}/launch", SessionView)

    async def get(self, session: str, patience_s: float = 0) -> SessionView:
        """Return one session; a daemon that is away is waited for that long."""
        return await _patiently(patience_s, lambda: self._call("GET", _path(session), SessionView))

    async def list(
        self,
        states: Sequence[SessionState] = (),
        limit: int = 100,
        cursor: str = "",
        *,
        reasons: Sequence[Reason] = (),
        image: str = "",
        patience_s: float = 0,
    ) -> SessionPage:
        """Return a page of sessions, the newest first; only those of these states, reasons and this image, if given.

        A daemon that is away is waited for as `get` does.
        """
        query = [("limit", str(limit)), *(("state", state.value) for state in states)]
        query += [*(("reason", reason.value) for reason in reasons), *([("image", image)] if image else [])]
        query += [("cursor", cursor)] if cursor else []
        return await _patiently(patience_s, lambda: self._call("GET", "/v1/sessions", SessionPage, query=query))

    async def stop(self, session: str, grace_ms: int | None = None) -> SessionView:
        """Begin to end a session."""
        return await self._call("POST", f"{_path(session)}/stop", SessionView, body={"grace_ms": grace_ms})

    async def events(self, session: str, *, after: int = 0, follow: bool = True) -> AsyncIterator[EventView]:
        """Yield a session's events; with `follow`, until it has ended."""
        async for data in self._events(session, after, follow=follow):
            yield _decoded(data, EventView)

    async def follow_events(self, session: str, patience_s: float) -> AsyncIterator[EventView]:
        """Yield a session's events to its end, across restarts of the daemon that take no longer than `patience_s`."""
        number = 0

        def rest(opened: _Opened) -> AsyncIterator[bytes]:
            return self._events(session, number, follow=True, opened=opened)

        async for data in _across(patience_s, rest):
            event = _decoded(data, EventView)
            number = event.number
            yield event

    async def follow_log(self, session: str, stream: str, patience_s: float) -> AsyncIterator[bytes]:
        """Yield the bytes of one output to the session's end, across restarts as `follow_events` does."""
        offset = 0

        def rest(opened: _Opened) -> AsyncIterator[bytes]:
            return self._log(session, stream, offset, follow=True, opened=opened)

        async for data in _across(patience_s, rest):
            offset += len(data)
            yield data

    async def follow_logs(self, session: str, patience_s: float) -> AsyncIterator[LogLine]:
        """Yield both outputs, merged, to the session's end, across restarts as `follow_events` does."""
        count = 0

        def rest(opened: _Opened) -> AsyncIterator[bytes]:
            return self._log(session, "merged", count, follow=True, opened=opened, take=Answer.lines)

        async for line in _across(patience_s, rest):
            count += 1
            yield _decoded(line, LogLine)

    async def follow_egress(self, session: str, patience_s: float) -> AsyncIterator[dict[str, Any]]:
        """Yield the gateway's decisions for a session to its end, across restarts as `follow_events` does."""
        offset = 0

        def rest(opened: _Opened) -> AsyncIterator[bytes]:
            return self._egress(session, offset, follow=True, opened=opened)

        async for line in _across(patience_s, rest):
            offset += len(line)
            yield _decoded(line, dict[str, Any])

    async def ended(self, session: str) -> SessionView:
        """Wait until a session has ended and return it."""
        async for _ in self.events(session):
            pass
        return await self.get(session)

    async def log(self, session: str, stream: str, *, offset: int = 0, follow: bool = False) -> AsyncIterator[bytes]:
        """Yield the bytes of one output."""
        async for chunk in self._log(session, stream, offset, follow=follow):
            yield chunk

    async def logs(self, session: str, *, follow: bool = False) -> AsyncIterator[LogLine]:
        """Yield both outputs, merged in the order in which they came."""
        async for line in self._log(session, "merged", 0, follow=follow, take=Answer.lines):
            yield _decoded(line, LogLine)

    async def egress(self, session: str, *, follow: bool = False) -> AsyncIterator[dict[str, Any]]:
        """Yield the gateway's decisions for a session."""
        async for line in self._egress(session, 0, follow=follow):
            yield _decoded(line, dict[str, Any])

    async def check_egress(self, check: EgressCheck) -> EgressChecked:
        """Ask what the gateway would decide about hosts."""
        return await self._call("POST", "/v1/egress/check", EgressChecked, body=check)

    async def gateway(self) -> GatewayView:
        """Return the gateway and the sessions that it serves."""
        return await self._call("GET", "/v1/gateway", GatewayView)

    async def run(self, session: str, command: RunRequest) -> AsyncIterator[RunLine]:
        """Run a command in a session; leaving the iteration early cancels it."""
        async with self._request("POST", f"{_path(session)}/runs", body=command) as answer:
            async for line in answer.lines():
                yield _decoded(line, RunLine)  # type: ignore[arg-type]  # of a union mypy knows no type

    async def out(self, session: str, destination: Path) -> int:
        """Write the tar of what a session left in /out; return its size in bytes."""
        size = 0
        async with self._request("GET", f"{_path(session)}/out") as answer:
            with destination.open("wb") as file:
                async for chunk in answer.chunks():
                    size += len(chunk)
                    await asyncio.to_thread(file.write, chunk)
        return size

    async def health(self) -> Health:
        """Return whether all parts of the host are there."""
        async with self._request("GET", "/health", accept=(503,)) as answer:
            return _decoded(await answer.read(_MAX_ANSWER_BYTES), Health)

    async def _events(
        self, session: str, after: int, *, follow: bool, opened: _Opened | None = None
    ) -> AsyncIterator[bytes]:
        query = [("after", str(after)), ("follow", str(int(follow)))]
        async for line in self._stream(f"{_path(session)}/events", query, Answer.lines, opened):
            if line.startswith(b"data: "):
                yield line[6:]

    def _log(
        self,
        session: str,
        stream: str,
        offset: int,
        *,
        follow: bool,
        opened: _Opened | None = None,
        take: _Take | None = None,
    ) -> AsyncIterator[bytes]:
        query = [("stream", stream), ("offset", str(offset)), ("follow", str(int(follow)))]
        return self._stream(f"{_path(session)}/logs", query, take or Answer.chunks, opened)

    def _egress(
        self, session: str, offset: int, *, follow: bool, opened: _Opened | None = None
    ) -> AsyncIterator[bytes]:
        query = [("offset", str(offset)), ("follow", str(int(follow)))]
        return self._stream(f"{_path(session)}/egress", query, Answer.lines, opened)

    async def _stream(
        self, path: str, query: Sequence[tuple[str, str]], take: _Take, opened: _Opened | None
    ) -> AsyncIterator[bytes]:
        async with self._request("GET", path, query=query) as answer:
            if opened is not None:
                opened()
            async for piece in take(answer):
                yield piece

    async def _call(
        self,
        method: str,
        path: str,
        kind: type[T],
        *,
        body: object = None,
        query: Sequence[tuple[str, str]] = (),
        headers: Mapping[str, str] | None = None,
    ) -> T:
        try:
            async with (
                asyncio.timeout(_ANSWER_S),
                self._request(method, path, body=body, query=query, headers=headers) as answer,
            ):
                return _decoded(await answer.read(_MAX_ANSWER_BYTES), kind)
        except TimeoutError as error:
            raise ControlUnavailableError(f"the control daemon did not answer within {_ANSWER_S:g} s") from error

    @asynccontextmanager
    async def _request(
        self,
        method: str,
        path: str,
        *,
        body: object = None,
        data: BinaryIO | None = None,
        query: Sequence[tuple[str, str]] = (),
        headers: Mapping[str, str] | None = None,
        accept: tuple[int, ...] = (),
    ) -> AsyncIterator[Answer]:
        assert self._address is not None, "use `async with ControlClient(…)`"
        sent: bytes | BinaryIO = data or (b"" if body is None else msgspec.json.encode(body))
        if query:
            path += f"?{urlencode(query)}"
        given = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        try:
            async with exchange(self._address, method, path, {**given, **(headers or {})}, sent) as answer:
                if answer.status >= 300 and answer.status not in accept:
                    raise ControlError(_problem(answer.status, await answer.read(_MAX_PROBLEM_BYTES)))
                yield answer
        except ExchangeError as error:
            raise ControlUnavailableError(f"the control daemon cannot be reached at {self._name}: {error}") from error


class _Patience:
    """Bounds how long a daemon that is away is waited for: each absence by itself, however long it was there between."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until: float | None = None

    def renew(self) -> None:
        """Note that it is there. An answer's head tells: a session that is silent sends nothing more for hours."""
        self._until = None

    async def wait(self) -> None:
        """Wait before another try. Called while the failure is handled: raises it again when there was enough time."""
        now = monotonic()
        if self._until is None:
            self._until = now + self._seconds
        if now >= self._until:
            raise
        await asyncio.sleep(_RETRY_S)


async def _across(patience_s: float, rest: Callable[[_Opened], AsyncIterator[T]]) -> AsyncIterator[T]:
    """Yield what a stream brings to its end; `rest` opens it behind what was yielded, anew when the daemon was away."""
    patience = _Patience(patience_s)
    while True:
        try:
            async for each in rest(patience.renew):
                yield each
        except (ControlUnavailableError, ControlError) as error:
            if not _away(error):
                raise
            await patience.wait()
        else:
            return


async def _patiently(patience_s: float, call: Callable[[], Awaitable[T]]) -> T:
    patience = _Patience(patience_s)
    while True:
        try:
            return await call()
        except (ControlUnavailableError, ControlError) as error:
            if not _away(error):
                raise
            await patience.wait()


def _away(error: Exception) -> bool:
    # 503: it is there, and something that it needs is not yet.
    return not isinstance(error, ControlError) or error.problem.status == HTTPStatus.SERVICE_UNAVAILABLE


def _path(session: str) -> str:
    return f"/v1/sessions/{quote(session, safe='')}"


def _decoded(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ControlUnavailableError(f"the answer is not of this version of the API: {error}") from error


def _problem(status: int, body: bytes) -> Problem:
    try:
        return msgspec.json.decode(body, type=Problem)
    except (msgspec.MsgspecError, RecursionError):
        text = body.decode("utf-8", "replace")[:500]
        return Problem(
            type="about:blank", title="error", status=status, detail=text or f"status {status}", reason="unknown"
        )
