"""Bring our images into the engine: built here, or from a tarball that an operator carried in."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from control.docker.images import Images, is_saved_image
from control.docker.types import EngineError
from control.images.build import build
from control.images.recipes import IMAGES, LABEL_IMAGE, Recipe, recipe
from control.plan.container import ImageSettings


def reference(settings: ImageSettings, name: str) -> str:
    """Return under which reference the settings want one of IMAGES."""
    references = {"forwarder": settings.forwarder, "helper": settings.helper, "sandbox": settings.sandbox}
    return references[name]


async def install(
    images: Images,
    settings: ImageSettings,
    cache: Path,
    mirrors: Sequence[str] = (),
    *,
    names: Sequence[str] = IMAGES,
    force: bool = False,
) -> list[str]:
    """Build what is not in `cache` and import what the engine lacks; return one sentence for each change.

    Raises BuildError, EngineError.
    """
    present = {tag: image.label for image in await images.listing() for tag in image.tags}
    changes = []
    for name in names:
        wanted = recipe(name)
        tag = reference(settings, name)
        if present.get(tag) == wanted.label(mirrors) and not force:
            continue
        tarball = await asyncio.to_thread(build, wanted, cache, mirrors, force=force)
        await images.import_rootfs(tarball, tag, wanted.changes(mirrors))
        changes.append(f"imported {tag} from {tarball.name}")
    return changes


async def load(images: Images, settings: ImageSettings, tarball: Path, name: str | None) -> str:
    """Load an operator's tarball: what `docker save` wrote, or a root file system for one of IMAGES by `name`.

    Returns what was done. Raises EngineError.
    """
    if await asyncio.to_thread(is_saved_image, tarball):
        return await images.load(tarball)
    if name is None:
        raise EngineError(
            f"{tarball} is a root file system, not what `docker save` writes.",
            f"Say which image it is: {', '.join(IMAGES)}.",
        )
    which: Recipe = recipe(name)
    tag = reference(settings, name)
    # Its content is the operator's: the label must not claim to be what the recipe makes.
    changes = [line for line in which.changes() if not line.startswith(f"LABEL {LABEL_IMAGE}=")]
    await images.import_rootfs(tarball, tag, changes)
    return f"imported {tag} from {tarball.name}"
