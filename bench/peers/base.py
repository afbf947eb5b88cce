"""What a benchmark asks of a peer."""

import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

from bench.load import Client, Route
from bench.processes import FIRST_UID, Process


@dataclass(frozen=True, slots=True)
class Ground:
    """What stands around the peers: the server's addresses, the names that lead there, who resolves them.

    `tls` is empty when no server could listen on port 443.
    """

    plain: str
    plain_name: str
    tls: str
    tls_name: str
    nameserver: str


class CheckError(Exception):
    """A peer does not do what its configuration says; what it would measure means nothing."""


class Peer(ABC):
    """One way from client to server. `start` and `stop` may be called in turn any number of times.

    `checks` tells in a few words what the peer checks on each connection.
    """

    name: ClassVar[str]
    checks: ClassVar[str] = "nothing"
    # Whether the peer reads ClientHellos, so that TLS is a scenario of its own there.
    reads_hello: ClassVar[bool] = False
    is_forward_proxy: ClassVar[bool] = False
    uid: ClassVar[int] = FIRST_UID

    def __init__(self) -> None:
        self._processes: list[Process] = []
        self._directory: Path | None = None
        self._ground: Ground | None = None

    @classmethod
    def missing(cls) -> str:
        """Return why this peer cannot run here; empty when it can."""
        return ""

    def about(self) -> str:
        """Return what it is, with its version."""
        return self.name

    def start(self, ground: Ground) -> None:
        """Start and prove that it works. Raises CheckError, NotRunningError."""
        self._ground = ground
        self._directory = Path(tempfile.mkdtemp(prefix=f"bench-{self.name}-"))
        self._directory.chmod(0o755)
        try:
            self._start(ground, self._directory)
            self._verify(ground)
        except BaseException:
            self.stop()
            raise

    @abstractmethod
    def _start(self, ground: Ground, directory: Path) -> None:
        """Write the configuration into `directory` and start."""

    def _verify(self, ground: Ground) -> None:
        """Prove that connections pass: both ports, one byte there and back."""
        for tls in (False, True) if ground.tls else (False,):
            result = Client("connect", self.route(tls=tls), ["--total", "1"]).run()
            if result["errors"]:
                raise CheckError(f"{self.name}: {result['first_error']}")

    @abstractmethod
    def route(self, *, tls: bool = False) -> Route:
        """Return the way through the peer to the server, or to its port 443."""

    def pids(self) -> list[int]:
        """Return the ids of all its processes."""
        return [pid for process in self._processes for pid in process.pids()]

    def compare(self, results: Sequence[dict[str, Any]]) -> list[str]:
        """Compare the peer's own record since the last call with what the load made; return every difference."""
        del results
        return []

    def stop(self) -> None:
        """Stop, and remove what it wrote."""
        while self._processes:
            self._processes.pop().stop()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None


class Direct(Peer):
    """Nothing in between: what the load and loopback can do at most."""

    name = "direct"
    about_text: Final = "loopback, no proxy"

    def about(self) -> str:
        return self.about_text

    def _start(self, ground: Ground, directory: Path) -> None:
        pass

    def route(self, *, tls: bool = False) -> Route:
        assert self._ground is not None
        return Route(self._ground.tls if tls else self._ground.plain)
