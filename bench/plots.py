"""Plots of a run as SVG; matplotlib is only needed here."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bench.records import Record, Run, summarize

# One colour a peer in every plot; the gateway stands out.
_COLOURS: Final = {
    "direct": "#9aa0a6",
    "c-splicer": "#5f6368",
    "haproxy-tcp": "#8ab4f8",
    "gateway": "#d93025",
    "gateway+forwarder": "#f29900",
    "squid": "#34a853",
    "tinyproxy": "#a142f4",
}
_OTHER: Final = "#795548"


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
    drawn = [
        _bars(records, directory / "throughput.svg", "Throughput down, GB/s", "gb_per_s",
              {"1 tunnel": "bulk-1-down", "16 tunnels": "bulk-16-down", "256 tunnels": "bulk-256-down"}),
        _bars(records, directory / "cpu-per-gb.svg", "CPU seconds per GB", "cpu_s_per_gb",
              {"1 tunnel": "bulk-1-down", "16 tunnels": "bulk-16-down", "256 tunnels": "bulk-256-down"}),
        _bars(records, directory / "connections.svg", "Connections per second", "connections_per_s",
              {"plain": "connections", "TLS": "connections-tls"}),
        _bars(records, directory / "cpu-per-connection.svg", "CPU µs per connection", "cpu_us_per_connection",
              {"plain": "connections", "TLS": "connections-tls"}),
        _latencies(records, directory / "echo.svg"),
        _curve(records, directory / "idle-memory.svg", "Resident memory, MB", "idle tunnels", _idle_points),
        _curve(records, directory / "throughput-by-tunnels.svg", "GB/s down", "tunnels", _bulk_points),
        _curve(records, directory / "connections-by-concurrency.svg", "connections/s", "connections at once", _rate_points),
        _bars(records, directory / "model-cpu.svg", "CPU µs per request", "cpu_us_per_request",
              {"small reply": "requests-small", "115 KB body": "requests-large"}),
        _bars(records, directory / "model-events.svg", "CPU µs per event", "cpu_us_per_event",
              {"streams": "events-stream", "1,000 paced": "paced-1000"}),
    ]  # fmt: skip
    return [path for path in drawn if path is not None]


def _peers(records: Sequence[Record]) -> list[str]:
    found = dict.fromkeys(record.peer for record in records)
    return [peer for peer in _COLOURS if peer in found] + [peer for peer in found if peer not in _COLOURS]


def _save(figure: Any, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    import matplotlib.pyplot as plt

    plt.close(figure)
    return path


def _axes(width: float = 7.0, height: float = 3.2) -> tuple[Any, Any]:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(width, height))
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _bars(records: Sequence[Record], path: Path, title: str, value: str, groups: dict[str, str]) -> Path | None:
    groups = {label: name for label, name in groups.items() if any(record.scenario == name for record in records)}
    peers = [
        peer
        for peer in _peers(records)
        if any((found := summarize(records, name, peer, value)) and found.median for name in groups.values())
    ]
    if not peers:
        return None
    figure, axes = _axes()
    width = 0.8 / len(peers)
    for index, peer in enumerate(peers):
        for place, scenario in enumerate(groups.values()):
            found = summarize(records, scenario, peer, value)
            if found is None:
                continue
            axes.bar(
                place + (index - (len(peers) - 1) / 2) * width, found.median, width * 0.9,
                yerr=[[found.median - found.least], [found.most - found.median]],
                color=_COLOURS.get(peer, _OTHER), label=peer if place == 0 else None, error_kw={"linewidth": 0.8},
            )  # fmt: skip
    axes.set_xticks(range(len(groups)), list(groups))
    axes.set_title(title, loc="left")
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return _save(figure, path)


def _latencies(records: Sequence[Record], path: Path) -> Path | None:
    names = ("p50_us", "p99_us", "p999_us")
    peers = [peer for peer in _peers(records) if summarize(records, "echo", peer, "p50_us")]
    if not peers:
        return None
    figure, axes = _axes()
    for peer in peers:
        found = [summarize(records, "echo", peer, name) for name in names]
        if all(found):
            medians = [each.median for each in found if each]
            axes.plot(["p50", "p99", "p99.9"], medians, marker="o", color=_COLOURS.get(peer, _OTHER), label=peer)
    axes.set_yscale("log")
    axes.set_title("Echo of one byte through one tunnel, µs", loc="left")
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return _save(figure, path)


def _idle_points(records: Sequence[Record], peer: str) -> dict[float, float]:
    values = {name for record in records if record.scenario == "idle" for name in record.values}
    steps = [int(name.removeprefix("rss_mb_")) for name in values if name.startswith("rss_mb_")]
    found = {step: summarize(records, "idle", peer, f"rss_mb_{step}") for step in sorted(steps)}
    return {step: summary.median for step, summary in found.items() if summary}


def _bulk_points(records: Sequence[Record], peer: str) -> dict[float, float]:
    found = {
        number: summarize(records, f"bulk-{number}-down", peer, "gb_per_s") for number in (1, 4, 16, 64, 256, 1000)
    }
    return {number: summary.median for number, summary in found.items() if summary}


def _rate_points(records: Sequence[Record], peer: str) -> dict[float, float]:
    names = {1: "connections-1", 8: "connections-8", 32: "connections", 128: "connections-128", 512: "connections-512"}
    found = {number: summarize(records, name, peer, "connections_per_s") for number, name in names.items()}
    return {number: summary.median for number, summary in found.items() if summary}


def _curve(records: Sequence[Record], path: Path, title: str, label: str, points: Any) -> Path | None:
    curves = {peer: points(records, peer) for peer in _peers(records)}
    curves = {peer: found for peer, found in curves.items() if len(found) > 2}
    if not curves:
        return None
    figure, axes = _axes()
    for peer, found in curves.items():
        axes.plot(list(found), list(found.values()), marker="o", color=_COLOURS.get(peer, _OTHER), label=peer)
    if min(next(iter(curves.values()))) >= 1:
        axes.set_xscale("log")
    axes.set_xlabel(label)
    axes.set_title(title, loc="left")
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return _save(figure, path)
