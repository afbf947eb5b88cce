"""Images: built without a registry, brought into the engine once, and what a launch is told of one."""

import asyncio
import hashlib
import time
from pathlib import Path

import pytest

from control.docker.service import DockerService
from control.docker.types import EngineError
from control.images.build import BuildError, build
from control.images.recipes import recipe
from control.images.store import install, load
from control.plan.container import LABEL_HOST, LABEL_ROLE, LABEL_SESSION, ImageSettings
from tests.docker.sandboxes import HOST_ID
from tests.support.engine import PrivateEngine
from tests.support.paths import IMAGES
from tests.support.patience import PATIENCE_S

SETTINGS = ImageSettings()


async def test_images_that_are_there_are_not_imported_again(service: DockerService) -> None:
    assert await install(service.images, SETTINGS, IMAGES) == []


async def test_images_are_listed_with_the_recipe_they_were_made_from(service: DockerService) -> None:
    labels = {tag: image.label for image in await service.images.listing() for tag in image.tags}
    for name in ("forwarder", "helper", "sandbox"):
        assert labels[f"opificia-{name}:latest"] == recipe(name).label()


async def test_a_sandbox_image_can_run_the_runner(service: DockerService) -> None:
    facts = await service.image(SETTINGS.sandbox)
    assert facts is not None
    assert (facts.can_run_runner, facts.own_runner, facts.volumes) == (True, False, ())


async def test_an_image_without_python_cannot_run_the_runner(service: DockerService) -> None:
    facts = await service.image(SETTINGS.helper)
    assert facts is not None
    assert not facts.can_run_runner


async def test_a_missing_image_is_none_at_once_and_never_pulled(service: DockerService) -> None:
    async with asyncio.timeout(PATIENCE_S):
        assert await service.image("registry.invalid/nothing:1") is None


async def test_looking_into_an_image_leaves_no_container(service: DockerService, engine: PrivateEngine) -> None:
    await service.image(SETTINGS.forwarder)
    client = engine.client()
    try:
        names = [container.name for container in client.containers.list(all=True)]
    finally:
        client.close()
    assert all(name.startswith("opificia-") for name in names), names


async def test_a_container_made_to_look_into_an_image_is_not_ours_whatever_the_image_says(
    service: DockerService, engine: PrivateEngine
) -> None:
    client = engine.client()
    try:
        made = client.api.create_container("opificia-helper:latest")["Id"]
        claims = " ".join(f"{label}=claimed" for label in (LABEL_ROLE, LABEL_SESSION))
        image = client.api.commit(made, changes=[f"LABEL {LABEL_HOST}={HOST_ID} {claims}"])["Id"]
        client.api.remove_container(made)
        begin = time.time() - 1
        assert await service.image(image) is not None
        seen = client.events(since=begin, until=time.time() + 1, decode=True, filters={"event": "create"})
        looked = [each["Actor"]["Attributes"] for each in seen if each["Actor"]["Attributes"].get("image") == image]
        assert [each[LABEL_ROLE] for each in looked] == ["claimed"]
        assert HOST_ID not in [each[LABEL_HOST] for each in looked]
        client.api.remove_image(image)
    finally:
        client.close()


async def test_an_operators_saved_image_and_root_file_system_can_be_loaded(
    service: DockerService, engine: PrivateEngine, tmp_path: Path
) -> None:
    rootfs = next(IMAGES.glob("helper-*.tar"))
    other = ImageSettings(helper="brought-along:1")
    assert await load(service.images, other, rootfs, "helper") == f"imported brought-along:1 from {rootfs.name}"
    client = engine.client()
    try:
        image = client.images.get("brought-along:1")
        assert image.attrs["Config"]["Cmd"] == ["opificia-serve"]
        # The operator's content must not pass for what the recipe makes.
        assert not image.labels
        saved = tmp_path / "saved.tar"
        with saved.open("wb") as file:
            for chunk in image.save(named=True):
                file.write(chunk)
        client.images.remove("brought-along:1")
        await load(service.images, SETTINGS, saved, None)
        assert client.images.get("brought-along:1").id == image.id
        client.images.remove("brought-along:1")
    finally:
        client.close()


async def test_a_root_file_system_without_a_name_is_refused_with_the_remedy(service: DockerService) -> None:
    with pytest.raises(EngineError, match="Say which image it is"):
        await load(service.images, SETTINGS, next(IMAGES.glob("helper-*.tar")), None)


async def test_a_file_that_is_no_archive_is_refused(service: DockerService, tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_text("no archive")
    with pytest.raises(EngineError, match="cannot be read as a tar file"):
        await load(service.images, SETTINGS, tmp_path / "x.tar", None)


@pytest.mark.timeout(300)
def test_building_again_gives_the_same_bytes(tmp_path: Path) -> None:
    again = build(recipe("helper"), tmp_path)
    before = IMAGES / again.name
    assert hashlib.sha256(again.read_bytes()).digest() == hashlib.sha256(before.read_bytes()).digest()
    assert build(recipe("helper"), tmp_path) == again


def test_a_mirror_that_cannot_be_reached_is_told_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="--mirror"):
        build(recipe("helper"), tmp_path, ("http://127.0.0.1:9/debian",))
    assert list(tmp_path.iterdir()) == []
