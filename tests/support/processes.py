"""Start, await and end processes; find them by what /proc says of them."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Final

_POLL_S: Final = 0.02


class ConditionTimeoutError(AssertionError):
    """What was waited for did not come."""


def wait_until(
    condition: Callable[[], bool],
    what: str,
    *,
    timeout_s: float = 120.0,
    give_up: Callable[[], str | None] = lambda: None,
) -> None:
    """Poll `condition` until it holds.

    Raises ConditionTimeoutError naming `what` after `timeout_s`, or at once with what `give_up` returns (a
    process that has died will not become ready).
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        if (reason := give_up()) is not None:
            raise ConditionTimeoutError(f"{what}: {reason}")
        if time.monotonic() > deadline:
            raise ConditionTimeoutError(f"{what}: not within {timeout_s:g} s")
        time.sleep(_POLL_S)


def spawn(
    argv: Sequence[str],
    *,
    log: IO[bytes] | int,
    stdin: int = subprocess.DEVNULL,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    ends_with_us: bool = False,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start `argv` with both outputs to `log`, in a session of its own.

    So a Ctrl-C at the terminal reaches only us, and we stop what we started in order. `ends_with_us`: the kernel ends it
    when we are killed. That is bound to the thread that starts it, which must be the main thread.
    """
    return subprocess.Popen(
        ["setpriv", "--pdeathsig=TERM", "--", *argv] if ends_with_us else argv,
        stdin=stdin,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=env,
        cwd=cwd,
        start_new_session=True,
        pass_fds=pass_fds,
    )


def stop(process: subprocess.Popen[bytes], *, grace_s: float = 10.0) -> int:
    """End a process of ours: SIGTERM, after `grace_s` SIGKILL. Returns its exit status."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
    return process.wait()


def command_line(pid: int) -> str:
    """Return the arguments of a process joined by spaces, empty when it is gone."""
    return _read(pid, "cmdline").replace("\0", " ").strip()


def cgroups(pid: int) -> str:
    """Return the cgroup paths of a process, empty when it is gone."""
    return _read(pid, "cgroup")


def all_pids() -> list[int]:
    """Return every process id of the machine."""
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def kill_all(pids: Iterable[int], *, timeout_s: float = 60.0) -> None:
    """SIGKILL these and wait until they are gone or only zombies."""
    remaining = set(pids) - {os.getpid()}
    for pid in remaining:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def gone() -> bool:
        return all(state(pid) in ("", "Z", "X") for pid in remaining)

    wait_until(gone, f"end of killed processes {sorted(remaining)}", timeout_s=timeout_s)


def state(pid: int) -> str:
    """Return the letter of a process' state (proc(5)), empty when it is gone."""
    status = _read(pid, "stat")
    # The command stands in parentheses and may hold any character, so count from the last one.
    return status.rpartition(")")[2].split()[0] if status else ""


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""
