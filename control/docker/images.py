"""Images in the engine: what a launch must know of one, and how ours get in without a registry."""

import base64
import json
import os
import re
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from control.docker.engine import Engine
from control.docker.stream import Stream
from control.docker.types import EngineError, ImageFacts, NotFoundError
from control.images.recipes import LABEL_IMAGE
from control.plan.container import LABEL_HOST, LABEL_RUNNER

_DEFAULT_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# The reference runner's oldest Python.
_MIN_PYTHON_MINOR: Final = 8
_PYTHON: Final = re.compile(r"python3\.([0-9]{1,3})$", re.ASCII)
# Importing 400 MB takes the engine seconds on a good disk.
_IMPORT_TIMEOUT_S: Final = 600.0
_MAX_REPORT_BYTES: Final = 16 * 1024 * 1024
_CACHED: Final = 256


@dataclass(frozen=True, slots=True)
class Image:
    """An image as it is listed. `label` says which of our recipes made it, empty for another."""

    id: str
    tags: tuple[str, ...]
    bytes: int
    created_at: int
    label: str


class Images:
    """The engine's images."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._facts: dict[str, ImageFacts] = {}

    async def facts(self, reference: str) -> ImageFacts | None:
        """Return what a launch must know of an image, None when the engine does not have it. Never pulls."""
        try:
            image = await self._engine.call(lambda api: api.inspect_image(reference))
        except NotFoundError:
            return None
        known = self._facts.get(image["Id"])
        if known is None:
            config = image.get("Config") or {}
            own_runner = (config.get("Labels") or {}).get(LABEL_RUNNER) == "own"
            known = ImageFacts(
                id=image["Id"],
                volumes=tuple(sorted(config.get("Volumes") or {})),
                own_runner=own_runner,
                can_run_runner=not own_runner and await self._has_python(image["Id"], config.get("Env") or []),
            )
            if len(self._facts) >= _CACHED:
                self._facts.clear()
            self._facts[known.id] = known
        return known

    async def import_rootfs(self, tarball: Path, reference: str, changes: list[str]) -> str:
        """Make an image from a root file system and return its id. `changes`: Dockerfile instructions."""
        repository, _, tag = reference.rpartition(":")
        query = {"fromSrc": "-", "repo": repository, "tag": tag}
        return await self._send("/images/create", query, tarball, changes)

    async def load(self, tarball: Path) -> str:
        """Load what `docker save` wrote and return the engine's word on it."""
        return await self._send("/images/load", {"quiet": "1"}, tarball, [])

    async def listing(self) -> list[Image]:
        """Return all images with a name, newest first."""
        found = await self._engine.call(lambda api: api.images())
        images = [
            Image(
                id=entry["Id"],
                tags=tuple(tag for tag in entry.get("RepoTags") or () if tag != "<none>:<none>"),
                bytes=entry["Size"],
                created_at=entry["Created"],
                label=(entry.get("Labels") or {}).get(LABEL_IMAGE, ""),
            )
            for entry in found
        ]
        return sorted((image for image in images if image.tags), key=lambda image: -image.created_at)

    async def _send(self, path: str, query: dict[str, str], tarball: Path, changes: list[str]) -> str:
        def consume(stream: Stream) -> str:
            report = bytearray()
            while data := stream.read():
                report += data
                if len(report) > _MAX_REPORT_BYTES:
                    raise EngineError("The engine says too much about an image.")
            return _last_word(bytes(report))

        try:
            with tarball.open("rb") as file:
                body = (file, os.fstat(file.fileno()).st_size)
                return await self._engine.in_thread(
                    "POST",
                    path,
                    query | ({"changes": "\n".join(changes)} if changes else {}),
                    consume,
                    body=body,
                    head_timeout_s=_IMPORT_TIMEOUT_S,
                )
        except OSError as error:
            raise EngineError(f"{tarball} cannot be read: {error}.") from error

    async def _has_python(self, image: str, environment: list[str]) -> bool:
        """Look for a Python in a container of the image that is never started."""
        path = next((entry[5:] for entry in environment if entry.startswith("PATH=")), _DEFAULT_PATH)
        folders = [folder for folder in path.split(":") if folder.startswith("/")]

        def look(api: Any) -> bool:
            body = {
                "Image": image,
                "Entrypoint": ["/nothing"],
                # A container has its image's labels too, and an image may say that its containers are ours.
                "Labels": {LABEL_HOST: ""},
                "HostConfig": {"NetworkMode": "none"},
            }
            container = api.create_container_from_config(body)["Id"]
            try:
                return any(_is_python(_stat(api, container, f"{folder}/python3")) for folder in folders[:16])
            finally:
                api.remove_container(container, force=True, v=True)

        return await self._engine.call(look)


def is_saved_image(tarball: Path) -> bool:
    """Tell what `docker save` wrote from a bare root file system. Raises EngineError when it is no tar file."""
    try:
        with tarfile.open(tarball) as archive:
            # `docker save` puts its few entries flat at the top; a root file system holds no manifest.json there.
            return any(member.name in ("manifest.json", "index.json") for member in archive)
    except (OSError, tarfile.TarError) as error:
        raise EngineError(f"{tarball} cannot be read as a tar file: {error}.") from error


def _stat(api: Any, container: str, path: str) -> dict[str, Any] | None:
    url = f"{api.base_url}/v{api.api_version}/containers/{container}/archive"
    reply = api.head(url, params={"path": path}, timeout=api.timeout)
    if reply.status_code != 200:
        return None
    found: dict[str, Any] = json.loads(base64.b64decode(reply.headers["X-Docker-Container-Path-Stat"]))
    return found


def _is_python(stat: dict[str, Any] | None) -> bool:
    if stat is None:
        return False
    version = _PYTHON.search(stat.get("linkTarget") or "")
    # Most often python3 is a link that names the version; a file that does not is given the benefit of the doubt.
    return version is None or int(version[1]) >= _MIN_PYTHON_MINOR


def _last_word(report: bytes) -> str:
    """Return the last status among the engine's JSON lines. Raises EngineError when one is an error."""
    said = ""
    for line in report.splitlines():
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(message, dict):
            continue
        if "error" in message:
            raise EngineError(f"The engine could not take the image: {message['error']}.")
        said = str(message.get("status") or message.get("stream") or said).strip()
    return said
