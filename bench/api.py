"""The control API with many stored sessions, on SQLite and PostgreSQL: latency of create, get and list.

The daemon is a process of its own with a real database, socket and HTTP stack; only its engine has no containers. Both databases
are filled once, then asked in interleaved rounds: one request after the other, and four at once. `python -m bench.api ROOT URL`
is the daemon.
"""

import asyncio
import contextlib
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from bench.machine import Busy, version_of
from bench.processes import cpu_seconds, family
from bench.records import Record, Run
from control.app import Control, serve
from control.client import ControlClient, ControlError, ControlUnavailableError
from control.config import ControlConfig
from control.db.rows import StoredSession
from control.db.store import Store
from control.docker.types import EngineInfo
from control.plan.session import Exit, Reason, Session, SessionState
from control.sessions.engine import Engine
from control.spec import SandboxSpec
from gateway.contract.limits import GIB
from gateway.contract.policy import NetworkLevel
from gateway.runtime.settings import parse

SUITE: Final = "api"
SCENARIOS: Final = ("api-get", "api-list", "api-list-failed", "api-create")
_AT_ONCE: Final = (1, 4)
_START_S: Final = 60.0
_BEGAN_MS: Final = 1_700_000_000_000


@dataclass(frozen=True, slots=True)
class Plan:
    """How often, how many requests a measurement, and how many sessions are stored."""

    rounds: int = 3
    requests: int = 1_000
    stored: int = 10_000

    @classmethod
    def quick(cls) -> "Plan":
        """Return what shows that all works; its numbers mean nothing."""
        return cls(1, 40, 200)

    def expected_s(self) -> float:
        """Return about how long it takes."""
        return 2 * (5 + self.stored / 500 + self.rounds * (4 + 8 * self.requests / 350))


class _IdleEngine:
    """What the daemon asks an engine that has no containers."""

    async def ping(self) -> EngineInfo:
        return EngineInfo("bench", "1.41", 8 * GIB, 2, ())

    async def owned(self) -> list[Any]:
        return []

    async def out_volumes(self) -> list[str]:
        return []


def _config(root: Path, url: str) -> ControlConfig:
    lines = [
        f'store.url = "{url}"',
        f'paths = {{ data = "{root}", egress_logs = "{root}/egress", door = "{root}/door" }}',
        f'listen.api = "unix:{root}/api.sock"',
        f'listen.runner = "unix:{root}/runner.sock"',
        f'gateway.contract = "unix:{root}/gateway.sock"',
    ]
    # All that are stored ended long ago.
    lines += [f"limits.{name} = 0" for name in ("keep_ended_ms", "keep_ended_sessions", "keep_ended_bytes")]
    return parse("\n".join(lines), ControlConfig)


async def _daemon(root: Path, url: str) -> None:
    async def verify() -> list[str]:
        return []

    await serve(Control(_config(root, url), cast(Engine, _IdleEngine()), "bench", verify))


def _session(number: int) -> StoredSession:
    """Return a session as most are: with an environment, a command, some rules, and an end."""
    spec = SandboxSpec(
        image="opificia-sandbox:latest",
        session_id=f"bench-{number:05d}",
        run_id=f"run-{number:05d}",
        command=("sh", "-c", "npm ci && npm test -- --reporter=json > /out/report.json"),
        env={f"VARIABLE_{index}": "value" * 4 for index in range(10)},
        network=NetworkLevel.REGISTRIES,
        allow=tuple(f"host-{index}.example.com" for index in range(10)),
    )
    at = _BEGAN_MS + number * 1_000
    life = Session(
        state=SessionState.EXITED if number % 10 else SessionState.FAILED,
        reason=Reason.EXIT_CODE if number % 10 else Reason.HELLO_TIMEOUT,
        exit=Exit(0, oom_killed=False),
        container="c" * 64,
        image_id="sha256:" + "a" * 64,
        launched_at=at + 100,
        connected_at=at + 400,
        running_at=at + 420,
        ended_at=at + 900,
    )
    return StoredSession(
        id=spec.session_id,
        run_id=spec.run_id,
        position=at * 1_000,
        created_at=at,
        memory_bytes=4 * GIB,
        cpus=2.0,
        spec=spec,
        life=life,
        last_event=8,
        cleaned=True,
    )


async def _fill(url: str, count: int) -> None:
    store = Store(url)
    try:
        await store.migrate()
        for number in range(count):
            await store.insert(_session(number))
    finally:
        await store.close()


@contextlib.contextmanager
def _running(root: Path, url: str) -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-m", "bench.api", str(root), url])
    try:
        until = time.monotonic() + _START_S
        while not (root / "api.sock").exists():
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError("the daemon did not start")
            time.sleep(0.05)
        yield process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


class _Asker:
    """One database's daemon under measurement. Counts answers that are not what was asked for."""

    def __init__(self, client: ControlClient, stored: int, daemon: int, database: int | None) -> None:
        self._client = client
        self._stored = stored
        self._daemon = daemon
        self._database = database
        # The same sessions in each run.
        self._chance = random.Random(7)
        self._problems: list[str] = []
        asked = (self._get, self._page, self._failed, self._create)
        self._questions: Final[dict[str, Callable[[], Awaitable[bool]]]] = dict(zip(SCENARIOS, asked, strict=True))

    async def _get(self) -> bool:
        name = f"bench-{self._chance.randrange(self._stored):05d}"
        return (await self._client.get(name)).id == name

    async def _page(self) -> bool:
        # A page somewhere in the middle: each of them is full.
        after = self._chance.randrange(100, self._stored)
        cursor = str((_BEGAN_MS + after * 1_000) * 1_000 + 1)
        return len((await self._client.list(limit=100, cursor=cursor)).sessions) == 100

    async def _failed(self) -> bool:
        page = await self._client.list([SessionState.FAILED], limit=100)
        return len(page.sessions) == min(100, self._stored // 10)

    async def _create(self) -> bool:
        spec = _session(0).spec
        made = await self._client.create(SandboxSpec(image=spec.image, command=spec.command, env=spec.env))
        return made.state is SessionState.CREATED

    async def measure(self, scenario: str, at_once: int, requests: int, record: Record) -> None:
        """Ask `requests` times and fill the record in."""
        ask = self._questions[scenario]
        await self._latencies(ask, min(50, requests), at_once)
        self._problems.clear()
        processes = [self._daemon, os.getpid(), *(family(self._database) if self._database else ())]
        before = (cpu_seconds([self._daemon]), cpu_seconds(processes), Busy.now(), time.monotonic())
        taken = await self._latencies(ask, requests, at_once)
        seconds = time.monotonic() - before[3]
        daemon = cpu_seconds([self._daemon]) - before[0]
        foreign = Busy.now().busy - before[2].busy - (cpu_seconds(processes) - before[1])
        record.foreign_cpu = round(max(0.0, foreign / seconds / len(os.sched_getaffinity(0))), 3)
        if self._problems:
            record.problems.append(f"{len(self._problems)} errors, the first: {self._problems[0]}")
            return
        record.values = {
            "requests_per_s": len(taken) / seconds,
            "p50_ms": taken[len(taken) // 2],
            "p99_ms": taken[len(taken) * 99 // 100],
            "max_ms": taken[-1],
            "cpu_ms_per_request": daemon * 1_000 / len(taken),
        }

    async def _latencies(self, ask: Callable[[], Awaitable[bool]], requests: int, at_once: int) -> list[float]:
        """Return the milliseconds of each request, in order of size."""
        taken: list[float] = []

        async def worker() -> None:
            for _ in range(requests // at_once):
                begun = time.perf_counter()
                try:
                    if not await ask():
                        self._problems.append("another answer than asked for")
                except (ControlError, ControlUnavailableError) as error:
                    self._problems.append(str(error))
                taken.append((time.perf_counter() - begun) * 1_000)

        await asyncio.gather(*(worker() for _ in range(at_once)))
        return sorted(taken)


@dataclass(frozen=True, slots=True)
class _Database:
    """Where a daemon finds it, and the first process of its server, None without one."""

    url: str
    server: int | None


async def _measure(
    run_: Run, plan: Plan, folder: Path, daemons: dict[str, tuple[_Database, int]], say: Callable[[str], None]
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        askers = {
            name: _Asker(
                await stack.enter_async_context(ControlClient(f"unix:{folder}/{name}/api.sock")),
                plan.stored,
                daemon,
                database.server,
            )
            for name, (database, daemon) in daemons.items()
        }
        for number in range(plan.rounds):
            order = list(askers.items())
            if number % 2:
                order.reverse()
            for scenario in SCENARIOS:
                for at_once in _AT_ONCE:
                    for name, asker in order:
                        title = scenario if at_once == 1 else f"{scenario}-{at_once}-at-once"
                        say(f"round {number + 1}/{plan.rounds}: {title}: {name}")
                        record = Record(SUITE, title, name, number, {})
                        await asker.measure(scenario, at_once, plan.requests, record)
                        run_.records.append(record)


def _databases(stack: contextlib.ExitStack, folder: Path, run_: Run) -> dict[str, _Database]:
    found = {"sqlite": _Database(f"sqlite:///{folder}/sqlite/control.db", None)}
    run_.peers["sqlite"] = {"about": f"SQLite {sqlite3.sqlite_version}", "checks": "", "forward_proxy": False}
    try:
        # From the checkout only: the tests know how to run a server of their own.
        from tests.support.postgres import Postgres

        postgres = stack.enter_context(Postgres(durable=True))
    except (ImportError, RuntimeError) as error:
        run_.missing.append(f"not measured: postgresql ({error})")
        return found
    found["postgresql"] = _Database(postgres.create("bench"), postgres.pid)
    about = version_of(str(postgres.program), "--version")
    run_.peers["postgresql"] = {"about": about, "checks": "", "forward_proxy": False}
    return found


def run(run_: Run, plan: Plan, say: Callable[[str], None]) -> None:
    """Fill the databases, ask in rounds, and add the records to `run_`. Raises RuntimeError when a daemon does not start."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="opificia-bench-")))
        daemons: dict[str, tuple[_Database, int]] = {}
        for name, database in _databases(stack, folder, run_).items():
            root = folder / name
            root.mkdir()
            say(f"{name}: storing {plan.stored} sessions")
            asyncio.run(_fill(database.url, plan.stored))
            daemons[name] = (database, stack.enter_context(_running(root, database.url)))
        asyncio.run(_measure(run_, plan, folder, daemons, say))


def watch(
    run_: Run,
    plan: Plan,
    scenario: str,
    watchers: Sequence[Callable[[int, Record], contextlib.AbstractContextManager[None]]],
    say: Callable[[str], None],
) -> None:
    """Ask one question on SQLite, once under each of the watchers: they are given the daemon's process id and the record."""

    async def ask() -> None:
        async with ControlClient(f"unix:{root}/api.sock") as client:
            asker = _Asker(client, plan.stored, daemon, None)
            for watcher in watchers:
                record = Record(SUITE, scenario, "sqlite", 0, {})
                with watcher(daemon, record):
                    await asker.measure(scenario, 1, plan.requests, record)
                run_.records.append(record)

    with tempfile.TemporaryDirectory(prefix="opificia-bench-") as folder:
        root, url = Path(folder), f"sqlite:///{folder}/control.db"
        say(f"storing {plan.stored} sessions")
        asyncio.run(_fill(url, plan.stored))
        with _running(root, url) as daemon:
            asyncio.run(ask())


if __name__ == "__main__":
    asyncio.run(_daemon(Path(sys.argv[1]), sys.argv[2]))
