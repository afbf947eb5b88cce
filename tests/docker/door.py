"""The gateway's side of the door, as little of it as shows who called."""

import contextlib
import socket
from pathlib import Path

_SIGNATURE = b"\r\n\r\n\0\r\nQUIT\n"


class Door:
    """Listens on a unix socket and answers each connection with the source address of its PROXY v2 header."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(path))
        self._socket.listen(128)

    def serve(self) -> None:
        """Serve until closed."""
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.settimeout(60)
                header = connection.recv(28, socket.MSG_WAITALL)
                assert header.startswith(_SIGNATURE)
                # The forwarder leads here who has said something. What is not read would make the end a reset.
                connection.recv(100)
                connection.sendall(f"door:{socket.inet_ntoa(header[16:20])}\n".encode())

    def close(self) -> None:
        """Stop serving."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
