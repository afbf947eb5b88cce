"""The engine's events: an event wakes, a break wakes all, and the next stream begins behind the last event that came."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from control.docker.engine import Engine
from control.docker.events import Events, _parsed
from tests.support.listener import StreamServer
from tests.support.patience import PATIENCE_S


class EventSource:
    """As much of an engine as tells events. Each stream ends when the test says so."""

    def __init__(self) -> None:
        self.queries: list[dict[str, list[str]]] = []
        self.opened: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target = urlsplit((await reader.readuntil(b"\r\n\r\n")).split(b" ")[1].decode())
        if target.path.endswith("/version"):
            body = json.dumps({"ApiVersion": "1.41"}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            writer.close()
            return
        self.queries.append(parse_qs(target.query))
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        await self.opened.put(writer)
        await writer.wait_closed()


@pytest.fixture
async def source(tmp_path: Path) -> AsyncIterator[EventSource]:
    made = EventSource()
    async with StreamServer(made.answer, tmp_path / "engine.sock"):
        yield made


@pytest.fixture
async def events(source: EventSource, tmp_path: Path) -> AsyncIterator[Events]:
    engine = Engine(str(tmp_path / "engine.sock"), timeout_s=5, threads=2)
    made = Events(engine, "host")
    yield made
    await made.close()
    engine.close()


async def woken(wake: asyncio.Event) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await wake.wait()
    wake.clear()


async def test_an_event_wakes_who_waits_for_its_container_and_no_other(source: EventSource, events: Events) -> None:
    events.begin()
    with events.watch("a") as mine, events.watch("b") as other:
        stream = await source.opened.get()
        stream.write(b'no event\n{"Action": "die", "Actor": {"ID": "a"}, "timeNano": 1700000000123456789}\n')
        await woken(mine)
        assert not other.is_set()
        stream.close()


async def test_after_a_break_all_look_again_and_no_event_is_missed(source: EventSource, events: Events) -> None:
    events.begin()
    with events.watch("a") as wake:
        stream = await source.opened.get()
        # All that the engine remembers, at first.
        assert source.queries[0]["since"] == ["1"]
        stream.write(b'{"Action": "die", "Actor": {"ID": "a"}, "timeNano": 1700000000000000009}\n')
        await woken(wake)
        stream.close()
        # At the break, and when the engine is there again.
        await woken(wake)
        stream = await source.opened.get()
        await woken(wake)
        assert source.queries[1]["since"] == ["1700000000.000000009"]
        assert events.generation == 1
        stream.close()


async def test_an_end_is_known_as_long_as_the_container_is_there_also_when_the_engine_has_forgotten_it(
    source: EventSource, events: Events
) -> None:
    events.begin()
    with events.watch("a") as wake:
        stream = await source.opened.get()
        try:
            stream.write(b'{"Action": "die", "Actor": {"ID": "a"}, "timeNano": 1}\n')
            await woken(wake)
            assert await events.saw_end("a")
            stream.write(b'{"Action": "destroy", "Actor": {"ID": "a"}, "timeNano": 2}\n')
            await woken(wake)
            assert await asked(source, events, b"") is False
        finally:
            stream.close()


async def test_an_end_that_was_not_told_yet_is_asked_for(source: EventSource, events: Events) -> None:
    other = b'{"Action": "die", "Actor": {"ID": "b"}, "timeNano": 1}\n'
    assert await asked(source, events, other + other.replace(b'"b"', b'"a"')) is True
    assert await asked(source, events, other) is False


async def test_of_an_end_among_more_events_than_the_engine_remembers_nothing_is_said(
    source: EventSource, events: Events
) -> None:
    other = b'{"Action": "start", "Actor": {"ID": "b"}, "timeNano": 1}\n'
    assert await asked(source, events, 200 * other) is None


async def asked(source: EventSource, events: Events, answer: bytes) -> bool | None:
    """Ask whether the end of container `a` was seen, which the engine is asked for and answers so."""
    asking = asyncio.create_task(events.saw_end("a"))
    async with asyncio.timeout(PATIENCE_S):
        stream = await source.opened.get()
        stream.write(answer)
        stream.close()
        return await asking


@pytest.mark.parametrize("number", [b"1e999", b"-1e999", b"NaN", b'"x"', b"null", b"[]"])
def test_an_event_whose_time_is_no_number_is_none(number: bytes) -> None:
    assert _parsed(b'{"Action":"die","Actor":{"ID":"c"},"timeNano":%b}' % number) == ("", "", "")
