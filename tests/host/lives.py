"""Whole sessions through the control API, and what is found of them afterwards: on disk, in the engine, in the gateway."""

import asyncio
import subprocess
from typing import Any, Final

import docker

from control.api.types import RunBroken, RunCompleted, RunOutput, RunRequest, SessionView
from control.client import ControlClient, ControlError, ControlUnavailableError
from control.plan.session import Reason, SessionState
from control.spec import SandboxSpec
from gateway.contract.limits import MIB
from tests.support.host import PrivateHost
from tests.support.patience import until
from tests.support.sandbox import IMAGE

PATIENCE_S: Final = 120.0
ROOM: Final = 8
LOG_BYTES: Final = MIB
# Small sandboxes, many at a time; limits that are minutes in production end within a test's patience.
SETTINGS: Final[dict[str, dict[str, Any]]] = {
    "sandbox": {
        "memory_bytes": 256 * MIB,
        "work_bytes": 64 * MIB,
        "tmp_bytes": 16 * MIB,
        "home_bytes": 16 * MIB,
    },
    "admission": {"cpus": 64.0, "memory_bytes": 64 * 256 * MIB},
    "limits": {
        "max_running": ROOM,
        "hello_timeout_ms": 25_000,
        "stop_grace_ms": 3_000,
        "runner_reconnect_ms": 15_000,
        "log_bytes": LOG_BYTES,
        "out_bytes": 4 * MIB,
        "out_files": 100,
    },
}
# Prints numbers until it is told to end, so that what is missing or doubled shows; its end is its own.
COUNT: Final = "n=0; until [ -e /work/end ]; do n=$((n+1)); echo $n; sleep 0.05; done; exit 6"
EAT: Final = "python3 -c 'b = []\nwhile True: b.append(bytearray(8 << 20))'"


async def launch(control: ControlClient, script: str = "", **fields: Any) -> str:
    """Launch a session that runs a shell script, or waits for commands."""
    command = ("sh", "-c", script) if script else ()
    view = await control.create(SandboxSpec(**{"image": IMAGE, "command": command, **fields}))
    await control.launch(view.id)
    return view.id


async def ended(control: ControlClient, session: str, patience_s: float = PATIENCE_S) -> SessionView:
    """Wait for the end, across restarts of the daemon."""
    async with asyncio.timeout(patience_s):
        async for _ in control.follow_events(session, patience_s):
            pass
        while True:
            try:
                return await control.get(session)
            except ControlUnavailableError:
                await asyncio.sleep(0.2)
            except ControlError as error:
                # Its database is away.
                if error.problem.status != 503:
                    raise
                await asyncio.sleep(0.2)


async def running(control: ControlClient, session: str) -> None:
    """Wait until the session's command runs and its runner is there."""
    async with asyncio.timeout(PATIENCE_S):
        async for _ in control.events(session):
            view = await control.get(session)
            assert not view.state.final, f"{view.reason}: {view.message}"
            if view.state is SessionState.RUNNING and view.runner_connected:
                return


async def connected(control: ControlClient, session: str) -> None:
    """Wait until the session's runner is there."""
    async with asyncio.timeout(PATIENCE_S):
        while not (await control.get(session)).runner_connected:
            await asyncio.sleep(0.05)


async def ready(control: ControlClient) -> None:
    """Wait until nothing is in the way of a launch."""
    async with asyncio.timeout(PATIENCE_S):
        while (await control.health()).status != "ok":
            await asyncio.sleep(0.2)


async def execute(control: ControlClient, session: str, *argv: str) -> tuple[int, bytes]:
    """Run a command in a session; return its exit code and what came on stdout."""
    out = bytearray()
    async for line in control.run(session, RunRequest(argv=argv)):
        match line:
            case RunOutput():
                out += line.data.encode()
            case RunCompleted():
                return line.exit_code, bytes(out)
            case RunBroken():
                break
    raise AssertionError(f"the end of {argv[0]} is not known")


def log(host: PrivateHost, session: str, stream: str = "stdout") -> bytes:
    path = host.sessions / session / f"{stream}.log"
    return path.read_bytes() if path.exists() else b""


def counted(data: bytes) -> int:
    """Check that numbers came once each and in order; return how many."""
    numbers = [int(line) for line in data.split(b"\n")[:-1]]
    assert numbers == list(range(1, len(numbers) + 1))
    return len(numbers)


def how(view: SessionView) -> tuple[SessionState, Reason | None, int | None]:
    return view.state, view.reason, view.exit_code


async def nothing_left(
    host: PrivateHost,
    control: ControlClient,
    docker_client: docker.DockerClient,
    *sessions: str,
    volumes: bool = True,
) -> None:
    """Check that of ended sessions only folder and record are left: no container, volume, loop device or grant."""

    def leftovers() -> list[str]:
        containers = docker_client.api.containers(all=True, filters={"label": "opificia.role=sandbox"})
        found = [container["Labels"].get("opificia.session") for container in containers]
        if volumes:
            listed = docker_client.api.volumes()["Volumes"] or []
            found += [volume["Name"].removeprefix("opificia-out-") for volume in listed]
            found += [session for session in sessions if session in _loop_devices()]
        return [session for session in sessions if session in found]

    try:
        await until(lambda: not leftovers(), "the clean-up")
    except AssertionError:
        raise AssertionError(f"left of sessions that have ended: {leftovers()}") from None
    async with asyncio.timeout(PATIENCE_S):
        while {each.id for each in (await control.gateway()).sessions} & set(sessions):
            await asyncio.sleep(0.1)


def _loop_devices() -> str:
    listing = ["losetup", "--list", "--noheadings", "--output", "BACK-FILE"]
    return subprocess.run(listing, check=True, capture_output=True, text=True).stdout
