"""Commands for the helper containers, over their input and output."""

import asyncio

import pytest

from control.docker.helper import Executed, Helper, _answer
from control.docker.service import DockerService
from control.docker.types import EngineError, NotFoundError
from control.plan.container import ROLE_VOLUMES
from tests.docker.sandboxes import HOST_ID
from tests.support.engine import PrivateEngine
from tests.support.patience import PATIENCE_S


@pytest.fixture
def helper(service: DockerService) -> Helper:
    """The volumes helper."""
    return Helper(service._engine, HOST_ID, ROLE_VOLUMES)


async def test_output_errors_and_status_come_apart(helper: Helper) -> None:
    ended = await helper.execute(["sh", "-c", "echo out; echo err >&2; exit 3"])
    assert ended == Executed(3, "out", "err")


async def test_arguments_arrive_as_they_are(helper: Helper) -> None:
    hostile = ["a b", "$(id)", "'quoted' \"twice\"", "*", "", "ünï", "-n", "\\"]
    ended = await helper.execute(["printf", "%s|", *hostile])
    assert ended.stdout == "|".join(hostile) + "|"


async def test_a_long_answer_arrives_whole(helper: Helper) -> None:
    ended = await helper.execute(["seq", "100000"])
    assert ended.stdout.splitlines() == [str(number) for number in range(1, 100_001)]


async def test_those_who_ask_at_the_same_time_get_each_their_own_answer(helper: Helper) -> None:
    answers = await asyncio.gather(*(helper.run(["echo", str(number)]) for number in range(24)))
    assert answers == [str(number) for number in range(24)]


async def test_a_burst_of_questions_waits_its_turn_and_nobody_gives_up(
    helper: Helper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("control.docker.helper._PATIENCE_S", 2.0)
    answers = await asyncio.gather(*(helper.run(["sh", "-c", f"sleep 0.2; echo {number}"]) for number in range(30)))
    assert answers == [str(number) for number in range(30)]


async def test_a_command_that_fails_says_what_it_said(helper: Helper) -> None:
    with pytest.raises(EngineError, match="ls failed in the volumes helper: ls: cannot access '/nowhere'"):
        await helper.run(["ls", "/nowhere"])


async def test_a_helper_that_restarts_is_waited_for(helper: Helper, engine: PrivateEngine) -> None:
    await helper.run(["true"])
    client = engine.client()
    try:
        container = client.containers.get("opificia-sandbox-volumes")
        restarting = asyncio.create_task(asyncio.to_thread(container.restart, timeout=5))
        while not restarting.done():
            assert await helper.run(["echo", "here"]) == "here"
        await restarting
    finally:
        client.close()


async def test_a_missing_helper_is_told_at_once_with_the_remedy(service: DockerService) -> None:
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(NotFoundError, match="host prepare"):
            await Helper(service._engine, "another-host", ROLE_VOLUMES).run(["true"])


async def test_a_command_of_two_lines_is_refused(helper: Helper) -> None:
    with pytest.raises(ValueError, match="one line"):
        await helper.run(["echo", "a\nb"])


@pytest.mark.parametrize("line", [b"id", b"id x - -", b"id 0 = -", b"id 0 - - -", b"id 0 \xff -", b"id 0 AAA -"])
def test_an_answer_that_cannot_be_read_raises_only_the_engines_error(line: bytes) -> None:
    with pytest.raises(EngineError):
        _answer(line)
