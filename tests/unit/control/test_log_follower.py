"""Following a container's output through an engine that answers as the test says."""

import asyncio
from collections.abc import Callable
from typing import Any

from control.docker.logs import LogFollower
from control.docker.types import EngineUnavailableError, LogStream


def frame(data: bytes) -> bytes:
    return b"\x01\0\0\0" + len(data).to_bytes(4, "big") + data


class Stream:
    """Gives one piece, then ends or breaks."""

    def __init__(self, *pieces: bytes, breaks: bool = False) -> None:
        self._pieces = [*pieces]
        self._breaks = breaks

    def read(self) -> bytes:
        if self._pieces:
            return self._pieces.pop(0)
        if self._breaks:
            raise EngineUnavailableError("broken off")
        return b""


class Script:
    """Stands for engine and events: the container's states in turn (the last stays), and streams by what is asked for."""

    generation = 1

    def __init__(self, states: list[str], **streams: list[Stream]) -> None:
        self._states = states
        self._streams = streams
        self.asked: list[str] = []

    async def listening(self) -> None:
        pass

    async def call(self, _function: Callable[[Any], Any]) -> Any:
        state = self._states.pop(0) if len(self._states) > 1 else self._states[0]
        return {"State": {"Status": state, "Running": state == "running"}}

    async def in_thread(self, _method: str, path: str, _query: Any, consume: Callable[[Any], None]) -> None:
        name = path.rpartition("/")[2]
        self.asked.append(name)
        stream = self._streams[name].pop(0)
        await asyncio.to_thread(consume, stream)


class Sink:
    def __init__(self) -> None:
        self.kept = b""

    def position(self, stream: LogStream) -> int:
        return len(self.kept) if stream is LogStream.STDOUT else 0

    def write(self, stream: LogStream, data: bytes) -> None:
        assert stream is LogStream.STDOUT
        self.kept += data


async def follow(script: Any) -> bytes:
    sink = Sink()
    async with asyncio.timeout(20):
        await LogFollower(script, script, "c1", sink).run()
    return sink.kept


async def test_an_attachment_made_before_the_start_needs_no_record() -> None:
    script = Script(["created", "exited"], attach=[Stream(frame(b"all"))])
    assert await follow(script) == b"all"
    assert script.asked == ["attach"]


async def test_a_start_that_came_before_a_second_attachment_loses_nothing() -> None:
    # The engine restarted between attachment and start; the second attachment came after an instant exit.
    script = Script(
        ["created", "created", "exited"],
        attach=[Stream(breaks=True), Stream()],
        logs=[Stream(frame(b"all"))],
    )
    assert await follow(script) == b"all"


async def test_an_attachment_that_breaks_goes_on_from_the_record_behind_what_it_brought() -> None:
    script = Script(
        ["created", "running", "exited"],
        attach=[Stream(frame(b"one "), breaks=True)],
        logs=[Stream(frame(b"one two ")), Stream(frame(b"one two three"))],
    )
    assert await follow(script) == b"one two three"
