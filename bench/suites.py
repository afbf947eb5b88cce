"""The suites by name: what each will do, about how long that takes, and doing it."""

import argparse
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Final

from bench import api, egress, handover, model, peers, sandbox
from bench.load import compiler
from bench.peers import Peer
from bench.peers.fetched import LiteLLM, Portkey
from bench.records import Run
from bench.rounds import Scenario, Settings, expected_s

# In the order in which `all` runs them: what is judged first, first.
SUITES: Final = {
    "egress": "the egress proxy against other proxies",
    "model": "the model proxy against other relays",
    "sandbox": "session starts against the engine's own, and a hundred sessions (root)",
    "api": "the control API with 10,000 stored sessions, on SQLite and PostgreSQL",
    "handover": "a checked transfer under restarts and reloads of the gateway, and without (root)",
    "curves": "throughput and rate of the egress proxy, from 1 to 256 tunnels and to 5,000 connections at once",
}


class Job(ABC):
    """One suite with its options. `missing` holds a sentence for each peer that cannot be measured here."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.missing: list[str] = []

    @abstractmethod
    def plan(self) -> str:
        """Return in a few words what will be done."""

    @abstractmethod
    def expected_s(self) -> float:
        """Return about how many seconds it takes on an idle machine."""

    @abstractmethod
    def run(self, run: Run, say: Callable[[str], None]) -> None:
        """Measure and add records to `run`; `say` is told of each step. Raises LoadError, RuntimeError."""


class _ProxyJob(Job):
    """Peers that answer the same scenarios in interleaved rounds."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        super().__init__(name)
        self._settings = Settings.quick() if options.quick else Settings(options.rounds, options.seconds, options.idle)
        self._peers: list[Peer]
        self._chosen: list[Scenario]
        if name == "model":
            self._peers = model.choose_peers(options.peer, options.command)
            fetched = [kind for kind in (LiteLLM, Portkey) if kind.name in options.fetch]
            self._peers += [kind() for kind in fetched if not kind.missing()]
            self.missing = [f"{kind.name}: {kind.missing()}" for kind in fetched if kind.missing()]
            self._chosen = model.scenarios()
        else:
            self._peers, self.missing = peers.choose(options.peer, options.command)
            self._chosen = egress.scaling() if name == "curves" else egress.scenarios()
        self._chosen = _named(self._chosen, options.scenario)

    def plan(self) -> str:
        names = ", ".join(peer.name for peer in self._peers)
        return f"{len(self._chosen)} scenarios, {self._settings.rounds} rounds, peers {names}"

    def expected_s(self) -> float:
        return expected_s(self._peers, self._chosen, self._settings)

    def run(self, run: Run, say: Callable[[str], None]) -> None:
        if compiler() is None:
            run.notes.append("no C compiler: the load generator in Python is often what limits the rate")
        if self.name == "model":
            model.run(run, self._peers, self._chosen, self._settings, say)
        else:
            egress.run(run, self.name, self._peers, self._chosen, self._settings, say)


class _SandboxJob(Job):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__("sandbox")
        self._starts: int = 1 if options.quick else options.starts
        self._sessions: int = sandbox.AT_ONCE if options.quick else options.sessions

    def plan(self) -> str:
        return f"{self._starts} rounds of starts, {self._sessions} sessions, on a private engine"

    def expected_s(self) -> float:
        return sandbox.expected_s(self._starts, self._sessions)

    def run(self, run: Run, say: Callable[[str], None]) -> None:
        sandbox.run(run, self._starts, self._sessions, say)


class _ApiJob(Job):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__("api")
        self._plan = api.Plan.quick() if options.quick else api.Plan(options.rounds, options.requests, options.stored)

    def plan(self) -> str:
        plan = self._plan
        return f"{plan.stored} sessions stored, {plan.rounds} rounds of {plan.requests} requests"

    def expected_s(self) -> float:
        return self._plan.expected_s()

    def run(self, run: Run, say: Callable[[str], None]) -> None:
        api.run(run, self._plan, say)


class _HandoverJob(Job):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__("handover")
        asked = handover.Size(options.gigabytes, options.tunnels, options.restarts)
        self._size = handover.Size(0.2, 10, 2) if options.quick else asked
        self._rounds: int = 1 if options.quick else options.rounds

    def plan(self) -> str:
        size = self._size
        about = f"{size.gigabytes:g} GB in {size.tunnels} tunnels, with {size.restarts} restarts, {size.restarts} reloads, and without"
        return f"{self._rounds} rounds of {about}"

    def expected_s(self) -> float:
        return handover.expected_s(self._size, self._rounds)

    def run(self, run: Run, say: Callable[[str], None]) -> None:
        handover.run(run, self._size, self._rounds, say)


def job(name: str, options: argparse.Namespace) -> Job:
    """Return a suite with its options. Raises ValueError for a peer, command or scenario that it does not have."""
    match name:
        case "sandbox":
            return _SandboxJob(options)
        case "api":
            return _ApiJob(options)
        case "handover":
            return _HandoverJob(options)
        case _:
            return _ProxyJob(name, options)


def _named(known: Sequence[Scenario], names: Sequence[str]) -> list[Scenario]:
    """Return the scenarios that are named in full or by their beginning; all without a name. Raises ValueError."""
    if not names:
        return list(known)
    found = [each for each in known if any(each.name == name or each.name.startswith(name + "-") for name in names)]
    if not found:
        raise ValueError(f"no such scenario; there are {', '.join(each.name for each in known)}")
    return found
