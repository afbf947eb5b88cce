"""What is made of numbers: medians, limits, goals, changes beyond noise, and README's section."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from bench import publish
from bench.goals import judge
from bench.measure import Usage
from bench.micro_runs import Measured, load, save, slower
from bench.plots import draw
from bench.profile import python_table
from bench.records import Record, Run, summarize
from bench.report import print_report
from bench.suites import SUITES

MACHINE = {"cores": 2, "cpu": "a CPU", "kernel": "6", "system": "Debian"}


def usage(
    *, peer: float = 0, thread: float = 0, load: float = 0, server: float = 0, machine: float = 0, seconds: float = 1
) -> Usage:
    return Usage(peer, thread, load, server, machine, seconds)


@pytest.mark.parametrize(
    ("used", "limit"),
    [
        (usage(peer=0.99, thread=0.99, load=0.99, machine=1.98), "load"),
        (usage(peer=0.99, thread=0.99, server=0.99, machine=1.98), "load"),
        (usage(peer=0.99, thread=0.99, load=0.4, machine=1.4), "peer"),
        # Two threads that share the work: neither is saturated.
        (usage(peer=1.0, thread=0.5, load=0.4, machine=1.4), "waiting"),
        (usage(peer=0.5, thread=0.5, load=0.5, machine=1.0), "waiting"),
        (usage(seconds=0), None),
    ],
)
def test_says_when_the_load_was_the_bottleneck(used: Usage, limit: str | None) -> None:
    assert used.limited_by() == limit


def test_counts_what_other_programs_took_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    assert usage(peer=0.5, load=0.5, machine=1.5).foreign_share == pytest.approx(0.25)


def record(scenario: str, peer: str, number: int = 0, problem: str = "", **values: float) -> Record:
    return Record("egress", scenario, peer, number, values, problems=[problem] if problem else [])


def a_run() -> Run:
    run = Run("2026-01-01", "python -m bench egress", MACHINE)
    run.peers = {name: {"about": name, "checks": "", "forward_proxy": name == "squid"} for name in ("gateway", "squid")}
    for number in range(3):
        run.records += [
            record("bulk-1-down", "gateway", number, gb_per_s=3.0 + number, cpu_s_per_gb=0.2),
            record("bulk-1-down", "squid", number, gb_per_s=1.5, cpu_s_per_gb=0.8),
            record("connections", "gateway", number, connections_per_s=100, cpu_us_per_connection=300),
            record("connections", "squid", number, connections_per_s=200, cpu_us_per_connection=200),
        ]
    return run


def test_a_round_with_problems_is_in_no_median_and_in_the_table() -> None:
    run = a_run()
    run.records.append(record("bulk-1-down", "gateway", 3, "1 errors, the first: reset", gb_per_s=1_000))
    found = summarize(run.records, "bulk-1-down", "gateway", "gb_per_s")
    assert found is not None
    assert (found.median, found.least, found.most, found.rounds) == (4.0, 3.0, 5.0, 3)
    console = Console(width=130, record=True, file=io.StringIO())
    print_report(run, console)
    assert "no result: 1 errors" in console.export_text()


def test_goals_are_reached_missed_or_not_measured() -> None:
    reached = {goal.text: goal.reached for goal in judge(a_run())}
    assert reached["1 tunnel: at least 2.0 x the best forward proxy"] is True
    assert reached["CPU per connection: at most Squid's"] is False
    assert reached["idle tunnels: at most 60 MB resident"] is None


def test_what_is_added_to_the_first_byte_is_judged_where_all_have_the_same_rate() -> None:
    run = Run("", "", MACHINE)
    for scenario, ours, straight in (("first-byte", 900.0, 50.0), ("first-byte-1000", 250.0, 100.0)):
        for peer, value in (("gateway", ours), ("direct", straight)):
            run.records.append(Record("model", scenario, peer, 0, {"first_p50_us": value}))
    found = {goal.text: (goal.found, goal.reached) for goal in judge(run)}
    assert found["first byte at 1,000 requests a second: at most 300 us added at p50"] == ("150 us", True)


@pytest.mark.parametrize(("requests", "reached"), [(100_000, False), (1_000, None)])
def test_memory_is_not_judged_after_a_few_requests(requests: int, reached: bool | None) -> None:
    run = Run("", "", MACHINE)
    values = {"requests": float(requests), "growth_mb": 9.0, "rss_mb": 50.0}
    run.records = [Record("model", "memory", "gateway", 0, values)]
    (goal,) = (goal for goal in judge(run) if goal.text.startswith("memory"))
    assert goal.reached is reached


def test_a_missed_limit_of_time_is_not_judged_on_a_machine_that_others_use() -> None:
    run = Run("", "", MACHINE)
    run.records = [
        Record("api", "api-get", "sqlite", 0, {"p99_ms": 30.0}),
        Record("api", "api-get", "postgresql", 0, {"p99_ms": 30.0}, foreign_cpu=0.5),
    ]
    reached = {goal.text: goal.reached for goal in judge(run)}
    assert reached["sqlite: p99 of get at most 20 ms"] is False
    assert reached["postgresql: p99 of get at most 20 ms"] is None


def test_a_function_that_became_slower_is_told_from_a_slower_machine(tmp_path: Path) -> None:
    baseline = {"a": Measured(1.0, 1.1, 2.0), "b": Measured(5.0, 5.1, 2.0)}
    twice_as_slow = {name: Measured(each.best_us * 2, each.median_us, 4.0) for name, each in baseline.items()}
    assert slower(baseline, twice_as_slow) == {}
    changed = {**twice_as_slow, "b": Measured(15.0, 15.1, 4.0), "new": Measured(9.0, 9.0, 4.0)}
    assert slower(baseline, changed) == {"b": 1.5}
    save(baseline, tmp_path / "baseline.json")
    assert load(tmp_path / "baseline.json") == baseline


def test_every_micro_benchmark_is_in_the_committed_baseline() -> None:
    names = {
        line.split("(")[0].removeprefix("def ")
        for file in (Path(publish.__file__).parent / "micro").glob("test_*.py")
        for line in file.read_text().splitlines()
        if line.startswith("def test_")
    }
    assert {name.rpartition("::")[2].partition("[")[0] for name in load()} == names


def test_readme_gets_tables_and_missed_goals_between_its_markers_and_nothing_else(tmp_path: Path) -> None:
    readme, folder = tmp_path / "README.md", tmp_path / "results/of-a-day"
    readme.write_text(f"before\n{publish.BEGIN}\nold numbers\n{publish.END}\nafter\n")
    a_run().save(folder / "egress.json")
    for _ in range(2):  # the second time changes nothing
        assert publish.update(folder, Console(quiet=True), readme) == 0
    text = readme.read_text()
    assert text.startswith(f"before\n{publish.BEGIN}\n")
    assert text.endswith(f"{publish.END}\nafter\n")
    assert "old numbers" not in text
    assert "| **gateway** | **4.0 ±1.0** | **0.20 ±0.00** | **100 ±0** | **300 ±0** |" in text
    assert "\n\n±: half the distance between the rounds' extremes.\n\n" in text
    assert "CPU per connection: at most Squid's (300 us to 200: 1.50 x)" in text
    assert text.count("throughput.svg") == 1


def test_what_a_number_must_not_be_taken_for_stands_beside_it() -> None:
    run = a_run()
    for each in run.of("egress"):
        # In two of three rounds; once is no mark.
        often, peer = each.round > 0, each.peer
        each.limited_by = "load" if often == (peer == "gateway") else "waiting"
        each.foreign_cpu = 0.4 if often == (peer == "squid") else None
    run.notes, run.missing = ["without TLS scenarios: no port."], ["not measured: tinyproxy: not installed"]
    run.failed = ["round 1: c-splicer did not start: it ended with status 1:\nits log"]
    run.records.append(record("echo", "gateway", 0, "1 errors, the first: reset", p50_us=1.0))
    lines = publish.section("egress", run, "results", lambda _: False).splitlines()
    assert "| **gateway** | **≥4.0 ±1.0** | **0.20 ±0.00** | **≥100 ±0** | **300 ±0** |" in lines
    assert r"| squid | 1.5 ±0.0\* | 0.80 ±0.00\* | 200 ±0\* | 200 ±0\* |" in lines
    assert [line.count("in most rounds") for line in lines if line.startswith("±")] == [2]
    assert (
        "Notes: without TLS scenarios: no port; not measured: tinyproxy: not installed; round 1: c-splicer did not "
        "start: it ended with status 1; gateway, echo: 1 rounds without a result (1 errors, the first: reset)."
    ) in lines


def test_one_round_has_no_spread_and_what_has_no_mark_no_legend() -> None:
    run = a_run()
    run.records = [each for each in run.records if not each.round]
    text = publish.section("egress", run, "results", lambda _: False)
    assert "| **gateway** | **3.0** | **0.20** | **100** | **300** |" in text
    assert not any(mark in text for mark in ("±:", "≥:", r"\*:", "Notes"))


def test_a_run_under_another_congestion_control_is_a_table_of_its_own(tmp_path: Path) -> None:
    readme, folder = tmp_path / "README.md", tmp_path / "results"
    readme.write_text(f"{publish.BEGIN}{publish.END}")
    for name in ("egress", "egress-reno", "api"):
        a_run().save(folder / f"{name}.json")
    assert publish.update(folder, Console(quiet=True), readme) == 0
    text = readme.read_text()
    titles = ("**Egress proxy**: ", "**Egress proxy, reno for all**: ", "**Control API**: ")
    assert sorted(titles, key=text.index) == list(titles)
    part = text.partition(titles[1])[2].partition(titles[2])[0]
    assert "results/egress-reno.json" in part
    assert "results/egress-reno/throughput.svg" in part
    assert "goals reached" in part


def test_readme_without_markers_is_left_alone(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("no place\n")
    a_run().save(tmp_path / "egress.json")
    assert publish.update(tmp_path, Console(quiet=True), readme) == 2
    assert readme.read_text() == "no place\n"


def test_readme_has_its_markers() -> None:
    text = publish.README.read_text()
    assert text.count(publish.BEGIN) == text.count(publish.END) == 1


def test_plots_are_drawn_from_whatever_a_run_has(tmp_path: Path) -> None:
    assert {path.name for path in draw(a_run(), tmp_path)} == {
        "throughput.svg", "cpu-per-gb.svg", "connections.svg", "cpu-per-connection.svg",
    }  # fmt: skip
    assert draw(Run("", "", MACHINE), tmp_path) == []


def test_curves_are_drawn_from_the_suite_of_that_name(tmp_path: Path) -> None:
    run = Run("", "", MACHINE)
    for number in (1, 5000):
        run.records.append(Record("curves", f"connections-{number}", "gateway", 0, {"connections_per_s": number}))
    assert [path.name for path in draw(run, tmp_path)] == ["connections-by-number.svg"]


def test_every_suite_has_its_place_in_readme() -> None:
    assert SUITES.keys() == publish.TITLES.keys() == publish.PLOTS.keys()


def test_samples_of_one_function_are_summed_up_over_its_lines() -> None:
    table = python_table("main (a.py:1);loop (a.py:5) 6\nmain (a.py:1);loop (a.py:7) 2\nmain (a.py:2) 2\n")
    assert [line.split() for line in table[1:]] == [
        ["80.0%", "80.0%", "loop", "(a.py)"],
        ["20.0%", "100.0%", "main", "(a.py)"],
    ]
