"""How soon a session's runner says hello, and what a hundred sessions leave behind. Needs root, as the tests with an engine do.

Start: from the request to the runner's hello, one session and eight at once, in interleaved rounds on one private engine,
against the engine's own create and start of the same container (its configuration read back from a live sandbox, with a volume
of its own that is made before and mounted at the start) to its first output; against `docker run` of the same image, which has none of the protection; and against `docker exec` in a sandbox that
is there already. Every start is cold: nothing is made in advance.
Many: a hundred sessions, eight at a time, each with its log, its exit code and its result; afterwards no container, volume, loop
device, grant or place may be left, and control's memory must not have grown with their number.
"""

import asyncio
import contextlib
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Address
from typing import Any, Final

import docker

from bench.processes import cpu_seconds, rss_bytes
from bench.records import Record, Run
from control.api.types import SessionView
from control.app import host_id
from control.client import ControlClient
from control.config import load_config
from control.docker.service import DockerService
from control.docker.volumes import volume_name
from control.plan.container import membership
from control.plan.network import NetworkSettings
from control.plan.session import Reason, RunnerConnected
from control.spec import SandboxSpec
from gateway.contract.limits import MIB

SUITE: Final = "sandbox"
OURS: Final = "opificia"
ENGINE: Final = "engine-python"
AT_ONCE: Final = 8
# Between the first sessions and the last, which is when a leak of some KiB a session shows.
_WARM: Final = 10
MEMORY_GROWTH_MB: Final = 8.0
_PYTHON: Final = ("python3", "-I", "-c", "print('here')")
_ECHO: Final = ("echo", "here")
# The runner is Python too: that is the fair comparison. A shell's first output comes sooner.
ABOUT: Final = {
    OURS: "request to the runner's hello, by the control API",
    ENGINE: "the same container by the engine's API: create, attach, start, to the first output of Python",
    "engine-echo": "the same, to the first output of echo",
    "docker-run": "docker run --network none of the same image, not hardened, echo",
    "docker-exec": "docker exec in a running sandbox, echo",
}
_TWINS: Final = (ENGINE, "engine-echo")
_IMAGE: Final = "opificia-sandbox:latest"
_WAIT_S: Final = 120.0
_SETTINGS: Final[dict[str, dict[str, Any]]] = {
    "sandbox": {"memory_bytes": 256 * MIB, "work_bytes": 64 * MIB, "tmp_bytes": 16 * MIB, "home_bytes": 16 * MIB},
    "admission": {"cpus": 64.0, "memory_bytes": 64 * 256 * MIB},
    # One more for the sandbox whose twins are started.
    "limits": {"max_running": AT_ONCE + 1, "stop_grace_ms": 1_000, "out_bytes": 4 * MIB, "out_files": 100},
}


class Bench:
    """One private host under measurement."""

    def __init__(self, host: Any, engine: Any, control: ControlClient, client: docker.DockerClient, run_: Run) -> None:
        self._host = host
        self._engine = engine
        self._control = control
        self._client = client
        self._config = load_config(host.root / "etc/control.toml")
        self._service = DockerService(
            self._config.docker,
            host_id(self._config.data),
            limits=self._config.limits,
            sandbox=self._config.sandbox,
        )
        self._run = run_
        # asyncio's own pool has only a few more threads than there are cores.
        self._threads = ThreadPoolExecutor(AT_ONCE)

    async def start(self, rounds: int, say: Callable[[str], None]) -> None:
        """Measure starts, one and several at once, in another order each round. The first round warms caches."""
        model = await self._connected()
        body = self._same_container(model.id)
        peers: dict[str, Callable[[str], Awaitable[float]]] = {
            OURS: lambda _: self._hello(),
            ENGINE: lambda name: self._twin(body, _PYTHON, name),
            "engine-echo": lambda name: self._twin(body, _ECHO, name),
        }
        if shutil.which("docker"):
            plain = ("run", "--rm", "--network", "none", "--entrypoint", _ECHO[0], _IMAGE, *_ECHO[1:])
            peers["docker-run"] = lambda _: self._command(*plain)
            peers["docker-exec"] = lambda _: self._command("exec", f"opificia-{model.id}", *_ECHO)
        else:
            self._run.missing.append("not measured: docker run, docker exec (no docker command)")
        self._run.peers |= {name: {"about": ABOUT[name], "checks": "", "forward_proxy": False} for name in peers}
        order = list(peers.items())
        for number in range(rounds + 1):
            for at_once in dict.fromkeys((1, AT_ONCE)):
                for name, begin in (*order[number % len(order) :], *order[: number % len(order)]):
                    say(f"round {number}/{rounds}: start-{at_once}: {name}")
                    record = Record(SUITE, f"start-{at_once}", name, number, {})
                    await self._start(begin, at_once, record)
                    if number:
                        self._run.records.append(record)
        await self._end(model.id)

    async def close(self) -> None:
        """End the connections to the engine."""
        await self._service.close()

    async def _start(self, begin: Callable[[str], Awaitable[float]], at_once: int, record: Record) -> None:
        names = [f"twin-{record.round}-{record.peer}-{place}" for place in range(at_once)]
        if record.peer in _TWINS:
            # Making a volume is not the engine's work; mounting it at the start is.
            limits = self._config.limits
            for name in names:
                await self._service.create_out_volume(name, limits.out_bytes, limits.out_files)
        cpu, began = cpu_seconds([self._host.control.pid]), time.monotonic()
        taken = await asyncio.gather(*(begin(name) for name in names))
        if record.peer == OURS:
            # With the end and the clean-up of each.
            record.values["control_cpu_ms"] = (cpu_seconds([self._host.control.pid]) - cpu) * 1000 / at_once
        record.values |= {"ms": statistics.median(taken) * 1000, "max_ms": max(taken) * 1000}
        record.raw = {"ms": [round(each * 1000, 1) for each in taken], "seconds": time.monotonic() - began}
        for name in names if record.peer in _TWINS else ():
            await self._service.remove_out_volume(name)

    async def many(self, count: int) -> None:
        """Run `count` sessions and look for what they leave."""
        record = Record(SUITE, f"sessions-{count}", OURS, 0, {})
        folders = {path.name for path in self._host.sessions.iterdir()}
        began = time.monotonic()
        sessions = [await self._launch("sh", "-c", f"echo {n}; echo {n} > /out/n; exit 7") for n in range(count)]
        memory = 0
        for number, session in enumerate(sessions):
            view = await self._ended(session)
            if number + 1 == _WARM:
                memory = rss_bytes([self._host.control.pid])
            log = (self._host.sessions / session / "stdout.log").read_bytes()
            if (view.reason, view.exit_code, log) != (Reason.EXIT_CODE, 7, b"%d\n" % number):
                record.problems.append(f"{session}: {view.reason}, {view.exit_code}, log {log!r}")
        seconds = time.monotonic() - began
        record.problems += await self._left(sessions)
        strange = {path.name for path in self._host.sessions.iterdir()} - folders - set(sessions)
        record.problems += [f"a folder that is nobody's: {name}" for name in sorted(strange)]
        record.values = {"seconds": seconds, "sessions_per_s": count / seconds}
        if count > _WARM:
            grown = (rss_bytes([self._host.control.pid]) - memory) / MIB
            record.values["control_growth_mib"] = grown
            if grown > MEMORY_GROWTH_MB:
                record.problems.append(f"control's memory grew by {grown:.1f} MiB after the first {_WARM}")
        self._run.records.append(record)

    async def _launch(self, *command: str) -> str:
        view = await self._control.create(SandboxSpec(image=_IMAGE, command=command))
        await self._control.launch(view.id)
        return view.id

    async def _connected(self) -> SessionView:
        session = await self._launch()
        async for event in self._control.events(session):
            if isinstance(event.event, RunnerConnected):
                return await self._control.get(session)
        view = await self._control.get(session)
        raise RuntimeError(f"session {session} did not start: {view.reason}: {view.message}")

    async def _hello(self) -> float:
        began = time.monotonic()
        view = await self._connected()
        took = time.monotonic() - began
        await self._end(view.id)
        return took

    async def _ended(self, session: str) -> SessionView:
        async with asyncio.timeout(_WAIT_S):
            return await self._control.ended(session)

    async def _end(self, session: str) -> None:
        """End a session and wait until nothing of it takes time any more."""
        await self._control.stop(session, 0)
        await self._ended(session)
        if left := await self._left([session]):
            raise RuntimeError("; ".join(left))

    def _same_container(self, session: str) -> dict[str, Any]:
        """Return the create call of a live sandbox's twin: all the same but its owner, its program and its address."""
        found = self._client.api.inspect_container(f"opificia-{session}")
        return {
            **found["Config"],
            "HostConfig": found["HostConfig"],
            "Labels": {},
            "Cmd": [],
        }

    async def _twin(self, body: dict[str, Any], program: tuple[str, ...], name: str) -> float:
        place = int(name.rpartition("-")[2])
        network = NetworkSettings()
        # From the far end of the network, where no sandbox is yet.
        address = IPv4Address(int(network.network.broadcast_address) - 1 - place)
        mounts = [
            {**mount, "Source": volume_name(name)} if mount["Type"] == "volume" else mount
            for mount in body["HostConfig"]["Mounts"]
        ]
        limits = {**body["HostConfig"], "Mounts": mounts}
        whole = {**body, "HostConfig": limits, "Entrypoint": list(program), **membership(network, address)}
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._first_output, whole, name)

    def _first_output(self, body: dict[str, Any], name: str) -> float:
        api: Any = self._client.api
        began = time.monotonic()
        container = api.create_container_from_config(body, name)["Id"]
        try:
            output = api.attach(container, stream=True, logs=True)
            api.start(container)
            if next(iter(output)) != b"here\n":
                raise RuntimeError("the twin said something else")
            return time.monotonic() - began
        finally:
            api.remove_container(container, force=True)

    async def _command(self, *arguments: str) -> float:
        """Run the docker command; return when its first output came."""
        began = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            "docker", "--host", f"unix://{self._engine.socket}", *arguments, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        line = await process.stdout.readline()
        took = time.monotonic() - began
        if await process.wait() or line != b"here\n":
            raise RuntimeError(f"docker {arguments[0]} failed")
        return took

    async def _left(self, sessions: list[str]) -> list[str]:
        """Return what is left of ended sessions after a while in which it may still go."""
        until = time.monotonic() + 30
        while (left := await self._leftovers(sessions)) and time.monotonic() < until:  # noqa: ASYNC110 - of other processes
            await asyncio.sleep(0.1)
        return left

    async def _leftovers(self, sessions: list[str]) -> list[str]:
        ours = set(sessions)
        containers = self._client.api.containers(all=True, filters={"label": "opificia.role=sandbox"})
        volumes = self._client.api.volumes()["Volumes"] or []
        devices = await asyncio.to_thread(_loop_devices)
        found = {
            "container": {each["Labels"].get("opificia.session", "") for each in containers} & ours,
            "volume": {each["Name"].removeprefix("opificia-out-") for each in volumes} & ours,
            "loop device": {session for session in sessions if session in devices},
            "grant": {each.id for each in (await self._control.gateway()).sessions} & ours,
        }
        left = [f"{kind} of {session} is left" for kind, names in found.items() for session in sorted(names)]
        health = await self._control.health()
        if len(sessions) > 1 and (health.running or health.waiting):
            left.append(f"{health.running} places are still taken, {health.waiting} wait")
        return left


def _loop_devices() -> str:
    listing = ["losetup", "--list", "--noheadings", "--output", "BACK-FILE"]
    return subprocess.run(listing, check=True, capture_output=True, text=True).stdout


@contextlib.contextmanager
def _host() -> Iterator[tuple[Any, Any]]:
    # The tests' own host: an engine in namespaces of its own, both daemons as their users.
    from control.images.build import build
    from control.images.recipes import IMAGES as RECIPES
    from control.images.recipes import recipe
    from tests.support.engine import PrivateEngine
    from tests.support.host import PrivateHost, stand_in_model
    from tests.support.paths import IMAGES

    for name in RECIPES:
        build(recipe(name), IMAGES)
    with (
        PrivateEngine.acquire() as engine,
        stand_in_model() as model,
        PrivateHost(engine, model, control=_SETTINGS) as host,
    ):
        yield host, engine


def _measure(run_: Run, starts: int, sessions: int, say: Callable[[str], None]) -> None:
    async def work(host: Any, engine: Any, client: docker.DockerClient) -> None:
        async with ControlClient(host.api) as control:
            bench = Bench(host, engine, control, client, run_)
            if starts:
                await bench.start(starts, say)
            if sessions:
                say(f"{sessions} sessions, {AT_ONCE} at a time")
                await bench.many(sessions)
            await bench.close()

    say("images, a private engine, and both daemons")
    with _host() as (host, engine), contextlib.closing(engine.client()) as client:
        asyncio.run(work(host, engine, client))


def expected_s(starts: int, sessions: int) -> float:
    """Return about how long `run` takes, once the images are built."""
    return 30 + (starts + 1) * 14 + sessions / 2.5


def run(run_: Run, starts: int, sessions: int, say: Callable[[str], None]) -> None:
    """Measure `starts` rounds of starts, then `sessions` sessions. Raises RuntimeError when no private engine can run."""
    if os.geteuid() != 0:
        raise RuntimeError("a private engine needs root")
    _measure(run_, starts, sessions, say)
