"""Following a container's output through an engine that answers as the test says."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from control.docker.logs import END_UNSEEN, RECORD_BROKEN, LogFollower
from control.docker.types import EngineUnavailableError, LogStream
from tests.docker.sandboxes import Output
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
    """Stands for engine and events: the container's states in turn (the last stays), and streams by what is asked for.

    `saw`: whether the engine saw the container's end.
    """

    generation = 1

    def __init__(self, states: list[str], *, saw: bool | None = True, **streams: list[Stream]) -> None:
        self._states = states
        self._streams = streams
        self._saw = saw
        self.asked: list[str] = []

    async def listening(self) -> None:
        pass

    async def saw_end(self, _container: str) -> bool | None:
        return self._saw

    async def call(self, _function: Callable[[Any], Any]) -> Any:
        state = self._states.pop(0) if len(self._states) > 1 else self._states[0]
        return {"State": {"Status": state, "Running": state == "running"}}

    async def in_thread(self, _method: str, path: str, _query: Any, consume: Callable[[Any], None]) -> None:
        name = path.rpartition("/")[2]
        self.asked.append(name)
        stream = self._streams[name].pop(0)
        await asyncio.to_thread(consume, stream)


async def follow(script: Any, missing: str = "", kept: bytes = b"", said: bytes = b"") -> bytes:
    """Return what is kept of stdout in the end. `missing`: what the follower says; `said`: what the log says."""
    sink = Output(kept, said)
    async with asyncio.timeout(PATIENCE_S):
        assert await LogFollower(script, script, "c1", sink).run() == missing
    assert sink.stderr.decode() == (f"[opificia: {missing}]\n" if missing else "")
    return sink.stdout


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
        # Each time to see where to go on, then to do so.
        logs=[Stream(frame(text)) for text in (b"one two ", b"one two ", b"one two three", b"one two three")],
    )
    assert await follow(script) == b"one two three"


async def test_output_whose_end_the_engine_did_not_see_is_told_to_be_missing_perhaps() -> None:
    script = Script(
        ["created", "exited"],
        saw=False,
        attach=[Stream(frame(b"one "), breaks=True)],
        logs=[Stream(frame(b"one ")), Stream(frame(b"one "))],
    )
    assert await follow(script, END_UNSEEN) == b"one "


async def test_an_attachment_that_ended_in_order_with_an_engine_that_is_another_by_now_needs_the_record() -> None:
    """Nobody has noticed yet that the engine was away."""
    script = Script(
        ["created", "exited"],
        saw=False,
        attach=[Stream(frame(b"one "))],
        logs=[Stream(frame(b"one two")), Stream(frame(b"one two"))],
    )
    assert await follow(script, END_UNSEEN) == b"one two"


@pytest.mark.parametrize("away", [False, True])
async def test_an_end_that_the_engine_has_forgotten_is_doubted_if_the_engine_was_away(away: bool) -> None:
    script = Script(
        ["created", "exited"],
        saw=None,
        attach=[Stream(frame(b"one "), breaks=True)],
        logs=[Stream(frame(b"one ")), Stream(frame(b"one "))],
    )
    attached = script.in_thread

    async def leave(*arguments: Any) -> None:
        try:
            await attached(*arguments)
        finally:
            script.generation += away

    script.in_thread = leave  # type: ignore[method-assign]
    assert await follow(script, END_UNSEEN if away else "") == b"one "


async def test_what_may_be_missing_is_told_once_in_the_log_also_by_the_control_that_comes_after() -> None:
    said = f"[opificia: {END_UNSEEN}]\n".encode()
    script = Script(["exited"], saw=False, logs=[Stream(frame(b"one ")), Stream(frame(b"one "))])
    assert await follow(script, END_UNSEEN, b"one ", said) == b"one "


async def test_a_record_that_does_not_go_on_where_the_log_ends_is_told_there() -> None:
    script = Script(["exited"], logs=[Stream(frame(b"ten\n")), Stream(frame(b"ten\n"))])
    sink = Output(b"one\n")
    async with asyncio.timeout(PATIENCE_S):
        assert await LogFollower(cast(Any, script), cast(Any, script), "c1", sink).run() == RECORD_BROKEN
    assert sink.stdout.decode() == f"one\n[opificia: {RECORD_BROKEN}]\nten\n"


async def test_of_an_output_that_is_full_nothing_is_asked() -> None:
    class Full(Output):
        def full(self, stream: LogStream) -> bool:
            return stream is LogStream.STDOUT

    script = Script(["exited"], logs=[Stream(frame(b"ten\n"))])
    sink = Full(b"one\n")
    async with asyncio.timeout(PATIENCE_S):
        assert await LogFollower(cast(Any, script), cast(Any, script), "c1", sink).run() == ""
    assert sink.stdout == b"one\n"
