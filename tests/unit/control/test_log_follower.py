"""Following a container's output through an engine that answers as the test says."""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from control.docker.logs import MAY_MISS, LogFollower
from control.docker.types import EngineUnavailableError, LogStream
from tests.support.patience import PATIENCE_S


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

    def __init__(self, states: list[str], **streams: list[Stream]) -> None:
        self._states = states
        self._streams = streams
        self.generation = 1
        self.asked: list[str] = []
        self.finished = datetime(2020, 1, 1, tzinfo=UTC)
        self._away = False

    async def listening(self) -> None:
        if self._away:
            self._away, self.finished = False, datetime.now(UTC)
            self.generation += 1

    def goes(self) -> None:
        """Let the engine go, to be back at the next look; the container ends meanwhile."""
        self._away = True

    async def call(self, _function: Callable[[Any], Any]) -> Any:
        state = self._states.pop(0) if len(self._states) > 1 else self._states[0]
        return {"State": {"Status": state, "Running": state == "running", "FinishedAt": self.finished.isoformat()}}

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


async def follow(script: Any, missing: str = "") -> bytes:
    sink = Sink()
    async with asyncio.timeout(PATIENCE_S):
        assert await LogFollower(script, script, "c1", sink).run() == missing
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


async def test_output_of_a_container_that_ends_while_the_engine_is_away_is_told_to_be_missing_perhaps() -> None:
    script = Script(["created", "exited"], logs=[Stream(frame(b"one "))])

    class Going(Stream):
        def read(self) -> bytes:
            if not self._pieces:
                script.goes()
            return super().read()

    script._streams["attach"] = [Going(frame(b"one "), breaks=True)]
    assert await follow(script, MAY_MISS) == b"one "
