"""The reference runner: runs what control sends, inside a sandbox. One file, standard library only, Python 3.8 or later.

It is mounted read-only and is the container's command. It connects to OPIFICIA_RUNNER_URL through the gateway, says hello,
runs commands, streams their output, and reports how they ended. Output also goes to its own stdout and stderr: Docker's
logs are the record. Without a connection it goes on, keeps what it has to report, and holds commands back (their pipes fill)
when that exceeds MAX_UNACKED_BYTES; nothing is dropped.

Threads: the main thread owns the connection and reads; one thread writes; every run has one for each output and one that
waits for its end. Messages and their rules: control.runner.messages.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import os
import select
import signal
import socket
import struct
import sys
import termios
import threading
import time
from collections import deque

# A sandbox's start waits for these imports: `typing` is left to the type checker, `subprocess` comes after the hello.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from typing import Any, Final, NoReturn

NAME: Final = "opificia-reference-runner/1"
PROTOCOL_VERSION: Final = 1

CONNECT_TIMEOUT_S: Final = 10.0
SEND_TIMEOUT_S: Final = 60.0
FIRST_RETRY_S: Final = 0.1
LAST_RETRY_S: Final = 5.0
# A run may carry its stdin and environment; control's own bound on a request is lower.
MAX_FRAME_BYTES: Final = 4 * 1024 * 1024
MAX_HEAD_BYTES: Final = 16 * 1024
# Output in one frame, unless control's own bound asks for less: JSON makes at most six bytes of one.
CHUNK_BYTES: Final = 32 * 1024
JSON_FACTOR: Final = 6
FRAME_OVERHEAD_BYTES: Final = 1024
MAX_UNACKED_BYTES: Final = 8 * 1024 * 1024
# Processes that stay in the background may hold the pipes open for ever; they get this long after the exit.
LINGER_S: Final = 1.0
# Below Docker's own grace, so that the end is still reported.
TERM_GRACE_S: Final = 8.0
# The first connection is worth a word in the log only when it takes longer than a gateway's restart.
QUIET_S: Final = 5.0

# RFC 6455 §1.3 and §5.2.
_GUID: Final = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_CONTINUATION, _TEXT, _CLOSE, _PING, _PONG = 0x0, 0x1, 0x8, 0x9, 0xA


class ConnectionLostError(Exception):
    """The connection could not be made or has ended."""


class WebSocket:
    """A WebSocket client for text frames (RFC 6455), bounded and blocking."""

    def __init__(self, url: str, token: str) -> None:
        scheme, _, rest = url.partition("://")
        authority, _, path = rest.partition("/")
        host, _, port = authority.rpartition(":")
        if scheme != "ws" or not host or not port.isdigit():
            raise SystemExit(f"opificia-runner: OPIFICIA_RUNNER_URL must be ws://host:port/…, not {url!r}")
        self._sending = threading.Lock()
        self._buffer = bytearray()
        try:
            self._socket = socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            raise ConnectionLostError(str(error)) from error
        try:
            self._handshake(authority, path, token)
        except BaseException:
            self._socket.close()
            raise

    def _handshake(self, authority: str, path: str, token: str) -> None:
        key = base64.b64encode(os.urandom(16))
        request = (
            f"GET /{path} HTTP/1.1\r\nHost: {authority}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key.decode()}\r\nSec-WebSocket-Version: 13\r\nAuthorization: Bearer {token}\r\n\r\n"
        )
        try:
            self._socket.sendall(request.encode())
            while b"\r\n\r\n" not in self._buffer:
                if len(self._buffer) > MAX_HEAD_BYTES:
                    raise ConnectionLostError("the answer's head is too large")
                self._receive()
        except OSError as error:
            raise ConnectionLostError(str(error)) from error
        head, _, rest = bytes(self._buffer).partition(b"\r\n\r\n")
        self._buffer = bytearray(rest)
        lines = head.decode("latin-1").split("\r\n")
        headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])
        }
        accept = base64.b64encode(hashlib.sha1(key + _GUID).digest()).decode()  # noqa: S324 - RFC 6455 asks for SHA-1
        if " 101" not in lines[0][:13] or headers.get("sec-websocket-accept") != accept:
            raise ConnectionLostError(f"refused: {lines[0][:200]}")

    def set_read_timeout(self, seconds: float) -> None:
        """End the connection when nothing is heard for `seconds`."""
        self._socket.settimeout(seconds)

    def send(self, text: str) -> None:
        """Send one text frame. Raises ConnectionLostError."""
        self._send(_TEXT, text.encode("utf-8", "surrogatepass"))

    def receive(self) -> str:
        """Return the next text message, answering pings meanwhile. Raises ConnectionLostError."""
        message = bytearray()
        while True:
            final, opcode, payload = self._frame()
            if opcode == _PING:
                self._send(_PONG, payload)
            elif opcode == _CLOSE:
                raise ConnectionLostError("closed by the gateway")
            elif opcode in (_TEXT, _CONTINUATION):
                message += payload
                if len(message) > MAX_FRAME_BYTES:
                    raise ConnectionLostError("a message is too large")
                if final:
                    return message.decode("utf-8", "replace")
            elif opcode != _PONG:
                raise ConnectionLostError("a frame of an unknown kind")

    def close(self) -> None:
        """End the connection at once, also for a thread that is sending or receiving."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._socket.close()

    def _frame(self) -> tuple[bool, int, bytes]:
        first, second = self._exactly(2)
        length = second & 0x7F
        # A server's frames are never masked (RFC 6455 §5.1), and no extension was agreed on.
        if first & 0x70 or second & 0x80:
            raise ConnectionLostError("a frame breaks the protocol")
        if length == 126:
            (length,) = struct.unpack(">H", self._exactly(2))
        elif length == 127:
            (length,) = struct.unpack(">Q", self._exactly(8))
        if length > MAX_FRAME_BYTES:
            raise ConnectionLostError("a frame is too large")
        return bool(first & 0x80), first & 0x0F, self._exactly(length)

    def _exactly(self, count: int) -> bytes:
        try:
            while len(self._buffer) < count:
                self._receive()
        except OSError as error:
            raise ConnectionLostError(str(error)) from error
        data = bytes(self._buffer[:count])
        del self._buffer[:count]
        return data

    def _receive(self) -> None:
        data = self._socket.recv(64 * 1024)
        if not data:
            raise ConnectionLostError("the connection ended")
        self._buffer += data

    def _send(self, opcode: int, payload: bytes) -> None:
        size = len(payload)
        if size < 126:
            head = struct.pack(">BB", 0x80 | opcode, 0x80 | size)
        elif size < 65_536:
            head = struct.pack(">BBH", 0x80 | opcode, 0x80 | 126, size)
        else:
            head = struct.pack(">BBQ", 0x80 | opcode, 0x80 | 127, size)
        mask = os.urandom(4)
        # One exclusive-or of two long numbers: a loop over bytes costs a thousand times as much.
        key = (mask * (size // 4 + 1))[:size]
        masked = (int.from_bytes(payload, "big") ^ int.from_bytes(key, "big")).to_bytes(size, "big")
        with self._sending:
            try:
                self._socket.sendall(head + mask + masked)
            except OSError as error:
                raise ConnectionLostError(str(error)) from error


class Outbox:
    """Events until control has them: numbered from 1, in order, bounded in bytes."""

    def __init__(self, limit_bytes: int = MAX_UNACKED_BYTES) -> None:
        self._limit = limit_bytes
        self.chunk_bytes = CHUNK_BYTES
        self._changed = threading.Condition()
        self._kept: deque[tuple[int, str]] = deque()
        self._bytes = 0
        self._last = 0
        self._sent = 0

    def put(self, kind: str, **fields: Any) -> int:
        """Number and keep an event, and return its number; waits while too much is kept."""
        with self._changed:
            while self._bytes >= self._limit:
                self._changed.wait()
            self._last += 1
            text = json.dumps({"type": kind, "seq": self._last, **fields}, ensure_ascii=False, separators=(",", ":"))
            self._kept.append((self._last, text))
            self._bytes += len(text)
            self._changed.notify_all()
            return self._last

    def ack(self, seq: int) -> None:
        """Forget the events up to `seq`."""
        with self._changed:
            while self._kept and self._kept[0][0] <= seq:
                self._bytes -= len(self._kept.popleft()[1])
            self._changed.notify_all()

    def resume(self, seq: int) -> None:
        """Send again from the event after `seq`."""
        self.ack(seq)
        with self._changed:
            self._sent = seq
            self._changed.notify_all()

    def take(self, stopped: threading.Event) -> str | None:
        """Return the next event to send, waiting for it; None once `stopped` is set and `wake` was called."""
        with self._changed:
            while not stopped.is_set():
                if self._sent < self._last and self._kept:
                    index = max(0, self._sent + 1 - self._kept[0][0])
                    self._sent, text = self._kept[index]
                    return text
                self._changed.wait()
            return None

    def wake(self) -> None:
        """Let waiting threads look again."""
        with self._changed:
            self._changed.notify_all()


def write_all(fd: int, data: bytes) -> None:
    """Write all of `data`; an output that nobody reads any more is no reason to end a run."""
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(fd, view) :]
    except OSError:
        pass


class Run:
    """One command and its threads."""

    def __init__(self, message: dict[str, Any], outbox: Outbox) -> None:
        self.id: str = message["run"]
        self._outbox = outbox
        self._timeout_s: float | None = message.get("timeout_ms", 0) / 1000 or None
        self._process: subprocess.Popen[bytes] | None = None
        self.done = threading.Event()
        # The number of the event that tells its end; 0 before.
        self.end_seq = 0
        self._cancelled = False
        threading.Thread(target=self._live, args=(message,), daemon=True).start()

    def _live(self, message: dict[str, Any]) -> None:
        import subprocess

        stdin = message.get("stdin", "")
        data = base64.b64decode(stdin) if message.get("stdin_encoding") == "base64" else stdin.encode()
        try:
            process = subprocess.Popen(  # noqa: S603 - running what control sends is what a runner is for
                message["argv"],
                cwd=message.get("cwd") or "/",
                env={**os.environ, **message.get("env", {})},
                stdin=subprocess.PIPE if data else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                # A process group of its own, so that a cancel reaches the command's children too.
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            text = f"opificia-runner: {getattr(error, 'filename', None) or message['argv'][0]}: {reason}\n"
            self._report("stderr", 2, text.encode("utf-8", "replace"))
            self._complete(127 if isinstance(error, FileNotFoundError) else 126, error=text.strip())
            return
        self._process = process
        if self._cancelled:
            self._signal(signal.SIGTERM)
        # Closed when the command has ended, which both readers see as a hang-up.
        exited, running = os.pipe()
        drained = []
        for pipe, stream, own in ((process.stdout, "stdout", 1), (process.stderr, "stderr", 2)):
            assert pipe is not None
            drained.append(threading.Event())
            reader = (pipe.fileno(), exited, stream, own, drained[-1])
            threading.Thread(target=self._read, args=reader, daemon=True).start()
        if data:
            threading.Thread(target=self._feed, args=(data,), daemon=True).start()
        timed_out = self._wait(process)
        os.close(running)
        for event in drained:
            event.wait()
        os.close(exited)
        code = process.returncode
        self._complete(128 - code if code < 0 else code, timed_out=timed_out)

    def _wait(self, process: subprocess.Popen[bytes]) -> bool:
        import subprocess

        try:
            process.wait(self._timeout_s)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGTERM)
            try:
                process.wait(LINGER_S)
            except subprocess.TimeoutExpired:
                pass
            self._signal(signal.SIGKILL)
            process.wait()
            return True
        return False

    def _read(self, source: int, exited: int, stream: str, own: int, drained: threading.Event) -> None:
        """Take one output to its end; set `drained` when all that the command itself wrote is taken.

        A process left in the background may hold the pipe open and write for ever: it gets LINGER_S.
        """
        poll = select.poll()
        poll.register(source, select.POLLIN)
        poll.register(exited, select.POLLIN)
        owed: int | None = None
        until = 0.0
        rest = b""
        while True:
            waiting = owed is not None and not drained.is_set()
            ready = [fd for fd, _ in poll.poll(max(0.0, until - time.monotonic()) * 1000 if waiting else None)]
            if exited in ready:
                poll.unregister(exited)
                (owed,) = struct.unpack("i", fcntl.ioctl(source, termios.FIONREAD, b"\0" * 4))
                until = time.monotonic() + LINGER_S
            if source in ready:
                data = os.read(source, self._outbox.chunk_bytes)
                write_all(own, data)
                rest = self._send(stream, rest + data, final=not data)
                if not data:
                    break
                if owed is not None and owed > 0:
                    owed -= len(data)
                    until = time.monotonic() + LINGER_S
            if owed is not None and owed <= 0 and time.monotonic() >= until:
                drained.set()
        drained.set()

    def _report(self, stream: str, own: int, data: bytes) -> None:
        write_all(own, data)
        self._send(stream, data, final=True)

    def _send(self, stream: str, data: bytes, final: bool) -> bytes:
        """Send output as text where it is UTF-8; return the bytes of a character that is not whole yet."""
        rest = b""
        try:
            text, encoding = data.decode(), "utf-8"
        except UnicodeDecodeError as error:
            if not final and error.reason == "unexpected end of data" and len(data) - error.start < 4:
                data, rest = data[: error.start], data[error.start :]
                text, encoding = data.decode(), "utf-8"
            else:
                text, encoding = base64.b64encode(data).decode(), "base64"
        if text:
            self._outbox.put("output", run=self.id, stream=stream, data=text, encoding=encoding)
        return rest

    def _feed(self, data: bytes) -> None:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        try:
            process.stdin.write(data)
            process.stdin.close()
        except OSError:
            pass

    def _complete(self, exit_code: int, timed_out: bool = False, error: str = "") -> None:
        told = {"exit_code": exit_code, "timed_out": timed_out, "error": error[:1000]}
        self.end_seq = self._outbox.put("completed", run=self.id, **told)
        self.done.set()

    def _signal(self, number: int) -> None:
        process = self._process
        if process is not None and process.poll() is None:
            try:
                os.killpg(process.pid, number)
            except OSError:
                pass

    def cancel(self, grace_s: float) -> None:
        """End the command: SIGTERM, then SIGKILL after the grace. Returns at once."""
        self._cancelled = True
        self._signal(signal.SIGTERM)
        killer = threading.Timer(grace_s, self._signal, (signal.SIGKILL,))
        killer.daemon = True
        killer.start()


class Terminated(BaseException):
    """SIGTERM or SIGINT arrived."""


class Runner:
    """The connection to control, and the runs."""

    def __init__(self, url: str, token: str) -> None:
        self._url = url
        self._token = token
        self._instance = os.urandom(16).hex()
        self._outbox = Outbox()
        self._runs: dict[str, Run] = {}
        self._greeted = False
        self._began = time.monotonic()

    def serve(self) -> int:
        """Stay connected until control says shutdown or a signal arrives; return the exit code."""
        retry = FIRST_RETRY_S
        try:
            while True:
                began = time.monotonic()
                try:
                    return self._connection()
                except ConnectionLostError as error:
                    self._complain(str(error))
                    if time.monotonic() - began > LAST_RETRY_S:
                        retry = FIRST_RETRY_S
                # Sandboxes that lost the same gateway must not come back all at once.
                time.sleep(retry * (0.5 + os.urandom(1)[0] / 512))
                retry = min(2 * retry, LAST_RETRY_S)
        except Terminated:
            self._end_runs(TERM_GRACE_S)
            return 128 + signal.SIGTERM

    def _complain(self, problem: str) -> None:
        if not self._greeted and time.monotonic() - self._began > QUIET_S:
            self._greeted = True
            write_all(2, f"opificia-runner: cannot reach control yet: {problem}\n".encode("utf-8", "replace"))

    def _connection(self) -> int:
        connection = WebSocket(self._url, self._token)
        stopped = threading.Event()
        try:
            hello = {
                "type": "hello",
                "version": PROTOCOL_VERSION,
                "instance": self._instance,
                "runner": NAME,
                "runs": list(self._runs),
            }
            connection.send(json.dumps(hello))
            # While control takes note: the first command will need it.
            import subprocess  # noqa: F401

            welcome = json.loads(connection.receive())
            if welcome.get("type") != "welcome":
                raise ConnectionLostError(f"not welcome: {welcome.get('message', '')}")
            self._greeted = True
            connection.set_read_timeout(max(SEND_TIMEOUT_S, 3 * welcome["ping_ms"] / 1000))
            room = (welcome["frame_bytes"] - FRAME_OVERHEAD_BYTES) // JSON_FACTOR
            self._outbox.chunk_bytes = max(1, min(CHUNK_BYTES, room))
            self._outbox.resume(welcome["seq"])
            self._forget_runs(welcome["seq"])
            threading.Thread(target=self._write, args=(connection, stopped), daemon=True).start()
            while True:
                code = self._handle(connection, json.loads(connection.receive()))
                if code is not None:
                    return code
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConnectionLostError(f"control sent what is not of the protocol: {error!r}") from error
        finally:
            stopped.set()
            self._outbox.wake()
            connection.close()

    def _write(self, connection: WebSocket, stopped: threading.Event) -> None:
        try:
            while True:
                text = self._outbox.take(stopped)
                if text is None:
                    return
                connection.send(text)
        except ConnectionLostError:
            # Wakes the reader, which makes the next connection.
            connection.close()

    def _handle(self, connection: WebSocket, message: dict[str, Any]) -> int | None:
        kind = message["type"]
        if kind == "run":
            if message["run"] not in self._runs:
                self._runs[message["run"]] = Run(message, self._outbox)
        elif kind == "cancel":
            if message["run"] in self._runs:
                self._runs[message["run"]].cancel(message.get("grace_ms", 5000) / 1000)
        elif kind == "ping":
            connection.send(json.dumps({"type": "pong", "nonce": message.get("nonce", "")}))
        elif kind == "ack":
            self._outbox.ack(message["seq"])
            self._forget_runs(message["seq"])
        elif kind == "shutdown":
            self._end_runs(message.get("grace_ms", 5000) / 1000)
            return int(message.get("exit_code", 0))
        # Anything else is from a later version, or an error about a frame of ours: there is nothing to do about it.
        return None

    def _forget_runs(self, acked: int) -> None:
        """Forget the runs whose end control has: it gives them to nobody again, and there may be very many."""
        self._runs = {name: run for name, run in self._runs.items() if not 0 < run.end_seq <= acked}

    def _end_runs(self, grace_s: float) -> None:
        live = [run for run in list(self._runs.values()) if not run.done.is_set()]
        for run in live:
            run.cancel(grace_s)
        until = time.monotonic() + grace_s + LINGER_S
        for run in live:
            run.done.wait(max(0.0, until - time.monotonic()))


def _terminate(_number: int, _frame: object) -> NoReturn:
    raise Terminated


def main() -> NoReturn:
    """Run until control or a signal says stop."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _terminate)
    try:
        url, token = os.environ["OPIFICIA_RUNNER_URL"], os.environ["OPIFICIA_RUNNER_TOKEN"]
    except KeyError as missing:
        sys.exit(f"opificia-runner: {missing.args[0]} is not set; this program is started by the sandbox host")
    code = Runner(url, token).serve()
    # Threads may sit in reads that never end.
    os._exit(code)


if __name__ == "__main__":
    main()
