"""Interleaved rounds: every peer answers every scenario once a round, in another order each time."""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.load import LoadError, Server
from bench.measure import Usage
from bench.peers.base import CheckError, Ground, Peer
from bench.processes import NotRunningError
from bench.records import Record, Run

# Of each client's samples, as the load programs name them.
PERCENTILES: Final = ("p50", "p90", "p99", "p999", "max")
# Starting a peer and proving its checks, once a round.
_START_S: Final = 1.5


@dataclass(frozen=True, slots=True)
class Settings:
    """How long and how often. `seconds` is the length of one measurement."""

    rounds: int = 3
    seconds: float = 3.0
    idle_tunnels: int = 5_000
    concurrency: int = 32

    @classmethod
    def quick(cls) -> "Settings":
        """Return what shows that all works, as fast as that can be shown; its numbers mean nothing."""
        return cls(rounds=1, seconds=0.2, idle_tunnels=100)


@dataclass(slots=True)
class Stage:
    """What scenarios run on."""

    settings: Settings
    server: Server
    ground: Ground
    hello: Path


class Scenario(ABC):
    """One question put to a peer. `result` fills in the values and returns the clients' own results for comparison."""

    def __init__(self, name: str) -> None:
        self.name = name

    def applies(self, peer: Peer, stage: Stage) -> bool:
        """Tell whether the question makes sense for this peer."""
        del peer, stage
        return True

    def expected_s(self, settings: Settings) -> float:
        """Return about how long one run takes: warm-up, measurement, and the comparison with the audit log."""
        return settings.seconds + 1.2

    @abstractmethod
    def run(self, peer: Peer, stage: Stage, record: Record) -> list[dict[str, Any]]:
        """Measure; fill `record.values`. Returns the results of all load clients."""


def take_usage(record: Record, usage: Usage) -> None:
    """Note what limited the run, and how busy the machine was with others."""
    record.limited_by = usage.limited_by()
    record.foreign_cpu = round(usage.foreign_share, 3)


def take_latency(record: Record, result: dict[str, Any], samples: str = "latency_us", prefix: str = "") -> None:
    """Note the percentiles of a client's samples."""
    found = result.get(samples, {})
    record.values.update({f"{prefix}{name}_us": found[name] for name in PERCENTILES if name in found})


def expected_s(peers: Sequence[Peer], chosen: Sequence[Scenario], settings: Settings) -> float:
    """Return about how long `run_rounds` takes."""
    once = _START_S + sum(scenario.expected_s(settings) for scenario in chosen)
    return settings.rounds * len(peers) * once


def run_rounds(
    run_: Run,
    suite: str,
    peers: Sequence[Peer],
    chosen: Sequence[Scenario],
    stage: Stage,
    say: Callable[[str], None],
) -> None:
    """Run all rounds and add their records to `run_`; `say` is told of each step."""
    for number in range(stage.settings.rounds):
        _run_round(run_, suite, shuffled(peers, number), chosen, stage, number, say)
    # In the order of the tables again.
    run_.peers = {peer.name: run_.peers[peer.name] for peer in peers if peer.name in run_.peers}


def shuffled(peers: Sequence[Peer], number: int) -> list[Peer]:
    """Return a round's order: another one each round, in which nobody always follows the same, and the same in each run."""
    # Not a rotation: its last peers would never begin, and each would follow the same one in every round.
    return random.Random(number).sample(peers, len(peers))


def _run_round(
    run_: Run,
    suite: str,
    peers: Sequence[Peer],
    chosen: Sequence[Scenario],
    stage: Stage,
    number: int,
    say: Callable[[str], None],
) -> None:
    started: list[Peer] = []
    try:
        for peer in peers:
            try:
                peer.start(stage.ground)
            except (CheckError, NotRunningError, LoadError) as error:
                run_.failed.append(f"round {number + 1}: {peer.name} did not start: {error}")
                continue
            started.append(peer)
            run_.peers.setdefault(
                peer.name,
                {"about": peer.about(), "checks": peer.checks, "forward_proxy": peer.is_forward_proxy},
            )
        for scenario in chosen:
            for peer in started:
                if not scenario.applies(peer, stage):
                    continue
                say(f"round {number + 1}/{stage.settings.rounds}: {scenario.name}: {peer.name}")
                run_.records.append(_measure(suite, scenario, peer, stage, number))
    finally:
        for peer in started:
            peer.stop()


def _measure(suite: str, scenario: Scenario, peer: Peer, stage: Stage, number: int) -> Record:
    record = Record(suite, scenario.name, peer.name, number, {})
    try:
        results = scenario.run(peer, stage, record)
    except LoadError as error:
        record.problems.append(str(error))
        return record
    record.raw["clients"] = results
    for result in results:
        if result["errors"]:
            record.problems.append(f"{result['errors']} errors, the first: {result['first_error']}")
    record.problems += peer.compare(results)
    return record
