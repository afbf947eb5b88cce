"""LiteLLM's proxy as a peer: the gateway that most people know. Installed from PyPI into a virtual environment of its own."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from bench.load import LoadError
from bench.machine import version_of
from bench.peers.base import Ground
from bench.peers.model import KEY, ModelRoute
from bench.peers.proxies import ProgramPeer
from bench.processes import Process, accepts, free_port

_PACKAGE: Final = "litellm[proxy]"
# It refuses to start without one, and compares it with each request's credentials.
_MASTER_KEY: Final = "sk-a-key-of-benchmarks"
# Importing it takes many seconds.
_START_S: Final = 240.0

_CONFIG: Final = """\
model_list:
  - model_name: "*"
    litellm_params:
      model: "anthropic/*"
      api_base: http://{upstream}
      api_key: {key}
litellm_settings:
  num_retries: 0
general_settings:
  disable_spend_logs: true
"""


def environment() -> Path:
    """Return the virtual environment in the cache, made and filled at first. Raises LoadError when that fails."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "opificia-bench"
    folder = cache / "litellm"
    if not (folder / "installed").exists():
        for command in (
            [sys.executable, "-m", "venv", str(folder)],
            [str(folder / "bin/pip"), "install", "-q", _PACKAGE],
        ):
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            if done.returncode:
                raise LoadError(f"litellm cannot be installed: {done.stderr.strip()[-500:]}")
        (folder / "installed").touch()
    return folder


class LiteLLM(ProgramPeer):
    """One worker, a static key, no database, no spend log. It runs as the benchmark's user, who owns its environment."""

    name = "litellm"
    checks = "one static key, known models"

    @classmethod
    def missing(cls) -> str:
        return ""

    def about(self) -> str:
        return version_of(
            str(environment() / "bin/python"),
            "-c",
            "from importlib import metadata; print('litellm', metadata.version('litellm'))",
        )

    def _start(self, ground: Ground, directory: Path) -> None:
        self._port = free_port()
        config = directory / "config.yaml"
        config.write_text(_CONFIG.format(upstream=ground.plain, key=KEY))
        process = Process(
            [
                str(environment() / "bin/litellm"),
                "--config",
                str(config),
                "--host",
                "127.0.0.1",
                "--port",
                str(self._port),
            ],
            log=directory / "log",
            cwd=directory,
            environment={**os.environ, "LITELLM_MASTER_KEY": _MASTER_KEY, "LITELLM_LOG": "ERROR"},
        )
        self._processes.append(process)
        process.wait_for(lambda: accepts(self._port), self.name, _START_S)

    def model_route(self) -> ModelRoute:
        """Return the proxy's address."""
        return ModelRoute(f"127.0.0.1:{self._port}", token=_MASTER_KEY, by_model=True)

    def _verify(self, ground: Ground) -> None:
        pass
