"""Results: one record for each peer, scenario and round; medians and spread over rounds; raw JSON for whoever doubts them."""

import json
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class Record:
    """What one peer did in one scenario in one round.

    `values` are the measured numbers by name (units in the name). `problems` is empty, or the record is no result.
    `limited_by` says what had no more to give: a thread of the peer, the load, the machine, or nothing (it waited).
    `foreign_cpu` is the share of the machine that other programs took meanwhile. Both are None where they were not measured.
    """

    suite: str
    scenario: str
    peer: str
    round: int
    values: dict[str, float]
    problems: list[str] = field(default_factory=list)
    limited_by: str | None = None
    foreign_cpu: float | None = None
    raw: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Summary:
    """One number over all rounds that count."""

    median: float
    least: float
    most: float
    rounds: int

    @property
    def spread(self) -> float:
        """The distance between the extremes as a part of the median."""
        return (self.most - self.least) / self.median if self.median else 0.0


def summarize(records: Iterable[Record], scenario: str, peer: str, value: str) -> Summary | None:
    """Return median and extremes of a value over the rounds without problems; None without any."""
    found = [
        record.values[value]
        for record in records
        if record.scenario == scenario and record.peer == peer and not record.problems and value in record.values
    ]
    return Summary(statistics.median(found), min(found), max(found), len(found)) if found else None


@dataclass(slots=True)
class Run:
    """All that a run has found out, as it is written to bench/results."""

    date: str
    command: str
    machine: dict[str, Any]
    peers: dict[str, dict[str, Any]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    # Peers that should have been measured and did not start.
    failed: list[str] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> "Run":
        """Read what `save` wrote."""
        document = json.loads(path.read_text())
        document["records"] = [Record(**record) for record in document["records"]]
        return cls(**document)

    def of(self, suite: str) -> list[Record]:
        """Return one suite's records."""
        return [record for record in self.records if record.suite == suite]
