"""Ends of transfers in which every byte is checked, each end a process of its own.

`python -m bench.checked serve SIZE` answers, `python -m bench.checked load …` asks. Even tunnels download and odd ones upload.
What a tunnel carries is its own: a base of random bytes, begun at another place for each, so that bytes of another tunnel
would be found out too.
"""

import base64
import functools
import hashlib
import json
import mmap
import os
import random
import selectors
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

# The base: sent by sendfile from a memfd that holds it twice, so that a tunnel may begin anywhere in it.
BASE_BYTES: Final = 16 << 20
_PIECE: Final = 1 << 20
_REQUEST: Final = struct.Struct(">cI")
_DIGEST_BYTES: Final = 32
# Shared by both ends and who restarts the gateway: bytes that have come at the client, at the server; whether all restarts are
# over.
_PROGRESS: Final = struct.Struct("=QQQ")
PROGRESS_BYTES: Final = _PROGRESS.size
_COUNT: Final = struct.Struct("=Q")


@functools.cache
def base() -> bytes:
    """Return the base; the same in every process."""
    return random.Random(1).randbytes(BASE_BYTES) * 2


@functools.cache
def _memory() -> int:
    descriptor = os.memfd_create("base")
    view = memoryview(base())
    while view:
        view = view[os.write(descriptor, view) :]
    return descriptor


def start_of(tunnel: int) -> int:
    """Return where in the base a tunnel begins."""
    return tunnel * 1_000_003 % BASE_BYTES


def digest_of(tunnel: int, size: int) -> bytes:
    """Return the SHA-256 of what a tunnel carries."""
    digest = hashlib.sha256()
    at, view = start_of(tunnel), memoryview(base())
    while size:
        piece = min(size, BASE_BYTES)
        digest.update(view[at : at + piece])
        size -= piece
    return digest.digest()


class Sending:
    """What one end sends: the base from a place of its own, `size` bytes of it."""

    def __init__(self, tunnel: int, size: int) -> None:
        self._at = start_of(tunnel)
        self._left = size

    def step(self, sock: socket.socket) -> bool:
        """Send as much as the socket takes; True when all is sent."""
        while self._left:
            try:
                sent = os.sendfile(sock.fileno(), _memory(), self._at, min(self._left, BASE_BYTES))
            except BlockingIOError:
                return False
            self._left -= sent
            self._at = (self._at + sent) % BASE_BYTES
        return True


class Receiving:
    """What one end has got, and its digest."""

    _buffer: Final = memoryview(bytearray(_PIECE))

    def __init__(self, size: int, count: Callable[[int], None]) -> None:
        self._left = size
        self._count = count
        self._digest = hashlib.sha256()

    def step(self, sock: socket.socket) -> bool:
        """Take one piece; True when all has come. Raises ConnectionError when the other end is gone before."""
        try:
            size = sock.recv_into(self._buffer, min(self._left, _PIECE))
        except BlockingIOError:
            return False
        if not size:
            raise ConnectionError(f"closed with {self._left} bytes to come")
        self._digest.update(self._buffer[:size])
        self._left -= size
        self._count(size)
        return not self._left

    @property
    def digest(self) -> bytes:
        """The SHA-256 of what has come."""
        return self._digest.digest()


def serve(size: int) -> None:
    """Serve transfers of `size` bytes on a port of loopback, which is printed; count uploads into the shared file."""
    server = socket.create_server(("127.0.0.1", 0), backlog=1024)
    print(server.getsockname()[1], flush=True)
    progress = _Progress(Path(sys.argv[3]), 1)
    selector = selectors.EpollSelector()
    selector.register(server, selectors.EVENT_READ, None)
    while True:
        for key, _ in selector.select():
            if key.data is None:
                sock, _ = server.accept()
                # The request is smaller than any segment, and the client sends it at once.
                kind, tunnel = _REQUEST.unpack(sock.recv(_REQUEST.size, socket.MSG_WAITALL))
                sock.setblocking(False)
                if kind == b"D":
                    selector.register(sock, selectors.EVENT_WRITE, Sending(tunnel, size))
                else:
                    selector.register(sock, selectors.EVENT_READ, Receiving(size, progress.add))
                continue
            sock = key.fileobj  # type: ignore[assignment]
            try:
                if key.data.step(sock):
                    selector.unregister(sock)
                    if isinstance(key.data, Receiving):
                        sock.sendall(key.data.digest)
                    sock.shutdown(socket.SHUT_WR)
                    sock.close()
            except OSError:
                selector.unregister(sock)
                sock.close()


class _Progress:
    """Bytes that have come, where another process sees them. `place`: 0 for the client's, 1 for the server's."""

    def __init__(self, file: Path, place: int) -> None:
        with file.open("r+b") as opened:
            self._map = mmap.mmap(opened.fileno(), PROGRESS_BYTES)
        self._place = place * _COUNT.size
        self._total = 0

    def add(self, size: int) -> None:
        self._total += size
        _COUNT.pack_into(self._map, self._place, self._total)

    @property
    def is_over(self) -> bool:
        """Whether the gateway is restarted no more."""
        return bool(_PROGRESS.unpack_from(self._map)[2])


def moved(file: Path) -> int:
    """Return how many bytes have come at both ends together."""
    return sum(_PROGRESS.unpack(file.read_bytes())[:2])


def say_over(file: Path) -> None:
    """Tell the load that the gateway is restarted no more."""
    with file.open("r+b") as opened:
        opened.seek(2 * _COUNT.size)
        opened.write(_COUNT.pack(1))


class _Transfer:
    """One tunnel of the load."""

    def __init__(self, number: int, sock: socket.socket, size: int, progress: _Progress) -> None:
        self.number = number
        self.sock = sock
        self.error = ""
        self._size = size
        self._progress = progress
        self._answer = b""
        self.work: Sending | Receiving | None = (
            Receiving(size, progress.add) if self.downloads else Sending(number, size)
        )

    @property
    def downloads(self) -> bool:
        return self.number % 2 == 0

    def step(self) -> bool:
        """Go on; True when it is over, well or not."""
        try:
            if isinstance(self.work, Receiving):
                if not self.work.step(self.sock):
                    return False
                self._answer = self.work.digest
                return True
            if isinstance(self.work, Sending):
                if self.work.step(self.sock):
                    self.work = None
                return False
            data = self.sock.recv(_DIGEST_BYTES - len(self._answer))
            if not data:
                raise ConnectionError("closed before the digest came")
            self._answer += data
            return len(self._answer) == _DIGEST_BYTES
        except BlockingIOError:
            return False
        except OSError as error:
            self.error = f"tunnel {self.number}: {type(error).__name__}: {error}"
            return True

    def check(self) -> str:
        """Return what went wrong, empty when every byte came as it was sent. It takes as long as the digest does."""
        if not self.error and self._answer != digest_of(self.number, self._size):
            return f"tunnel {self.number}: other bytes have come than were sent"
        return self.error

    @property
    def events(self) -> int:
        """What it waits for."""
        return selectors.EVENT_WRITE if isinstance(self.work, Sending) else selectors.EVENT_READ


def _opened(port: int, target: str, credentials: str, number: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), timeout=60)
    token = base64.b64encode(credentials.encode()).decode()
    sock.sendall(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\nProxy-Authorization: Basic {token}\r\n\r\n".encode())
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        byte = sock.recv(1)
        if not byte:
            raise ConnectionError(f"refused: {head!r}")
        head += byte
    if b" 200 " not in head:
        raise ConnectionError(f"refused: {head!r}")
    sock.sendall(_REQUEST.pack(b"U" if number % 2 else b"D", number))
    sock.setblocking(False)
    return sock


def load(port: int, target: str, credentials: str, tunnels: int, size: int, progress_file: Path) -> None:
    """Open all tunnels, then move `size` bytes through each. Prints one JSON line.

    The last one waits until all restarts are over: without it a short transfer would be done before them.
    """
    progress = _Progress(progress_file, 0)
    # Before anything is measured: 16 MiB of it is what takes time.
    base()
    selector = selectors.EpollSelector()
    transfers = [
        _Transfer(number, _opened(port, target, credentials, number), size, progress) for number in range(tunnels)
    ]
    print("running", flush=True)
    started = time.monotonic()
    *early, last = transfers
    for transfer in early:
        selector.register(transfer.sock, transfer.events, transfer)
    waits = True
    left, ended = len(transfers), started
    while left:
        if waits and progress.is_over:
            selector.register(last.sock, last.events, last)
            waits = False
        for key, _ in selector.select(0.01 if waits else None):
            transfer = key.data
            before = transfer.events
            if transfer.step():
                selector.unregister(transfer.sock)
                transfer.sock.close()
                left -= 1
                ended = time.monotonic()
            elif transfer.events != before:
                selector.modify(transfer.sock, transfer.events, transfer)
    # Not before the end is measured.
    errors = [error for transfer in transfers if (error := transfer.check())]
    print(json.dumps({"seconds": ended - started, "bytes": tunnels * size, "errors": errors}), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]))
    else:
        load(int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]), int(sys.argv[6]), Path(sys.argv[7]))
