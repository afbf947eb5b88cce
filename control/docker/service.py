"""What control asks of the container engine. Plans come from control.plan; here they are carried out and told back.

Every method raises EngineError with a sentence and a remedy, EngineUnavailableError when it is worth another try, and
NotFoundError when the thing is gone. Only containers labelled with this installation's host id are ever listed.
"""

import asyncio
import contextlib
import errno
from pathlib import Path
from typing import Any, Final

from control.docker.archive import collect
from control.docker.engine import Engine
from control.docker.events import Events
from control.docker.images import Images
from control.docker.logs import LogFollower
from control.docker.types import (
    ContainerExit,
    EngineError,
    EngineInfo,
    EngineUnavailableError,
    ImageFacts,
    LogSink,
    NotFoundError,
    ObservedContainer,
    OutLimits,
    OutSummary,
)
from control.docker.volumes import OutVolumes
from control.host.prepare import Host
from control.plan.container import (
    LABEL_HOST,
    LABEL_POLICY,
    LABEL_ROLE,
    LABEL_RUN,
    LABEL_SESSION,
    OUT_PATH,
    ContainerPlan,
    DockerSettings,
    SandboxSettings,
)
from control.plan.host import HostPlan
from gateway.contract.limits import ControlLimits

# An event may be missed; a look every so often misses nothing.
_LOOK_S: Final = 15.0
# The engine tells of an end shortly before an inspection shows it.
_LOOK_AGAIN_S: Final = 0.05
_ENDED: Final = frozenset({"exited", "dead"})


class DockerService:
    """One engine, as one installation uses it. Must be used from one event loop; call `close` at the end."""

    def __init__(
        self,
        settings: DockerSettings,
        host_id: str,
        *,
        limits: ControlLimits | None = None,
        sandbox: SandboxSettings | None = None,
    ) -> None:
        limits = limits or ControlLimits()
        sandbox = sandbox or SandboxSettings()
        self._host_id = host_id
        self._owner = (sandbox.uid, sandbox.gid)
        self._engine = Engine(settings.socket, timeout_s=limits.engine_timeout_ms / 1000, threads=limits.engine_threads)
        self._events = Events(self._engine, host_id)
        self._followers: dict[str, LogFollower] = {}
        self._volumes = OutVolumes(self._engine, host_id)
        self._host = Host(self._engine, host_id)
        self.images: Final = Images(self._engine)

    async def close(self) -> None:
        """End the connections; containers stay as they are."""
        await self._events.close()
        self._engine.close()

    async def ping(self) -> EngineInfo:
        """Ask the engine who it is and what it can enforce."""
        info, version = await asyncio.gather(
            self._engine.call(lambda api: api.info()), self._engine.call(lambda api: api.version())
        )
        return EngineInfo(
            version=str(version["Version"]),
            api_version=str(version["ApiVersion"]),
            memory_bytes=int(info["MemTotal"]),
            cpus=int(info["NCPU"]),
            runtimes=tuple(sorted(info.get("Runtimes") or {})),
            warnings=tuple(_engine_warnings(info)),
        )

    async def image(self, reference: str) -> ImageFacts | None:
        """Return what a launch must know of an image, None when the engine does not have it. Never pulls."""
        return await self.images.facts(reference)

    async def create(self, plan: ContainerPlan) -> str:
        """Make a container and return its id."""

        async def make() -> str:
            made = await self._engine.call(lambda api: api.create_container_from_config(plan.body, plan.name))
            return str(made["Id"])

        try:
            return await make()
        except EngineError as error:
            if "is already in use by container" not in error.message:
                raise
            # What a process of ours asked for before it was killed, the engine may finish after we looked for it.
            if not await self._remove_unstarted(plan.name):
                raise
            return await make()

    async def start(self, container: str) -> None:
        """Start a container; if its logs are being followed, not before they are attached."""
        if (follower := self._followers.get(container)) is not None:
            await follower.attached.wait()
        await self._engine.call(lambda api: api.start(container))

    async def follow_logs(self, container: str, sink: LogSink) -> str:
        """Bring all output to `sink`; return when the container has ended, or is gone, and its output is whole.

        Returns a sentence when some of it may be missing all the same, else nothing.
        Begun before the start, it misses nothing. Begun later, it goes on behind `sink.position`. An engine that goes
        away is waited for.
        """
        follower = LogFollower(self._engine, self._events, container, sink)
        self._followers[container] = follower
        try:
            return await follower.run()
        finally:
            # Whoever waits to start it must not wait for a follower that failed.
            follower.attached.set()
            if self._followers.get(container) is follower:
                del self._followers[container]

    async def wait(self, container: str) -> ContainerExit:
        """Return how the container ended, when it has. Outlasts restarts of the engine.

        Raises NotFoundError when it is gone.
        """
        self._events.begin()
        with self._events.watch(container) as wake:
            while True:
                # Cleared before the look: what happens during it leads to another.
                told = wake.is_set()
                wake.clear()
                with contextlib.suppress(EngineUnavailableError):
                    found = await self._engine.call(lambda api: api.inspect_container(container))
                    if (ended := _exit(found)) is not None:
                        return ended
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_AGAIN_S if told else _LOOK_S):
                        await wake.wait()

    async def stop(self, container: str, grace_s: float) -> None:
        """Ask the container to end, after the grace kill it. Returns when it has ended."""
        await self._engine.call(lambda api: api.stop(container, timeout=max(0, round(grace_s))), extra_s=grace_s)

    async def kill(self, container: str) -> None:
        """Kill the container at once; one that has ended is no error."""
        try:
            await self._engine.call(lambda api: api.kill(container))
        except EngineError as error:
            if "is not running" not in error.message:
                raise

    async def remove(self, container: str) -> None:
        """Remove a container, running or not, with its anonymous volumes; one that is gone is no error."""
        with contextlib.suppress(NotFoundError):
            await self._engine.call(lambda api: api.remove_container(container, force=True, v=True))

    async def remove_made_for(self, session: str) -> None:
        """Remove a session's containers whose making was asked for but never answered; none is no error."""
        filters = {"label": [f"{LABEL_HOST}={self._host_id}", f"{LABEL_SESSION}={session}"]}
        for entry in await self._engine.call(lambda api: api.containers(all=True, filters=filters)):
            await self.remove(entry["Id"])

    async def owned(self) -> list[ObservedContainer]:
        """Return the containers of this installation, whatever their role and state."""
        filters = {"label": [f"{LABEL_HOST}={self._host_id}"]}
        listed = await self._engine.call(lambda api: api.containers(all=True, filters=filters))
        looked_at = await asyncio.gather(*(self._observe(entry["Id"]) for entry in listed))
        return [observed for observed in looked_at if observed is not None]

    async def declare_out_volume(self, session: str) -> str:
        """Make the name of the session's volume known and return it: enough to create a container, not to start it."""
        return await self._volumes.declare(session)

    async def create_out_volume(self, session: str, size_bytes: int, inodes: int) -> str:
        """Make the session's volume of limited size for /out and return its name; made before, it stays."""
        return await self._volumes.create(session, size_bytes, inodes, self._owner)

    async def remove_out_volume(self, session: str) -> None:
        """Remove the session's volume; one that is gone is no error."""
        await self._volumes.remove(session)

    async def out_volumes(self) -> list[str]:
        """Return the sessions of this installation that have a volume."""
        return await self._volumes.sessions()

    async def archive_out(self, container: str, destination: Path, limits: OutLimits) -> OutSummary:
        """Write what the ended container left in /out to a tar file that appears when it is whole.

        Bounded by `limits`; what lies beyond is left out and the summary says so. Nothing is followed out of /out, and
        nothing is extracted.
        """
        try:
            return await self._archive(container, destination, limits)
        except (EngineUnavailableError, NotFoundError):
            raise
        except EngineError:
            # A reboot takes the volume's device away; the volume stays.
            found = await self._engine.call(lambda api: api.inspect_container(container))
            await self._volumes.attach(found["Config"]["Labels"][LABEL_SESSION])
            return await self._archive(container, destination, limits)

    async def _archive(self, container: str, destination: Path, limits: OutLimits) -> OutSummary:
        try:
            return await self._engine.in_thread(
                "GET",
                f"/containers/{container}/archive",
                # With the dot, names are relative to the folder ("./a/b"); without it they would begin with its own.
                {"path": f"{OUT_PATH}/."},
                lambda stream: collect(stream, destination, limits),
            )
        except OSError as error:
            kind = EngineUnavailableError if error.errno in (errno.EMFILE, errno.ENFILE) else EngineError
            raise kind(f"{destination} cannot be written: {error.strerror}.") from error

    async def prepare_host(self, plan: HostPlan) -> list[str]:
        """Make network, firewall rules, forwarder and helpers where they are missing or differ; return the changes."""
        return await self._host.prepare(plan)

    async def verify_host(self, plan: HostPlan) -> list[str]:
        """Return a sentence for each thing of the host that is not as planned; empty: sandboxes may be launched."""
        return await self._host.verify(plan)

    async def runtime_problems(self, runtime: str) -> list[str]:
        """Return a sentence when the engine does not know the runtime that sessions are to have; empty: its default."""
        if not runtime:
            return []
        known = (await self._engine.call(lambda api: api.info())).get("Runtimes") or {}
        if runtime in known:
            return []
        has = ", ".join(sorted(known))
        remedy = f"register it in the engine's daemon.json and restart the engine (it has {has})"
        return [f"the engine has no runtime {runtime}, which [sandbox] runtime names; {remedy}"]

    async def remove_host(self, plan: HostPlan) -> list[str]:
        """Take down what `prepare_host` made; return the changes."""
        return await self._host.remove(plan)

    async def _remove_unstarted(self, name: str) -> bool:
        """Remove a container of this installation that was never started; return whether there is none any more."""
        try:
            found = await self._engine.call(lambda api: api.inspect_container(name))
        except NotFoundError:
            return True
        labels = found["Config"]["Labels"] or {}
        if labels.get(LABEL_HOST) != self._host_id or _time(found["State"]["StartedAt"]):
            return False
        await self.remove(found["Id"])
        return True

    async def _observe(self, container: str) -> ObservedContainer | None:
        try:
            found = await self._engine.call(lambda api: api.inspect_container(container))
        except NotFoundError:
            return None
        labels = found["Config"]["Labels"] or {}
        networks = found["NetworkSettings"]["Networks"] or {}
        addresses = [
            (network.get("IPAMConfig") or {}).get("IPv4Address") or network.get("IPAddress") or ""
            for network in networks.values()
        ]
        return ObservedContainer(
            id=found["Id"],
            name=found["Name"].removeprefix("/"),
            role=labels.get(LABEL_ROLE, ""),
            session=labels.get(LABEL_SESSION, ""),
            run=labels.get(LABEL_RUN, ""),
            policy_digest=labels.get(LABEL_POLICY, ""),
            state=found["State"]["Status"],
            started_at=_time(found["State"]["StartedAt"]),
            address=next(filter(None, addresses), ""),
            exit=_exit(found),
        )


def _exit(found: dict[str, Any]) -> ContainerExit | None:
    state = found["State"]
    # A container that could not be started stays "created" and carries the engine's error.
    if state["Status"] not in _ENDED and not (state["Status"] == "created" and state["Error"]):
        return None
    return ContainerExit(
        exit_code=int(state["ExitCode"]),
        oom_killed=bool(state["OOMKilled"]),
        error=str(state["Error"]),
        finished_at=_time(state["FinishedAt"]),
    )


def _time(text: str) -> str:
    # Go's zero time means never.
    return "" if text.startswith("0001-") else text


def _engine_warnings(info: dict[str, Any]) -> list[str]:
    """Say what of the hardening this engine cannot enforce."""
    security = info.get("SecurityOptions") or []
    abilities = (
        ("MemoryLimit", "cannot limit memory"),
        ("SwapLimit", "cannot limit swap, so a sandbox may use the host's"),
        ("PidsLimit", "cannot limit the number of processes"),
        ("CpuCfsQuota", "cannot limit CPUs"),
    )
    warnings = [f"the engine {lack}" for key, lack in abilities if info.get(key) is False]
    if not any(str(option).startswith("name=seccomp") for option in security):
        warnings.append("the engine has no seccomp")
    if any(str(option).startswith("name=rootless") for option in security):
        warnings.append("the engine is rootless: limits and firewall rules do not hold there")
    return warnings
