"""The same suite under another congestion control: in a network namespace of its own, so that the machine's settings stay as they are."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_SETTING: Final = Path("/proc/sys/net/ipv4/tcp_congestion_control")
_AVAILABLE: Final = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
# Loopback is down in a new namespace.
_SCRIPT: Final = f'ip link set lo up && printf %s "$0" > {_SETTING} && exec "$@"'


class CongestionError(Exception):
    """The suite cannot be run under this congestion control here."""


def under(name: str, arguments: Sequence[str]) -> None:
    """Return where TCP has this congestion control; otherwise begin the program anew in a namespace that has it.

    Raises CongestionError.
    """
    if _SETTING.read_text().strip() == name:
        return
    available = _AVAILABLE.read_text().split()
    if name not in available:
        raise CongestionError(f"the kernel has no congestion control {name!r} now; it has {', '.join(available)}")
    if os.geteuid() != 0:
        raise CongestionError("another congestion control needs root, for a network namespace of its own")
    command = [sys.executable, "-m", "bench", *arguments]
    try:
        os.execvp("unshare", ["unshare", "--net", "sh", "-c", _SCRIPT, name, *command])
    except OSError as error:
        raise CongestionError(f"unshare cannot be run: {error.strerror}") from error
