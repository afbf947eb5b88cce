"""A daemon under test: an unprivileged process that says when it is ready, as under systemd (sd_notify(3))."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.support.processes import spawn, stop

START_TIMEOUT_S: Final = 60.0


class DaemonError(AssertionError):
    """A daemon did not become ready; the message ends with its log."""


class Daemon:
    """One program that can be started again and again. Its log is kept over all its lives."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        uid: int,
        groups: Sequence[int] = (),
        environment: Mapping[str, str],
        log: Path,
        notify: Path,
    ) -> None:
        """`uid` is also the gid; `notify` is where the socket for its READY=1 is made."""
        self.name: Final = log.stem
        self._argv = argv
        self._uid = uid
        self._groups = groups
        # Of the next process.
        self.environment = environment
        self._log = log
        self._notify = notify
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        """Whether the process lives."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The daemon's own process id: setpriv executes it in place."""
        assert self._process is not None, f"{self.name} was never started"
        return self._process.pid

    def start(self, *program: str) -> None:
        """Start it and wait until it says READY=1. Raises DaemonError.

        `program` takes the place of `python -m name`: a stand-in of a test's, with the same arguments behind it.
        """
        assert not self.running, f"{self.name} is running"
        argv = [*program, *self._argv[3:]] if program else self._argv
        self._notify.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready:
            ready.bind(str(self._notify))
            os.chown(self._notify, self._uid, self._uid)
            groups = ",".join(map(str, self._groups))
            with self._log.open("ab") as log:
                self._process = spawn(
                    [
                        *("setpriv", f"--reuid={self._uid}", f"--regid={self._uid}"),
                        *([f"--groups={groups}"] if groups else ["--clear-groups"]),
                        *("--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"),
                        # Bound to the thread that starts it, so start daemons from the main thread.
                        *("--pdeathsig=TERM", "--", *argv),
                    ],
                    log=log,
                    env={**self.environment, "NOTIFY_SOCKET": str(self._notify)},
                    cwd=Path("/"),
                )
            self._await_ready(ready)

    def stop(self, *, grace_s: float = 35.0) -> int:
        """SIGTERM, SIGKILL after the grace; returns the exit status. Harmless when it does not run."""
        return 0 if self._process is None else stop(self._process, grace_s=grace_s)

    def kill(self) -> None:
        """SIGKILL, as a crash."""
        self.signal(signal.SIGKILL)
        assert self._process is not None
        self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def log(self) -> str:
        """Return everything it has logged."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def _await_ready(self, ready: socket.socket) -> None:
        assert self._process is not None
        ready.settimeout(0.1)
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise DaemonError(f"{self.name} ended with status {self._process.returncode}\n{self.log()}")
            try:
                if b"READY=1" in ready.recv(4096).splitlines():
                    return
            except TimeoutError:
                continue
        raise DaemonError(f"{self.name} was not ready within {START_TIMEOUT_S:g} s\n{self.log()}")
