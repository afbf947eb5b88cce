"""A service manager for one daemon, as far as systemd's file descriptor store goes (sd_notify(3), sd_listen_fds(3)).

It keeps what the daemon sends with FDSTORE=1, answers BARRIER=1, and passes what it keeps to the next process as LISTEN_FDS.
What real systemd does beside that is tested on a real one (tests/host).
"""

import array
import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.support.processes import ConditionTimeoutError, spawn, state, stop, wait_until

_MAX_FDS: Final = 253
_CREDENTIALS: Final = struct.Struct("3i")
# Becomes the daemon: only the process itself can say LISTEN_PID and WATCHDOG_PID, and put descriptors where they must be,
# from 3 on.
_BECOME: Final = """
import fcntl, os, sys
given = [int(each) for each in sys.argv[1].split(",") if each]
high = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 1000) for each in given]
for each in given:
    os.close(each)
for index, each in enumerate(high):
    os.dup2(each, 3 + index, inheritable=True)
os.environ["LISTEN_PID"] = os.environ["WATCHDOG_PID"] = str(os.getpid())
os.execvp(sys.argv[2], sys.argv[2:])
"""


class Manager:
    """Starts, restarts and kills one daemon. `maximum` is its FileDescriptorStoreMax=; 0: it has no store."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        uid: int,
        groups: Sequence[int] = (),
        environment: Mapping[str, str],
        log: Path,
        folder: Path,
        maximum: int = 8,
    ) -> None:
        self._argv = argv
        self._uid = uid
        self._groups = groups
        # Of the next process.
        self.environment = dict(environment)
        self._log = log
        self._path = folder / "notify.sock"
        self.maximum = maximum
        # WatchdogSec=; 0: none. Nobody is killed for it here.
        self.watchdog_s = 0.0
        # By name, in the order they came: what the store holds.
        self.stored: list[tuple[str, int]] = []
        self.messages: list[str] = []
        # What is done once, by the listening thread, when the main process has said something that begins so.
        self.then: dict[str, Callable[[], None]] = {}
        # Of processes that it does not listen to.
        self.unheard: list[str] = []
        self.pid = 0
        self._ready = False
        self._process: subprocess.Popen[bytes] | None = None
        # Processes that a reload left or made; the manager is not their parent.
        self._others: set[int] = set()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(str(self._path))
        os.chown(self._path, uid, uid)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    @property
    def names(self) -> list[str]:
        """What is in the store, by name."""
        return [name for name, _ in self.stored]

    @property
    def running(self) -> bool:
        """Whether the main process lives."""
        if self._process is not None and self._process.pid == self.pid:
            return self._process.poll() is None
        return _lives(self.pid)

    def start(self) -> None:
        """Start the daemon with what the store holds and wait until it says READY=1."""
        assert not self.running
        if self._process is not None:
            # It is dead, but may not have been waited for: its end was seen in /proc.
            self._process.wait(60)
        self._ready = False
        kept = self.stored[:]
        environment = {**self.environment, "NOTIFY_SOCKET": str(self._path)}
        if self.watchdog_s:
            environment["WATCHDOG_USEC"] = str(int(self.watchdog_s * 1e6))
        if self.maximum:
            environment["FDSTORE"] = str(self.maximum)
        if kept:
            environment["LISTEN_FDS"] = str(len(kept))
            environment["LISTEN_FDNAMES"] = ":".join(name for name, _ in kept)
        groups = ",".join(map(str, self._groups))
        argv = [
            *("setpriv", f"--reuid={self._uid}", f"--regid={self._uid}"),
            *([f"--groups={groups}"] if groups else ["--clear-groups"]),
            *("--no-new-privs", "--bounding-set=-all", "--inh-caps=-all", "--pdeathsig=TERM", "--"),
            *(sys.executable, "-I", "-S", "-c", _BECOME, ",".join(str(each) for _, each in kept), *self._argv),
        ]
        with self._log.open("ab") as log:
            descriptors = [descriptor for _, descriptor in kept]
            self._process = spawn(argv, log=log, env=environment, cwd=Path("/"), pass_fds=descriptors)
        self.pid = self._process.pid
        wait_until(
            lambda: self._ready,
            "the daemon's READY=1",
            timeout_s=60,
            give_up=lambda: None if self.running else f"it ended\n{self.log()}",
        )

    def stop(self, *, grace_s: float = 35.0) -> int:
        """SIGTERM to all of its processes, SIGKILL after the grace. The store keeps what it holds, as in a restart."""
        if self._process is None:
            return 0
        for pid in self._others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        status = stop(self._process, grace_s=grace_s)
        wait_until(lambda: not any(map(_lives, self._others)), "the end of other processes", timeout_s=grace_s)
        self._others.clear()
        return status if self.pid == self._process.pid else 0

    def reload(self) -> None:
        """Have the daemon start its next process beside itself; on return that is the main process and ready.

        As `systemctl reload` does by ExecReload=. Raises ConditionTimeoutError if the daemon goes on as it is.
        """
        before = self.pid
        self._ready = False
        os.kill(before, signal.SIGUSR2)
        wait_until(lambda: self._ready, "READY=1 after a reload", timeout_s=60)
        if self.pid == before:
            raise ConditionTimeoutError("the daemon was not replaced")

    def drained(self) -> bool:
        """Tell whether only the main process is left."""
        first = self._process
        others = self._others | ({first.pid} if first is not None and first.poll() is None else set())
        return not any(pid != self.pid and _lives(pid) for pid in others)

    def restart(self) -> None:
        """Stop and start."""
        status = self.stop()
        assert status == 0, f"it ended with status {status}\n{self.log()}"
        self.start()

    def kill(self) -> None:
        """SIGKILL, as a crash."""
        assert self._process is not None
        os.kill(self.pid, signal.SIGKILL)
        wait_until(lambda: not self.running, "the end of a killed process")

    def log(self) -> str:
        """Return everything the daemon has logged."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def forget(self) -> None:
        """Drop the store, as `systemctl stop` does."""
        while self.stored:
            os.close(self.stored.pop()[1])

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the main process."""
        os.kill(self.pid, number)

    def close(self) -> None:
        """End the daemon and everything of it."""
        self.stop()
        self.forget()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
            last.connect(str(self._path))
            last.send(b"")
        self._thread.join()
        self._socket.close()

    def _listen(self) -> None:
        while True:
            sender, data, descriptors = self._receive()
            if not data:
                return
            fields = dict(line.split("=", 1) for line in data.decode().splitlines())
            # NotifyAccess=main
            if sender == self.pid:
                self.messages.append(data.decode())
            else:
                self.unheard.append(data.decode())
                fields = {}
            self._take(fields, descriptors)
            if sender == self.pid or "MAINPID" in fields:
                for beginning in [each for each in self.then if data.decode().startswith(each)]:
                    self.then.pop(beginning)()

    def _receive(self) -> tuple[int, bytes, list[int]]:
        """Return a message with its sender's process id and descriptors."""
        room = socket.CMSG_SPACE(_MAX_FDS * 4) + socket.CMSG_SPACE(_CREDENTIALS.size)
        data, ancillary, _, _ = self._socket.recvmsg(65536, room)
        sender, descriptors = 0, array.array("i")
        for _, kind, content in ancillary:
            if kind == socket.SCM_CREDENTIALS:
                sender = _CREDENTIALS.unpack(content)[0]
            elif kind == socket.SCM_RIGHTS:
                descriptors.frombytes(content)
        return sender, data, list(descriptors)

    def _take(self, fields: dict[str, str], descriptors: list[int]) -> None:
        name = fields.get("FDNAME", "stored")
        if "FDSTOREREMOVE" in fields:
            for entry in [each for each in self.stored if each[0] == name]:
                self.stored.remove(entry)
                os.close(entry[1])
        if "FDSTORE" in fields:
            # systemd polls what it keeps and drops what hangs up, unless it is told not to.
            assert fields.get("FDPOLL") == "0"
            while descriptors and len(self.stored) < self.maximum:
                self.stored.append((name, descriptors.pop(0)))
        for descriptor in descriptors:
            os.close(descriptor)
        if "MAINPID" in fields:
            self._others |= {self.pid, int(fields["MAINPID"])}
            assert self._process is not None
            self._others.discard(self._process.pid)
            self.pid = int(fields["MAINPID"])
        if fields.get("READY") == "1":
            self._ready = True


def _lives(pid: int) -> bool:
    return state(pid) not in ("", "Z", "X")
