"""How long tests wait: far longer than anything takes, or exactly as long as is promised, on a clock that knows load."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

# Every wait of a test ends: what takes longer than this on a loaded machine hangs.
PATIENCE_S: Final = 60.0
_TICK_S: Final = 0.01


async def until(condition: Callable[[], bool], what: str = "the condition", seconds: float = PATIENCE_S) -> None:
    """Wait for a condition that no event announces."""
    try:
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(_TICK_S)
    except TimeoutError:
        raise AssertionError(f"{what} did not come true") from None


@asynccontextmanager
async def within(seconds: float) -> AsyncIterator[None]:
    """Fail a block that takes longer. Raises TimeoutError.

    Counted in naps of 10 ms: a machine that keeps us from running stretches each nap, and what we wait for with it.
    """
    async with asyncio.timeout(None) as limit:

        async def count() -> None:
            for _ in range(round(seconds / _TICK_S)):
                await asyncio.sleep(_TICK_S)
            limit.reschedule(asyncio.get_running_loop().time())

        counting = asyncio.get_running_loop().create_task(count())
        try:
            yield
        finally:
            counting.cancel()
