"""The load generator as Python sees it: built from C at first use, a plain Python stand-in where there is no compiler."""

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

_SOURCES: Final = Path(__file__).parent
_CFLAGS: Final = ("-O2", "-std=gnu11", "-Wall", "-Wextra")


class LoadError(Exception):
    """The load generator itself failed."""


def compiler() -> str | None:
    """Return the C compiler, None without one."""
    return shutil.which(os.environ.get("CC", "cc"))


def build(name: str) -> Path | None:
    """Compile `<name>.c` unless the cache has it; None without a compiler. Raises LoadError if it does not compile."""
    cc = compiler()
    if cc is None:
        return None
    source = _SOURCES / f"{name}.c"
    read = source.read_bytes() + (_SOURCES / "common.h").read_bytes()
    digest = hashlib.sha256(read + repr(_CFLAGS).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "opificia-bench"
    program = cache / f"{name}-{digest}"
    if program.exists():
        return program
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        made = Path(scratch) / name
        done = subprocess.run([cc, *_CFLAGS, "-o", made, source], capture_output=True, text=True, check=False)
        if done.returncode:
            raise LoadError(f"{source.name} does not compile:\n{done.stderr}")
        made.replace(program)
    return program


def command(name: str = "load") -> list[str]:
    """Return how a load program is run. Raises LoadError for one that has no stand-in where there is no compiler."""
    program = build(name)
    if program is None and name != "load":
        raise LoadError(f"{name}.c needs a C compiler")
    return [str(program)] if program else [sys.executable, "-m", "bench.load.fallback"]


@dataclass(frozen=True, slots=True)
class Route:
    """How the load reaches the server: the address to connect to and, through a CONNECT proxy, what to ask it for."""

    via: str
    connect: str | None = None
    credentials: str | None = None

    def arguments(self) -> list[str]:
        """Return the load program's arguments for it."""
        found = ["--via", self.via]
        if self.connect is not None:
            found += ["--connect", self.connect]
        if self.credentials is not None:
            found += ["--auth", base64.b64encode(self.credentials.encode()).decode()]
        return found


class Way(Protocol):
    """How a load client reaches what it measures."""

    def arguments(self) -> list[str]:
        """Return the load program's arguments for it."""


@dataclass(slots=True)
class Client:
    """One run of a load client. `program` is which one: `load` for tunnels, `model` for model requests."""

    mode: str
    route: Way
    options: Sequence[str] = ()
    on_event: Callable[[str], None] = lambda _event: None
    program: str = "load"
    _process: "subprocess.Popen[str] | None" = field(default=None, init=False)

    def start(self) -> None:
        """Begin; `finish` must be called."""
        argv = [*command(self.program), self.mode, *self.route.arguments(), *self.options]
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    @property
    def pid(self) -> int:
        """The client's process id."""
        assert self._process is not None
        return self._process.pid

    def wait_open(self) -> dict[str, Any]:
        """Wait until an `idle` client has opened all its tunnels; return how many, and the errors."""
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise LoadError(self.mode + ": " + self._process.communicate()[1])
        found: dict[str, Any] = json.loads(line)
        return found

    def finish(self) -> dict[str, Any]:
        """Wait for the end (an `idle` client is told to end) and return the result. Raises LoadError."""
        process = self._process
        assert process is not None
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdin.close()
        result: dict[str, Any] | None = None
        for line in process.stdout:
            result = json.loads(line)
            if isinstance(event := result.get("event") if result else None, str):
                self.on_event(event)
        process.wait()
        assert process.stderr is not None
        if process.returncode or result is None or "mode" not in result:
            raise LoadError(f"{self.mode}: exit status {process.returncode}: {process.stderr.read().strip()}")
        process.stdout.close()
        process.stderr.close()
        return result

    def run(self) -> dict[str, Any]:
        """Start and finish."""
        self.start()
        return self.finish()


class Server:
    """The server at the far end, on every address given (port 0: any free one)."""

    def __init__(self, addresses: Sequence[str], program: str = "load") -> None:
        argv = [*command(program), "serve"]
        for address in addresses:
            argv += ["--listen", address]
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise LoadError("server: " + self._process.communicate()[1].strip())
        hosts = [address.rpartition(":")[0] for address in addresses]
        self.addresses = [f"{host}:{port}" for host, port in zip(hosts, json.loads(line)["ports"], strict=True)]

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._process.pid

    def stop(self) -> None:
        """End it."""
        self._process.communicate()
