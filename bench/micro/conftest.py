"""Beside each benchmark, what a fixed piece of Python takes at that moment: the unit in which a baseline can be compared.

Another machine, another clock rate or a busy neighbour slows both down alike.
"""

import timeit
from collections.abc import Iterator
from typing import Final

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

_LINE: Final = b"Host: files.packages.example:443\r\nUser-Agent: a-client/1.0\r\nAccept: */*\r\n\r\n"
_TURNS: Final = 100


def _work() -> int:
    """Do a little of what the hot functions do: cut bytes, look up, count, call."""
    found = {b"host": 0, b"accept": 0}
    for line in _LINE.split(b"\r\n"):
        name, _, value = line.partition(b":")
        key = name.lower()
        if key in found:
            found[key] += len(value.strip())
    return sum(found.values()) + int.from_bytes(_LINE[:8])


def _unit_us() -> float:
    return min(timeit.repeat(_work, number=_TURNS, repeat=20)) / _TURNS * 1e6


@pytest.fixture(autouse=True)
def unit(benchmark: BenchmarkFixture) -> Iterator[None]:
    """Note how long the fixed work takes, before and after."""
    if benchmark.disabled:
        yield
        return
    before = _unit_us()
    yield
    benchmark.extra_info["unit_us"] = min(before, _unit_us())
