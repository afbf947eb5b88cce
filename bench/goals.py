"""The speed goals of the egress proxy, judged from a run's records. A goal that cannot be judged says what is missing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from bench.records import Record, summarize

GATEWAY: Final = "gateway"
TUNED: Final = "haproxy-tcp"
# What a single-threaded forward proxy should reach with 5,000 tunnels open and idle.
IDLE_MB: Final = 60.0


@dataclass(frozen=True, slots=True)
class Goal:
    """One goal: what was wanted, what was found, and whether that is enough (None: not measured)."""

    text: str
    found: str
    reached: bool | None


class _Judge:
    def __init__(self, records: Sequence[Record], forward_proxies: Sequence[str]) -> None:
        self._records = records
        self.proxies = forward_proxies

    def value(self, scenario: str, peer: str, name: str) -> float | None:
        summary = summarize(self._records, scenario, peer, name)
        return summary.median if summary else None

    def best(self, scenario: str, name: str, pick: Callable[[Sequence[float]], float]) -> float | None:
        found = [value for peer in self.proxies if (value := self.value(scenario, peer, name)) is not None]
        return pick(found) if found else None

    def ratio(self, text: str, ours: float | None, theirs: float | None, unit: str, least: float, most: float) -> Goal:
        if ours is None or theirs is None or not theirs:
            return Goal(text, "not measured", None)
        factor = ours / theirs
        return Goal(text, f"{ours:.3g} {unit} to {theirs:.3g}: {factor:.2f} x", least <= factor <= most)


def judge(records: Sequence[Record], forward_proxies: Sequence[str]) -> list[Goal]:
    """Return every goal. `forward_proxies` are the peers that do the same work, by name."""
    judge_ = _Judge(records, forward_proxies)
    endless = float("inf")
    goals = []
    for tunnels, factor in ((1, 2.0), (16, 1.3)):
        scenario = f"bulk-{tunnels}-down"
        ours = judge_.value(scenario, GATEWAY, "gb_per_s")
        text = f"{tunnels} tunnel{'s' if tunnels > 1 else ''}"
        goals += [
            judge_.ratio(
                f"{text}: at least {factor} x the best forward proxy",
                ours, judge_.best(scenario, "gb_per_s", max), "GB/s", factor, endless,
            ),
            judge_.ratio(
                f"{text}: at least 0.9 x HAProxy tuned to splice",
                ours, judge_.value(scenario, TUNED, "gb_per_s"), "GB/s", 0.9, endless,
            ),
            judge_.ratio(
                f"{text}: CPU at most 0.4 x the best forward proxy's",
                judge_.value(scenario, GATEWAY, "cpu_s_per_gb"), judge_.best(scenario, "cpu_s_per_gb", min), "s/GB", 0, 0.4,
            ),
        ]  # fmt: skip
    cpu = judge_.value("connections", GATEWAY, "cpu_us_per_connection")
    rate = judge_.value("connections", GATEWAY, "connections_per_s")
    for proxy in forward_proxies:
        # Tinyproxy takes a thread a connection, so two cores instead of one: reported, no goal.
        if proxy == "tinyproxy":
            continue
        their_rate = judge_.value("connections", proxy, "connections_per_s")
        if their_rate is not None:
            goals.append(judge_.ratio(f"connections: at least {proxy}'s rate", rate, their_rate, "/s", 1, endless))
    goals.append(
        judge_.ratio(
            "CPU per connection: at most Squid's",
            cpu, judge_.value("connections", "squid", "cpu_us_per_connection"), "us", 0, 1,
        )
    )  # fmt: skip
    for percentile in ("p50", "p99"):
        goals.append(
            judge_.ratio(
                f"echo {percentile}: at most the best forward proxy's",
                judge_.value("echo", GATEWAY, f"{percentile}_us"), judge_.best("echo", f"{percentile}_us", min), "us", 0, 1,
            )
        )  # fmt: skip
    memory = judge_.value("idle", GATEWAY, "rss_mb")
    goals.append(
        Goal(
            f"idle tunnels: at most {IDLE_MB:.0f} MB resident",
            "not measured" if memory is None else f"{memory:.1f} MB",
            None if memory is None else memory <= IDLE_MB,
        )
    )
    return goals
