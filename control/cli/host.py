"""`opificia host` and `opificia images`: what works on the engine itself, with control.toml and without the daemon."""

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer

from control.cli.output import as_json, cell, fail, show, table

if TYPE_CHECKING:
    from control.config import ControlConfig
    from control.docker.service import DockerService

host = typer.Typer(help="Make this host ready for sandboxes, or say what it lacks.", no_args_is_help=True)
images = typer.Typer(help="The images of sandboxes and of the host's own containers.", no_args_is_help=True)

Config = Annotated[Path, typer.Option("--config", help="control.toml")]
Json = Annotated[bool, typer.Option("--json", help="JSON for programs instead of text for people.")]

CACHE: Final = Path("/var/cache/opificia/images")

DEFAULT_CONFIG: Final = Path("/etc/opificia/control.toml")
IMAGE_NAMES: Final = ("forwarder", "helper", "sandbox")

T = TypeVar("T")


def _with_engine(path: Path, work: "Callable[[DockerService, ControlConfig], Coroutine[Any, Any, T]]") -> T:
    from control.app import StartError, host_id
    from control.config import load_config
    from control.docker.service import DockerService
    from control.docker.types import EngineError
    from control.images.build import BuildError
    from gateway.runtime.settings import EXIT_CONFIG, SettingsError

    async def run(config: "ControlConfig") -> T:
        engine = DockerService(config.docker, host_id(config.data), limits=config.limits, sandbox=config.sandbox)
        try:
            return await work(engine, config)
        finally:
            await engine.close()

    try:
        return asyncio.run(run(load_config(path)))
    except SettingsError as error:
        fail(str(error) if path.exists() else f"there is no {path}; name yours with --config", EXIT_CONFIG)
    except (EngineError, BuildError, StartError) as error:
        fail(str(error))


@contextlib.contextmanager
def _alone(data: Path) -> Iterator[None]:
    """Wait until nobody else changes this host: a timer, a playbook and an operator may want to in the same moment."""
    fd = os.open(data, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _say(changes: Sequence[str], json: bool, quiet: bool = False) -> None:
    if json:
        as_json({"changed": bool(changes), "changes": changes})
        return
    for change in changes:
        print(change)
    if not changes and not quiet:
        print("nothing to change")


@host.command("prepare")
def prepare(
    config: Config = DEFAULT_CONFIG,
    quiet: Annotated[bool, typer.Option("--quiet", help="Say nothing when there is nothing to change.")] = False,
    json: Json = False,
) -> None:
    """Make network, firewall rules, forwarder and helpers where they are missing or differ; say what changed.

    Example: opificia host prepare --json
    """

    async def work(engine: "DockerService", settings: "ControlConfig") -> list[str]:
        with _alone(settings.data):
            return await engine.prepare_host(settings.host_plan)

    _say(_with_engine(config, work), json, quiet)


@host.command("verify")
def verify(config: Config = DEFAULT_CONFIG, json: Json = False) -> None:
    """Say what of the host is not as control.toml has it; exit with 1 if anything is not.

    Example: opificia host verify
    """
    problems = _with_engine(config, lambda engine, settings: engine.verify_host(settings.host_plan))
    if json:
        as_json({"ready": not problems, "problems": problems})
    else:
        for problem in problems:
            print(f"✗ {problem}")
        if not problems:
            print("✓ this host is ready for sandboxes")
    raise SystemExit(1 if problems else 0)


@host.command("remove")
def remove(config: Config = DEFAULT_CONFIG, json: Json = False) -> None:
    """Take down what `prepare` made. Sandboxes must have ended.

    Example: opificia host remove
    """

    async def work(engine: "DockerService", settings: "ControlConfig") -> list[str]:
        with _alone(settings.data):
            return await engine.remove_host(settings.host_plan)

    _say(_with_engine(config, work), json)


@images.command("build")
def build(
    names: Annotated[
        list[str] | None, typer.Argument(help=f"Of {', '.join(IMAGE_NAMES)}; all if none is given.")
    ] = None,
    config: Config = DEFAULT_CONFIG,
    cache: Annotated[Path, typer.Option(help="Where built images are kept as tarballs.")] = CACHE,
    mirror: Annotated[list[str] | None, typer.Option(help="Debian mirror; repeatable.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Build anew what is there.")] = False,
    json: Json = False,
) -> None:
    """Build the images from Debian packages, without an image registry, and bring them into the engine. Needs root.

    Example: opificia images build sandbox --force
    """
    from control.images.store import install

    unknown = sorted(set(names or ()) - set(IMAGE_NAMES))
    if unknown:
        fail(f"there is no image {unknown[0]!r}; known: {', '.join(IMAGE_NAMES)}", 2)
    changes = _with_engine(
        config,
        lambda engine, settings: install(
            engine.images, settings.images, cache, mirror or (), names=names or IMAGE_NAMES, force=force
        ),
    )
    _say(changes, json)


@images.command("ls")
def listing(config: Config = DEFAULT_CONFIG, json: Json = False) -> None:
    """List the engine's images.

    Example: opificia images ls
    """
    from datetime import UTC, datetime

    found = _with_engine(config, lambda engine, _settings: engine.images.listing())
    if json:
        as_json(found)
        return
    made = table("IMAGE", "SIZE", "CREATED", "RECIPE")
    for image in found:
        created = datetime.fromtimestamp(image.created_at, UTC).strftime("%Y-%m-%d %H:%M")
        made.add_row(cell(", ".join(image.tags)), f"{image.bytes // 1_000_000} MB", created, cell(image.label))
    show(made)


@images.command("load")
def load_tarball(
    tarball: Annotated[Path, typer.Argument(help="What `docker save` wrote, or a root file system as a tar.")],
    name: Annotated[
        str | None, typer.Option("--as", help=f"Which image a root file system is: {', '.join(IMAGE_NAMES)}.")
    ] = None,
    config: Config = DEFAULT_CONFIG,
    json: Json = False,
) -> None:
    """Bring an image from a file into the engine, for hosts without a network.

    Example: opificia images load sandbox.tar --as sandbox
    """
    from control.images.store import load

    if name is not None and name not in IMAGE_NAMES:
        fail(f"there is no image {name!r}; known: {', '.join(IMAGE_NAMES)}", 2)
    if not tarball.is_file():
        fail(f"there is no file {tarball}", 2)
    done = _with_engine(config, lambda engine, settings: load(engine.images, settings.images, tarball, name))
    _say([done], json)
