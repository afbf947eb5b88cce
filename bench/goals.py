"""The speed goals, judged from a run's records. A goal that cannot be judged says what is missing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from bench import sandbox
from bench.measure import FOREIGN_LIMIT
from bench.model import MANY_REQUESTS
from bench.records import Run, summarize

GATEWAY: Final = "gateway"
TUNED: Final = "haproxy-tcp"
RELAY: Final = "aiohttp-relay"
# What a single-threaded forward proxy should reach with 5,000 tunnels open and idle.
IDLE_MB: Final = 60.0
# From the request to the runner's hello, against the engine's own start of the same container.
START_FACTOR: Final = 1.3
# p99 of get and list with 10,000 stored sessions.
API_MS: Final = 20.0
# What the gateway may add to the time of a reply's first byte.
ADDED_FIRST_BYTE_US: Final = 300.0
# Of the events that fall into the measured window; at its ends some are on their way.
KEEPS_UP: Final = 0.995
_ENDLESS: Final = float("inf")


@dataclass(frozen=True, slots=True)
class Goal:
    """One goal: what was wanted, what was found, and whether that is enough (None: not measured, or not to be judged)."""

    text: str
    found: str
    reached: bool | None


class _Judge:
    def __init__(self, run: Run) -> None:
        self._records = run.records
        # Peers that do the same work as the egress proxy.
        self.proxies = [name for name, peer in run.peers.items() if peer["forward_proxy"]]

    def value(self, scenario: str, peer: str, name: str) -> float | None:
        summary = summarize(self._records, scenario, peer, name)
        return summary.median if summary else None

    def best(self, scenario: str, name: str, pick: Callable[[Sequence[float]], float]) -> float | None:
        found = [value for peer in self.proxies if (value := self.value(scenario, peer, name)) is not None]
        return pick(found) if found else None

    def ratio(self, text: str, ours: float | None, theirs: float | None, unit: str, least: float, most: float) -> Goal:
        # CPU seconds come in hundredths: what took none was too little to be measured.
        if not ours or not theirs:
            return Goal(text, "not measured", None)
        factor = ours / theirs
        return Goal(text, f"{ours:.3g} {unit} to {theirs:.3g}: {factor:.2f} x", least <= factor <= most)

    def at_most(self, text: str, found: float | None, most: float, unit: str) -> Goal:
        if found is None:
            return Goal(text, "not measured", None)
        return Goal(text, f"{found:.3g} {unit}", found <= most)

    def disturbed(self, scenario: str, peer: str) -> bool:
        """Tell whether other programs took so much of the machine that a missed limit in seconds says nothing."""
        return any(
            (record.foreign_cpu or 0) > FOREIGN_LIMIT
            for record in self._records
            if (record.scenario, record.peer) == (scenario, peer)
        )


def judge(run: Run) -> list[Goal]:
    """Return the goals of every suite that the run has."""
    judge_ = _Judge(run)
    suites = {"egress": _egress, "model": _model, sandbox.SUITE: _sandbox, "api": _api}
    return [goal for suite, goals in suites.items() if run.of(suite) for goal in goals(judge_)]


def _egress(judge_: _Judge) -> list[Goal]:
    goals = []
    for tunnels, factor in ((1, 2.0), (16, 1.3)):
        scenario = f"bulk-{tunnels}-down"
        ours = judge_.value(scenario, GATEWAY, "gb_per_s")
        text = f"{tunnels} tunnel{'s' if tunnels > 1 else ''}"
        goals += [
            judge_.ratio(
                f"{text}: at least {factor} x the best forward proxy",
                ours, judge_.best(scenario, "gb_per_s", max), "GB/s", factor, _ENDLESS,
            ),
            judge_.ratio(
                f"{text}: at least 0.9 x HAProxy tuned to splice",
                ours, judge_.value(scenario, TUNED, "gb_per_s"), "GB/s", 0.9, _ENDLESS,
            ),
            judge_.ratio(
                f"{text}: CPU at most 0.4 x the best forward proxy's",
                judge_.value(scenario, GATEWAY, "cpu_s_per_gb"), judge_.best(scenario, "cpu_s_per_gb", min), "s/GB", 0, 0.4,
            ),
        ]  # fmt: skip
    cpu = judge_.value("connections", GATEWAY, "cpu_us_per_connection")
    rate = judge_.value("connections", GATEWAY, "connections_per_s")
    for proxy in judge_.proxies:
        # Tinyproxy takes a thread a connection, so two cores instead of one: reported, no goal.
        their_rate = judge_.value("connections", proxy, "connections_per_s")
        if proxy != "tinyproxy" and their_rate is not None:
            goals.append(judge_.ratio(f"connections: at least {proxy}'s rate", rate, their_rate, "/s", 1, _ENDLESS))
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
    goals.append(judge_.at_most(f"idle tunnels: at most {IDLE_MB:.0f} MB resident", memory, IDLE_MB, "MB"))
    return goals


def _model(judge_: _Judge) -> list[Goal]:
    def relay(scenario: str, name: str) -> tuple[float | None, float | None]:
        return judge_.value(scenario, GATEWAY, name), judge_.value(scenario, RELAY, name)

    # Both at the same rate: each at its own, the difference would be one of rates.
    first, straight = (judge_.value("first-byte-1000", name, "first_p50_us") for name in (GATEWAY, "direct"))
    delivered = judge_.value("paced-1000-fast", GATEWAY, "delivered")
    growth, memory, requests = (judge_.value("memory", GATEWAY, name) for name in ("growth_mb", "rss_mb", "requests"))
    enough = requests is not None and requests >= MANY_REQUESTS
    return [
        judge_.ratio(
            "requests: CPU at most 1/8 of the aiohttp relay's",
            *relay("requests-small", "cpu_us_per_request"), "us", 0, 1 / 8,
        ),
        judge_.ratio(
            "events: CPU at most 1/2 of the aiohttp relay's", *relay("events-stream", "cpu_us_per_event"), "us", 0, 1 / 2
        ),
        judge_.ratio(
            "events that come one by one: CPU at most 1/2 of the aiohttp relay's",
            *relay("paced-1000", "cpu_us_per_event"), "us", 0, 1 / 2,
        ),
        judge_.at_most(
            f"first byte at 1,000 requests a second: at most {ADDED_FIRST_BYTE_US:.0f} us added at p50",
            None if first is None or straight is None else first - straight, ADDED_FIRST_BYTE_US, "us",
        ),
        judge_.ratio(
            "first byte at a quarter of saturation: p99 at most the aiohttp relay's",
            *relay("first-byte", "first_p99_us"), "us", 0, 1,
        ),
        judge_.ratio(
            "first byte at 1,000 requests a second: p99 at most the aiohttp relay's",
            *relay("first-byte-1000", "first_p99_us"), "us", 0, 1,
        ),
        Goal(
            "1,000 streams of 50 events a second: keeps up",
            "not measured" if delivered is None else f"{delivered:.1%} of the events of the window came in it",
            None if delivered is None else delivered >= KEEPS_UP,
        ),
        judge_.at_most(
            "memory after 100,000 requests: grown by at most a tenth",
            None if growth is None or memory is None or not enough else growth / memory, 0.1, "of all",
        ),
    ]  # fmt: skip


def _sandbox(judge_: _Judge) -> list[Goal]:
    return [
        judge_.ratio(
            f"start of {number}: at most {START_FACTOR} x the engine's own start of the same container",
            judge_.value(f"start-{number}", sandbox.OURS, "ms"), judge_.value(f"start-{number}", sandbox.ENGINE, "ms"), "ms", 0, START_FACTOR,
        )
        for number in (1, sandbox.AT_ONCE)
    ]  # fmt: skip


def _api(judge_: _Judge) -> list[Goal]:
    goals = []
    for database in ("sqlite", "postgresql"):
        for scenario in ("api-get", "api-list"):
            text = f"{database}: p99 of {scenario.removeprefix('api-')} at most {API_MS:g} ms"
            goal = judge_.at_most(text, judge_.value(scenario, database, "p99_ms"), API_MS, "ms")
            if goal.reached is False and judge_.disturbed(scenario, database):
                goal = Goal(text, f"{goal.found}, but other programs took part of the machine", None)
            goals.append(goal)
    return goals
