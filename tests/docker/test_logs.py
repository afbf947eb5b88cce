"""Output: whole, apart, and bounded, also when a container ends at once or the engine goes away meanwhile."""

import asyncio
import contextlib
import errno
import hashlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from control.docker.logs import END_UNSEEN, RECORD_BROKEN
from control.docker.service import DockerService
from control.docker.types import LogStream
from control.plan.container import DockerSettings
from control.plan.host import HostPlan
from tests.docker.conftest import LIMITS, host_plan, prepare
from tests.docker.door import Door
from tests.docker.sandboxes import HOST_ID, Output, Sandboxes
from tests.support.engine import PrivateEngine
from tests.support.faults import Fault, FaultProxy, Kind
from tests.support.patience import PATIENCE_S


async def test_an_instant_exit_loses_nothing(sandboxes: Sandboxes) -> None:
    for _ in range(10):
        ended = await sandboxes.run("printf out; printf err >&2; exit 7")
        assert (ended.stdout, ended.stderr, ended.exit.exit_code) == ("out", "err", 7)


async def test_output_arrives_byte_for_byte(sandboxes: Sandboxes) -> None:
    sandbox = await sandboxes.launch("head -c 3000000 /dev/urandom > a; sha256sum a >&2; cat a")
    async with asyncio.timeout(PATIENCE_S):
        await sandbox._following
    stdout = sandbox.output.stdout
    assert len(stdout) == 3_000_000
    assert sandbox.output.stderr.decode().split()[0] == hashlib.sha256(stdout).hexdigest()


async def test_a_program_that_closes_its_outputs_is_followed_to_its_end(sandboxes: Sandboxes) -> None:
    ended = await sandboxes.run("echo said; exec >/dev/null 2>&1; sleep 1; exit 4")
    assert (ended.stdout, ended.exit.exit_code) == ("said\n", 4)


async def test_following_begun_late_goes_on_behind_what_was_taken(sandboxes: Sandboxes, service: DockerService) -> None:
    sandbox = await sandboxes.launch(
        "printf 'ünd so weiter'; printf 'error text' >&2; read -t 2 < <(:) ; sleep 1; echo end"
    )
    await sandbox.said("weiter")
    late = Output("ünd so ".encode(), b"error ")
    async with asyncio.timeout(PATIENCE_S):
        await service.follow_logs(sandbox.container, late)
    assert late.stdout == "ünd so weiterend\n".encode()
    assert late.stderr == b"error text"


async def test_following_a_container_that_is_gone_returns(service: DockerService) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await service.follow_logs("no-such-container", Output())


async def test_cancelled_following_stops_taking(sandboxes: Sandboxes) -> None:
    sandbox = await sandboxes.launch("while :; do echo more; done")
    await sandbox.said("more")
    sandbox._following.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sandbox._following
    taken = sandbox.output.position(LogStream.STDOUT)
    await asyncio.sleep(0)
    assert sandbox.output.position(LogStream.STDOUT) == taken


@pytest.mark.parametrize("kind", [Kind.TRUNCATE, Kind.HALF_CLOSE, Kind.RESET])
async def test_nothing_is_lost_or_repeated_when_the_wire_to_the_engine_is_cut(
    engine: PrivateEngine, prepared: list[str], plan: HostPlan, tmp_path: Path, kind: Kind
) -> None:
    """An attachment that ends in order looks like a program that closed its outputs."""
    with FaultProxy(engine.socket, tmp_path / "docker.sock") as wire:
        service = DockerService(DockerSettings(socket=str(tmp_path / "docker.sock")), HOST_ID, limits=LIMITS)
        (tmp_path / "sandboxes").mkdir()
        sandboxes = Sandboxes(service, plan.network, LIMITS, tmp_path / "sandboxes")
        try:
            sandbox = await sandboxes.launch("for n in $(seq 200); do echo line $n; sleep 0.02; done; exit 5")
            await sandbox.said("line 20\n")
            wire.set(Fault(kind))
            wire.clear()
            ended = await sandbox.ended()
            assert ended.stdout.splitlines() == [f"line {n}" for n in range(1, 201)]
            assert ended.exit.exit_code == 5
        finally:
            await sandboxes.close()
            await service.close()


class FullDisk(Output):
    """Takes nothing for a while, from the second line on."""

    def __init__(self) -> None:
        super().__init__()
        self.refusals = 3

    def write(self, stream: LogStream, data: bytes) -> None:
        if self.stdout and self.refusals:
            self.refusals -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(stream, data)


async def test_nothing_is_lost_or_repeated_when_the_disk_is_full_for_a_while(
    sandboxes: Sandboxes, service: DockerService
) -> None:
    made = await sandboxes.create("for n in $(seq 100); do echo line $n; sleep 0.02; done")
    made._following.cancel()
    disk = FullDisk()
    following = asyncio.create_task(service.follow_logs(made.container, disk))
    await made.start()
    async with asyncio.timeout(PATIENCE_S):
        await following
    assert disk.refusals == 0
    assert disk.stdout.decode().splitlines() == [f"line {n}" for n in range(1, 101)]


async def test_the_engines_own_record_stays_capped(sandboxes: Sandboxes, engine: PrivateEngine) -> None:
    sandbox = await sandboxes.launch("timeout 3 yes; echo done >&2")
    await sandbox.ended()
    client = engine.client()
    try:
        path = client.api.inspect_container(sandbox.container)["LogPath"]
    finally:
        client.close()
    # Two files of the log limit at most (log_config).
    assert sum(file.stat().st_size for file in Path(path).parent.glob("*-json.log*")) < 2.2 * 8 * 1024 * 1024


async def test_a_record_whose_beginning_the_engine_has_thrown_away_is_gone_on_with_or_told(
    sandboxes: Sandboxes, service: DockerService
) -> None:
    """Of short lines the engine's two files hold far less than the log may: each takes eighty bytes more there."""
    sandbox = await sandboxes.launch("seq 300000")
    whole = (await sandbox.ended()).stdout.encode()
    assert whole == b"".join(b"%d\n" % n for n in range(1, 300_001))
    near, far = Output(whole[:-50_000]), Output(whole[:50_000])
    async with asyncio.timeout(PATIENCE_S):
        assert await service.follow_logs(sandbox.container, near) == ""
        assert await service.follow_logs(sandbox.container, far) == RECORD_BROKEN
    assert near.stdout == whole
    told = whole[:50_000].decode().rstrip("\n") + f"\n[opificia: {RECORD_BROKEN}]\n"
    assert far.stdout.decode().startswith(told)
    assert far.stdout.endswith(b"299999\n300000\n")


@dataclass(frozen=True)
class Surviving:
    """Sandboxes that go on while the engine is away (live-restore), and the wire to it."""

    engine: PrivateEngine
    wire: FaultProxy
    sandboxes: Sandboxes


@pytest.fixture(scope="module")
def surviving_engine(door: Door) -> Iterator[PrivateEngine]:
    with PrivateEngine.acquire(live_restore=True) as engine:
        asyncio.run(prepare(engine, host_plan(door)))
        yield engine


@pytest.fixture
async def surviving(surviving_engine: PrivateEngine, door: Door, tmp_path: Path) -> AsyncIterator[Surviving]:
    with FaultProxy(surviving_engine.socket, tmp_path / "docker.sock") as wire:
        service = DockerService(DockerSettings(socket=str(tmp_path / "docker.sock")), HOST_ID, limits=LIMITS)
        (tmp_path / "sandboxes").mkdir()
        sandboxes = Sandboxes(service, host_plan(door).network, LIMITS, tmp_path / "sandboxes")
        try:
            yield Surviving(surviving_engine, wire, sandboxes)
        finally:
            wire.clear()
            await sandboxes.close()
            await service.close()


async def test_nothing_is_lost_or_repeated_when_the_engine_restarts(surviving: Surviving) -> None:
    sandbox = await surviving.sandboxes.launch("for n in $(seq 400); do echo line $n ü; sleep 0.02; done; exit 5")
    await sandbox.said("line 50 ")
    await asyncio.to_thread(surviving.engine.restart, kill=True)
    ended = await sandbox.ended()
    assert ended.stdout.splitlines() == [f"line {n} ü" for n in range(1, 401)]
    assert (ended.exit.exit_code, ended.stderr) == (5, "")


async def test_half_a_line_that_the_engine_had_not_recorded_hides_nothing_of_what_comes_after(
    surviving: Surviving,
) -> None:
    sandbox = await surviving.sandboxes.launch(
        "echo first; printf 'half a '; until [ -e /in/go ]; do sleep 0.05; done; echo line; echo last"
    )
    await sandbox.said("half a ")
    await asyncio.to_thread(surviving.engine.restart, kill=True)
    surviving.sandboxes.put("go")
    assert (await sandbox.ended()).stdout == "first\nhalf a line\nlast\n"


async def test_output_is_got_of_a_container_that_ended_before_the_engine_was_killed_but_was_not_looked_at(
    surviving: Surviving,
) -> None:
    sandbox = await surviving.sandboxes.launch(
        "echo first; until [ -e /in/go ]; do sleep 0.05; done; echo last; exit 5"
    )
    await sandbox.said("first\n")
    surviving.wire.set(Fault(Kind.STALL))
    surviving.sandboxes.put("go")
    with contextlib.closing(surviving.engine.client()) as client:
        await asyncio.to_thread(client.api.wait, sandbox.container)
    await asyncio.to_thread(surviving.engine.restart, kill=True)
    surviving.wire.set(Fault(Kind.RESET))
    surviving.wire.clear()
    ended = await sandbox.ended()
    assert (ended.stdout, ended.exit.exit_code) == ("first\nlast\n", 5)
    # Nobody can know that it is all: the engine of now has not seen the end.
    assert ended.stderr == f"[opificia: {END_UNSEEN}]\n"
