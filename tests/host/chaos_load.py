"""The load of the chaos test: a program that sandboxes run, and the server on the other side of its tunnels.

Each operation is a line of the session's output: what it was, when, and how it failed, if it did. Everything that is
carried is held against its checksum at both ends.
"""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from tests.support.listener import StreamServer

HOST: Final = "bulk.chaos.test"
END: Final = "/work/end"
# The load is over, and all that it had can be given back, before the session ends.
LEAVE: Final = "/work/leave"
# The last of a worker's output.
ENDED: Final = b'"kind": "end"}\n'
TUNNELS: Final = 3
STREAMS: Final = 2

# Arguments: port of the server, seed. It ends when it is told to, by a file. Half of the tunnels take their time, so that every fault meets open ones.
WORKER: Final = f"""
import base64, hashlib, http.client, json, os, random, socket, sys, threading, time, urllib.parse
port, seed = int(sys.argv[1]), sys.argv[2]
proxy = urllib.parse.urlsplit(os.environ["OPIFICIA_EGRESS_PROXY"])
model = urllib.parse.urlsplit(os.environ["ANTHROPIC_BASE_URL"])
words = "".join(f"word {{n}} " for n in range(20))
lock, count = threading.Lock(), 0

def say(**line):
    global count
    with lock:
        count += 1
        print(json.dumps({{"number": count, **line}}), flush=True)

def exactly(peer, size):
    data = bytearray()
    while len(data) < size:
        piece = peer.recv(min(65536, size - len(data)))
        if not piece:
            raise EOFError(f"ended after {{len(data)}} of {{size}} bytes")
        data += piece
    return bytes(data)

def tunnel(rng):
    slow = rng.random() < 0.5
    pieces, pause = (rng.randrange(20, 80), 0.05) if slow else (rng.randrange(16, 96), 0)
    credentials = base64.b64encode(f"{{proxy.username}}:{{proxy.password}}".encode()).decode()
    with socket.create_connection((proxy.hostname, proxy.port), timeout=30) as peer:
        target = f"{HOST}:{{port}}"
        head = f"CONNECT {{target}} HTTP/1.1\\r\\nHost: {{target}}\\r\\nProxy-Authorization: Basic {{credentials}}\\r\\n\\r\\n"
        peer.sendall(head.encode())
        reply = b""
        while b"\\r\\n\\r\\n" not in reply:
            piece = peer.recv(1)
            if not piece:
                raise EOFError("ended in the reply's head")
            reply += piece
        if not reply.startswith(b"HTTP/1.1 200 "):
            raise OSError(reply.split(b"\\r\\n")[0].decode())
        whole = hashlib.sha256()
        for _ in range(pieces):
            piece = rng.randbytes(65536)
            whole.update(piece)
            peer.sendall(piece)
            if exactly(peer, len(piece)) != piece:
                raise ValueError("other bytes came back")
            time.sleep(pause)
        peer.shutdown(socket.SHUT_WR)
        if exactly(peer, 32) != whole.digest():
            raise ValueError("another checksum came back")
        if peer.recv(1):
            raise ValueError("more came than was said")
    return True

def stream(rng):
    connection = http.client.HTTPConnection(model.hostname, model.port, timeout=60)
    try:
        body = json.dumps({{"model": "fake-slow", "max_tokens": 9, "stream": True,
                           "messages": [{{"role": "user", "content": "x" * rng.randrange(1, 100_000)}}]}})
        headers = {{"x-api-key": os.environ["ANTHROPIC_AUTH_TOKEN"], "content-type": "application/json"}}
        connection.request("POST", model.path + "/v1/messages", body, headers)
        reply = connection.getresponse()
        data = reply.read().decode()
        if reply.status != 200:
            raise OSError(f"{{reply.status}} {{reply.reason}}")
        events = [json.loads(line[6:]) for line in data.splitlines() if line.startswith("data: ")]
        text = "".join(event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta")
        if events[-1]["type"] != "message_stop":
            raise EOFError("the stream ended early and looked whole")
        if text != words:
            raise ValueError("another text came")
    finally:
        connection.close()

def work(kind, act, rng):
    while not os.path.exists("{END}"):
        begin, error, wrong = time.time(), "", False
        try:
            act(rng)
        except ValueError as failed:
            error, wrong = str(failed), True
        except (OSError, EOFError, http.client.HTTPException) as failed:
            error = f"{{type(failed).__name__}}: {{failed}}"
        say(kind=kind, begin=begin, end=time.time(), error=error, wrong=wrong)
        if error:
            time.sleep(0.2)

threads = [
    threading.Thread(target=work, args=(kind, act, random.Random(f"{{seed}} {{kind}} {{n}}")))
    for kind, act, times in (("tunnel", tunnel, {TUNNELS}), ("model", stream, {STREAMS}))
    for n in range(times)
]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(json.dumps({{"number": count + 1, "kind": "end"}}), flush=True)
while not os.path.exists("{LEAVE}"):
    time.sleep(0.1)
sys.exit(9)
"""
WORKER_EXIT: Final = 9


@dataclass(frozen=True, slots=True)
class Operation:
    """One tunnel or model stream, in seconds since the epoch. `error` is empty when all of it was right."""

    kind: str
    begin: float
    end: float
    error: str
    wrong: bool


def operations(output: bytes, *, whole: bool = True) -> list[Operation]:
    """Read a worker's output; not `whole`: of one that was ended. Raises AssertionError when a line is missing, doubled or spoilt."""
    *complete, rest = output.split(b"\n")
    lines = [json.loads(line) for line in complete]
    assert [line["number"] for line in lines] == list(range(1, len(lines) + 1)), "lines of the output are missing"
    if whole:
        assert (lines.pop()["kind"], rest) == ("end", b""), "the end of the output is missing"
    return [Operation(line["kind"], line["begin"], line["end"], line["error"], line["wrong"]) for line in lines]


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    whole = hashlib.sha256()
    try:
        while piece := await reader.read(65536):
            whole.update(piece)
            writer.write(piece)
            await writer.drain()
        writer.write(whole.digest())
        await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


@asynccontextmanager
async def far_side() -> AsyncIterator[int]:
    """Run the server that sends back what it is sent, and at the end its checksum; yields its port."""
    async with StreamServer(_answer, ("127.0.0.1", 0)) as server:
        yield server.port
