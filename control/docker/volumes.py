"""The volume of a session's /out: an ext4 of fixed size on a loop device, so that a full /out is ENOSPC in the sandbox.

A bind mount has no quota, and a tmpfs is charged to the sandbox's memory and gone at its end. The file system is made by
a helper container that has loop devices and no capability; control itself needs none.
"""

import contextlib
import re
from typing import Any, Final

from control.docker.engine import Engine
from control.docker.helper import Helper
from control.docker.types import EngineError, NotFoundError
from control.plan.container import LABEL_HOST, LABEL_ROLE, LABEL_SESSION, ROLE_OUT, ROLE_VOLUMES
from gateway.contract.limits import MIB

_COMMAND: Final = "opificia-volumes"
# Where the helper links each device by its session (images/helper/volumes.sh): loop numbers change with a reboot.
_DEVICES: Final = "/dev/opificia"
# mkfs's default inode size; and room for the journal, bitmaps and folders, so that the session has its bytes whole.
_INODE_BYTES: Final = 256
_OVERHEAD_BYTES: Final = 16 * MIB
# The name becomes a file's and a device's; ids have been checked, this makes it certain.
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,200}", re.ASCII)


class OutVolumes:
    """Makes and removes the volumes of one installation's sessions."""

    def __init__(self, engine: Engine, host_id: str) -> None:
        self._engine = engine
        self._host_id = host_id
        self._helper = Helper(engine, host_id, ROLE_VOLUMES)
        # What the engine was told of, so that a launch tells it once.
        self._declared: set[str] = set()

    async def create(self, session: str, size_bytes: int, inodes: int, owner: tuple[int, int]) -> str:
        """Make the volume for a session and return its name; made before, it is left as it is."""
        size = size_bytes + inodes * _INODE_BYTES + _OVERHEAD_BYTES
        uid, gid = owner
        device = await self._helper.run(
            [_COMMAND, "create", self._file(session), str(size), str(inodes), str(uid), str(gid)]
        )
        known = self._device(session)
        if device != known:
            raise EngineError(f"The helper made {device} where {known} was due.")
        return volume_name(session) if session in self._declared else await self.declare(session)

    async def declare(self, session: str) -> str:
        """Give the engine the volume's name, which is all that making a container needs; its start needs the rest."""
        name, device = volume_name(session), self._device(session)
        labels = {LABEL_HOST: self._host_id, LABEL_ROLE: ROLE_OUT, LABEL_SESSION: session}
        options = {"type": "ext4", "device": device, "o": "nosuid,nodev,noatime"}

        made: dict[str, Any] = await self._engine.call(
            lambda api: api.create_volume(name, driver="local", driver_opts=options, labels=labels)
        )
        if (made.get("Options") or {}) != options:
            raise EngineError(
                f"The engine has a volume {name} that is not ours.", f"Remove it: docker volume rm {name}"
            )
        self._declared.add(session)
        return name

    async def attach(self, session: str) -> None:
        """Make sure that the volume's device is there, as after a reboot."""
        await self._helper.run([_COMMAND, "attach", self._file(session)])

    async def remove(self, session: str) -> None:
        """Remove the volume and all that is in it; one that is gone is no error."""
        name = volume_name(session)
        # First: of a volume that the engine has forgotten nobody would look for the file, should there be no helper now.
        await self._helper.run(["true"])
        self._declared.discard(session)
        try:
            await self._engine.call(lambda api: api.remove_volume(name))
        except NotFoundError:
            pass
        except EngineError as error:
            if "active mounts" not in error.message:
                raise
            # After a restart with live-restore the engine counts a mount too many, and would keep the volume until
            # the next restart. Forced, it forgets it, though it still complains; the space is freed below.
            with contextlib.suppress(EngineError):
                await self._engine.call(lambda api: api.remove_volume(name, force=True))
        await self._helper.run([_COMMAND, "remove", self._file(session)])

    async def sessions(self) -> list[str]:
        """Return the sessions that have a volume."""
        filters = {"label": [f"{LABEL_HOST}={self._host_id}", f"{LABEL_ROLE}={ROLE_OUT}"]}
        found = await self._engine.call(lambda api: api.volumes(filters=filters))
        return [volume["Labels"][LABEL_SESSION] for volume in found["Volumes"] or []]

    def _device(self, session: str) -> str:
        return f"{_DEVICES}/{self._file(session)}"

    def _file(self, session: str) -> str:
        name = f"{self._host_id}-{session}"
        if not _NAME.fullmatch(name):
            raise EngineError(f"{name!r} cannot name a volume.")
        return name


def volume_name(session: str) -> str:
    """Return the name of a session's volume."""
    return f"opificia-out-{session}"
