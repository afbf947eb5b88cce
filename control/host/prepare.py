"""Make a host ready for sandboxes, or say what it lacks. The code behind `opificia host prepare`.

Everything goes through the engine's socket: rules are loaded by a helper container in the engine's own network
namespace. So whoever may use the engine can prepare the host, and no program but the engine has to be installed on it.
Only what differs is changed, and each change is told.
"""

import asyncio
import grp
import pwd
from dataclasses import dataclass
from typing import Any, Final

from control.docker.engine import Engine
from control.docker.helper import Helper
from control.docker.types import EngineError, NotFoundError
from control.plan import firewall, routes
from control.plan.container import (
    LABEL_HOST,
    LABEL_ROLE,
    ROLE_FIREWALL,
    ROLE_PREFLIGHT,
    ROLE_SANDBOX,
    ContainerPlan,
)
from control.plan.host import (
    LABEL_PLAN,
    HostPlan,
    firewall_container,
    forwarder_container,
    network_arguments,
    network_problems,
    preflight_container,
    volumes_container,
)

_REMEDY: Final = "Run `opificia host prepare`."


class Host:
    """The host's part of one installation."""

    def __init__(self, engine: Engine, host_id: str) -> None:
        self._engine = engine
        self._host_id = host_id
        self._firewall = Helper(engine, host_id, ROLE_FIREWALL)
        self._preflight = Helper(engine, host_id, ROLE_PREFLIGHT)

    async def prepare(self, plan: HostPlan) -> list[str]:
        """Make what is missing or differs, and return one sentence for each change. Raises EngineError.

        What cannot be made is found before anything is: images, the door, a subnet that is taken. The rules come before
        the network that they close. Where all is as planned, nothing is started only to look.
        """
        if not await self.verify(plan):
            return []
        containers = await self._containers(plan)
        if problems := await self._route_problems(plan, containers.preflight):
            raise EngineError(f"This host cannot have the sandbox network: {'; '.join(problems)}.")
        changes = await self._ensure(containers.firewall)
        changes += await self._ensure_rules(plan, fresh=bool(changes))
        changes += await self._ensure_network(plan)
        changes += await self._ensure(containers.volumes)
        changes += await self._ensure(containers.forwarder)
        return changes

    async def verify(self, plan: HostPlan) -> list[str]:
        """Return a sentence for each thing that is not as planned; empty when sandboxes may be launched.

        Raises EngineUnavailableError.
        """
        try:
            containers = await self._containers(plan)
        except NotFoundError as error:
            return [str(error)]
        looks = (
            self._network_problems(plan),
            self.firewall_problems(plan),
            self._container_problems(containers.firewall),
            self._container_problems(containers.volumes),
            self._container_problems(containers.forwarder),
        )
        found = [problem for problems in await asyncio.gather(*looks) for problem in problems]
        return [f"{problem}. {_REMEDY}" for problem in dict.fromkeys(found)]

    async def firewall_problems(self, plan: HostPlan) -> list[str]:
        """Return a sentence for each chain of the firewall that is missing or not ours; a look takes about 10 ms."""
        try:
            listing = await self._firewall.run(firewall.LIST_COMMAND)
        except EngineError as error:
            return [f"the firewall cannot be read: {error.message.rstrip('.')}"]
        return firewall.problems(listing, plan.network)

    async def remove(self, plan: HostPlan) -> list[str]:
        """Take down everything that `prepare` made and return one sentence for each; sandboxes must be gone."""
        removed = []
        if await self._sandboxes():
            raise EngineError("Sandboxes still run on this host.", "Stop them first.")
        containers = await self._containers(plan)
        for container in (containers.forwarder, containers.volumes):
            removed += await self._remove_container(container.name)
        removed += await self._remove_network(plan)
        try:
            await self._firewall.run(firewall.unload_command(plan.network))
            removed.append("removed the firewall rules")
        except NotFoundError:
            pass
        return removed + await self._remove_container(containers.firewall.name)

    async def _containers(self, plan: HostPlan) -> "_Containers":
        """Return the planned containers, with the ids of images that are there. Raises EngineError, NotFoundError."""
        forwarder, helper = await asyncio.gather(self._image(plan.images.forwarder), self._image(plan.images.helper))
        return _Containers(
            forwarder=forwarder_container(plan, self._host_id, forwarder, _user_ids(plan.forwarder.user)),
            volumes=volumes_container(plan, self._host_id, helper),
            firewall=firewall_container(plan, self._host_id, helper),
            preflight=preflight_container(plan, self._host_id, helper),
        )

    async def _image(self, reference: str) -> str:
        try:
            return str((await self._engine.call(lambda api: api.inspect_image(reference)))["Id"])
        except NotFoundError as error:
            raise NotFoundError(
                f"The engine has no image {reference}.", "Run `opificia images build`, or `opificia images load`."
            ) from error

    async def _inspect(self, name: str) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = await self._engine.call(lambda api: api.inspect_container(name))
        except NotFoundError:
            return None
        return found

    async def _container_problems(self, plan: ContainerPlan) -> list[str]:
        found = await self._inspect(plan.name)
        if found is None:
            return [f"the container {plan.name} is missing"]
        labels = found["Config"]["Labels"] or {}
        problems = []
        if labels.get(LABEL_HOST) != self._host_id:
            problems.append(f"the container {plan.name} belongs to another installation")
        elif labels.get(LABEL_PLAN) != plan.body["Labels"][LABEL_PLAN]:
            problems.append(f"the container {plan.name} was made from other settings or another image")
        if not found["State"]["Running"]:
            problems.append(f"the container {plan.name} does not run")
        # A label says how it was made; someone may have connected it to another network since.
        wanted = plan.body["HostConfig"]["NetworkMode"]
        if set(found["NetworkSettings"]["Networks"]) != {wanted}:
            problems.append(f"the container {plan.name} is not a member of the network {wanted} alone")
        return problems

    async def _ensure(self, plan: ContainerPlan) -> list[str]:
        found = await self._inspect(plan.name)
        if found is not None:
            if (found["Config"]["Labels"] or {}).get(LABEL_HOST) != self._host_id:
                raise EngineError(
                    f"There is a container {plan.name} that does not belong to this installation.",
                    f"Remove it (docker rm -f {plan.name}), or choose other names under [network].",
                )
            if not await self._container_problems(plan):
                return []
            await self._engine.call(lambda api: api.remove_container(plan.name, force=True, v=True))
        await self._start(plan)
        return [f"{'replaced' if found else 'started'} the container {plan.name}"]

    async def _start(self, plan: ContainerPlan) -> None:
        await self._engine.call(lambda api: api.create_container_from_config(plan.body, plan.name))
        await self._engine.call(lambda api: api.start(plan.name))

    async def _route_problems(self, plan: HostPlan, helper: ContainerPlan) -> list[str]:
        # One that a cut run left behind.
        await self._remove_container(helper.name)
        await self._start(helper)
        try:
            listing = await self._preflight.run(routes.ROUTES_COMMAND)
        finally:
            await self._remove_container(helper.name)
        return routes.problems(listing, plan.network)

    async def _ensure_rules(self, plan: HostPlan, *, fresh: bool) -> list[str]:
        # A fresh helper may still be about to load them itself; to load them twice changes nothing.
        if not fresh and not await self.firewall_problems(plan):
            return []
        await self._firewall.run(firewall.load_command(plan.network, firewall.rules(plan.network)))
        if problems := await self.firewall_problems(plan):
            raise EngineError(f"The firewall rules did not come into force: {'; '.join(problems)}.")
        return [f"loaded the firewall rules for {plan.network.bridge}"]

    async def _network_problems(self, plan: HostPlan) -> list[str]:
        found = await self._network(plan)
        if found is None:
            return [f"the network {plan.network.name} is missing"]
        return network_problems(found, plan, self._host_id)

    async def _network(self, plan: HostPlan) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = await self._engine.call(lambda api: api.inspect_network(plan.network.name))
        except NotFoundError:
            return None
        return found

    async def _ensure_network(self, plan: HostPlan) -> list[str]:
        found = await self._network(plan)
        name = plan.network.name
        if found is not None:
            problems = network_problems(found, plan, self._host_id)
            if not problems:
                return []
            if (found.get("Labels") or {}).get(LABEL_HOST) != self._host_id:
                raise EngineError(
                    f"There is a network {name} that does not belong to this installation.",
                    f"Remove it (docker network rm {name}), or choose another [network] name.",
                )
            if await self._sandboxes():
                raise EngineError(
                    f"The network must be made anew ({'; '.join(problems)}), but sandboxes are on it.",
                    "Stop them first.",
                )
            await self._remove_container(plan.network.gateway_name)
            await self._remove_network(plan)
        arguments = network_arguments(plan, self._host_id)
        await self._engine.call(lambda api: api.create_network(**arguments))
        verb = "replaced" if found else "made"
        return [f"{verb} the internal network {name} ({plan.network.network} on {plan.network.bridge})"]

    async def _sandboxes(self) -> bool:
        filters = {"label": [f"{LABEL_HOST}={self._host_id}", f"{LABEL_ROLE}={ROLE_SANDBOX}"]}
        return bool(await self._engine.call(lambda api: api.containers(filters=filters)))

    async def _remove_container(self, name: str) -> list[str]:
        try:
            await self._engine.call(lambda api: api.remove_container(name, force=True, v=True))
        except NotFoundError:
            return []
        return [f"removed the container {name}"]

    async def _remove_network(self, plan: HostPlan) -> list[str]:
        try:
            await self._engine.call(lambda api: api.remove_network(plan.network.name))
        except NotFoundError:
            return []
        return [f"removed the network {plan.network.name}"]


@dataclass(frozen=True, slots=True)
class _Containers:
    """The three containers of a host, and the one that only looks."""

    forwarder: ContainerPlan
    volumes: ContainerPlan
    firewall: ContainerPlan
    preflight: ContainerPlan


def _user_ids(user: str) -> tuple[int, int]:
    """Return uid and gid of an account's name or of "UID:GID". Raises EngineError."""
    if ":" in user:
        uid, gid = user.split(":")
        return int(uid), int(gid)
    try:
        account = pwd.getpwnam(user)
        return account.pw_uid, grp.getgrgid(account.pw_gid).gr_gid
    except KeyError as error:
        raise EngineError(
            f"There is no account {user} on this host, as whom the forwarder is to run.",
            "Make it (systemd-sysusers), or set [forwarder] user.",
        ) from error
