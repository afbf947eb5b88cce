"""Sandboxes as production launches them, kept alive for one command after another."""

import asyncio
import json
import subprocess
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any, Final, TypeVar

import docker

from control.docker.seccomp import default_seccomp_profile
from control.docker.service import DockerService
from control.images.store import install
from control.plan.container import ContainerPlan, DockerSettings, SandboxPlan, SandboxSettings, sandbox_container
from control.plan.environment import sandbox_environment
from control.plan.host import HostPlan
from gateway.contract.limits import MIB, ControlLimits
from tests.support.engine import PrivateEngine
from tests.support.gateway_process import TOKEN
from tests.support.paths import IMAGES

T = TypeVar("T")

_HOST_ID: Final = "clients-tests"
_LIMITS: Final = ControlLimits(out_bytes=16 * MIB, out_files=100)
# How long one command may take.
COMMAND_TIMEOUT_S: Final = 110
_TIMED_OUT: Final = 124  # timeout(1)


@dataclass(frozen=True, slots=True)
class Ran:
    """How a command ended, and what its user saw of it."""

    code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        """Both outputs."""
        return self.stdout + self.stderr

    def report(self) -> Any:
        """Return what a program of `inside/` found: the JSON on its last line."""
        assert self.code == 0, self.output
        return json.loads(self.stdout.splitlines()[-1])


class Sandbox:
    """One session's container. Its first process only waits; commands are executed beside it."""

    def __init__(self, client: docker.DockerClient, container: str, environment: Mapping[str, str]) -> None:
        self._api = client.api
        self._container = container
        self.environment: Final = environment

    def run(self, *argv: str, environment: Mapping[str, str] | None = None) -> Ran:
        """Run a command to its end, with the session's environment; `environment` adds to it."""
        limited = ["timeout", str(COMMAND_TIMEOUT_S), *argv]
        created = self._api.exec_create(self._container, limited, environment=dict(environment or {}))
        outputs = self._api.exec_start(created["Id"], demux=True)
        code = self._api.exec_inspect(created["Id"])["ExitCode"]
        stdout, stderr = ((output or b"").decode(errors="replace") for output in outputs)
        assert code != _TIMED_OUT, f"{argv[0]} did not end\n{stdout}{stderr}"
        return Ran(code, stdout, stderr)

    def copy_out(self, folder: str, target: Path) -> None:
        """Copy a folder to the host, where the engine cannot: from a tmpfs of a running sandbox."""
        created = self._api.exec_create(self._container, ["tar", "-C", folder, "-c", "."], stderr=False)
        archive = self._api.exec_start(created["Id"])
        subprocess.run(["tar", "-C", str(target), "--no-same-owner", "-x"], input=archive, check=True)


class Host:
    """A prepared host, on which each session's sandbox is launched when it is first asked for.

    All sandboxes see `in_dir` as /in, and trust `ca_bundle`.
    """

    def __init__(self, engine: PrivateEngine, plan: HostPlan, in_dir: Path, ca_bundle: Path) -> None:
        self._engine = engine
        self._plan = plan
        self._in_dir = in_dir
        self._settings = SandboxSettings(ca_bundle=str(ca_bundle), openai_provider="openai")
        self._client = docker.DockerClient(base_url=engine.url, timeout=COMMAND_TIMEOUT_S + 10)
        self._launched: dict[str, Sandbox] = {}

    def start(self) -> None:
        """Load the images and prepare the host."""

        async def work(service: DockerService) -> None:
            await install(service.images, self._plan.images, IMAGES)
            await service.prepare_host(self._plan)

        self._with_service(work)

    def stop(self) -> None:
        """Remove the sandboxes and what was prepared."""

        async def work(service: DockerService) -> None:
            for session in self._launched:
                await service.remove(f"opificia-{session}")
                await service.remove_out_volume(session)
            await service.remove_host(self._plan)

        try:
            self._with_service(work)
        finally:
            self._client.close()

    def sandbox(self, session: str, address: IPv4Address) -> Sandbox:
        """Return a session's sandbox."""
        if session not in self._launched:
            self._launched[session] = self._with_service(lambda service: self._launch(service, session, address))
        return self._launched[session]

    async def _launch(self, service: DockerService, session: str, address: IPv4Address) -> Sandbox:
        """Launch a sandbox: all of it as in production but the first process."""
        image = await service.image(self._plan.images.sandbox)
        assert image is not None
        network = self._plan.network
        environment = sandbox_environment(
            session, "run", TOKEN, network, {}, ca_bundle=True, openai_provider=self._settings.openai_provider
        )
        plan = SandboxPlan(
            session=session,
            run="run",
            policy_digest="digest",
            image=image.id,
            address=address,
            environment=environment,
            in_dir=str(self._in_dir),
            out_volume=await service.create_out_volume(session, _LIMITS.out_bytes, _LIMITS.out_files),
            runner=None,
        )
        made = sandbox_container(plan, self._settings, network, _LIMITS, _HOST_ID, default_seccomp_profile())
        body = {**made.body, "Entrypoint": ["sleep", "infinity"], "Cmd": []}
        container = await service.create(ContainerPlan(made.name, body))
        await service.start(container)
        return Sandbox(self._client, container, environment)

    def _with_service(self, work: Callable[[DockerService], Awaitable[T]]) -> T:
        async def whole() -> T:
            service = DockerService(DockerSettings(socket=str(self._engine.socket)), _HOST_ID, limits=_LIMITS)
            try:
                return await work(service)
            finally:
                await service.close()

        return asyncio.run(whole())
