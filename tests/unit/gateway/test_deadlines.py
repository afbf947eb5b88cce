"""Deadlines: one timer for many things with the same limit."""

import asyncio

from gateway.net.deadlines import Deadlines
from tests.support.patience import PATIENCE_S


async def test_expires_what_was_not_discarded_in_order_and_nothing_else() -> None:
    expired: list[str] = []
    all_gone = asyncio.Event()

    def expire(item: str) -> None:
        expired.append(item)
        if item == "last":
            all_gone.set()

    deadlines: Deadlines[str] = Deadlines(asyncio.get_running_loop(), 0.05, expire)
    for item in ("first", "gone", "second", "last"):
        deadlines.add(item)
    deadlines.discard("gone")
    deadlines.discard("never there")
    async with asyncio.timeout(PATIENCE_S):
        await all_gone.wait()
    assert expired == ["first", "second", "last"]
    assert len(deadlines) == 0


async def test_adding_again_starts_the_time_anew_and_an_expiry_may_add() -> None:
    loop = asyncio.get_running_loop()
    times: list[float] = []
    done = asyncio.Event()

    def expire(item: str) -> None:
        times.append(loop.time())
        if len(times) == 1:
            deadlines.add(item)
        else:
            done.set()

    deadlines: Deadlines[str] = Deadlines(loop, 0.05, expire)
    started = loop.time()
    deadlines.add("x")
    async with asyncio.timeout(PATIENCE_S):
        await done.wait()
    assert times[0] - started >= 0.05
    assert times[1] - times[0] >= 0.05


async def test_closing_expires_nothing() -> None:
    deadlines: Deadlines[str] = Deadlines(asyncio.get_running_loop(), 0.001, lambda _: 1 / 0)
    deadlines.add("x")
    deadlines.close()
    done = asyncio.Event()
    asyncio.get_running_loop().call_later(0.05, done.set)
    await done.wait()
