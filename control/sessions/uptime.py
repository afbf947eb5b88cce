"""How long ago a session was launched, across restarts of the daemon: by the machine's uptime, a clock that nobody sets.

A time of day tells it only as long as no clock is set; it is what remains to go by after a reboot.
"""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from control.plan.session import Session

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def boot_id(environment: Mapping[str, str] = os.environ, file: Path = _BOOT_ID) -> str:
    """Return what tells this boot from others (random(4)), empty when nothing does. Our unit hides the file, and names it."""
    try:
        told = environment.get("OPIFICIA_BOOT_ID") or file.read_text()
    except OSError:
        return ""
    return told.strip().replace("-", "")


def uptime_ms() -> int:
    """Return the milliseconds since the machine's boot."""
    return time.monotonic_ns() // 1_000_000


def gone_ms(life: Session, boot: str, uptime_now: int, now: int) -> int:
    """Return how long ago a session was launched. One whose launch is in the future by the time of day: that was set back."""
    if boot and life.launched_boot == boot:
        return uptime_now - life.launched_uptime_ms
    return max(0, now - (life.launched_at or now))
