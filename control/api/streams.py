"""Handlers of the API that stream: events, logs, egress, results, and commands."""

import asyncio
import os
import secrets
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import msgspec
from aiohttp import hdrs, web

from control.api.problems import ProblemError
from control.api.sessions import query_int, read_body, session_id
from control.api.types import (
    EventView,
    LogLine,
    RunBroken,
    RunCompleted,
    RunLine,
    RunOutput,
    RunRequest,
    rfc3339,
)
from control.docker.types import LogStream
from control.runner.channel import RunFailedError, RunHandle
from control.runner.messages import Output, Run, Stream, decode_data, encode_data
from control.sessions.logs import PieceReader
from control.sessions.manager import SessionManager
from control.spec import command_problems

_CHUNK: Final = 256 * 1024
# Proxies and clients drop a stream that is silent for long.
_KEEP_ALIVE_S: Final = 15.0
# The gateway writes the egress log; another process's file can only be looked at.
_EGRESS_POLL_S: Final = 0.3
_CANCEL_GRACE_MS: Final = 5_000


def _flag(request: web.Request, name: str) -> bool:
    return request.query.get(name, "") in ("1", "true", "yes")


class StreamHandlers:
    """Events (SSE), logs, egress, results, commands."""

    def __init__(self, manager: SessionManager, egress_logs: Path) -> None:
        self._manager = manager
        self._egress_logs = egress_logs

    async def events(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/sessions/{session}/events"""
        session = session_id(request)
        await self._manager.get(session)
        text = request.headers.get("Last-Event-ID", "") or request.query.get("after", "")
        after = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
        response = await self._begin(request, "text/event-stream")
        while True:
            record = self._manager.record(session)
            ticket = None if record is None else record.changed.ticket()
            over = record is None or record.life.state.final
            for stored in await self._manager.store.events(session, after):
                after = stored.number
                data = msgspec.json.encode(EventView(stored.number, rfc3339(stored.at), stored.event))
                tag = stored.event.__struct_config__.tag
                await response.write(b"id: %d\nevent: %b\ndata: %b\n\n" % (after, str(tag).encode(), data))
            if ticket is None or (over and record is not None and after >= record.number):
                break
            if not _flag(request, "follow"):
                break
            try:
                async with asyncio.timeout(_KEEP_ALIVE_S):
                    await ticket.wait()
            except TimeoutError:
                await response.write(b": still here\n\n")
        await response.write_eof()
        return response

    async def logs(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/sessions/{session}/logs"""
        session = session_id(request)
        await self._manager.get(session)
        wanted = request.query.get("stream", "merged")
        follow = _flag(request, "follow")
        offset = query_int(request, "offset", 0, 0, 2**53)
        if wanted == "merged":
            response = await self._begin(request, "application/x-ndjson")
            lines = self._merged(session, offset, follow)
        elif wanted in (LogStream.STDOUT, LogStream.STDERR):
            response = await self._begin(request, "application/octet-stream")
            lines = self._plain(session, self._manager.folder(session) / f"{wanted}.log", offset, follow)
        else:
            raise ProblemError(422, "invalid_query", "stream must be stdout, stderr or merged")
        async for data in lines:
            await response.write(data)
        await response.write_eof()
        return response

    async def _plain(self, session: str, path: Path, offset: int, follow: bool) -> AsyncIterator[bytes]:
        while True:
            record = self._manager.record(session)
            tickets = None if record is None else (record.logged.ticket(), record.changed.ticket())
            over = record is None or record.life.state.final
            while data := await asyncio.to_thread(_read_at, path, offset):
                offset += len(data)
                yield data
            if over or not follow or tickets is None:
                return
            await _first(tickets)

    async def _merged(self, session: str, skipped: int, follow: bool) -> AsyncIterator[bytes]:
        folder = self._manager.folder(session)
        index = PieceReader(folder)
        await asyncio.to_thread(index.skip, skipped)
        while True:
            record = self._manager.record(session)
            tickets = None if record is None else (record.logged.ticket(), record.changed.ticket())
            over = record is None or record.life.state.final
            while lines := await asyncio.to_thread(_merged_lines, index, folder):
                yield lines
            if over or not follow or tickets is None:
                return
            await _first(tickets)

    async def egress(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/sessions/{session}/egress"""
        session = session_id(request)
        await self._manager.get(session)
        path = self._egress_logs / f"{session}.log"
        offset = query_int(request, "offset", 0, 0, 2**53)
        response = await self._begin(request, "application/x-ndjson")
        while True:
            over = self._manager.record(session) is None
            while data := await asyncio.to_thread(_read_at, path, offset):
                # Only whole lines: the writer may be in the middle of one.
                whole = data.rfind(b"\n") + 1
                if not whole:
                    break
                offset += whole
                await response.write(data[:whole])
            if over or not _flag(request, "follow"):
                break
            await asyncio.sleep(_EGRESS_POLL_S)
        await response.write_eof()
        return response

    async def out(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/sessions/{session}/out"""
        session = session_id(request)
        stored = await self._manager.get(session)
        if not stored.life.state.final:
            raise ProblemError(
                409, "wrong_state", f"results are there when the session has ended; it is {stored.life.state}"
            )
        path = self._manager.folder(session) / "out.tar"
        if not path.is_file():
            raise ProblemError(404, "no_results", "the session left no results")
        return web.FileResponse(path, headers={hdrs.CONTENT_TYPE: "application/x-tar"})

    async def run(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/sessions/{session}/runs"""
        session = session_id(request)
        wanted = await read_body(request, RunRequest)
        problems = command_problems(wanted.argv, wanted.cwd, wanted.env)
        try:
            decode_data(wanted.stdin, wanted.stdin_encoding)
        except ValueError as error:
            problems.append(f"stdin: is not {wanted.stdin_encoding}: {error}")
        if problems:
            raise ProblemError(422, "invalid_command", "the command cannot be run", problems=tuple(problems))
        run = Run(
            run=f"run-{secrets.token_hex(8)}",
            argv=wanted.argv,
            cwd=wanted.cwd,
            env=wanted.env,
            stdin=wanted.stdin,
            stdin_encoding=wanted.stdin_encoding,
            timeout_ms=wanted.timeout_ms,
        )
        handle = await self._manager.run_command(session, run)
        try:
            response = await self._begin(request, "application/x-ndjson")
            while True:
                line = await _run_line(handle)
                await response.write(msgspec.json.encode(line) + b"\n")
                if not isinstance(line, RunOutput):
                    break
            await response.write_eof()
        finally:
            handle.unfollow()
            if not handle.completed.done():
                # Whoever asked for it is gone: nobody would ever see its end.
                await self._manager.cancel_command(session, run.run, _CANCEL_GRACE_MS)
        return response

    @staticmethod
    async def _begin(request: web.Request, content_type: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={hdrs.CONTENT_TYPE: content_type, hdrs.CACHE_CONTROL: "no-store"})
        await response.prepare(request)
        return response


async def _run_line(handle: RunHandle) -> RunLine:
    try:
        message = await handle.next()
    except RunFailedError as error:
        return RunBroken(str(error))
    if isinstance(message, Output):
        return RunOutput(message.stream, message.data, message.encoding)
    return RunCompleted(message.exit_code, message.timed_out, message.error)


def _merged_lines(index: PieceReader, folder: Path) -> bytes:
    """Return the next lines of the merged log, a bounded number of bytes; none when there are no more yet."""
    lines = bytearray()
    for piece in index.next():
        data = _read_at(folder / f"{piece.stream.value}.log", piece.offset, piece.length)
        text, encoding = encode_data(data)
        lines += msgspec.json.encode(LogLine(rfc3339(piece.at), Stream(piece.stream.value), text, encoding)) + b"\n"
    return bytes(lines)


async def _first(events: tuple[asyncio.Event, ...]) -> None:
    tasks = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def _read_at(path: Path, offset: int, length: int = _CHUNK) -> bytes:
    try:
        # The egress logs' folder is the gateway's, which parses hostile bytes: neither a link in it leads anywhere, nor is a
        # FIFO waited at.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return b""
    try:
        return os.pread(fd, length, offset) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
    finally:
        os.close(fd)
