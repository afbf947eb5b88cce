"""Entry of `opificia-control`: reads control.toml, and runs the daemon on the engine it names."""

import argparse
import asyncio
import logging
import os
import sys
from pathlib import Path

from control.app import Control, StartError, host_id, serve
from control.config import DEFAULT_PATH, ControlConfig, load_config
from control.db.database import StoreUnavailableError
from control.db.store import Store
from control.docker.service import DockerService
from control.docker.types import EngineError
from control.plan.reconcile import Action
from control.sessions.preview import describe, preview
from gateway.runtime.log import begin
from gateway.runtime.settings import EXIT_CONFIG, SettingsError
from gateway.runtime.version import version


def main() -> None:
    """Run the daemon. Exits with 78 when the configuration is wrong, 1 when the daemon cannot start."""
    parser = argparse.ArgumentParser(prog="opificia-control", description="The control daemon of the sandbox host.")
    parser.add_argument("--config", type=Path, default=DEFAULT_PATH, help="control.toml (default: %(default)s)")
    parser.add_argument(
        "--check-config", action="store_true", help="say what is wrong with the configuration, and exit"
    )
    parser.add_argument("--migrate", action="store_true", help="bring the database to this version's form, and exit")
    parser.add_argument(
        "--preview", action="store_true", help="say what a start would do about sessions and containers, and exit"
    )
    parser.add_argument("--version", action="version", version=version())
    parser.add_argument("--verbose", action="store_true", help="log every step")
    arguments = parser.parse_args()
    try:
        config = load_config(arguments.config)
    except SettingsError as error:
        print(error, file=sys.stderr)  # noqa: T201 - before there is a log
        sys.exit(EXIT_CONFIG)
    if arguments.check_config:
        return
    # What it keeps is for its own group at most, whatever it was started with.
    os.umask(0o027)
    begin(logging.DEBUG if arguments.verbose else logging.INFO)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("aiosqlite").setLevel(logging.WARNING)
    try:
        if arguments.preview:
            for action in asyncio.run(_preview(config)):
                print(describe(action))  # noqa: T201 - what was asked for
        else:
            asyncio.run(_migrate(config) if arguments.migrate else _run(config))
    except StartError as error:
        sys.exit(f"opificia-control: {error}")


async def _migrate(config: ControlConfig) -> None:
    store = Store(config.store.url)
    try:
        await store.migrate()
    except StoreUnavailableError as error:
        raise StartError(f"{error}; check [store] url and that the database runs") from error
    finally:
        await store.close()


async def _preview(config: ControlConfig) -> list[Action]:
    store = Store(config.store.url)
    engine = DockerService(config.docker, host_id(config.data), limits=config.limits, sandbox=config.sandbox)
    try:
        return await preview(store, engine, config.data / "sessions")
    except (StoreUnavailableError, EngineError) as error:
        raise StartError(str(error)) from error
    finally:
        await engine.close()
        await store.close()


async def _run(config: ControlConfig) -> None:
    identity = host_id(config.data)
    engine = DockerService(config.docker, identity, limits=config.limits, sandbox=config.sandbox)
    plan = config.host_plan

    async def verify() -> list[str]:
        return [*await engine.verify_host(plan), *await engine.runtime_problems(config.sandbox.runtime)]

    try:
        await serve(
            Control(
                config,
                engine,
                identity,
                verify=verify,
                prepare=(lambda: engine.prepare_host(plan)) if config.docker.manage_host else None,
            )
        )
    finally:
        await engine.close()


if __name__ == "__main__":
    main()
