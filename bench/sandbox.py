"""`python -m bench.sandbox`: how soon a session's runner says hello, and what a hundred sessions leave behind.

Start: from the request to the runner's hello, against the engine's own create and start of the same container (its configuration
read back from a live sandbox) to its first output, in interleaved rounds on one private engine. Goal: at most 1.3 times as long.
Many: a hundred sessions, eight at a time, each with its log, its exit code and its result; afterwards no container, volume, loop
device, grant or place may be left, and control's memory must not have grown with their number.

Needs root, as the tests with an engine do.
"""

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any, Final

import docker

from bench.machine import describe
from bench.processes import cpu_seconds, rss_bytes
from bench.records import Record, Run, summarize
from control.api.types import SessionView
from control.client import ControlClient
from control.plan.container import membership
from control.plan.network import NetworkSettings
from control.plan.session import Reason, RunnerConnected
from control.spec import SandboxSpec
from gateway.contract.limits import MIB

GOAL_FACTOR: Final = 1.3
AT_ONCE: Final = 8
# Between the first ten sessions and the last, which is when a leak of some KiB a session shows.
MEMORY_GROWTH_MB: Final = 8.0
_SUITE: Final = "sandbox"
_OURS: Final = "request to hello"
_ENGINE: Final = "engine, Python"
_ENGINE_SHELL: Final = "engine, echo"
# The runner is Python too. A shell's first output comes sooner, and is told for comparison.
_FIRST_OUTPUT: Final = {
    _ENGINE: ["python3", "-I", "-c", "print('here')"],
    _ENGINE_SHELL: ["echo", "here"],
}
_WAIT_S: Final = 120.0
_SETTINGS: Final[dict[str, dict[str, Any]]] = {
    "sandbox": {"memory_bytes": 256 * MIB, "work_bytes": 64 * MIB, "tmp_bytes": 16 * MIB, "home_bytes": 16 * MIB},
    "admission": {"cpus": 64.0, "memory_bytes": 64 * 256 * MIB},
    "limits": {"max_running": AT_ONCE, "stop_grace_ms": 1_000, "out_bytes": 4 * MIB, "out_files": 100},
}


class Bench:
    """One private host under measurement."""

    def __init__(self, host: Any, engine: Any, control: ControlClient, client: docker.DockerClient, run: Run) -> None:
        self._host = host
        self._engine = engine
        self._control = control
        self._client = client
        self._run = run
        self._image = "opificia-sandbox:latest"

    async def start(self, rounds: int) -> None:
        """Measure starts, in another order each round."""
        model = await self._connected()
        body = self._same_container(model.id)
        order = [_OURS, *_FIRST_OUTPUT]
        for number in range(rounds + 1):
            for peer in (*order[number % len(order) :], *order[: number % len(order)]):
                began = cpu_seconds([self._host.control.pid])
                took = await (self._hello() if peer is _OURS else self._first_output(body, _FIRST_OUTPUT[peer], number))
                if number == 0:
                    continue  # the first of each warms caches
                values = {"ms": took * 1000}
                if peer is _OURS:
                    values["control_cpu_ms"] = (cpu_seconds([self._host.control.pid]) - began) * 1000
                self._run.records.append(Record(_SUITE, "start", peer, number, values))
        await self._end(model.id)

    async def many(self, count: int) -> None:
        """Run `count` sessions and look for what they leave."""
        record = Record(_SUITE, f"{count} sessions, {AT_ONCE} at a time", _OURS, 0, {})
        folders = {path.name for path in self._host.sessions.iterdir()}
        began = time.monotonic()
        sessions = [await self._launch("sh", "-c", f"echo {n}; echo {n} > /out/n; exit 7") for n in range(count)]
        memory = 0
        for number, session in enumerate(sessions):
            view = await self._ended(session)
            if number == 9:
                memory = rss_bytes([self._host.control.pid])
            log = (self._host.sessions / session / "stdout.log").read_bytes()
            if (view.reason, view.exit_code, log) != (Reason.EXIT_CODE, 7, b"%d\n" % number):
                record.problems.append(f"{session}: {view.reason}, {view.exit_code}, log {log!r}")
        seconds = time.monotonic() - began
        record.problems += await self._left(sessions)
        strange = {path.name for path in self._host.sessions.iterdir()} - folders - set(sessions)
        record.problems += [f"a folder that is nobody's: {name}" for name in sorted(strange)]
        grown = (rss_bytes([self._host.control.pid]) - memory) / MIB
        if grown > MEMORY_GROWTH_MB:
            record.problems.append(f"control's memory grew by {grown:.1f} MiB after the first ten")
        record.values = {"seconds": seconds, "sessions_per_s": count / seconds, "control_growth_mib": grown}
        self._run.records.append(record)

    async def _launch(self, *command: str) -> str:
        view = await self._control.create(SandboxSpec(image=self._image, command=command))
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
        network = NetworkSettings()
        last = IPv4Address(int(network.network.broadcast_address) - 1)
        return {
            **found["Config"],
            "HostConfig": found["HostConfig"],
            "Labels": {},
            "Cmd": [],
            **membership(network, last),
        }

    async def _first_output(self, body: dict[str, Any], program: list[str], number: int) -> float:
        return await asyncio.to_thread(self._first_output_in_thread, {**body, "Entrypoint": program}, f"twin-{number}")

    def _first_output_in_thread(self, body: dict[str, Any], name: str) -> float:
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


async def _measure(run: Run, rounds: int, sessions: int) -> None:
    with _host() as (host, engine), contextlib.closing(engine.client()) as client:
        async with ControlClient(host.api) as control:
            bench = Bench(host, engine, control, client, run)
            if rounds:
                await bench.start(rounds)
            if sessions:
                await bench.many(sessions)


def _print(run: Run) -> bool:
    """Print what was found; return whether every goal is reached."""
    reached = True
    medians = {}
    for peer in (_OURS, *_FIRST_OUTPUT):
        summary = summarize(run.records, "start", peer, "ms")
        if summary is not None:
            medians[peer] = summary.median
            print(f"start: {peer:18} median {summary.median:6.0f} ms ({summary.least:.0f} to {summary.most:.0f})")
    cpu = [each.values["control_cpu_ms"] for each in run.records if "control_cpu_ms" in each.values]
    if cpu:
        print(f"start: control's CPU, to the end and the clean-up: median {statistics.median(cpu):.0f} ms")
    if medians:
        factor = medians[_OURS] / medians[_ENGINE]
        reached = factor <= GOAL_FACTOR
        print(f"goal: at most {GOAL_FACTOR} x the engine's own: {factor:.2f} x, {'reached' if reached else 'missed'}")
    for record in run.records:
        if record.scenario != "start":
            values = record.values
            print(
                f"{record.scenario}: {values['seconds']:.1f} s, {values['sessions_per_s']:.2f}/s, "
                f"control's memory {values['control_growth_mib']:+.1f} MiB after the first ten"
            )
            for problem in record.problems:
                print(f"  {problem}")
            reached = reached and not record.problems
            print(f"goal: nothing lost, nothing left, memory flat: {'missed' if record.problems else 'reached'}")
    return reached


def main() -> int:
    """Measure, print, and return 0 when every goal is reached, 2 when it cannot run."""
    parser = argparse.ArgumentParser(prog="python -m bench.sandbox", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="of starts; 0: none")
    parser.add_argument("--sessions", type=int, default=100, help="in all; 0: none")
    parser.add_argument("--out", type=Path, metavar="FILE", help="raw results as JSON")
    options = parser.parse_args()
    if os.geteuid() != 0:
        print("a private engine needs root", file=sys.stderr)
        return 2
    run = Run(time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()), " ".join(sys.argv), describe())
    asyncio.run(_measure(run, options.rounds, options.sessions))
    if options.out:
        run.save(options.out)
    return 0 if _print(run) else 1


if __name__ == "__main__":
    sys.exit(main())
