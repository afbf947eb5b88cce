"""Runs on the stand-in: tunnels that check every byte, and one model stream, through the gateway's door until told to stop.

Only the standard library. `load.py tunnels N` or `load.py stream`; prints one JSON line at the end.
"""

import base64
import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DOOR = "/run/opificia/door/sandbox.sock"
ENOUGH = "/run/enough"
TOKEN = "token-of-a-test"
PIECE = 60_000
PROVIDER_PORT = 9000


def echo(connection: socket.socket) -> None:
    """Send back what comes."""
    with connection, contextlib.suppress(OSError):
        while data := connection.recv(1 << 16):
            connection.sendall(data)


def serve(server: socket.socket, handle: Callable[[socket.socket], None]) -> None:
    """Give each connection a thread."""
    while True:
        connection, _ = server.accept()
        threading.Thread(target=handle, args=(connection,), daemon=True).start()


def door(request: bytes) -> socket.socket:
    """Connect to the gateway and send a request."""
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(180)
    sock.connect(DOOR)
    sock.sendall(request)
    return sock


def read_head(sock: socket.socket) -> bytes:
    """Read a head and not a byte more."""
    head = b""
    while b"\r\n\r\n" not in head:
        data = sock.recv(1)
        if not data:
            raise ConnectionError(f"closed after {head!r}")
        head += data
    return head


def exchange(port: int, result: dict[str, Any]) -> None:
    """Send random bytes through a tunnel to the echo and compare, until it is enough."""
    try:
        target = f"127.0.0.1:{port}"
        credentials = base64.b64encode(f"s1:{TOKEN}".encode()).decode()
        head = f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\nProxy-Authorization: Basic {credentials}\r\n\r\n"
        with door(head.encode()) as sock:
            answer = read_head(sock)
            if b" 200 " not in answer:
                raise ConnectionError(answer.decode("latin-1"))
            while not Path(ENOUGH).exists():
                data = os.urandom(PIECE)
                sock.sendall(data)
                back = b""
                while len(back) < len(data):
                    piece = sock.recv(1 << 16)
                    if not piece:
                        raise ConnectionError("closed")
                    back += piece
                if back != data:
                    raise ValueError("other bytes came back")
                result["bytes"] += len(data)
                result["progress"] = True
    except (OSError, ValueError) as error:
        result["error"] = f"{type(error).__name__}: {error}"


def tunnels(count: int) -> None:
    """Run many exchanges at once."""
    server = socket.create_server(("127.0.0.1", 0), backlog=1000)
    threading.Thread(target=serve, args=(server, echo), daemon=True).start()
    results = [{"bytes": 0, "error": "", "progress": False} for _ in range(count)]
    threads = [threading.Thread(target=exchange, args=(server.getsockname()[1], each)) for each in results]
    for thread in threads:
        thread.start()
    while not all(each["progress"] or each["error"] for each in results):
        time.sleep(0.05)
    print("running", flush=True)
    for thread in threads:
        thread.join()
    errors = [each["error"] for each in results if each["error"]]
    print(json.dumps({"tunnels": count, "bytes": sum(each["bytes"] for each in results), "errors": errors}), flush=True)


def provide(connection: socket.socket) -> None:
    """Stream numbered events until told that it is enough."""
    with connection:
        read_head(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        number = 0
        while not Path(ENOUGH).exists():
            event = f'data: {{"number":{number}}}\n\n'.encode()
            connection.sendall(b"%x\r\n%b\r\n" % (len(event), event))
            number += 1
            time.sleep(0.02)
        event = f'data: {{"last":{number}}}\n\n'.encode()
        connection.sendall(b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event))


def stream() -> None:
    """Read one stream from its first event to its last."""
    server = socket.create_server(("127.0.0.1", PROVIDER_PORT))
    threading.Thread(target=serve, args=(server, provide), daemon=True).start()
    head = f"GET /model/s1/v1/models HTTP/1.1\r\nHost: gateway\r\nx-api-key: {TOKEN}\r\n\r\n"
    with door(head.encode()) as sock:
        answer = read_head(sock)
        if b" 200 " not in answer:
            raise SystemExit(answer.decode("latin-1"))
        print("running", flush=True)
        data = b""
        while not data.endswith(b"\r\n0\r\n\r\n"):
            piece = sock.recv(1 << 16)
            if not piece:
                raise SystemExit("the stream was cut")
            data += piece
    events = [json.loads(line[6:]) for line in data.split(b"\r\n") if line.startswith(b"data: ")]
    numbers = [event.get("number", event.get("last")) for event in events]
    print(json.dumps({"events": len(events), "in_order": numbers == list(range(len(events)))}), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "tunnels":
        tunnels(int(sys.argv[2]))
    else:
        stream()
