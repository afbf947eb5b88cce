"""Puts the results of a folder into README.md: between two markers, so that no number there was typed by hand."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from rich.console import Console

from bench.goals import judge
from bench.measure import FOREIGN_LIMIT
from bench.plots import draw
from bench.records import Record, Run, summarize
from bench.suites import SUITES

_CHECKOUT: Final = Path(__file__).parent.parent
README: Final = _CHECKOUT / "README.md"
BEGIN: Final = "<!-- benchmarks: begin -->"
END: Final = "<!-- benchmarks: end -->"

# A column: heading, scenario, value, format.
_Column = tuple[str, str, str, str]
_TABLES: Final[dict[str, tuple[tuple[_Column, ...], ...]]] = {
    "egress": (
        (
            ("1 tunnel GB/s", "bulk-1-down", "gb_per_s", ".1f"),
            ("CPU s/GB", "bulk-1-down", "cpu_s_per_gb", ".2f"),
            ("16 tunnels GB/s", "bulk-16-down", "gb_per_s", ".1f"),
            ("CPU s/GB", "bulk-16-down", "cpu_s_per_gb", ".2f"),
            ("connections/s", "connections", "connections_per_s", ",.0f"),
            ("CPU µs each", "connections", "cpu_us_per_connection", ",.0f"),
            ("heads that differ: CPU µs each", "connections-fresh", "cpu_us_per_connection", ",.0f"),
            ("idle tunnels' MB", "idle", "rss_mb", ",.0f"),
        ),
        (
            ("echo p50 µs", "echo", "p50_us", ",.0f"),
            ("p99 µs", "echo", "p99_us", ",.0f"),
            ("CPU µs a message", "echo", "cpu_us_per_message", ".1f"),
            ("each 2 ms: p50 µs", "echo-paced", "p50_us", ",.0f"),
            ("p99 µs", "echo-paced", "p99_us", ",.0f"),
            ("CPU µs a message", "echo-paced", "cpu_us_per_message", ".1f"),
        ),
    ),
    "model": (
        (
            ("requests/s", "requests-small", "requests_per_s", ",.0f"),
            ("CPU µs each", "requests-small", "cpu_us_per_request", ",.0f"),
            ("115 KB: CPU µs each", "requests-large", "cpu_us_per_request", ",.0f"),
            ("events/s", "events-stream", "events_per_s", ",.0f"),
            ("CPU µs each", "events-stream", "cpu_us_per_event", ".1f"),
            ("late p50 µs", "events-stream", "late_p50_us", ",.0f"),
            ("p99 µs", "events-stream", "late_p99_us", ",.0f"),
        ),
        (
            ("first byte at a quarter of saturation: p50 µs", "first-byte", "first_p50_us", ",.0f"),
            ("p99 µs", "first-byte", "first_p99_us", ",.0f"),
            ("at 1,000/s: p50 µs", "first-byte-1000", "first_p50_us", ",.0f"),
            ("p99 µs", "first-byte-1000", "first_p99_us", ",.0f"),
            ("1,000 streams of 10 events/s: late p50 µs", "paced-1000", "late_p50_us", ",.0f"),
            ("p99 µs", "paced-1000", "late_p99_us", ",.0f"),
            ("CPU µs each", "paced-1000", "cpu_us_per_event", ".1f"),
            ("of 50/s: keeps up", "paced-1000-fast", "delivered", ".1%"),
            ("late p99 µs", "paced-1000-fast", "late_p99_us", ",.0f"),
        ),
    ),
    "sandbox": (
        (
            ("one, ms", "start-1", "ms", ",.0f"),
            ("eight at once: median ms", "start-8", "ms", ",.0f"),
            ("slowest ms", "start-8", "max_ms", ",.0f"),
            ("100 sessions, eight at a time, s", "sessions-100", "seconds", ".0f"),
            ("control grew, MiB", "sessions-100", "control_growth_mib", "+.1f"),
        ),
    ),
    "handover": (
        (
            ("GB/s, every byte checked", "transfer", "gb_per_s", ".2f"),
            ("CPU s/GB", "transfer", "cpu_s_per_gb", ".2f"),
            ("one restart or reload, s", "transfer", "restart_s", ".2f"),
        ),
    ),
    "api": (
        (
            ("create p50 ms", "api-create", "p50_ms", ".1f"),
            ("p99 ms", "api-create", "p99_ms", ".1f"),
            ("get p50 ms", "api-get", "p50_ms", ".1f"),
            ("p99 ms", "api-get", "p99_ms", ".1f"),
            ("list 100: p50 ms", "api-list", "p50_ms", ".1f"),
            ("p99 ms", "api-list", "p99_ms", ".1f"),
            ("four at once: p99 ms", "api-list-4-at-once", "p99_ms", ".1f"),
        ),
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
# Of a suite measured again under another congestion control, which is about bulk.
_PLOTS_AGAIN: Final = ("throughput", "cpu-per-gb")
_OURS: Final = frozenset({"gateway", "opificia"})
# What a mark in a table means, in the order of README's line below it.
_SPREAD: Final = "±"
_LOWER_BOUND: Final = "≥"
_DISTURBED: Final = r"\*"
_MARKS: Final = {
    _SPREAD: "half the distance between the rounds' extremes",
    _LOWER_BOUND: "the load was saturated in most rounds, the peer can do more",
    _DISTURBED: f"other programs took more than {FOREIGN_LIMIT * 100:.0f} % of the machine in most rounds",
}


def update(folder: Path, console: Console, readme: Path = README) -> int:
    """Draw the plots of a folder's results and write them into `readme`. Returns 2 when that cannot be done."""
    inside = folder.resolve().is_relative_to(readme.parent.resolve())
    runs = {name: Run.load(folder / f"{name}.json") for name in _results(folder)}
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


def _results(folder: Path) -> list[str]:
    """Return the names of a folder's results in README's order: each suite, then the same under another congestion control."""
    files = [file for suite in SUITES for file in (folder / f"{suite}.json", *sorted(folder.glob(f"{suite}-*.json")))]
    return [file.stem for file in files if file.exists()]


def section(name: str, run: Run, folder: str, exists: Callable[[str], bool]) -> str:
    """Return what README says about one suite: table, notes, goals that were missed, plots that `exists` finds.

    `name` is the suite's, with `-reno` behind it when that was the congestion control of all.
    """
    suite, _, congestion = name.partition("-")
    title = TITLES[suite] + (f", {congestion} for all" if congestion else "")
    machine = run.machine
    rounds = len({each.round for each in run.records if each.scenario == run.records[0].scenario})
    virtual = ", a virtual machine" if machine.get("virtual") else ""
    where = f"{run.date}, {machine['cores']} cores {machine['cpu']}{virtual}, {machine['system']}"
    raw = f"[raw results]({folder}/{name}.json)"
    how = "one round" if rounds == 1 else f"medians of {rounds} interleaved rounds"
    parts = [f"**{title}**: `{run.command}`, {how}, {where}; {raw}."]
    if suite in _TABLES:
        tables = ["\n".join(_table(run, columns)) for columns in _TABLES[suite]]
        parts += [table for table in tables if table]
        if legend := [
            f"{mark}: {meaning}" for mark, meaning in _MARKS.items() if any(mark in table for table in tables)
        ]:
            parts.append("; ".join(legend) + ".")
    if notes := _notes(run):
        parts.append(f"Notes: {'; '.join(notes)}.")
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
    plots = _PLOTS_AGAIN if congestion else PLOTS[suite]
    parts += [f"![{plot}]({folder}/{name}/{plot}.svg)" for plot in plots if exists(f"{folder}/{name}/{plot}.svg")]
    return "\n\n".join(parts)


def _notes(run: Run) -> list[str]:
    """Return what a reader of the table must know: what was not measured, and which rounds gave no result."""
    broken: dict[tuple[str, str], list[Record]] = {}
    for record in run.records:
        if record.problems:
            broken.setdefault((record.peer, record.scenario), []).append(record)
    rounds = [
        f"{peer}, {scenario}: {len(records)} rounds without a result ({records[0].problems[0]})"
        for (peer, scenario), records in broken.items()
    ]
    # What a peer logged before it ended follows in further lines.
    return [text.splitlines()[0].rstrip(".:") for text in (*run.notes, *run.missing, *run.failed, *rounds)]


def _table(run: Run, columns: Sequence[_Column]) -> list[str]:
    records = run.records
    # Results of an earlier version lack what has been measured since.
    measured = {(record.scenario, value) for record in records for value in record.values}
    used = [column for column in columns if column[1:3] in measured]
    if not used:
        return []
    lines = ["| |" + "".join(f" {heading} |" for heading, *_ in used), "|---|" + "---|" * len(used)]
    for peer in run.peers:
        cells = []
        for _, scenario, value, form in used:
            of_peer = [each for each in records if (each.scenario, each.peer) == (scenario, peer) and not each.problems]
            cells.append(_cell(of_peer, value, form))
        if all(cell == "–" for cell in cells):
            continue
        title = f"{peer}: {run.peers[peer]['about']}" if run.of("sandbox") or run.of("handover") else peer
        mark = "**" if peer in _OURS else ""
        lines.append(f"| {mark}{title}{mark} |" + "".join(f" {mark}{cell}{mark} |" for cell in cells))
    return lines


def _cell(records: Sequence[Record], value: str, form: str) -> str:
    """Return median and spread of the results of one peer in one scenario, with the marks of `_MARKS`."""
    found = summarize(records, records[0].scenario, records[0].peer, value) if records else None
    if found is None:
        return "–"
    text = format(found.median, form)
    if found.rounds > 1:
        text += f" {_SPREAD}{format((found.most - found.least) / 2, form.removeprefix('+'))}"
    most = len(records) / 2
    if value.endswith("_per_s") and sum(record.limited_by == "load" for record in records) > most:
        text = _LOWER_BOUND + text
    if sum((record.foreign_cpu or 0) > FOREIGN_LIMIT for record in records) > most:
        text += _DISTURBED
    return text
