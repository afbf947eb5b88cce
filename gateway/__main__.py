"""`opificia-gateway --config gateway.toml`: the gateway as a program."""

import argparse
import logging
import sys
from pathlib import Path

import uvloop

from gateway.app import App, StartError
from gateway.channel import SuccessionError
from gateway.config import load_config, load_sessions
from gateway.runtime.addresses import ListenError
from gateway.runtime.log import begin
from gateway.runtime.settings import EXIT_CONFIG, SettingsError
from gateway.runtime.version import version

log = logging.getLogger("gateway")


def main(arguments: list[str] | None = None) -> int:
    """Run the gateway. Exit status 78 means that the configuration is wrong, 1 that it could not start."""
    parser = argparse.ArgumentParser(prog="opificia-gateway", description="The sandboxes' only door.")
    parser.add_argument("--config", type=Path, required=True, help="gateway.toml")
    parser.add_argument("--check-config", action="store_true", help="list every problem of the configuration and exit")
    parser.add_argument("--version", action="version", version=version())
    parser.add_argument("--log-level", default="INFO", choices=("DEBUG", "INFO", "WARNING", "ERROR"))
    options = parser.parse_args(arguments)
    begin(options.log_level)
    # Its access log would hold what sandboxes say.
    logging.getLogger("aiohttp").setLevel(logging.WARNING)
    problems: list[str] = []
    config = None
    try:
        config = load_config(options.config)
    except SettingsError as error:
        problems += str(error).splitlines()
    if config is not None and config.sessions.file:
        try:
            load_sessions(Path(config.sessions.file))
        except SettingsError as error:
            problems += str(error).splitlines()
    if config is None or problems:
        for problem in problems:
            print(problem, file=sys.stderr)  # noqa: T201  (the report is this command's output)
        return EXIT_CONFIG
    if options.check_config:
        print(f"{options.config}: no problems", file=sys.stderr)  # noqa: T201
        return 0

    async def serve() -> None:
        await App(config).run()

    try:
        uvloop.run(serve())
    except (StartError, ListenError, SuccessionError) as error:
        log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
