"""How a container ended, told apart, and that waiting survives what happens behind our back."""

import asyncio
from pathlib import Path

import pytest

from control.docker.service import DockerService
from control.docker.types import ContainerExit, EngineError, EngineUnavailableError, NotFoundError
from control.plan.container import DockerSettings
from gateway.contract.limits import ControlLimits
from tests.docker.sandboxes import HOST_ID, Sandboxes
from tests.support.engine import PrivateEngine
from tests.support.faults import Fault, FaultProxy, Kind, Way
from tests.support.listener import StreamServer
from tests.support.patience import PATIENCE_S

_EAT = "python3 -c 'b = []\nwhile True: b.append(bytearray(8 << 20))'"


def _how(exit_: ContainerExit) -> tuple[int, bool]:
    assert exit_.finished_at
    assert exit_.error == ""
    return exit_.exit_code, exit_.oom_killed


async def test_first_process_out_of_memory(sandboxes: Sandboxes) -> None:
    ended = await sandboxes.run(f"exec {_EAT}")
    assert _how(ended.exit) == (137, True)


async def test_child_out_of_memory_leaves_the_exit_status_to_its_parent(sandboxes: Sandboxes) -> None:
    ended = await sandboxes.run(f"{_EAT}; exit 9")
    assert _how(ended.exit) == (9, True)


async def test_killed_is_not_out_of_memory(sandboxes: Sandboxes, service: DockerService) -> None:
    sandbox = await sandboxes.launch("echo up; sleep 60")
    await sandbox.said("up")
    await service.kill(sandbox.container)
    assert _how((await sandbox.ended()).exit) == (137, False)


async def test_stopped_within_its_grace_ends_as_it_likes(sandboxes: Sandboxes, service: DockerService) -> None:
    sandbox = await sandboxes.launch("trap 'echo bye; exit 3' TERM; echo up; while :; do sleep 0.1; done")
    await sandbox.said("up")
    await service.stop(sandbox.container, 10)
    ended = await sandbox.ended()
    assert _how(ended.exit) == (3, False)
    assert ended.stdout.endswith("bye\n")


async def test_stopped_beyond_its_grace_is_killed(sandboxes: Sandboxes, service: DockerService) -> None:
    sandbox = await sandboxes.launch("trap '' TERM; echo up; while :; do sleep 0.1; done")
    await sandbox.said("up")
    await service.stop(sandbox.container, 1)
    assert _how((await sandbox.ended()).exit) == (137, False)


async def test_a_container_that_an_earlier_process_asked_for_too_late_gives_way_unless_it_was_started(
    sandboxes: Sandboxes, service: DockerService
) -> None:
    plan, _ = await sandboxes.plan("sleep 60")
    late = await service.create(plan)
    made = await service.create(plan)
    assert made != late
    assert [each.id for each in await service.owned() if each.name == plan.name] == [made]
    with pytest.raises(EngineError, match="already in use"):
        await DockerService(DockerSettings(socket=service._engine._socket_path), "another-host").create(plan)
    await service.start(made)
    with pytest.raises(EngineError, match="already in use"):
        await service.create(plan)
    await service.remove(made)


async def test_a_request_that_arrives_cut_is_tried_again_and_ends_nothing(
    sandboxes: Sandboxes, service: DockerService, engine: PrivateEngine, tmp_path: Path
) -> None:
    sandbox = await sandboxes.launch("echo up; sleep 60")
    await sandbox.said("up")
    with FaultProxy(engine.socket, tmp_path / "docker.sock") as wire:
        behind = DockerService(DockerSettings(socket=str(tmp_path / "docker.sock")), HOST_ID)
        try:
            assert [each.id for each in await behind.owned() if each.session == sandbox.session] == [sandbox.container]
            # The engine answers half a request with 400, which is no word about the container.
            wire.set(Fault(Kind.HALF_CLOSE, way=Way.UP, after=20))
            with pytest.raises(EngineUnavailableError, match="was cut"):
                await behind.owned()
            waiting = asyncio.create_task(behind.wait(sandbox.container))
            before = wire.acted
            async with asyncio.timeout(PATIENCE_S):
                while wire.acted == before:
                    await asyncio.sleep(0.01)
            wire.clear()
            await service.kill(sandbox.container)
            async with asyncio.timeout(PATIENCE_S):
                assert _how(await waiting) == (137, False)
        finally:
            await behind.close()


async def test_killing_what_has_ended_is_no_error(sandboxes: Sandboxes, service: DockerService) -> None:
    sandbox = await sandboxes.launch("true")
    await sandbox.ended()
    await service.kill(sandbox.container)
    await service.stop(sandbox.container, 1)


async def test_removed_behind_our_back_is_told_at_once(sandboxes: Sandboxes, service: DockerService) -> None:
    sandbox = await sandboxes.launch("echo up; sleep 60")
    await sandbox.said("up")
    waiting = asyncio.create_task(service.wait(sandbox.container))
    await service.remove(sandbox.container)
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(NotFoundError):
            await waiting
        await sandbox._following


async def test_a_fork_bomb_stays_within_its_processes(sandboxes: Sandboxes) -> None:
    bomb = "python3 -c 'import os\ntry:\n while True:\n  if os.fork() == 0: import time; time.sleep(30)\nexcept OSError as e: print(e.errno)'"
    ended = await sandboxes.run(f"timeout -k 1 60 {bomb}; exit 0")
    assert ended.stdout.split() == ["11"]


async def test_a_container_that_cannot_be_started_says_why(sandboxes: Sandboxes, service: DockerService) -> None:
    sandbox = await sandboxes.create("true", address=sandboxes.forwarder)
    with pytest.raises(EngineError, match="ddress already in use"):
        await sandbox.start()
    exit_ = await service.wait(sandbox.container)
    assert "already in use" in exit_.error


async def test_an_unknown_runtime_is_refused_with_the_remedy(sandboxes: Sandboxes) -> None:
    with pytest.raises(EngineError, match=r"daemon\.json"):
        await sandboxes.create("true", runtime="no-such-runtime")


async def test_a_default_runtime_that_the_engine_has_not_is_told_before_anything_is_launched(
    service: DockerService,
) -> None:
    assert await service.runtime_problems("") == []
    assert await service.runtime_problems("runc") == []
    (problem,) = await service.runtime_problems("runsc")
    assert "no runtime runsc" in problem
    assert "daemon.json" in problem


async def test_a_missing_input_folder_is_refused_and_not_made(sandboxes: Sandboxes) -> None:
    with pytest.raises(EngineError, match="/no/such/folder"):
        await sandboxes.create("true", in_dir="/no/such/folder")


async def test_owned_lists_this_installations_containers_only(
    sandboxes: Sandboxes, service: DockerService, engine: PrivateEngine
) -> None:
    sandbox = await sandboxes.launch("exit 6")
    await sandbox.ended()
    running = await sandboxes.launch("echo up; sleep 60")
    await running.said("up")
    client = engine.client()
    other = client.api.create_container(
        "opificia-helper:latest", labels={"opificia.host": "another", "opificia.role": "sandbox"}
    )["Id"]
    try:
        owned = {observed.id: observed for observed in await service.owned()}
    finally:
        client.api.remove_container(other)
        client.close()
    assert other not in owned
    ended = owned[sandbox.container]
    assert (ended.role, ended.session, ended.run, ended.policy_digest) == ("sandbox", sandbox.session, "run", "digest")
    assert (ended.state, ended.address) == ("exited", str(sandbox.address))
    assert ended.exit is not None
    assert ended.exit.exit_code == 6
    assert (owned[running.container].state, owned[running.container].exit) == ("running", None)
    assert sorted(observed.role for observed in owned.values() if observed.role != "sandbox") == [
        "firewall",
        "forwarder",
        "volumes",
    ]


async def test_an_engine_that_is_away_is_told_in_one_sentence(tmp_path: object) -> None:
    service = DockerService(DockerSettings(socket=f"{tmp_path}/docker.sock"), HOST_ID)
    try:
        with pytest.raises(EngineUnavailableError, match="There is no Docker engine at"):
            await service.ping()
    finally:
        await service.close()


async def test_a_hanging_engine_is_given_up_at_the_deadline_while_the_loop_goes_on(tmp_path: Path) -> None:
    open_ = 0
    all_closed = asyncio.Event()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal open_
        open_ += 1
        await reader.read()
        writer.close()
        await writer.wait_closed()
        open_ -= 1
        if not open_:
            all_closed.set()

    server = StreamServer(hang, tmp_path / "docker.sock")
    limits = ControlLimits(engine_timeout_ms=1_000, engine_threads=2)
    service = DockerService(DockerSettings(socket=f"{tmp_path}/docker.sock"), HOST_ID, limits=limits)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0)
            ticks += 1

    ticking = asyncio.create_task(tick())
    try:
        outcomes = await asyncio.gather(*(service.image("x") for _ in range(6)), return_exceptions=True)
        assert all(isinstance(outcome, EngineUnavailableError) for outcome in outcomes)
        # A loop that calls the engine itself turns a few times a call, however fast the machine is.
        assert ticks > 500
    finally:
        ticking.cancel()
        await service.close()
        await all_closed.wait()
        await server.stop()
