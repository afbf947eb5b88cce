"""A UDP port of the host for the time of a trial: it answers, and remembers whether anything came.

UDP has no handshake, so a port that does not answer looks like one that is closed off; this one does answer, and what arrives
is seen even if the answer does not get back.
"""

import contextlib
import socket
import threading
from types import TracebackType
from typing import Final, Self

_LOOK_S: Final = 0.1
_MAX_BYTES: Final = 512
# The trial sends one to each address; beyond that somebody else does, and is not answered.
_MAX_ANSWERS: Final = 1_000


class DatagramPort:
    """Listens on all addresses while the context is open."""

    def __init__(self) -> None:
        self._socket = _bound()
        self._socket.settimeout(_LOOK_S)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._answer, name="datagrams", daemon=True)
        self.port: Final = int(self._socket.getsockname()[1])
        self.heard = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._thread.join()
        self._socket.close()

    def _answer(self) -> None:
        while not self._closing.is_set():
            try:
                data, sender = self._socket.recvfrom(_MAX_BYTES)
            except OSError:
                continue
            self.heard += 1
            if self.heard <= _MAX_ANSWERS:
                with contextlib.suppress(OSError):
                    self._socket.sendto(data, sender)


def _bound() -> socket.socket:
    try:
        made = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    except OSError:
        # No IPv6 in this kernel.
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        made.bind(("", 0))
        return made
    made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    made.bind(("::", 0))
    return made
