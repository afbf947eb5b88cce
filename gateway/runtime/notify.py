"""What a daemon tells systemd (sd_notify(3)). Does nothing elsewhere."""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

log = logging.getLogger(__name__)

# A watchdog is fed this often within its time: one late turn of a loaded machine is not a hang.
_FEEDINGS = 3


def notify(state: str, environment: Mapping[str, str] = os.environ, descriptors: Sequence[int] = ()) -> bool:
    """Send `state` (`READY=1`, `STOPPING=1`, `WATCHDOG=1`) to the service manager; tell whether it was told.

    It gets copies of `descriptors` with it.
    """
    path = environment.get("NOTIFY_SOCKET")
    if not path:
        return False
    if path.startswith("@"):
        path = "\0" + path[1:]
    try:
        # Also this may fail: a process without a descriptor to spare tells nothing, and goes on.
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.connect(path)
            if descriptors:
                socket.send_fds(sender, [state.encode()], descriptors)
            else:
                sender.send(state.encode())
    except OSError:
        return False
    return True


def number_in(environment: Mapping[str, str], name: str) -> int:
    """Return the number that the manager put into a variable, 0 where it put none."""
    text = environment.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else 0


def notify_reloading(environment: Mapping[str, str] = os.environ) -> bool:
    """Tell the service manager that a reload begins; `READY=1` ends it."""
    return notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}", environment)


def more_time(seconds: float) -> str:
    """Return what asks the service manager for so many seconds for the start, reload or stop that goes on.

    It never makes the time shorter than the unit has it (TimeoutStartSec=, TimeoutStopSec=).
    """
    return f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}"


def watchdog_s(environment: Mapping[str, str] = os.environ) -> float | None:
    """Return within how many seconds the service manager wants a sign of life (sd_watchdog_enabled(3)); None: never."""
    if environment.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    return number_in(environment, "WATCHDOG_USEC") / 1e6 or None


async def feed_watchdog(prove: Callable[[], Awaitable[object]], environment: Mapping[str, str] = os.environ) -> None:
    """Say WATCHDOG=1 each time that `prove` has returned; returns at once where nobody wants it.

    What does not make progress never returns from `prove`, and the service manager restarts it. It does so as well when
    `prove` raises, and then the log says why.
    """
    interval = watchdog_s(environment)
    if interval is None:
        return
    try:
        while True:
            await prove()
            notify("WATCHDOG=1", environment)
            await asyncio.sleep(interval / _FEEDINGS)
    except Exception:
        log.exception("the watchdog is fed no more: the service manager will restart this process")
        raise
