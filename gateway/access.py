"""The audit log: `<dir>/<session>.log`, JSON lines, at most `max_lines` a session and then one line that says so.

A thread of the log's own writes, so a slow or full disk never stalls a tunnel. It finds finished lines, in lists by session: a
thread that ran Python for each line of a batch would keep the interpreter, and the event loop would wait for the whole batch. A sandbox that makes a million
refused requests costs a comparison each, no memory and no disk.
"""

import contextlib
import fcntl
import logging
import os
import threading
import time
from collections import OrderedDict
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from gateway.core.verdict import CloseReason, DenyReason

log = logging.getLogger("gateway.access")

# Files kept open between two writes; the descriptor limit is shared with the tunnels.
MAX_OPEN_FILES: Final = 64
# Lines waiting for a disk that does not take them. Beyond it lines are lost, counted and reported.
MAX_QUEUED_LINES: Final = 200_000
# A host name is at most 253 bytes; a longer text is not a name and only there to fill the disk.
MAX_HOST_CHARS: Final = 260
FLUSH_INTERVAL_S: Final = 0.05
# How often it is said that lines are lost; the metric counts them all.
COMPLAIN_EVERY_S: Final = 10.0


class ModelCost(msgspec.Struct, frozen=True):
    """What one model request came to. `status` is 0 when no reply began; nothing of the content is ever kept."""

    model: str
    status: int
    input_tokens: int
    output_tokens: int
    cache_read_tokens: int
    cache_write_tokens: int
    first_byte_ms: int


class AuditLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """One decision (`allow`, `refuse`) or one end (`close`). The end of a model request says what it cost."""

    ts: datetime
    session: str
    event: str
    kind: str
    host: str
    port: int
    address: str
    reason: str
    bytes_up: int
    bytes_down: int
    ms: int
    model: ModelCost | None = None


class _File:
    """An open file, and what this process knows of it: how many lines it has in its first `size` bytes."""

    __slots__ = ("fd", "lines", "size")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.lines = 0
        self.size = 0


class AuditLog:
    """Writes audit lines. With an empty `directory` it writes nothing (a gateway that is only measured)."""

    def __init__(self, directory: str, max_lines: int) -> None:
        self._directory = Path(directory) if directory else None
        self._max_lines = max_lines
        # Lines by session, and how many in all; the thread takes them at once. The lock is held for no longer than that.
        self._queued: dict[str, list[bytes]] = {}
        self._waiting = 0
        # Sessions that are over: their files are closed behind their last lines.
        self._over: list[str] = []
        self._lock = threading.Lock()
        self._written: dict[str, int] = {}
        self._files: OrderedDict[str, _File] = OrderedDict()
        self._encode = msgspec.json.Encoder().encode
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self.lost = 0
        self._quiet_until = 0.0
        self._thread: threading.Thread | None = None
        if self._directory is not None:
            self._thread = threading.Thread(target=self._run, name="audit", daemon=True)
            self._thread.start()

    def write(
        self,
        session: str,
        event: str,
        kind: str,
        host: str,
        port: int,
        address: str,
        reason: DenyReason | CloseReason | str,
        bytes_up: int = 0,
        bytes_down: int = 0,
        ms: int = 0,
        model: ModelCost | None = None,
        at: float | None = None,
    ) -> None:
        """Queue one line. `session` is a session id that is known to the registry, so it is safe as a file name.

        `at`: when it happened (time.time), if that was not now.
        """
        if self._directory is None:
            return
        count = self._written.get(session, 0)
        # One more than the limit is let through: the writer turns it into the last line.
        if count > self._max_lines:
            return
        if self._waiting >= MAX_QUEUED_LINES:
            self.lost += 1
            return
        self._written[session] = count + 1
        if not host.isascii():
            # JSON may hold U+2028, and some readers of lines end a line there.
            host = host.encode("ascii", "backslashreplace").decode()
        now = datetime.fromtimestamp(time.time() if at is None else at, UTC)
        line = AuditLine(
            now, session, event, kind, host[:MAX_HOST_CHARS], port, address, reason, bytes_up, bytes_down, ms, model
        )
        encoded = self._encode(line) + b"\n"
        with self._lock:
            self._queued.setdefault(session, []).append(encoded)
            self._waiting += 1
        if not self._wake.is_set():
            self._wake.set()

    def forget(self, session: str) -> None:
        """Drop what is kept open about a session that is over. Its file stays and its lines still count."""
        self._written.pop(session, None)
        if self._directory is not None:
            with self._lock:
                self._over.append(session)
            self._wake.set()

    def close(self) -> None:
        """Write what is queued and stop."""
        if self._thread is not None:
            self._stopping.set()
            self._wake.set()
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while True:
            self._wake.wait()
            stopping = self._stopping.is_set()
            self._wake.clear()
            self._flush()
            if stopping:
                break
            # Gather lines for one write a file instead of one write a line; who stops does not wait for it.
            self._stopping.wait(FLUSH_INTERVAL_S)
        for file in self._files.values():
            os.close(file.fd)

    def _flush(self) -> None:
        with self._lock:
            batches, self._queued, self._waiting = self._queued, {}, 0
            over, self._over = self._over, []
        for session, lines in batches.items():
            self._append(session, lines)
        for session in over:
            if (file := self._files.pop(session, None)) is not None:
                os.close(file.fd)

    def _append(self, session: str, lines: list[bytes]) -> None:
        count = 0
        problem: OSError | None = None
        try:
            file = self._open(session)
            # After a reload the process before still has lines of its own. It must not take a line of ours that is half
            # there for one that a crash cut, nor cut our line when the disk fills, and its lines count.
            fcntl.flock(file.fd, fcntl.LOCK_EX)
            try:
                _catch_up(file)
                room = self._max_lines - file.lines
                if room < 0:
                    return
                if len(lines) > room:
                    end = {
                        "ts": datetime.now(UTC),
                        "session": session,
                        "event": "log_full",
                        "max_lines": self._max_lines,
                    }
                    lines = [*lines[:room], self._encode(end) + b"\n"]
                count, problem = _write_lines(file, lines)
            finally:
                fcntl.flock(file.fd, fcntl.LOCK_UN)
        except OSError as error:
            problem = error
        if problem is not None:
            self._lose(session, len(lines) - count, problem)

    def _lose(self, session: str, count: int, error: OSError) -> None:
        self.lost += count
        now = time.monotonic()
        if now >= self._quiet_until:
            self._quiet_until = now + COMPLAIN_EVERY_S
            log.error(
                "egress log of session %s cannot be written, %d lines lost: %s", session, self.lost, error.strerror
            )

    def _open(self, session: str) -> _File:
        file = self._files.get(session)
        if file is not None:
            self._files.move_to_end(session)
            return file
        assert self._directory is not None
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self._directory / f"{session}.log", flags, 0o640)
        file = self._files[session] = _File(fd)
        if len(self._files) > MAX_OPEN_FILES:
            _, oldest = self._files.popitem(last=False)
            with contextlib.suppress(OSError):
                os.close(oldest.fd)
        return file


def _write_lines(file: _File, lines: list[bytes]) -> tuple[int, OSError | None]:
    """Append lines; return how many are in the file whole, and what kept the others out."""
    data = b"".join(lines)
    written = 0
    problem: OSError | None = None
    try:
        while written < len(data):
            written += os.write(file.fd, memoryview(data)[written:])
    except OSError as error:
        problem = error
    whole = written if problem is None else data.rfind(b"\n", 0, written) + 1
    count = len(lines) if problem is None else data.count(b"\n", 0, written)
    file.lines += count
    file.size += whole
    if whole < written:
        # What a full disk took of a line would make one broken line of it and of the next one that fits.
        with contextlib.suppress(OSError):
            os.ftruncate(file.fd, file.size)
    return count, problem


def _catch_up(file: _File) -> None:
    """Count what is in the file and not ours: the limit holds across restarts. A line that a crash cut is ended."""
    size = os.fstat(file.fd).st_size
    if size == file.size:
        return
    if size < file.size:
        # Somebody made it shorter.
        file.lines = file.size = 0
    end = b"\n"
    while chunk := os.pread(file.fd, 1 << 20, file.size):
        file.lines += chunk.count(b"\n")
        file.size += len(chunk)
        end = chunk[-1:]
    if end != b"\n":
        file.size += os.write(file.fd, b"\n")
        file.lines += 1
