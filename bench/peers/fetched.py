"""Gateways to model providers that most people know, as peers: fetched from their registry into the cache when asked for.

They run as the benchmark's user, who owns what was fetched.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Final

from bench.load import LoadError
from bench.machine import version_of
from bench.peers.base import Ground
from bench.peers.model import KEY, ModelRoute
from bench.peers.proxies import ProgramPeer
from bench.processes import Process, accepts, free_port

# Importing LiteLLM takes many seconds.
_START_S: Final = 240.0
# It refuses to start without one, and compares it with each request's credentials.
_MASTER_KEY: Final = "sk-a-key-of-benchmarks"
_LITELLM: Final = """\
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


class FetchedPeer(ProgramPeer):
    """A peer in a folder of the cache, filled at first."""

    @classmethod
    def folder(cls) -> Path:
        """Return where it is, fetched if it is not there. Raises LoadError when that fails."""
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "opificia-bench"
        folder = cache / cls.name
        if not (folder / "installed").exists():
            for command in cls._fetching(folder):
                done = subprocess.run(command, check=False, capture_output=True, text=True)
                if done.returncode:
                    raise LoadError(f"{cls.name} cannot be installed: {done.stderr.strip()[-500:]}")
            (folder / "installed").touch()
        return folder

    @classmethod
    def _fetching(cls, folder: Path) -> Sequence[Sequence[str]]:
        raise NotImplementedError

    def _serve(self, argv: Sequence[str], directory: Path, environment: Mapping[str, str]) -> None:
        process = Process(argv, log=directory / "log", cwd=directory, environment={**os.environ, **environment})
        self._processes.append(process)
        process.wait_for(lambda: accepts(self._port), self.name, _START_S)

    def _verify(self, ground: Ground) -> None:
        pass


class LiteLLM(FetchedPeer):
    """One worker, a static key, no database, no spend log."""

    name = "litellm"
    checks = "one static key, known models"

    @classmethod
    def missing(cls) -> str:
        return ""

    @classmethod
    def _fetching(cls, folder: Path) -> Sequence[Sequence[str]]:
        return (
            (sys.executable, "-m", "venv", str(folder)),
            (str(folder / "bin/pip"), "install", "-q", "litellm[proxy]"),
        )

    def about(self) -> str:
        version = "from importlib import metadata; print('litellm', metadata.version('litellm'))"
        return version_of(str(self.folder() / "bin/python"), "-c", version)

    def _start(self, ground: Ground, directory: Path) -> None:
        self._port = free_port()
        config = directory / "config.yaml"
        config.write_text(_LITELLM.format(upstream=ground.plain, key=KEY))
        argv = (
            str(self.folder() / "bin/litellm"),
            "--config",
            str(config),
            "--host",
            "127.0.0.1",
            "--port",
            str(self._port),
        )
        self._serve(argv, directory, {"LITELLM_MASTER_KEY": _MASTER_KEY, "LITELLM_LOG": "ERROR"})

    def model_route(self) -> ModelRoute:
        """Return the proxy's address."""
        return ModelRoute(f"127.0.0.1:{self._port}", token=_MASTER_KEY, by_model=True)


class Portkey(FetchedPeer):
    """Portkey's open gateway on Node.js. Each request says the provider and brings its key: it keeps none itself."""

    name = "portkey"
    checks = "nothing; the caller has the provider's key"
    _package: ClassVar[str] = "node_modules/@portkey-ai/gateway"

    @classmethod
    def missing(cls) -> str:
        return "" if shutil.which("npm") else "npm is not installed"

    @classmethod
    def _fetching(cls, folder: Path) -> Sequence[Sequence[str]]:
        return (
            ("npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder), "@portkey-ai/gateway"),
        )

    def about(self) -> str:
        package = self.folder() / self._package / "package.json"
        return version_of("node", "-p", f"'portkey ' + require('{package}').version + ', node ' + process.version")

    def _start(self, ground: Ground, directory: Path) -> None:
        self._port = free_port()
        program = self.folder() / self._package / "build/start-server.js"
        argv = ("node", str(program), f"--port={self._port}", "--headless")
        # Otherwise it takes requests to a loopback address for an attack.
        self._serve(argv, directory, {"NODE_ENV": "production", "TRUSTED_CUSTOM_HOSTS": "127.0.0.1"})

    def model_route(self) -> ModelRoute:
        """Return the gateway's address, and what each request must say."""
        assert self._ground is not None
        headers = ("x-portkey-provider: anthropic", f"x-portkey-custom-host: http://{self._ground.plain}/v1")
        return ModelRoute(f"127.0.0.1:{self._port}", token=KEY, by_model=True, headers=headers)
