"""A fault of a chaos test, which may cut some kinds of things, and the time in which it did."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

World = TypeVar("World")


@dataclass(frozen=True)
class Fault(Generic[World]):
    """`cuts`: kinds of things that may fail while it lasts, and for `after_s`: `tunnel`, `model`, `launch`, `session`.

    And `exit`: with live-restore a container that ends while the engine is away loses what it has printed since, and in the
    moment in which the engine goes also its exit code, which is 255 then (Docker 20.10).
    """

    name: str
    act: Callable[[World], Awaitable[None]]
    cuts: frozenset[str] = frozenset()
    after_s: float = 0.0


@dataclass(frozen=True)
class Window(Generic[World]):
    """A fault as it happened, in seconds since the epoch."""

    fault: Fault[World]
    begin: float
    end: float

    def explains(self, kind: str, begin: float, end: float) -> bool:
        """Tell whether something of this kind that failed between two times may have failed by it."""
        return kind in self.fault.cuts and begin <= self.end + self.fault.after_s and end >= self.begin
