"""Runs a load client against a peer and accounts for the CPU of everybody: peer, load, server, and the rest of the machine."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from bench.load import Client, LoadError, Server
from bench.machine import Busy
from bench.processes import cpu_seconds, family, settled_cpu_seconds, thread_seconds

# A thread that works for this part of the time is what limits the run.
_SATURATED: Final = 0.93
# More of the machine than this in other hands makes rates (not CPU seconds) doubtful.
FOREIGN_LIMIT: Final = 0.10


@dataclass(slots=True)
class Usage:
    """CPU seconds and wall seconds of a measured window. `peer`: of all its processes; `thread`: of its busiest thread."""

    peer: float
    thread: float
    load: float
    server: float
    machine: float
    seconds: float

    @property
    def foreign_share(self) -> float:
        """The part of the machine that neither peer, load nor server used."""
        capacity = self.seconds * _cores()
        return max(0.0, (self.machine - self.peer - self.load - self.server) / capacity) if capacity else 0.0

    def limited_by(self) -> str | None:
        """Say what was saturated. The load first: when it is, the peer's rate is only a lower bound."""
        if not self.seconds:
            return None
        if max(self.load, self.server) / self.seconds > _SATURATED:
            return "load"
        if self.thread / self.seconds > _SATURATED:
            return "peer"
        if self.machine / self.seconds / _cores() > _SATURATED:
            return "machine"
        return "waiting"


def _cores() -> int:
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True)
class _Reading:
    """Seconds that were used up to one end of the window."""

    peer: float
    server: float
    machine: float
    threads: dict[int, float]


class Window:
    """Takes the readings at both ends of a client's measured window, of the processes that the peer has at that moment."""

    def __init__(self, pids: Sequence[int], server: Server) -> None:
        self._pids = list(pids)
        self._server = server
        self._start: _Reading | None = None
        self._stop: _Reading | None = None

    def _read(self) -> _Reading:
        pids = family(*self._pids)
        machine = Busy.now().busy
        return _Reading(cpu_seconds(pids), cpu_seconds([self._server.pid]), machine, thread_seconds(pids))

    def on_event(self, event: str) -> None:
        """Take a reading at `start` and at `stop`."""
        if event == "start":
            self._start = self._read()
        elif event == "stop":
            self._stop = self._read()

    def usage(self, result: dict[str, Any], *, settled: bool) -> Usage:
        """Return what was used. `settled`: the peer's late work (closing, logging) belongs to the run as well.

        Raises LoadError when nothing was measured.
        """
        if self._start is None or self._stop is None:
            raise LoadError(f"{result['mode']}: nothing was measured: {result.get('first_error') or 'no reason given'}")
        peer = settled_cpu_seconds(self._pids) if settled else self._stop.peer
        before = self._start.threads
        return Usage(
            peer=peer - self._start.peer,
            # A thread that is new began at nothing.
            thread=max((used - before.get(thread, 0.0) for thread, used in self._stop.threads.items()), default=0.0),
            load=result["load_cpu_s"],
            server=self._stop.server - self._start.server,
            machine=self._stop.machine - self._start.machine,
            seconds=result["seconds"],
        )


def run_client(client: Client, pids: Sequence[int], server: Server, *, settled: bool) -> tuple[dict[str, Any], Usage]:
    """Run a client to its end; return its result and who used how much CPU in the measured window."""
    window = Window(pids, server)
    client.on_event = window.on_event
    result = client.run()
    return result, window.usage(result, settled=settled)
