"""The machine's clock is set while the gateway serves: no deadline fires early, each fires in its time, nothing hangs."""

import asyncio
import time
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.net.test_model import connected, message
from tests.net.test_reload import END, START, TOLD, Story, telling
from tests.net.test_tunnel import opened
from tests.support.clock import DAY_S, HOUR_S, settable_clock
from tests.support.gateway_process import GatewayProcess
from tests.support.patience import until
from tests.support.sockets import Client, echo_server

HEAD_S = 3.0
LIMITS = {"drain_ms": 5_000, "head_timeout_ms": int(HEAD_S * 1000)}


def closed(gateway: GatewayProcess) -> list[dict[str, Any]]:
    """The audit lines of tunnels that have ended."""
    return [line for line in gateway.audit("s1") if (line["event"], line["kind"]) == ("close", "connect")]


async def echoed(client: Client, data: bytes) -> None:
    await client.send(data)
    assert await client.read_exactly(len(data)) == data


async def ended(client: Client) -> None:
    client.end()
    assert await client.read_to_end() == b""


async def test_a_clock_that_is_set_neither_ends_nor_holds_up_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story()
    with settable_clock() as clock:
        for name, value in clock.environment.items():
            monkeypatch.setenv(name, value)
        async with telling(story.tell, limits=LIMITS) as gateway, echo_server() as server:
            target = f"127.0.0.1:{server.port}"
            async with await opened(gateway, target) as tunnel, connected(gateway) as asking:
                await asking.send(message(stream=True))
                await story.begun()
                story.add(START)
                for number, offset in enumerate((HOUR_S, -DAY_S), 1):
                    async with await gateway.client() as slow:
                        began = time.monotonic()
                        await slow.send(b"CONNECT ")
                        # Accepted after it, so its time runs.
                        async with await opened(gateway, target) as fresh:
                            clock.set(offset)
                            await echoed(fresh, b"new")
                            await ended(fresh)
                        # Its time ends by the clock that nobody sets: not before, and at all.
                        assert b" 408 " in await slow.read_to_end()
                        assert time.monotonic() - began >= HEAD_S * 0.9
                    await until(lambda seen=number: len(closed(gateway)) == seen)  # type: ignore[misc]
                    logged = datetime.fromisoformat(closed(gateway)[-1]["ts"]) - datetime.now(UTC)
                    assert abs(logged.total_seconds() - offset) < 600
                    await echoed(tunnel, b"still there")
                story.add(END, TOLD)
                assert (await asking.reply()).status == 200
                # What is handed over has its times by that clock as well.
                await asyncio.to_thread(gateway.restart)
                await echoed(tunnel, b"still there")
                await ended(tunnel)
                await until(lambda: len(closed(gateway)) == 3)
            assert all(0 <= line["ms"] < 600_000 for line in gateway.audit("s1"))
            assert "Traceback" not in gateway.log()
