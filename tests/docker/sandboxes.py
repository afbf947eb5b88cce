"""Sandboxes that run a shell command in place of the runner, in everything else as in production."""

import asyncio
import itertools
import secrets
from dataclasses import dataclass, replace
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any, Final

from control.docker.seccomp import default_seccomp_profile
from control.docker.service import DockerService
from control.docker.types import ContainerExit, LogStream
from control.plan.container import (
    ContainerPlan,
    SandboxPlan,
    SandboxSettings,
    sandbox_container,
)
from control.plan.environment import sandbox_environment
from control.plan.network import NetworkSettings
from gateway.contract.limits import MIB, ControlLimits
from tests.support.patience import PATIENCE_S

HOST_ID: Final = "test-host"
TOKEN: Final = "a-token-of-the-test"
SMALL: Final = SandboxSettings(
    memory_bytes=256 * MIB, pids=64, work_bytes=64 * MIB, tmp_bytes=16 * MIB, home_bytes=16 * MIB
)

_RUN: Final = secrets.token_hex(4)
_numbers = itertools.count(1)


class Output:
    """Keeps a container's output (control.docker.types.LogSink)."""

    def __init__(self, stdout: bytes = b"", stderr: bytes = b"") -> None:
        self._kept = {LogStream.STDOUT: bytearray(stdout), LogStream.STDERR: bytearray(stderr)}

    def position(self, stream: LogStream) -> int:
        """Return how much was taken, before and now."""
        return len(self._kept[stream])

    def read(self, stream: LogStream, offset: int, length: int) -> bytes:
        """Return a part of what was taken."""
        return bytes(self._kept[stream][offset : offset + length])

    def full(self, stream: LogStream) -> bool:
        """Tell that there is no limit."""
        return False

    def write(self, stream: LogStream, data: bytes) -> None:
        """Take more."""
        self._kept[stream] += data

    @property
    def stdout(self) -> bytes:
        """What was taken of stdout."""
        return bytes(self._kept[LogStream.STDOUT])

    @property
    def stderr(self) -> bytes:
        """What was taken of stderr."""
        return bytes(self._kept[LogStream.STDERR])


@dataclass(frozen=True, slots=True)
class Ended:
    """A command that has ended."""

    exit: ContainerExit
    stdout: str
    stderr: str


class Sandbox:
    """One running sandbox."""

    def __init__(self, container: str, session: str, address: IPv4Address, service: DockerService) -> None:
        self.container = container
        self.session = session
        self.address = address
        self.output = Output()
        self._service = service
        self._following = asyncio.create_task(service.follow_logs(container, self.output))

    async def start(self) -> None:
        """Start it with its logs attached."""
        # One step of the loop, so that the follower is the first to have begun.
        await asyncio.sleep(0)
        await self._service.start(self.container)

    async def ended(self) -> Ended:
        """Wait for its end and all its output."""
        async with asyncio.timeout(PATIENCE_S):
            exit_ = await self._service.wait(self.container)
            await self._following
        return Ended(exit_, self.output.stdout.decode(), self.output.stderr.decode())

    async def said(self, text: str) -> None:
        """Wait until its output holds `text`."""
        async with asyncio.timeout(PATIENCE_S):
            while text.encode() not in self.output.stdout:
                if self._following.done():
                    raise AssertionError(f"ended without {text!r}: {self.output.stdout!r} {self.output.stderr!r}")
                await asyncio.sleep(0.01)

    async def close(self) -> None:
        """Remove it."""
        await self._service.remove(self.container)
        self._following.cancel()
        await asyncio.gather(self._following, return_exceptions=True)


class Sandboxes:
    """Launches sandboxes on one host."""

    def __init__(self, service: DockerService, network: NetworkSettings, limits: ControlLimits, folder: Path) -> None:
        self._service = service
        self._network = network
        self._limits = limits
        self._in = folder / "in"
        self._in.mkdir()
        (self._in / "task.txt").write_text("the task\n")
        self._all: list[Sandbox] = []
        self._sessions: list[str] = []

    def put(self, name: str) -> None:
        """Make a file that appears in /in of all of them."""
        (self._in / name).touch()

    @property
    def launched(self) -> list[Sandbox]:
        """All sandboxes so far."""
        return list(self._all)

    @property
    def forwarder(self) -> IPv4Address:
        """The forwarder's address."""
        return self._network.forwarder

    async def plan(
        self,
        command: str,
        settings: SandboxSettings = SMALL,
        *,
        change: dict[str, Any] | None = None,
        **fields: Any,
    ) -> tuple[ContainerPlan, SandboxPlan]:
        """Plan a sandbox whose first process is bash with `command`; `change` replaces lines of HostConfig."""
        number = next(_numbers)
        # Loop devices belong to the machine, so names differ from run to run.
        session = f"{_RUN}-{number}"
        self._sessions.append(session)
        image = await self._service.image("opificia-sandbox:latest")
        assert image is not None
        extra = fields.pop("environment", {})
        plan = SandboxPlan(
            session=session,
            run="run",
            policy_digest="digest",
            image=image.id,
            address=self._network.network.network_address + 16 + number,
            environment=sandbox_environment(session, "run", TOKEN, self._network, extra, ca_bundle=False),
            in_dir=str(self._in),
            out_volume=await self._service.create_out_volume(session, self._limits.out_bytes, self._limits.out_files),
            runner=None,
        )
        plan = replace(plan, **fields)
        container = sandbox_container(plan, settings, self._network, self._limits, HOST_ID, default_seccomp_profile())
        body = {**container.body, "Entrypoint": ["bash", "-c", command], "Cmd": []}
        body["HostConfig"] = {**body["HostConfig"], **(change or {})}
        return ContainerPlan(container.name, body), plan

    async def create(self, command: str, settings: SandboxSettings = SMALL, **fields: Any) -> Sandbox:
        """Make a sandbox that is not started yet."""
        container, plan = await self.plan(command, settings, **fields)
        made = Sandbox(await self._service.create(container), plan.session, plan.address, self._service)
        self._all.append(made)
        return made

    async def launch(self, command: str, settings: SandboxSettings = SMALL, **fields: Any) -> Sandbox:
        """Make and start a sandbox."""
        made = await self.create(command, settings, **fields)
        await made.start()
        return made

    async def run(self, command: str, settings: SandboxSettings = SMALL, **fields: Any) -> Ended:
        """Run a command to its end."""
        return await (await self.launch(command, settings, **fields)).ended()

    async def close(self) -> None:
        """Remove all."""
        await asyncio.gather(*(sandbox.close() for sandbox in self._all))
        # Also of those that could not be made.
        await asyncio.gather(*(self._service.remove_out_volume(session) for session in self._sessions))
