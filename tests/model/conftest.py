"""Fixtures of the model proxy's tests: all run on uvloop, as the gateway does."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import uvloop

from tests.model.harness import KEY
from tests.support.provider import FakeProvider


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run on the loop that the gateway runs on; it differs from asyncio's own in when it closes and what it buffers."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
async def provider() -> AsyncIterator[FakeProvider]:
    fake = FakeProvider(KEY)
    await fake.start()
    yield fake
    await fake.close()
