"""A fault of a chaos test, which may cut some kinds of things, the order of many, and the time in which one did."""

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Generic, Protocol, TypeVar

from control.client import ControlClient, ControlUnavailableError

# How long a host may take to be well again.
READY_S: Final = 180.0


class Breakable(Protocol):
    """A host that can be broken."""

    @property
    def control(self) -> ControlClient:
        """Its API."""

    async def said(self) -> str:
        """What its parts have logged."""


World = TypeVar("World", bound=Breakable)


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


def order(faults: Sequence[Fault[World]], rng: random.Random, few: int, always: str) -> list[Fault[World]]:
    """Return the faults in an order that `rng` decides; not 0, `few` says how many of them beside the one that is never left out."""
    drawn = rng.sample(faults, len(faults))
    if not few:
        return drawn
    kept = next(fault for fault in drawn if fault.name == always)
    drawn.remove(kept)
    drawn.insert(rng.randrange(few + 1), kept)
    return drawn[: few + 1]


@dataclass
class Schedule(Generic[World]):
    """Does every fault once and then any, in an order that `seed` decides, until `seconds` have passed.

    With `few`, only so many, and the one that is `always` among them.
    """

    world: World
    faults: Sequence[Fault[World]]
    always: str
    seed: int
    few: int
    # Called after each fault, when the host is well again.
    after: Callable[[Fault[World]], Awaitable[None]]
    windows: list[Window[World]] = field(default_factory=list)

    async def run(self, seconds: float) -> None:
        """Break, wait until the host is well again, break the next."""
        rng = random.Random(self.seed)
        until_s = time.monotonic() + seconds
        first = True
        while first or time.monotonic() < until_s:
            for fault in order(self.faults, rng, self.few, self.always):
                if not first and time.monotonic() >= until_s:
                    break
                begin = time.time()
                await fault.act(self.world)
                await self._healthy(fault)
                self.windows.append(Window(fault, begin, time.time()))
                await self.after(fault)
                await asyncio.sleep(rng.uniform(0.2, 1.0))
            first = False

    async def _healthy(self, fault: Fault[World]) -> None:
        try:
            async with asyncio.timeout(READY_S):
                while True:
                    with contextlib.suppress(ControlUnavailableError):
                        if (await self.world.control.health()).status == "ok":
                            return
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise AssertionError(f"after {fault.name} the host was not well again\n{await self.world.said()}") from None


@contextlib.contextmanager
def no_more_descriptors(proc: Path, pid: int, run: Callable[[Sequence[str]], object]) -> Iterator[None]:
    """Let a process open nothing more. `proc` is where it is seen, `run` runs a command there.

    Said by its own user: another's limits are for CAP_SYS_RESOURCE (prlimit(2)).
    """
    process = proc / str(pid)
    ids = dict(
        line.split(":\t", 1)
        for line in (process / "status").read_text().splitlines()
        if line.startswith(("Uid", "Gid"))
    )
    uid, gid = (ids[name].split()[0] for name in ("Uid", "Gid"))
    line = next(each for each in (process / "limits").read_text().splitlines() if "open files" in each)
    soft, hard = line.split()[3:5]

    def limit(number: str) -> None:
        user = ["setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups", "--"]
        run([*user, "prlimit", f"--pid={pid}", f"--nofile={number}:{hard}"])

    limit(str(max(int(entry.name) for entry in (process / "fd").iterdir()) + 1))
    try:
        yield
    finally:
        limit(soft)
