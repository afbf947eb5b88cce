"""Callers who leave in the middle of a stream: nothing is logged as a failure, nothing of theirs goes on."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from control.api.problems import problem_middleware
from control.api.types import EventView
from control.client import ControlClient, ControlUnavailableError
from control.db.database import StoreUnavailableError
from control.plan.session import SessionState
from tests.control.conftest import Host
from tests.support.patience import PATIENCE_S, until

TALK = ("sh", "-c", "while :; do echo 01234567890123456789; done")


async def leave_early(host: Host, request: bytes) -> None:
    """Send a request, read the head of its answer, and go."""
    reader, writer = await asyncio.open_unix_connection(host.api)
    writer.write(request)
    async with asyncio.timeout(PATIENCE_S):
        head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    writer.transport.abort()


def failures(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.mark.parametrize("what", ["events?follow=1", "logs?follow=1", "logs?follow=1&stream=stdout", "egress?follow=1"])
@pytest.mark.parametrize("noisy", [True, False])
async def test_leaving_a_stream_is_no_failure(
    host: Host, caplog: pytest.LogCaptureFixture, what: str, noisy: bool
) -> None:
    session = await host.launch(*(TALK if noisy else ("sleep", "1000")))
    await host.state(session, SessionState.RUNNING)
    with caplog.at_level(logging.DEBUG):
        request = f"GET /v1/sessions/{session}/{what} HTTP/1.1\r\nHost: control\r\n\r\n".encode()
        for _ in range(20):
            await leave_early(host, request)
        # What happens next would be told to those who left.
        await host.manager.stop(session, 0)
        await host.ended(session)
        await host.cleaned(session)
        await until(lambda: not streaming(), "the end of the handlers")
    assert failures(caplog) == []


async def test_leaving_a_command_is_no_failure_and_ends_it(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    session = await host.launch("sleep", "1000")
    await host.state(session, SessionState.RUNNING)
    record = host.manager.record(session)
    assert record is not None
    body = json.dumps({"argv": TALK, "cwd": "/tmp"}).encode()
    with caplog.at_level(logging.DEBUG):
        head = f"POST /v1/sessions/{session}/runs HTTP/1.1\r\nHost: control\r\nContent-Length: {len(body)}\r\n\r\n"
        for _ in range(5):
            await leave_early(host, head.encode() + body)
        await until(lambda: record.life.open_runs == (record.life.main_run,), "the end of the commands")
    assert failures(caplog) == []


class Gone:
    """A request whose caller has left."""

    transport = None
    method, path = "GET", "/v1/sessions"


async def test_a_write_to_a_caller_who_has_left_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    # How aiohttp tells of it depends on the moment; in some it raises in the handler.
    async def handler(_request: web.Request) -> web.StreamResponse:
        raise ConnectionResetError("Cannot write to closing transport")

    answer = await problem_middleware(Gone(), handler)  # type: ignore[arg-type]
    assert isinstance(answer, web.Response)
    assert failures(caplog) == []


async def test_a_stream_that_fails_in_the_middle_is_broken_off_and_not_whole(
    host: Host, client: ControlClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await host.launch("sleep", "1000")
    await host.state(session, SessionState.RUNNING)
    following = client.events(session)
    first = await anext(following)
    assert first.number == 1

    async def away(*_arguments: object) -> None:
        raise StoreUnavailableError("the database is away")

    monkeypatch.setattr(host.manager.store, "events", away)
    await host.manager.stop(session, 0)
    with pytest.raises(ControlUnavailableError):
        await drained(following)
    monkeypatch.undo()
    await host.ended(session)


async def test_a_malformed_request_has_its_answer_and_no_traceback_in_the_log(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = await asyncio.open_unix_connection(host.api)
    writer.write(b"GET / HTTP/1.1\r\nno header\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.0 400")
    writer.close()
    assert failures(caplog) == []


async def drained(events: AsyncIterator[EventView]) -> None:
    async for _ in events:
        pass


def streaming() -> list[str]:
    """Return the tasks that serve streams."""
    names = [str(task.get_coro()) for task in asyncio.all_tasks()]
    return [name for name in names if "StreamHandlers" in name]
