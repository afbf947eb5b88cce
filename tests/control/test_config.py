"""control.toml, and how the daemon starts or says why it does not."""

import asyncio
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from control.app import Control, HostWatch, StartError, host_id
from control.config import ControlConfig, ListenSettings, StoreSettings
from control.plan.session import Reason, SessionState
from gateway.runtime.settings import SettingsError, parse
from tests.control.conftest import Host
from tests.support.patience import PATIENCE_S


def problems(text: str) -> list[str]:
    with pytest.raises(SettingsError) as wrong:
        parse(text, ControlConfig, "control.toml")
    return [f"{each.line}: {each.key}" for each in wrong.value.problems]


def test_an_empty_file_is_a_whole_configuration() -> None:
    config = parse("", ControlConfig)
    assert config.limits.hello_timeout_ms == 180_000
    assert config.sandbox.pids == 1024


def test_tells_every_problem_with_key_and_line() -> None:
    text = """
[store]
url = "mysql://x"
[paths]
data = "relative"
[network]
subnet = "8.8.8.0/24"
bridge = "a-name-that-is-too-long"
[sandbox]
in_roots = ["relative"]
uid = 0
surprise = 1
[listen]
api = "127.0.0.1:80"
tcp = "0.0.0.0:70000"
[limits]
hello_timeout_ms = -5
stop_grace_ms = "soon"
[docker]
socket = 5
[unknown]
x = 1
"""
    found = problems(text)
    for expected in (
        "3: store.url",
        "5: paths.data",
        "7: network.subnet",
        "8: network.bridge",
        "12: sandbox.surprise",
        "14: listen.api",
        "15: listen.tcp",
        "17: limits.hello_timeout_ms",
        "18: limits.stop_grace_ms",
        "20: docker.socket",
        "21: unknown",
    ):
        assert expected in found, (expected, found)


@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "1e300", "-1.0"])
def test_numbers_that_no_host_has_are_told(number: str) -> None:
    text = f"[sandbox]\ncpus = {number}\n[admission]\ncpus = {number}\n"
    assert problems(text) == ["2: sandbox.cpus", "4: admission.cpus"]


def test_whole_numbers_beyond_every_clock_and_disk_are_told() -> None:
    huge = "9" * 400
    text = f"[limits]\nstop_grace_ms = {huge}\nout_bytes = {huge}\n[sandbox]\nmemory_bytes = {huge}\npids = {huge}\n"
    found = problems(text)
    assert sorted(found) == [
        "2: limits.stop_grace_ms",
        "3: limits.out_bytes",
        "5: sandbox.memory_bytes",
        "6: sandbox.pids",
    ]


def test_tcp_needs_a_token() -> None:
    assert problems('[listen]\ntcp = "127.0.0.1:8902"\n') == ["1: listen.token_file"]


def test_capacity_comes_from_the_host_unless_it_is_set() -> None:
    gib = 1 << 30
    assert parse("", ControlConfig).capacity(16 * gib, 4).memory_bytes == 14 * gib
    assert parse("", ControlConfig).capacity(3 * gib, 4).memory_bytes == 3 * gib // 2
    assert parse("", ControlConfig).capacity(16 * gib, 4).cpus == 16
    config = parse("admission.memory_bytes = 5\nadmission.cpus = 1.5\nlimits.max_running = 3", ControlConfig)
    capacity = config.capacity(16 * gib, 4)
    assert (capacity.memory_bytes, capacity.cpus, capacity.sessions) == (5, 1.5, 3)


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="opificia-") as folder:
        yield Path(folder)


def write(root: Path, **changes: str) -> Path:
    sections = {
        "store": f'url = "sqlite:///{root}/control.db"',
        "paths": f'data = "{root}"',
        "docker": f'socket = "{root}/docker.sock"',
        "listen": f'api = "unix:{root}/api.sock"\nrunner = "unix:{root}/runner.sock"',
        "gateway": f'contract = "unix:{root}/gateway.sock"',
        **changes,
    }
    path = root / "control.toml"
    path.write_text("\n".join(f"[{name}]\n{text}" for name, text in sections.items()))
    return path


async def control(*arguments: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "control", *arguments, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(PATIENCE_S):
        _, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, err.decode()


async def test_a_wrong_configuration_is_exit_78(root: Path) -> None:
    path = write(root, limits="hello_timeout_ms = 0\nnonsense = 1")
    for arguments in (("--check-config",), ()):
        code, err = await control("--config", str(path), *arguments)
        assert code == 78
        assert len(err.splitlines()) == 2
        assert f"{path}: line 13: limits.hello_timeout_ms: must be at least 1" in err
    assert (await control("--config", str(root / "none.toml")))[0] == 78
    assert await control("--config", str(write(root)), "--check-config") == (0, "")


async def test_without_an_engine_it_says_so(root: Path) -> None:
    code, err = await control("--config", str(write(root)))
    assert code == 1
    (line,) = err.splitlines()
    assert line.startswith("opificia-control: ")
    assert "docker.sock" in line


async def test_a_database_that_cannot_be_opened_is_told(root: Path) -> None:
    code, err = await control("--config", str(write(root, store=f'url = "sqlite:///{root}/no/such.db"')))
    assert code == 1
    (line,) = err.splitlines()
    assert "[store] url" in line


async def test_a_folder_that_cannot_be_used_is_told(root: Path) -> None:
    code, err = await control("--config", str(write(root, paths='data = "/nowhere"')))
    assert code == 1
    assert "[paths] data" in err


async def test_a_socket_in_use_is_told_and_left_alone(host: Host) -> None:
    async def verify() -> list[str]:
        return []

    data = host.root / "elsewhere"
    data.mkdir()
    paths = msgspec.structs.replace(host.config.paths, data=str(data))
    config = msgspec.structs.replace(host.config, paths=paths, store=StoreSettings(f"sqlite:///{data}/control.db"))
    with pytest.raises(StartError, match="another process answers"):
        async with Control(config, host.engine, "host-2", verify).running():
            pass
    session = await host.launch("true")
    assert (await host.ended(session)).life.state.final


async def test_a_second_daemon_on_the_same_folder_is_refused_before_it_touches_anything(host: Host) -> None:
    async def verify() -> list[str]:
        return []

    session = await host.launch("sleep", "1000")
    await host.state(session, SessionState.RUNNING)
    listen = ListenSettings(api=f"unix:{host.root}/other.sock", runner=f"unix:{host.root}/other-runner.sock")
    config = msgspec.structs.replace(host.config, listen=listen)
    known = host.gateway.snapshots
    with pytest.raises(StartError, match="another control daemon works in"):
        async with Control(config, host.engine, "host-1", verify).running():
            pass
    assert host.gateway.snapshots == known
    await host.manager.stop(session, 0)
    assert (await host.ended(session)).life.reason is Reason.STOPPED_BY_USER
    # One that has ended, however it did, holds nobody up.
    await host.stop()
    await host.start()


async def test_an_engine_that_hangs_is_told_soon_to_who_cannot_wait_and_looked_at_once_for_all() -> None:
    answering, looks = asyncio.Event(), 0

    async def verify() -> list[str]:
        nonlocal looks
        looks += 1
        await answering.wait()
        return []

    host = HostWatch(verify)
    try:
        waiting = asyncio.create_task(host.problems())
        for _ in range(2):
            (problem,) = await host.problems(0.001)
            assert "has not answered" in problem
        assert not waiting.done()
        answering.set()
        assert await waiting == []
        assert await host.problems(0.001) == []
        assert looks == 1
    finally:
        await host.close()


@pytest.mark.parametrize("torn", ["", "\n", "0123", "0123456789abcdeX\n"])
def test_an_id_of_the_host_that_was_torn_is_told_and_not_taken_for_another_host(tmp_path: Path, torn: str) -> None:
    first = host_id(tmp_path)
    assert host_id(tmp_path) == first
    (tmp_path / "host-id").write_text(torn)
    with pytest.raises(StartError, match="holds no id"):
        host_id(tmp_path)
