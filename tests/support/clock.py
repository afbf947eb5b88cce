"""A wall clock of a daemon's own, which a test sets while the daemon runs (libfaketime).

CLOCK_REALTIME belongs to the whole machine (time_namespaces(7) covers the monotonic clocks alone), and the machine is not
the test's. The library answers for it in one process: time(2) and clock_gettime(2) are moved, the monotonic clocks and what
waits by them are not, as when an operator or NTP sets a clock. File times are the kernel's own, and stay.
"""

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

HOUR_S: Final = 3600
DAY_S: Final = 24 * HOUR_S


class Clock:
    """`environment` is for the daemons that are to have it."""

    def __init__(self, folder: Path, shared: str) -> None:
        self._file = folder / "clock"
        self.set(0)
        self.environment: Final = {**faked(library(), self._file), "FAKETIME_SHARED": shared}

    def set(self, offset_s: int) -> None:
        """Set it this far ahead of the machine's, or behind it."""
        fresh = self._file.with_suffix(".new")
        fresh.write_text(setting(offset_s))
        fresh.chmod(0o644)
        # Whole at any time: it is read at every look at the clock.
        fresh.rename(self._file)


def library() -> Path:
    """Return where the library is (the package `libfaketime`). Raises StopIteration without it."""
    return next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))


def faked(preloaded: Path, file: Path) -> dict[str, str]:
    """Return the environment of a process whose clock is in a file."""
    return {
        "LD_PRELOAD": str(preloaded),
        "FAKETIME_TIMESTAMP_FILE": str(file),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "NO_FAKE_STAT": "1",
    }


def setting(offset_s: int) -> str:
    """Return the content of the file."""
    return f"{offset_s:+d}\n"


@contextlib.contextmanager
def settable_clock() -> Iterator[Clock]:
    """Make a clock for the time of the context."""
    with _shared() as shared, tempfile.TemporaryDirectory(prefix="opificia-clock-") as folder:
        Path(folder).chmod(0o755)
        yield Clock(Path(folder), shared)


@contextlib.contextmanager
def _shared() -> Iterator[str]:
    """Have the library's semaphore and memory made, for daemons of other users as well, and removed in the end.

    What each daemon makes for itself bears its process id: made as root, before setpriv(1), it is closed to the daemon, and
    after a SIGKILL it stays.
    """
    say = ["faketime", "-f", "+0", "sh", "-c", "echo $FAKETIME_SHARED; exec cat"]
    with subprocess.Popen(say, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        shared = holder.stdout.readline().strip()
        semaphore, memory = shared.split()
        for path in (f"/dev/shm/sem.{semaphore.removeprefix('/')}", f"/dev/shm/{memory.removeprefix('/')}"):
            Path(path).chmod(0o666)
        try:
            yield shared
        finally:
            holder.communicate()
