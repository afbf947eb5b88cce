"""Plots of a run as SVG; matplotlib is only needed here. One colour a peer in every plot: red is ours, grey no peer but a bound."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from bench.records import Record, Run, summarize
from bench.rounds import PERCENTILES

_COLOURS: Final = {
    "direct": "#9aa0a6",
    "c-splicer": "#5f6368",
    "haproxy-tcp": "#8ab4f8",
    "gateway": "#d93025",
    "gateway+forwarder": "#f29900",
    "squid": "#34a853",
    "tinyproxy": "#a142f4",
    "aiohttp-relay": "#34a853",
    "aiohttp-quiet": "#8ab4f8",
    "litellm": "#a142f4",
    "portkey": "#f29900",
    "opificia": "#d93025",
    "engine-python": "#34a853",
    "engine-echo": "#8ab4f8",
    "docker-run": "#a142f4",
    "docker-exec": "#f29900",
    "sqlite": "#8ab4f8",
    "postgresql": "#34a853",
}
_OTHER: Final = "#795548"

_BULK: Final = {f"{number} {way}": f"bulk-{number}-{way}" for way in ("down", "up", "both") for number in (1, 16, 256)}
_CONNECTIONS: Final = {"plain": "connections", "heads that differ": "connections-fresh", "TLS": "connections-tls"}
_API: Final = {name: f"api-{name}" for name in ("create", "get", "list", "list-failed")}
_API_BUSY: Final = {name: f"{scenario}-4-at-once" for name, scenario in _API.items()}
_STARTS: Final = {"one": "start-1", "eight at once": "start-8"}
# File, title, value, and the groups of bars: label and scenario.
_BARS: Final[tuple[tuple[str, str, str, dict[str, str]], ...]] = (
    ("throughput", "Throughput by number of tunnels, GB/s", "gb_per_s", _BULK),
    ("cpu-per-gb", "CPU seconds per GB by number of tunnels", "cpu_s_per_gb", _BULK),
    ("connections", "Connections per second", "connections_per_s", _CONNECTIONS),
    ("cpu-per-connection", "CPU µs per connection", "cpu_us_per_connection", _CONNECTIONS),
    ("cpu-per-message", "CPU µs per message", "cpu_us_per_message", {"1 tunnel": "echo", "each 2 ms": "echo-paced", "64 tunnels": "echo-64"}),
    ("idle-memory-per-tunnel", "Memory of an idle tunnel, KiB", "rss_kib_per_tunnel", {"idle": "idle"}),
    ("model-requests", "Model requests per second", "requests_per_s", {"2 KB": "requests-small", "115 KB": "requests-large"}),
    ("model-cpu", "CPU µs per model request", "cpu_us_per_request", {"2 KB": "requests-small", "115 KB": "requests-large"}),
    ("model-events", "CPU µs per event", "cpu_us_per_event", {"as fast as taken": "events-stream", "1,000 streams, 10/s": "paced-1000", "50/s": "paced-1000-fast"}),
    ("session-start", "From request to first output, ms", "ms", _STARTS),
    ("api-p50", "API, one at a time: p50, ms", "p50_ms", _API),
    ("api-p99", "API, one at a time: p99, ms", "p99_ms", _API),
    ("api-p99-busy", "API, four at once: p99, ms", "p99_ms", _API_BUSY),
)  # fmt: skip
# File, title, the prefix of the values, and the panels: title and scenario.
_LATENCIES: Final[tuple[tuple[str, str, dict[str, str]], ...]] = (
    (
        "echo",
        "",
        {"echo, one tunnel": "echo", "each 2 ms": "echo-paced", "64 tunnels": "echo-64", "under bulk": "echo-under-bulk", "stalled readers": "echo-stalled-readers"},
    ),
    ("connect-latency", "", {"a connection, 32 at a time": "connections", "TLS": "connections-tls"}),
    ("model-latency", "", {"a small request": "requests-small", "a large one": "requests-large"}),
    ("model-first-byte", "first_", {"first byte, quarter load": "first-byte", "1,000/s": "first-byte-1000", "of busy streams": "events-stream"}),
    ("model-lateness", "late_", {"late, 10 events/s": "paced-1000", "50 events/s": "paced-1000-fast"}),
)  # fmt: skip


class PlotsUnavailableError(Exception):
    """matplotlib is not installed."""


def draw(run: Run, directory: Path) -> list[Path]:
    """Draw every plot for which the run has records; return the files. Raises PlotsUnavailableError."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise PlotsUnavailableError("matplotlib is not installed: pip install matplotlib") from None
    mpl.use("svg")
    # The same input gives the same file: no date, no random ids.
    mpl.rcParams.update({"svg.hashsalt": "bench", "svg.fonttype": "none", "font.size": 9})
    directory.mkdir(parents=True, exist_ok=True)
    records = run.records
    drawn = [_bars(records, directory / f"{name}.svg", title, value, groups) for name, title, value, groups in _BARS]
    drawn += [_latencies(records, directory / f"{name}.svg", prefix, panels) for name, prefix, panels in _LATENCIES]
    drawn.append(_curves(records, directory / "idle-memory.svg", "Resident memory, MB", "idle tunnels", _idle_points))
    # Two of the points have their place among the egress scenarios: alone they make no curve.
    for name, title, label, scenario, value in (
        ("throughput-by-tunnels", "Throughput down, GB/s", "tunnels", "bulk-{}-down", "gb_per_s"),
        ("cpu-by-tunnels", "CPU seconds per GB", "tunnels", "bulk-{}-down", "cpu_s_per_gb"),
        ("connections-by-number", "Connections per second", "connections at once", "connections-{}", "connections_per_s"),
        ("cpu-by-connections", "CPU µs per connection", "connections at once", "connections-{}", "cpu_us_per_connection"),
    ):  # fmt: skip
        drawn.append(_curves(records, directory / f"{name}.svg", title, label, _points(scenario, value)))
    return [path for path in drawn if path is not None]


def _peers(records: Sequence[Record]) -> list[str]:
    found = dict.fromkeys(record.peer for record in records)
    return [peer for peer in _COLOURS if peer in found] + [peer for peer in found if peer not in _COLOURS]


def _save(figure: Any, path: Path) -> Path:
    import matplotlib.pyplot as plt

    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path


def _axes(panels: int = 1, width: float = 7.0) -> tuple[Any, list[Any]]:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, panels, figsize=(width, 3.2), sharey=True, squeeze=False)
    for each in axes[0]:
        each.spines[["top", "right"]].set_visible(False)
    return figure, list(axes[0])


def _legend(axes: Any) -> None:
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))


def _bars(records: Sequence[Record], path: Path, title: str, value: str, groups: dict[str, str]) -> Path | None:
    found = {
        (peer, label): summary
        for label, scenario in groups.items()
        for peer in _peers(records)
        if (summary := summarize(records, scenario, peer, value)) and summary.median
    }
    if not found:
        return None
    labels = [label for label in groups if any(each == label for _, each in found)]
    peers = [peer for peer in _peers(records) if any(each == peer for each, _ in found)]
    figure, (axes,) = _axes(width=max(7.0, 1.4 * len(labels)))
    width = 0.8 / len(peers)
    for index, peer in enumerate(peers):
        mine = {label: found[peer, label] for label in labels if (peer, label) in found}
        axes.bar(
            [labels.index(label) + (index - (len(peers) - 1) / 2) * width for label in mine],
            [summary.median for summary in mine.values()],
            width * 0.9,
            yerr=[
                [summary.median - summary.least for summary in mine.values()],
                [summary.most - summary.median for summary in mine.values()],
            ],
            color=_COLOURS.get(peer, _OTHER), label=peer, error_kw={"linewidth": 0.8},
        )  # fmt: skip
    axes.set_xticks(range(len(labels)), labels)
    axes.set_title(title, loc="left")
    _legend(axes)
    return _save(figure, path)


def _latencies(records: Sequence[Record], path: Path, prefix: str, panels: dict[str, str]) -> Path | None:
    """Draw the distributions by their percentiles, one panel a scenario, each on the same logarithmic axis."""
    names = {"p50": "50 %", "p90": "90", "p99": "99", "p999": "99.9", "max": "max"}
    drawn = {
        title: {
            peer: [summary.median for summary in found if summary]
            for peer in _peers(records)
            if all(found := [summarize(records, scenario, peer, f"{prefix}{name}_us") for name in PERCENTILES])
        }
        for title, scenario in panels.items()
    }
    drawn = {title: peers for title, peers in drawn.items() if peers}
    if not drawn:
        return None
    figure, axes = _axes(len(drawn), 2.5 + 2.5 * len(drawn))
    for each, (title, peers) in zip(axes, drawn.items(), strict=True):
        for peer, values in peers.items():
            colour = _COLOURS.get(peer, _OTHER)
            each.plot([names[name] for name in PERCENTILES], values, marker="o", markersize=3, color=colour, label=peer)
        each.set_yscale("log")
        each.set_title(f"{title}, µs", loc="left")
    _legend(axes[-1])
    return _save(figure, path)


def _idle_points(records: Sequence[Record], peer: str) -> dict[int, float]:
    prefix = "rss_mb_"
    values = {name for record in records if record.scenario == "idle" for name in record.values}
    steps = sorted(int(name.removeprefix(prefix)) for name in values if name.startswith(prefix))
    found = {step: summarize(records, "idle", peer, f"{prefix}{step}") for step in steps}
    return {step: summary.median for step, summary in found.items() if summary}


def _points(scenario: str, value: str) -> Callable[[Sequence[Record], str], dict[int, float]]:
    before, _, after = scenario.partition("{}")

    def points(records: Sequence[Record], peer: str) -> dict[int, float]:
        names = {record.scenario for record in records if record.suite == "curves"}
        texts = [name[len(before) :].removesuffix(after) for name in names if name.startswith(before)]
        numbers = sorted(int(text) for text in texts if text.isdigit())
        found = {number: summarize(records, scenario.format(number), peer, value) for number in numbers}
        return {number: summary.median for number, summary in found.items() if summary}

    return points


def _curves(
    records: Sequence[Record],
    path: Path,
    title: str,
    label: str,
    points: Callable[[Sequence[Record], str], dict[int, float]],
) -> Path | None:
    curves = {peer: found for peer in _peers(records) if len(found := points(records, peer)) > 1}
    if not curves:
        return None
    figure, (axes,) = _axes()
    for peer, found in curves.items():
        axes.plot(list(found), list(found.values()), marker="o", color=_COLOURS.get(peer, _OTHER), label=peer)
    if all(min(found) >= 1 for found in curves.values()):
        axes.set_xscale("log")
    axes.set_xlabel(label)
    axes.set_title(title, loc="left")
    _legend(axes)
    return _save(figure, path)
