"""What a daemon tells systemd (sd_notify(3)) and what it is handed (sd_listen_fds(3)). Does nothing elsewhere."""

import os
import socket
from collections.abc import Mapping

_FIRST_FD = 3


def notify(state: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Send `state` (`READY=1`, `STOPPING=1`, `WATCHDOG=1`) to the service manager; tell whether there is one."""
    path = environment.get("NOTIFY_SOCKET")
    if not path:
        return False
    if path.startswith("@"):
        path = "\0" + path[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        try:
            sender.connect(path)
            sender.send(state.encode())
        except OSError:
            return False
    return True


def passed_sockets(environment: Mapping[str, str] = os.environ) -> dict[str, socket.socket]:
    """Return the sockets that systemd passed, by their FileDescriptorName."""
    if environment.get("LISTEN_PID") != str(os.getpid()):
        return {}
    count = int(environment.get("LISTEN_FDS", "0"))
    names = environment.get("LISTEN_FDNAMES", "").split(":")
    sockets = {}
    for index in range(count):
        passed = socket.socket(fileno=_FIRST_FD + index)
        passed.setblocking(False)
        os.set_inheritable(passed.fileno(), False)
        sockets[names[index] if index < len(names) else f"unknown{index}"] = passed
    return sockets
