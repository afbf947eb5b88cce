"""Processes that a benchmark starts: unprivileged, watched, and stopped again, each by its own id."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

# Users for peers when the benchmark runs as root; 60578 to 60705 are unassigned in systemd's table of ids.
_UIDS: Final = range(60620, 60700, 10)
_TICK: Final = os.sysconf("SC_CLK_TCK")
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_MOST_THREADS: Final = 64


def _unused_uid() -> int:
    """Return the first of ten user ids in whose name nothing runs.

    The kernel counts pipe pages by user: what an earlier run left behind, or two peers of one user, would take the pipes
    from each other, and bulk would go through small ones.
    """
    used = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                used.add(entry.stat().st_uid)
            except OSError:
                continue
    return next((first for first in _UIDS if used.isdisjoint(range(first, first + _UIDS.step))), _UIDS.start)


_PIPE_BYTES: Final = 1 << 20
# How many pipes of 1 MiB a peer is to find (F_SETPIPE_SZ is 1031): the kernel's default for a user.
_PIPES: Final = 64
_TAKE_PIPES: Final = (
    "import fcntl,os,sys\nfor _ in range(int(sys.argv[1])): fcntl.fcntl(os.pipe()[1],1031,int(sys.argv[2]))"
)


def lacks_pipes(user: int) -> bool:
    """Tell whether other processes of a user use up the pipe memory that the kernel grants it (pipe(7)).

    It shows in numbers only: what is spliced goes through pipes of 8 KiB then, at half the rate and four times the CPU.
    """
    granted = int(Path("/proc/sys/fs/pipe-user-pages-soft").read_text()) * _PAGE // _PIPE_BYTES
    argv = [
        sys.executable,
        "-I",
        "-S",
        "-c",
        _TAKE_PIPES,
        str(min(granted, _PIPES) if granted else _PIPES),
        str(_PIPE_BYTES),
    ]
    done = subprocess.run(argv, user=user, group=user, extra_groups=[], stderr=subprocess.DEVNULL, check=False)
    return done.returncode != 0


# Each peer's user is this one plus a number of its own.
FIRST_UID: Final = _unused_uid()


class NotRunningError(Exception):
    """A process ended or never became ready; the message holds what it logged."""


class Process:
    """A running program and its children. `uid` is only used when the benchmark itself is root."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        log: Path,
        uid: int | None = None,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        user = uid if os.geteuid() == 0 else None
        if user is not None and lacks_pipes(user):
            raise NotRunningError(f"other processes use up the pipe memory of user {user}: nothing could be measured")
        self._log = log
        try:
            with log.open("ab") as output:
                self._process = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    cwd=cwd,
                    env=environment,
                    user=user,
                    group=user,
                    extra_groups=None if user is None else [],
                    start_new_session=True,
                )
        except OSError as error:
            raise NotRunningError(f"{argv[0]} cannot be run: {error.strerror}") from error

    @property
    def pid(self) -> int:
        """The id of the first process."""
        return self._process.pid

    def pids(self) -> list[int]:
        """Return the ids of the program's processes, the first one first."""
        return family(self.pid)

    def log(self) -> str:
        """Return the end of what it has written."""
        return self._log.read_text(errors="replace")[-4000:]

    def wait_for(self, ready: Callable[[], bool], what: str, seconds: float = 20) -> None:
        """Wait until `ready` says so. Raises NotRunningError when the process ends first or takes too long."""
        end = time.monotonic() + seconds
        while not ready():
            if (status := self._process.poll()) is not None:
                raise NotRunningError(f"{what} ended with status {status}:\n{self.log()}")
            if time.monotonic() > end:
                raise NotRunningError(f"{what} does not answer after {seconds:g} s:\n{self.log()}")
            time.sleep(0.02)

    def stop(self) -> None:
        """End the program and its children, kindly first."""
        pids = self.pids()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pid in pids[1:]:
            try:
                if os.getsid(pid) == self.pid:
                    os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


def family(*pids: int) -> list[int]:
    """Return these processes and all their living descendants, each once."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            fields = _stat(entry)
            if fields:
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    # Keys, for their order.
    found, left = dict.fromkeys(pids), list(pids)
    while left:
        new = [child for child in children.get(left.pop(0), []) if child not in found]
        found.update(dict.fromkeys(new))
        left += new
    return list(found)


def _stat(entry: Path) -> list[str]:
    """Return the fields of a process's or a thread's `stat` from the state on (proc_pid_stat(5)); empty when it is gone."""
    try:
        return (entry / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def cpu_seconds(pids: Sequence[int]) -> float:
    """Return the user and system seconds of processes, all threads together, and of their children that ended."""
    ticks = 0
    for pid in pids:
        fields = _stat(Path(f"/proc/{pid}"))
        if fields:
            # utime, stime; cutime, cstime: a program that forks for each connection is not free.
            ticks += sum(int(field) for field in fields[11:15])
    return ticks / _TICK


def thread_seconds(pids: Sequence[int]) -> dict[int, float]:
    """Return the user and system seconds of each thread of processes by its id.

    Not of a process with very many threads: none of those does the work alone, and reading them all would show in what is measured.
    """
    found: dict[int, float] = {}
    for pid in pids:
        tasks = Path(f"/proc/{pid}/task")
        fields = _stat(tasks.parent)
        if not fields or int(fields[17]) > _MOST_THREADS:
            continue
        try:
            threads = list(tasks.iterdir())
        except OSError:
            continue
        for thread in threads:
            fields = _stat(thread)
            if fields:
                found[int(thread.name)] = (int(fields[11]) + int(fields[12])) / _TICK
    return found


def rss_bytes(pids: Sequence[int]) -> int:
    """Return the resident memory of processes."""
    pages = 0
    for pid in pids:
        try:
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except OSError:
            continue
    return pages * _PAGE


def settled_cpu_seconds(pids: Sequence[int], limit_s: float = 2.0) -> float:
    """Return the CPU seconds of processes and their families once they have stopped working: what ends late belongs to the run."""
    end = time.monotonic() + limit_s
    used = cpu_seconds(family(*pids))
    while time.monotonic() < end:
        time.sleep(0.05)
        now = cpu_seconds(family(*pids))
        if now == used:
            break
        used = now
    return used


def free_port(host: str = "127.0.0.1") -> int:
    """Return a TCP port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def accepts(port: int, host: str = "127.0.0.1") -> bool:
    """Tell whether somebody listens on a port."""
    try:
        with socket.create_connection((host, port), timeout=1):
            return True
    except OSError:
        return False
