"""Results as tables for people: medians, how far the rounds lie apart, and what the numbers must not be taken for."""

from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.goals import judge
from bench.measure import FOREIGN_LIMIT
from bench.records import Record, Run, Summary, summarize

# Columns of a scenario by the beginning of its name: value, heading, format.
_COLUMNS: Final[dict[str, tuple[tuple[str, str, str], ...]]] = {
    "bulk": (
        ("gb_per_s", "GB/s", ".2f"),
        ("cpu_s_per_gb", "CPU s/GB", ".3f"),
        ("fairness", "slowest/fastest", ".2f"),
    ),
    "connections": (
        ("connections_per_s", "connections/s", ",.0f"),
        ("cpu_us_per_connection", "CPU µs each", ".0f"),
        ("p50_us", "p50 µs", ",.0f"),
        ("p99_us", "p99 µs", ",.0f"),
    ),
    "echo": (
        ("p50_us", "p50 µs", ",.0f"),
        ("p99_us", "p99 µs", ",.0f"),
        ("p999_us", "p99.9 µs", ",.0f"),
        ("cpu_us_per_message", "CPU µs/message", ".1f"),
        ("bulk_gb_per_s", "bulk GB/s", ".2f"),
    ),
    "idle": (
        ("rss_mb", "RSS MB", ".1f"),
        ("rss_mb_0", "RSS MB empty", ".1f"),
        ("rss_kib_per_tunnel", "KiB a tunnel", ".2f"),
    ),
    "requests": (
        ("requests_per_s", "requests/s", ",.0f"),
        ("cpu_us_per_request", "CPU µs each", ".0f"),
        ("p50_us", "p50 µs", ",.0f"),
        ("p99_us", "p99 µs", ",.0f"),
    ),
    "first": (
        ("requests_per_s", "requests/s", ",.0f"),
        ("first_p50_us", "p50 µs", ",.0f"),
        ("first_p99_us", "p99 µs", ",.0f"),
    ),
    "memory": (
        ("requests", "requests", ",.0f"),
        ("rss_mb", "RSS MB", ".1f"),
        ("growth_mb", "grew MB", "+.1f"),
    ),
    "events": (
        ("events_per_s", "events/s", ",.0f"),
        ("cpu_us_per_event", "CPU µs each", ".2f"),
        ("first_p50_us", "first byte p50 µs", ",.0f"),
        ("first_p99_us", "first byte p99 µs", ",.0f"),
        ("late_p50_us", "late p50 µs", ",.0f"),
        ("late_p99_us", "late p99 µs", ",.0f"),
    ),
    "paced": (
        ("events_per_s", "events/s", ",.0f"),
        ("delivered", "keeps up", ".1%"),
        ("cpu_us_per_event", "CPU µs each", ".1f"),
        ("late_p50_us", "late p50 µs", ",.0f"),
        ("late_p99_us", "late p99 µs", ",.0f"),
        ("rss_mb", "RSS MB", ".1f"),
    ),
    "start": (
        ("ms", "median ms", ",.0f"),
        ("max_ms", "slowest ms", ",.0f"),
        ("control_cpu_ms", "control's CPU ms", ",.0f"),
    ),
    "sessions": (
        ("seconds", "seconds", ".1f"),
        ("sessions_per_s", "sessions/s", ".2f"),
        ("control_growth_mib", "control grew MiB", "+.1f"),
    ),
    "transfer": (
        ("gb_per_s", "GB/s", ".2f"),
        ("cpu_s_per_gb", "CPU s/GB", ".2f"),
        ("restart_s", "one restart s", ".2f"),
    ),
    "api": (
        ("requests_per_s", "requests/s", ",.0f"),
        ("p50_ms", "p50 ms", ".1f"),
        ("p99_ms", "p99 ms", ".1f"),
        ("max_ms", "slowest ms", ".1f"),
        ("cpu_ms_per_request", "CPU ms each", ".2f"),
    ),
}


def columns_of(scenario: str) -> tuple[tuple[str, str, str], ...]:
    """Return the values that a scenario's table shows."""
    return _COLUMNS.get(scenario.partition("-")[0], ())


def _cell(summary: Summary | None, form: str) -> Text:
    if summary is None:
        return Text("–", style="dim")
    text = Text(format(summary.median, form))
    if summary.rounds > 1:
        text.append(f" ±{summary.spread * 50:.0f}%", style="dim")
    return text


def _limits(records: Sequence[Record]) -> str:
    found = sorted({record.limited_by for record in records if record.limited_by})
    busy = max((record.foreign_cpu or 0 for record in records), default=0)
    if busy > FOREIGN_LIMIT:
        found.append(f"others used {busy:.0%}")
    return ", ".join(found)


def print_report(run: Run, console: Console) -> None:
    """Print a table for each scenario, the goals, and every note."""
    machine = run.machine
    console.print(
        f"{machine['cores']} cores {machine['cpu']}, Linux {machine['kernel']}, {machine['system']}, {run.date}",
        style="dim",
    )
    scenarios = list(dict.fromkeys(record.scenario for record in run.records))
    for scenario in scenarios:
        of_scenario = [record for record in run.records if record.scenario == scenario]
        table = Table(title=scenario, title_justify="left", header_style="bold")
        table.add_column("peer")
        for _, heading, _ in columns_of(scenario):
            table.add_column(heading, justify="right")
        table.add_column("limited by")
        # Rounds are shuffled, tables are not.
        found = {record.peer for record in of_scenario}
        for peer in (*(peer for peer in run.peers if peer in found), *sorted(found - run.peers.keys())):
            of_peer = [record for record in of_scenario if record.peer == peer]
            problems = list(dict.fromkeys(problem for record in of_peer for problem in record.problems))
            cells = [_cell(summarize(of_peer, scenario, peer, value), form) for value, _, form in columns_of(scenario)]
            table.add_row(peer, *cells, _limits([record for record in of_peer if not record.problems]))
            for problem in problems:
                table.add_row("", Text(f"no result: {problem}", style="red"))
        console.print(table)
    _print_goals(run, console)
    for text in run.failed:
        console.print(text, style="red")
    for text in (*run.missing, *run.notes):
        console.print(f"Note: {text}", style="yellow")


def _print_goals(run: Run, console: Console) -> None:
    goals = judge(run)
    if not goals:
        return
    table = Table(title="goals", title_justify="left", header_style="bold")
    for heading in ("goal", "found", "reached"):
        table.add_column(heading)
    words = {True: Text("yes", style="green"), False: Text("no", style="red"), None: Text("–", style="dim")}
    for goal in goals:
        table.add_row(goal.text, goal.found, words[goal.reached])
    console.print(table)
