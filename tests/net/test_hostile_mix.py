"""Every kind of request, cut, doubled and garbled, to hosts that are no better: nothing breaks, and nothing stays behind."""

import asyncio
import contextlib
import os
import random
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from tests.support.gateway_process import TOKEN, gateway_process
from tests.support.listener import StreamServer
from tests.support.patience import PATIENCE_S
from tests.support.sockets import basic

CONNECTIONS: Final = 1_500
AT_ONCE: Final = 40
CREDENTIALS: Final = f"Proxy-Authorization: {basic('s1', TOKEN)}\r\n".encode()
KEY: Final = b"x-api-key: %b\r\n" % TOKEN.encode()
BODY: Final = b'{"model":"claude-x","max_tokens":1}'
CHUNKED: Final = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
# What tips a careless parser over.
ODD: Final = (
    b"\r\n", b"\n", b"\r", b"\0", b" ", b":", b"\xff", b"%00", b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n",
    b"HTTP/1.0", b"CONNECT ", b"http://", b"Host: x\r\n", b"Connection: close\r\n", b"Expect: 100-continue\r\n", b"0\r\n\r\n",
    b"fffffff\r\n", b"a" * 9000,
)  # fmt: skip
ANSWERS: Final = (
    b"", b"\0\1\2garbage\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n123",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel",
    b'HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: {"type":"message_stop"}\n\n',
    b"HTTP/1.1 401 no\r\nContent-Length: 5\r\n\r\nsk-ab",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 x\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
)  # fmt: skip


def requests(host: bytes) -> list[bytes]:
    """Return one request of each kind, all of them good."""
    tunnel = b"CONNECT %b HTTP/1.1\r\nHost: %b\r\n" + CREDENTIALS + b"\r\n"
    plain = b"POST http://%b/x HTTP/1.1\r\nHost: %b\r\n" % (host, host) + CREDENTIALS
    model = b"POST /model/%b/v1/messages HTTP/1.1\r\nHost: g\r\n" + KEY
    upgrade = b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    return [
        tunnel % (host, host) + b"early",
        tunnel % (b"127.0.0.1:443", b"127.0.0.1:443") + b"\x16\x03\x01\x00\x20",
        tunnel % (b"127.0.0.1:80", b"127.0.0.1:80") + b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        plain + b"Content-Length: 5\r\n\r\nhello" + plain + b"\r\n",
        plain + CHUNKED,
        model % b"s1" + b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY),
        model % b"s2" + CHUNKED,
        b"GET /model/s1/v1/models HTTP/1.1\r\nHost: g\r\n" + KEY + b"\r\n",
        b"GET /runner?session=s1 HTTP/1.1\r\nHost: g\r\nAuthorization: Bearer %b\r\n" % TOKEN.encode() + upgrade,
    ]


def garbled(data: bytes, others: list[bytes], chance: random.Random) -> bytes:
    """Return `data` with up to four things done to it."""
    for _ in range(chance.choice((0, 0, 1, 1, 2, 4))):
        place = chance.randrange(len(data) + 1)
        head, rest = data[:place], data[place:]
        data = chance.choice(
            (
                head + bytes([chance.randrange(256)]) + rest[1:],
                head + chance.choice(ODD) + rest,
                head + rest[chance.randrange(1, 20) :],
                head + head[-30:] + rest,
                data + chance.choice(others),
                head,
            )
        )
    return data


@contextlib.asynccontextmanager
async def careless_hosts(chance: random.Random) -> AsyncIterator[tuple[int, Path]]:
    """Run a TCP and a unix server that answer anything at all."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            await reader.read(2000)
            writer.write(chance.choice(ANSWERS))
            await writer.drain()
        if chance.random() < 0.3:
            writer.transport.abort()
        writer.close()

    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        control = Path(folder) / "control.sock"
        async with StreamServer(serve, ("127.0.0.1", 0)) as tcp, StreamServer(serve, control):
            control.chmod(0o666)
            yield tcp.port, control


async def attack(port: int, data: bytes, chance: random.Random) -> None:
    """Send `data`, whole or in pieces, read a little or nothing, and leave in one way or another."""
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        size = chance.choice((37, len(data) + 1))
        for start in range(0, len(data), size):
            writer.write(data[start : start + size])
            await writer.drain()
        if chance.random() < 0.2:
            writer.write_eof()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(chance.random() * 0.5):
                await reader.read(100_000)
        if chance.random() < 0.5:
            writer.transport.abort()
        writer.close()


async def test_a_mix_of_everything_breaks_nothing_and_leaves_nothing() -> None:
    chance = random.Random(20261130)
    times = (
        "head_timeout_ms",
        "hello_timeout_ms",
        "egress_idle_ms",
        "model_first_byte_timeout_ms",
        "model_idle_timeout_ms",
    )
    async with careless_hosts(chance) as (port, control):
        config = {
            "model": {"upstream": f"http://127.0.0.1:{port}"},
            "runner": {"upstream": f"unix:{control}"},
            "limits": {**dict.fromkeys(times, 1_000), "egress_slot_wait_ms": 300},
        }
        sessions = [
            {"id": "s1", "egress_budget": {"connections": 8}},
            {"id": "s2", "model_budget": {"output_tokens": 10_000}, "models": ["claude-*"]},
        ]
        with gateway_process(config, sessions) as gateway:
            before = gateway.descriptors()
            kinds = requests(b"127.0.0.1:%d" % port)
            left = iter(range(CONNECTIONS))

            async def attacker() -> None:
                for number in left:
                    if number % 200 == 0:
                        os.kill(gateway.pid, signal.SIGHUP)
                    await attack(gateway.port, garbled(chance.choice(kinds), kinds, chance), chance)

            await asyncio.gather(*(attacker() for _ in range(AT_ONCE)))
            # Whatever hangs is ended by its deadline.
            async with asyncio.timeout(PATIENCE_S):
                while gateway.descriptors() > before + 4:
                    await asyncio.sleep(0.05)
            for word in ("Traceback", "ERROR", "Warning:"):
                assert word not in gateway.log()
            assert TOKEN not in gateway.log()
            client = await gateway.client()
            assert (await client.ask(kinds[0], body=False)).status == 200
            await client.close()
