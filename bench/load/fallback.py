"""`load.c` in plain Python, for machines without a C compiler: the same commands, options and output.

It costs several times as much CPU, so that it is often what limits a run; results say so. A thread a tunnel keeps it simple.
"""

import argparse
import itertools
import json
import os
import resource
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final

_CHUNK: Final = 1 << 20
_COUNT_BYTES: Final = 8


def _print(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


# ---- server


def _read_mode(sock: socket.socket) -> bytes:
    """Skip a TLS record in front and return the mode byte; empty at the end."""
    first = sock.recv(1)
    if first == b"\x16":
        header = sock.recv(4, socket.MSG_WAITALL)
        sock.recv(int.from_bytes(header[2:], "big"), socket.MSG_WAITALL)
        first = sock.recv(1)
    return first


def _serve_one(sock: socket.socket) -> None:
    buffer = bytearray(_CHUNK)
    try:
        with sock:
            mode = _read_mode(sock)
            if mode == b"1":
                sock.send(mode)
            elif mode == b"e":
                while data := sock.recv(1 << 16):
                    sock.sendall(data)
            elif mode == b"k":
                count = 0
                while size := sock.recv_into(buffer):
                    count += size
                sock.sendall(count.to_bytes(_COUNT_BYTES, sys.byteorder))
            elif mode in (b"s", b"b"):
                _source(sock, buffer)
    except OSError:
        return


def _source(sock: socket.socket, buffer: bytearray) -> None:
    """Send without end until the other side has ended, taking what it sends."""
    sock.setblocking(False)
    payload = bytes(_CHUNK)
    with selectors.DefaultSelector() as selector:
        selector.register(sock, selectors.EVENT_READ | selectors.EVENT_WRITE)
        while True:
            for _, events in selector.select():
                if events & selectors.EVENT_READ and not sock.recv_into(buffer):
                    return
                if events & selectors.EVENT_WRITE:
                    sock.send(payload)


def _serve(addresses: list[str]) -> None:
    servers = [socket.create_server(_address(text), backlog=4096) for text in addresses]
    _print({"ports": [server.getsockname()[1] for server in servers]})

    def accept(server: socket.socket) -> None:
        while True:
            sock, _ = server.accept()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=_serve_one, args=(sock,), daemon=True).start()

    for server in servers:
        threading.Thread(target=accept, args=(server,), daemon=True).start()
    sys.stdin.read()


# ---- clients


class _Load:
    """The counts that all tunnels of a client share."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.first = open(options.hello, "rb").read() if options.hello else b""  # noqa: PTH123, SIM115
        self.lock = threading.Lock()
        self.errors = 0
        self.first_error = ""
        self.tunnels = self.up = self.down = 0
        self.latencies: list[float] = []
        self._numbers = itertools.count(1)

    def failed(self, error: Exception) -> None:
        with self.lock:
            self.errors += 1
            self.first_error = self.first_error or str(error) or type(error).__name__

    def open(self, mode: bytes) -> socket.socket:
        """Return an open tunnel in which the first bytes were sent. Raises OSError."""
        options = self.options
        sock = socket.create_connection(_address(options.via), timeout=options.timeout)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            if options.connect:
                self._connect(sock)
            sock.sendall(self.first + mode)
        except OSError:
            sock.close()
            raise
        with self.lock:
            self.tunnels += 1
            self.up += len(self.first) + 1
        return sock

    def _connect(self, sock: socket.socket) -> None:
        options = self.options
        head = f"CONNECT {options.connect} HTTP/1.1\r\nHost: {options.connect}\r\n"
        if options.fresh:
            head += f"User-Agent: bench/{next(self._numbers):012}\r\n"
        if options.auth:
            head += f"Proxy-Authorization: Basic {options.auth}\r\n"
        sock.sendall(head.encode() + b"\r\n")
        reply = b""
        while not reply.endswith(b"\r\n\r\n"):
            data = sock.recv(512)
            if not data:
                raise ConnectionResetError("reply to CONNECT: connection closed")
            reply += data
            if len(reply) >= 12 and reply[9:12] != b"200":
                raise OSError("CONNECT: " + reply.partition(b"\r\n")[0].decode("latin-1"))

    def result(self, mode: str, seconds: float, cpu: float, **more: object) -> None:
        found: dict[str, Any] = {
            "mode": mode, "errors": self.errors, "first_error": self.first_error, "tunnels": self.tunnels,
            "seconds": seconds, "load_cpu_s": cpu, "total_up": self.up, "total_down": self.down, **more,
        }  # fmt: skip
        if self.latencies:
            ordered = sorted(self.latencies)
            parts = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999, "max": 1.0}
            found["latency_us"] = {"count": len(ordered)} | {
                name: round(ordered[round(part * (len(ordered) - 1))] * 1e6, 1) for name, part in parts.items()
            }
        _print(found)


def _threads(number: int, work: Callable[[], None]) -> list[threading.Thread]:
    threads = [threading.Thread(target=work) for _ in range(number)]
    for thread in threads:
        thread.start()
    return threads


class _Phase:
    """Whether it is measured now, and whether it is over."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.measured = self.over = False
        self._options = options

    def run(self) -> tuple[float, float]:
        """Go through warm-up and measurement; return wall and CPU seconds of the latter."""
        time.sleep(self._options.warmup)
        began, cpu = time.monotonic(), time.process_time()
        self.measured = True
        _print({"event": "start"})
        time.sleep(self._options.seconds)
        self.measured = False
        seconds, used = time.monotonic() - began, time.process_time() - cpu
        _print({"event": "stop"})
        self.over = True
        return seconds, used


def _connect(load: _Load) -> None:
    options = load.options
    phase = _Phase(options)
    left = iter(range(options.total)) if options.total else itertools.repeat(0)
    measured = 0

    def work() -> None:
        nonlocal measured
        while not phase.over:
            with load.lock:
                if next(left, None) is None:
                    return
            began, latencies = time.monotonic(), []
            try:
                with load.open(b"1") as sock:
                    answer = sock.recv(16)
                    latencies.append(time.monotonic() - began)
                    if answer != b"1" or sock.recv(16):
                        raise OSError("another answer than the byte sent")
            except OSError as error:
                load.failed(error)
                latencies.clear()
            with load.lock:
                load.down += len(latencies)
                if phase.measured:
                    measured += 1
                    load.latencies += latencies

    if options.total:
        phase.measured = True
        began, cpu = time.monotonic(), time.process_time()
        _print({"event": "start"})
        for thread in _threads(options.concurrency, work):
            thread.join()
        seconds, cpu = time.monotonic() - began, time.process_time() - cpu
        _print({"event": "stop"})
    else:
        threads = _threads(options.concurrency, work)
        seconds, cpu = phase.run()
        for thread in threads:
            thread.join()
    load.result("connect", seconds, cpu, connections=measured)


def _echo(load: _Load) -> None:
    phase = _Phase(load.options)
    message = b"x" * load.options.size
    pace = load.options.pace / 1000

    def work() -> None:
        rounds = 0
        latencies = []
        try:
            with load.open(b"e") as sock:
                due = time.monotonic()
                while not phase.over:
                    began = time.monotonic()
                    if pace:
                        # One that is due while the last is on its way waits, and that is part of its latency.
                        time.sleep(max(0.0, due - began))
                        began, due = due, due + pace
                    sock.sendall(message)
                    if len(sock.recv(len(message), socket.MSG_WAITALL)) < len(message):
                        raise ConnectionResetError("echo: connection closed")
                    rounds += 1
                    if phase.measured:
                        latencies.append(time.monotonic() - began)
        except OSError as error:
            load.failed(error)
        with load.lock:
            load.latencies += latencies
            load.up += rounds * len(message)
            load.down += rounds * len(message)

    threads = _threads(load.options.tunnels, work)
    seconds, cpu = phase.run()
    for thread in threads:
        thread.join()
    load.result("echo", seconds, cpu)


def _bulk(load: _Load) -> None:
    phase = _Phase(load.options)
    up, down = load.options.direction != "down", load.options.direction != "up"
    measured: list[int] = []
    ended = [0]
    payload = bytes(_CHUNK)

    def work() -> None:
        sent = received = counted = 0
        try:
            with load.open(b"b" if up and down else b"k" if up else b"s") as sock:
                buffer = bytearray(_CHUNK)
                sock.setblocking(False)
                with selectors.DefaultSelector() as selector:
                    selector.register(sock, selectors.EVENT_READ | (selectors.EVENT_WRITE if up else 0))
                    while not phase.over:
                        for _, events in selector.select(0.1):
                            size = 0
                            if events & selectors.EVENT_READ:
                                size = sock.recv_into(buffer)
                                received += size
                                if not size:
                                    raise ConnectionResetError("tunnel: connection closed")
                            if events & selectors.EVENT_WRITE:
                                sent += (took := sock.send(payload))
                                size += took
                            counted += size if phase.measured else 0
                sock.settimeout(load.options.timeout)
                sock.shutdown(socket.SHUT_WR)
                while size := sock.recv_into(buffer):
                    received += size
            ended[0] += 1
        except OSError as error:
            load.failed(error)
        with load.lock:
            load.up += sent
            load.down += received
            measured.append(counted)

    threads = _threads(load.options.tunnels, work)
    seconds, cpu = phase.run()
    for thread in threads:
        thread.join()
    more = {
        "bytes": sum(measured),
        "ended_in_order": ended[0],
        "least_bytes": min(measured),
        "most_bytes": max(measured),
    }
    load.result("bulk", seconds, cpu, **more)


def _idle(load: _Load) -> None:
    held: list[socket.socket] = []
    for _ in range(load.options.tunnels):
        try:
            held.append(load.open(b"s" if load.options.stalled else b"e"))
        except OSError as error:
            load.failed(error)
    _print({"event": "open", "tunnels": len(held), "errors": load.errors})
    sys.stdin.read()
    lost = 0
    for sock in held:
        sock.setblocking(False)
        try:
            if not load.options.stalled:
                sock.recv(1)
                lost += 1
        except BlockingIOError:
            pass
        except OSError:
            lost += 1
        sock.close()
    if lost:
        load.failed(OSError(f"{lost} tunnels did not stay open"))
    load.result("idle", 0, 0, lost=lost)


def main() -> None:
    """Run the command line of `load.c`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=["serve", "connect", "bulk", "echo", "idle"])
    parser.add_argument("--listen", action="append", default=[])
    for name in ("via", "connect", "auth", "hello"):
        parser.add_argument(f"--{name}")
    for name, number in (("total", 0), ("concurrency", 32), ("tunnels", 1), ("window", 32), ("size", 1)):
        parser.add_argument(f"--{name}", type=int, default=number)
    for name, seconds in (("seconds", 3.0), ("warmup", 0.5), ("timeout", 10.0), ("pace", 0.0)):
        parser.add_argument(f"--{name}", type=float, default=seconds)
    parser.add_argument("--direction", default="down")
    parser.add_argument("--stalled", action="store_true")
    parser.add_argument("--fresh", action="store_true")
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if options.mode == "serve":
        _serve(options.listen)
        os._exit(0)  # threads still serve
    {"connect": _connect, "bulk": _bulk, "echo": _echo, "idle": _idle}[options.mode](_Load(options))


if __name__ == "__main__":
    main()
