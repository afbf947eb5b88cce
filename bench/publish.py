"""Puts the results of a folder into README.md: between two markers, so that no number there was typed by hand."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from rich.console import Console

from bench.goals import judge
from bench.plots import draw
from bench.records import Run, summarize
from bench.suites import SUITES

_CHECKOUT: Final = Path(__file__).parent.parent
README: Final = _CHECKOUT / "README.md"
BEGIN: Final = "<!-- benchmarks: begin -->"
END: Final = "<!-- benchmarks: end -->"

# A column: heading, scenario, value, format.
_Column = tuple[str, str, str, str]
_TABLES: Final[dict[str, tuple[_Column, ...]]] = {
    "egress": (
        ("1 tunnel GB/s", "bulk-1-down", "gb_per_s", ".1f"),
        ("CPU s/GB", "bulk-1-down", "cpu_s_per_gb", ".2f"),
        ("16 tunnels GB/s", "bulk-16-down", "gb_per_s", ".1f"),
        ("CPU s/GB", "bulk-16-down", "cpu_s_per_gb", ".2f"),
        ("connections/s", "connections", "connections_per_s", ",.0f"),
        ("CPU µs each", "connections", "cpu_us_per_connection", ",.0f"),
        ("echo p50 µs", "echo", "p50_us", ",.0f"),
        ("p99 µs", "echo", "p99_us", ",.0f"),
        ("idle tunnels' MB", "idle", "rss_mb", ",.0f"),
    ),
    "model": (
        ("requests/s", "requests-small", "requests_per_s", ",.0f"),
        ("CPU µs each", "requests-small", "cpu_us_per_request", ",.0f"),
        ("115 KB: CPU µs each", "requests-large", "cpu_us_per_request", ",.0f"),
        ("events/s", "events-stream", "events_per_s", ",.0f"),
        ("CPU µs each", "events-stream", "cpu_us_per_event", ".1f"),
        ("first byte at a quarter of saturation: p50 µs", "first-byte", "first_p50_us", ",.0f"),
        ("p99 µs", "first-byte", "first_p99_us", ",.0f"),
        ("at 1,000/s: p50 µs", "first-byte-1000", "first_p50_us", ",.0f"),
        ("p99 µs", "first-byte-1000", "first_p99_us", ",.0f"),
        ("1,000 streams of 10 events/s: late p50 µs", "paced-1000", "late_p50_us", ",.0f"),
        ("CPU µs each", "paced-1000", "cpu_us_per_event", ".1f"),
        ("of 50/s: in time", "paced-1000-fast", "delivered", ".1%"),
    ),
    "sandbox": (
        ("one, ms", "start-1", "ms", ",.0f"),
        ("eight at once: median ms", "start-8", "ms", ",.0f"),
        ("slowest ms", "start-8", "max_ms", ",.0f"),
        ("100 sessions, eight at a time, s", "sessions-100", "seconds", ".0f"),
        ("control grew, MiB", "sessions-100", "control_growth_mib", "+.1f"),
    ),
    "handover": (
        ("GB/s, every byte checked", "transfer", "gb_per_s", ".2f"),
        ("CPU s/GB", "transfer", "cpu_s_per_gb", ".2f"),
        ("one restart or reload, s", "transfer", "restart_s", ".2f"),
    ),
    "api": (
        ("create p50 ms", "api-create", "p50_ms", ".1f"),
        ("p99 ms", "api-create", "p99_ms", ".1f"),
        ("get p50 ms", "api-get", "p50_ms", ".1f"),
        ("p99 ms", "api-get", "p99_ms", ".1f"),
        ("list 100: p50 ms", "api-list", "p50_ms", ".1f"),
        ("p99 ms", "api-list", "p99_ms", ".1f"),
    ),
}
TITLES: Final = {
    "egress": "Egress proxy",
    "model": "Model proxy",
    "sandbox": "Session start",
    "api": "Control API",
    "handover": "Restarts under load",
    "curves": "From 1 to 5,000 at once",
}
PLOTS: Final = {
    "egress": ("throughput", "cpu-per-gb", "connections", "cpu-per-connection", "echo", "idle-memory"),
    "model": ("model-cpu", "model-events", "model-first-byte", "model-lateness"),
    "sandbox": ("session-start",),
    "api": ("api-p99",),
    "handover": (),
    "curves": ("throughput-by-tunnels", "connections-by-number"),
}
_OURS: Final = frozenset({"gateway", "opificia"})


def update(folder: Path, console: Console, readme: Path = README) -> int:
    """Draw the plots of a folder's results and write them into `readme`. Returns 2 when that cannot be done."""
    inside = folder.resolve().is_relative_to(readme.parent.resolve())
    runs = {name: Run.load(file) for name in SUITES if (file := folder / f"{name}.json").exists()}
    text = readme.read_text()
    if not runs or not inside:
        console.print(f"no results in {folder}" if inside else f"{folder} is not below {readme.parent}", style="red")
        return 2
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        console.print(f"{readme} has no place for them: {BEGIN} {END}", style="red")
        return 2
    link = folder.resolve().relative_to(readme.parent.resolve()).as_posix()
    for name, run in runs.items():
        draw(run, folder / name)
    parts = [section(name, run, link, lambda path: (readme.parent / path).exists()) for name, run in runs.items()]
    before, _, rest = text.partition(BEGIN)
    readme.write_text(f"{before}{BEGIN}\n\n" + "\n\n".join(parts) + f"\n\n{END}{rest.partition(END)[2]}")
    console.print(f"{readme}: {', '.join(runs)}")
    return 0


def section(name: str, run: Run, folder: str, exists: Callable[[str], bool]) -> str:
    """Return what README says about one suite: table, goals that were missed, plots that `exists` finds."""
    machine = run.machine
    rounds = len({each.round for each in run.records if each.scenario == run.records[0].scenario})
    where = f"{run.date}, {machine['cores']} cores {machine['cpu']}, {machine['system']}"
    raw = f"[raw results]({folder}/{name}.json)"
    how = "one round" if rounds == 1 else f"medians of {rounds} interleaved rounds"
    parts = [f"**{TITLES[name]}**: `{run.command}`, {how}, {where}; {raw}."]
    if name in _TABLES:
        parts.append("\n".join(_table(run, _TABLES[name])))
    goals = judge(run)
    missed = [f"{goal.text} ({goal.found})" for goal in goals if goal.reached is False]
    unknown = [f"{goal.text} ({goal.found})" for goal in goals if goal.reached is None]
    reached = sum(goal.reached is True for goal in goals)
    if goals:
        parts.append(
            f"{reached} of {len(goals)} goals reached."
            + (f" Missed: {'; '.join(missed)}." if missed else "")
            + (f" Not judged: {'; '.join(unknown)}." if unknown else "")
        )
    parts += [f"![{plot}]({folder}/{name}/{plot}.svg)" for plot in PLOTS[name] if exists(f"{folder}/{name}/{plot}.svg")]
    return "\n\n".join(parts)


def _table(run: Run, columns: Sequence[_Column]) -> list[str]:
    records = run.records
    used = [column for column in columns if any(record.scenario == column[1] for record in records)]
    lines = ["| |" + "".join(f" {heading} |" for heading, *_ in used), "|---|" + "---|" * len(used)]
    for peer in run.peers:
        cells = []
        for _, scenario, value, form in used:
            found = summarize(records, scenario, peer, value)
            cells.append(format(found.median, form) if found else "–")
        if all(cell == "–" for cell in cells):
            continue
        title = f"{peer}: {run.peers[peer]['about']}" if run.of("sandbox") or run.of("handover") else peer
        mark = "**" if peer in _OURS else ""
        lines.append(f"| {mark}{title}{mark} |" + "".join(f" {mark}{cell}{mark} |" for cell in cells))
    return lines
