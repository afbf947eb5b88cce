"""An engine in memory: containers are processes of this machine that run the reference runner, or a script of the test.

It stands in for Docker where the test is about sessions. A container's program is chosen by the image's name.
"""

import asyncio
import io
import os
import signal
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from control.docker.types import (
    ContainerExit,
    EngineError,
    EngineInfo,
    ImageFacts,
    LogSink,
    LogStream,
    NotFoundError,
    ObservedContainer,
    OutLimits,
    OutSummary,
)
from control.plan.container import LABEL_POLICY, LABEL_ROLE, LABEL_RUN, LABEL_SESSION, ContainerPlan
from control.runner import client
from gateway.contract.limits import GIB


@dataclass
class FakeContainer:
    """One container and its process."""

    id: str
    plan: ContainerPlan
    process: asyncio.subprocess.Process | None = None
    output: dict[LogStream, bytearray] = field(default_factory=lambda: {stream: bytearray() for stream in LogStream})
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    complete: bool = False
    exit: ContainerExit | None = None
    oom: bool = False
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        return dict(entry.split("=", 1) for entry in self.plan.body["Env"])

    @property
    def labels(self) -> dict[str, str]:
        labels: dict[str, str] = self.plan.body["Labels"]
        return labels


class FakeEngine:
    """Speaks control.sessions.engine.Engine.

    `images`: name → argv of the container's first process; empty argv is the reference runner. `runner_url` is where a
    runner finds the server of the test, in place of the gateway. `fail`: call name → error to raise once.
    """

    def __init__(self, runner_url: str = "") -> None:
        self.runner_url = runner_url
        self.images: dict[str, list[str]] = {"sandbox": []}
        self.containers: dict[str, FakeContainer] = {}
        self.volumes: set[str] = set()
        self.calls: list[str] = []
        self.fail: dict[str, EngineError] = {}
        self.hold: dict[str, asyncio.Event] = {}
        # Raised once after the call was carried out: its answer is lost.
        self.unanswered: dict[str, EngineError] = {}
        self.out: dict[str, bytes] = {}
        self.out_truncated = False
        self._count = 0

    async def _called(self, name: str) -> None:
        self.calls.append(name)
        if name in self.hold:
            await self.hold[name].wait()
        if name in self.fail:
            raise self.fail.pop(name)

    async def ping(self) -> EngineInfo:
        return EngineInfo("fake", "1.41", 16 * GIB, 4, ())

    async def image(self, reference: str) -> ImageFacts | None:
        await self._called("image")
        if reference not in self.images:
            return None
        return ImageFacts(f"sha256:{reference}", (), False, reference != "without-python")

    async def create(self, plan: ContainerPlan) -> str:
        await self._called("create")
        self._count += 1
        container = FakeContainer(f"c{self._count}", plan)
        self.containers[container.id] = container
        if "create" in self.unanswered:
            raise self.unanswered.pop("create")
        return container.id

    async def start(self, container: str) -> None:
        await self._called("start")
        found = self._find(container)
        name = found.plan.body["Image"].removeprefix("sha256:")
        argv = self.images[name] or [sys.executable, "-I", "-S", client.__file__]
        environment = {**found.environment, "PATH": os.environ["PATH"]}
        session = found.labels[LABEL_SESSION]
        environment["OPIFICIA_RUNNER_URL"] = f"{self.runner_url}?session={session}"
        found.process = await asyncio.create_subprocess_exec(
            *argv,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        found.tasks.append(asyncio.create_task(self._live(found)))

    async def _live(self, container: FakeContainer) -> None:
        process = container.process
        assert process is not None
        assert process.stdout is not None
        assert process.stderr is not None
        copying = asyncio.gather(
            self._copy(container, LogStream.STDOUT, process.stdout),
            self._copy(container, LogStream.STDERR, process.stderr),
        )
        code = await process.wait()
        _kill_the_rest(container.environment["OPIFICIA_RUNNER_TOKEN"])
        await copying
        container.exit = ContainerExit(128 - code if code < 0 else code, container.oom, "", "now")
        container.ended.set()
        async with container.changed:
            container.complete = True
            container.changed.notify_all()

    async def _copy(self, container: FakeContainer, stream: LogStream, source: asyncio.StreamReader) -> None:
        while data := await source.read(65536):
            async with container.changed:
                container.output[stream] += data
                container.changed.notify_all()

    async def follow_logs(self, container: str, sink: LogSink) -> str:
        found = self._find(container)
        while True:
            async with found.changed:
                complete = found.complete
                for stream in LogStream:
                    data = bytes(found.output[stream][sink.position(stream) :])
                    if data:
                        sink.write(stream, data)
                if complete:
                    return ""
                await found.changed.wait()

    async def wait(self, container: str) -> ContainerExit:
        found = self._find(container)
        await found.ended.wait()
        if container not in self.containers:
            raise NotFoundError("gone")
        assert found.exit is not None
        return found.exit

    async def stop(self, container: str, grace_s: float) -> None:
        await self._called("stop")
        found = self._find(container)
        if found.process is None or found.ended.is_set():
            return
        self.signal(container, signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await found.ended.wait()
        except TimeoutError:
            self.signal(container, signal.SIGKILL)
            await found.ended.wait()

    async def kill(self, container: str) -> None:
        await self._called("kill")
        self.signal(container, signal.SIGKILL)

    def signal(self, container: str, number: int) -> None:
        """Signal the first process, or all when it is SIGKILL, as the end of a container's first process does."""
        process = self.containers[container].process
        assert process is not None
        try:
            if number == signal.SIGKILL:
                os.killpg(process.pid, number)
            else:
                os.kill(process.pid, number)
        except ProcessLookupError:
            pass

    async def remove(self, container: str) -> None:
        await self._called("remove")
        found = self.containers.pop(container, None)
        if found is not None:
            await self._reap(found)

    async def vanish(self, container: str) -> None:
        """Remove a container behind control's back."""
        await self._reap(self.containers.pop(container))

    async def _reap(self, container: FakeContainer) -> None:
        process = container.process
        if process is not None:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        await asyncio.gather(*container.tasks)

    async def owned(self) -> Sequence[ObservedContainer]:
        await self._called("owned")
        return [
            ObservedContainer(
                id=each.id,
                name=each.plan.name,
                role=each.labels[LABEL_ROLE],
                session=each.labels[LABEL_SESSION],
                run=each.labels[LABEL_RUN],
                policy_digest=each.labels[LABEL_POLICY],
                state="created" if each.process is None else "exited" if each.ended.is_set() else "running",
                started_at="" if each.process is None else "2024-01-01T00:00:00Z",
                address="",
                exit=each.exit,
            )
            for each in self.containers.values()
        ]

    async def declare_out_volume(self, session: str) -> str:
        await self._called("declare_out_volume")
        self.volumes.add(session)
        return f"out-{session}"

    async def create_out_volume(self, session: str, size_bytes: int, inodes: int) -> str:
        await self._called("create_out_volume")
        self.volumes.add(session)
        return f"out-{session}"

    async def out_volumes(self) -> Sequence[str]:
        return sorted(self.volumes)

    async def remove_out_volume(self, session: str) -> None:
        await self._called("remove_out_volume")
        self.volumes.discard(session)

    async def remove_made_for(self, session: str) -> None:
        for container in [each for each in self.containers.values() if each.labels[LABEL_SESSION] == session]:
            await self.remove(container.id)

    async def archive_out(self, container: str, destination: Path, limits: OutLimits) -> OutSummary:
        await self._called("archive_out")
        self._find(container)
        with tarfile.open(destination, "w") as tar:
            for name, data in self.out.items():
                info = tarfile.TarInfo(f"./{name}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        return OutSummary(sum(map(len, self.out.values())), len(self.out), self.out_truncated)

    def _find(self, container: str) -> FakeContainer:
        try:
            return self.containers[container]
        except KeyError:
            raise NotFoundError(f"there is no container {container}") from None

    async def close(self) -> None:
        """End all processes."""
        for container in list(self.containers):
            await self.vanish(container)


def _kill_the_rest(token: str) -> None:
    """Kill what a session's first process left behind, as the end of a container's PID namespace does.

    It is known by its token: tests in another checkout, run at the same time, give their sessions the same names.
    """
    mark = f"OPIFICIA_RUNNER_TOKEN={token}".encode()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
