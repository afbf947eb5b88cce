"""Runs the micro benchmarks, keeps a baseline, and tells what has become slower than noise explains.

A function's time is the fastest of its rounds, divided by the time of a fixed piece of work measured beside it
(`micro/conftest.py`): so the baseline of one machine can be compared with another, or with a busy one. What exceeds the limit is
measured again, and only counts when it does so each time.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from bench.machine import describe

_SUITE: Final = Path(__file__).parent / "micro"
_CHECKOUT: Final = Path(__file__).parent.parent
BASELINE: Final = Path(__file__).parent / "results/micro/baseline.json"
# Slower than the baseline by more than this, in each of so many tries, is a change.
LIMIT: Final = 1.3
TRIES: Final = 4


@dataclass(frozen=True, slots=True)
class Measured:
    """What one function takes: microseconds at best and in the median, and the unit beside it."""

    best_us: float
    median_us: float
    unit_us: float

    @property
    def units(self) -> float:
        """The best time as a multiple of the unit."""
        return self.best_us / self.unit_us


def slower(baseline: Mapping[str, Measured], now: Mapping[str, Measured], limit: float = LIMIT) -> dict[str, float]:
    """Return how many times as long each function takes that exceeds the limit. New functions have nothing to exceed."""
    found = {name: each.units / baseline[name].units for name, each in now.items() if name in baseline}
    return {name: factor for name, factor in found.items() if factor > limit}


def measure(names: Sequence[str] = ()) -> dict[str, Measured]:
    """Run the benchmarks of these names (none: all). Raises RuntimeError when one fails."""
    with tempfile.TemporaryDirectory(prefix="bench-micro-") as folder:
        file = Path(folder) / "result.json"
        status = _pytest(
            names, f"--benchmark-json={file}", "--benchmark-columns=min,median,iqr", "--benchmark-sort=name"
        )
        if status:
            raise RuntimeError(f"the micro benchmarks failed with status {status}")
        document = json.loads(file.read_text())
    return {
        each["fullname"]: Measured(
            round(each["stats"]["min"] * 1e6, 4),
            round(each["stats"]["median"] * 1e6, 4),
            round(each["extra_info"]["unit_us"], 4),
        )
        for each in document["benchmarks"]
    }


def _pytest(names: Sequence[str], *arguments: str) -> int:
    where = names or [str(_SUITE.relative_to(_CHECKOUT))]
    command = [sys.executable, "-m", "pytest", *where, "--override-ini=addopts=", "-p", "no:cacheprovider", "-q"]
    return subprocess.run([*command, *arguments], check=False, cwd=_CHECKOUT).returncode


def load(file: Path = BASELINE) -> dict[str, Measured]:
    """Read a baseline. Raises FileNotFoundError."""
    return {name: Measured(**each) for name, each in json.loads(file.read_text())["functions"].items()}


def save(found: Mapping[str, Measured], file: Path = BASELINE) -> None:
    """Write a baseline, with the date and the machine."""
    document = {
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M UTC}",
        "machine": describe(),
        "functions": {name: asdict(each) for name, each in sorted(found.items())},
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(document, indent=1) + "\n")


def run(*, keep: bool = False, compare: bool = False, once: bool = False) -> int:
    """Run them once each, or measure and then save or compare. Returns the exit status: 1 when something became slower."""
    if once:
        return _pytest((), "--benchmark-disable")
    found = measure()
    if keep:
        save(found)
    return _compare(found) if compare else 0


def _compare(found: dict[str, Measured]) -> int:
    baseline = load()
    changed = slower(baseline, found)
    for _ in range(TRIES - 1):
        if not changed:
            break
        print(f"slower than the baseline, measured again: {', '.join(changed)}", flush=True)
        changed = slower(baseline, measure(list(changed)))
    for name, factor in changed.items():
        print(f"slower: {name} takes {factor:.2f} x what the baseline has")
    for name in found.keys() - baseline.keys():
        print(f"not in the baseline: {name}")
    for name in baseline.keys() - found.keys():
        print(f"only in the baseline: {name}")
    if not changed:
        print(f"none of {len(found)} functions is slower than the baseline by more than {LIMIT - 1:.0%}")
    return 1 if changed else 0
