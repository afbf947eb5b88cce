"""`python -m bench egress | model | micro | all | show`: prints its plan and progress, then tables; writes raw JSON and plots."""

import argparse
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from rich.console import Console

from bench import egress, model, peers
from bench.load import LoadError, compiler
from bench.machine import describe
from bench.plots import PlotsUnavailableError, draw
from bench.records import Run
from bench.report import print_report
from bench.rounds import Scenario, Settings

RESULTS: Final = Path(__file__).parent / "results"
_MICRO: Final = Path(__file__).parent / "micro"
_BASELINES: Final = RESULTS / "micro"
# A median that grew by more than this since the baseline is a change, not noise.
_MICRO_LIMIT: Final = "median:25%"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    what = parser.add_subparsers(dest="suite", required=True)
    for name, text in (
        ("egress", "the egress proxy against other proxies"),
        ("model", "the model proxy against other relays"),
        ("all", "egress, model, then micro"),
    ):
        suite = what.add_parser(name, help=text, description=text)
        suite.add_argument("--peer", action="append", default=[], metavar="NAME", help="only this one (again for more)")
        suite.add_argument(
            "--command",
            action="append",
            default=[],
            metavar="NAME=COMMAND",
            help="one more peer; {port} is where it must listen, {upstream} (model) the provider's URL",
        )
        suite.add_argument(
            "--scenario", action="append", default=[], metavar="NAME", help="only this, or all that begin so"
        )
        suite.add_argument("--curves", action="store_true", help="egress: also the curves from 1 to 1,000 tunnels")
        suite.add_argument("--rounds", type=int, default=3)
        suite.add_argument("--seconds", type=float, default=3.0, help="of one measurement")
        suite.add_argument("--connections", type=int, default=20_000, help="connections or requests of one measurement")
        suite.add_argument("--idle", type=int, default=5_000, metavar="TUNNELS")
        suite.add_argument("--quick", action="store_true", help="one short round: does it work, not how fast is it")
        suite.add_argument(
            "--out", type=Path, metavar="FILE", help="raw results (default: a new file in bench/results)"
        )
    micro = what.add_parser("micro", help="every pure hot function by itself")
    micro.add_argument("--save", action="store_true", help="keep the result as this machine's baseline")
    micro.add_argument(
        "--compare", action="store_true", help=f"fail where a function exceeds the baseline, {_MICRO_LIMIT}"
    )
    micro.add_argument("--once", action="store_true", help="run each function once: is it correct, not how fast is it")
    show = what.add_parser("show", help="print and draw a result again")
    show.add_argument("file", type=Path)
    return parser


def run_micro(*, save: bool = False, compare: bool = False, once: bool = False) -> int:
    """Run the micro benchmarks with pytest-benchmark. Returns its exit status."""
    command = [sys.executable, "-m", "pytest", str(_MICRO), "--override-ini=addopts=", "-p", "no:cacheprovider", "-q"]
    if once:
        command += ["--benchmark-disable"]
    else:
        command += [
            f"--benchmark-storage=file://{_BASELINES}",
            "--benchmark-columns=median,iqr",
            "--benchmark-sort=name",
        ]
    if save:
        command += ["--benchmark-save=baseline"]
    if compare:
        command += ["--benchmark-compare", f"--benchmark-compare-fail={_MICRO_LIMIT}"]
    return subprocess.run(command, check=False, cwd=_MICRO.parent.parent).returncode


def _say(console: Console) -> Callable[[str], None]:
    return lambda text: console.print(text, style="dim", highlight=False)


def _settings(options: argparse.Namespace) -> Settings:
    if options.quick:
        return Settings(rounds=1, seconds=0.5, connections=500, idle_tunnels=200)
    return Settings(options.rounds, options.seconds, options.connections, options.idle)


def _choose(suite: str, options: argparse.Namespace) -> tuple[list[peers.Peer], list[str], list[Scenario]]:
    """Return the suite's peers, why others are missing, and its scenarios. Raises ValueError."""
    if suite == "egress":
        found, missing = peers.choose(options.peer, options.command)
        return found, missing, egress.choose(options.scenario, curves=options.curves)
    chosen = model.scenarios()
    if options.scenario:
        chosen = [each for each in chosen if any(each.name.startswith(name) for name in options.scenario)]
    return model.choose_peers(options.peer, options.command), [], chosen


def run_suite(suite: str, options: argparse.Namespace, console: Console) -> int:
    """Run a suite. Returns the exit status: 1 when a result does not count, 2 when nothing could be run."""
    settings, now = _settings(options), datetime.now(UTC)
    run = Run(now.strftime("%Y-%m-%d %H:%M UTC"), shlex.join(["python", "-m", "bench", *sys.argv[1:]]), describe())
    try:
        found, missing, chosen = _choose(suite, options)
        run.missing = [f"not measured: {text}" for text in missing]
        if compiler() is None:
            run.notes.append("no C compiler: the load generator in Python is often what limits the rate")
        names = ", ".join(peer.name for peer in found)
        console.print(f"{suite}: {len(chosen)} scenarios, {settings.rounds} rounds, peers {names}")
        (egress if suite == "egress" else model).run(run, found, chosen, settings, _say(console))
    except (ValueError, LoadError) as error:
        console.print(str(error), style="red")
        return 2
    out = options.out or RESULTS / f"{suite}-{now:%Y%m%d-%H%M%S}.json"
    run.save(out)
    finish(run, out, console)
    return 1 if any(record.problems for record in run.records) else 0


def finish(run: Run, file: Path, console: Console) -> None:
    """Print the tables and draw the plots of a run."""
    print_report(run, console)
    console.print(f"raw results: {file}")
    try:
        for path in draw(run, file.with_suffix("")):
            console.print(f"plot: {path}")
    except PlotsUnavailableError as error:
        console.print(f"no plots: {error}", style="yellow")


def main() -> int:
    """Run the command line."""
    options = _parser().parse_args()
    # Tables need room; a file or a pipe has as much as they want.
    console = Console() if sys.stdout.isatty() else Console(width=130)
    if options.suite == "micro":
        return run_micro(save=options.save, compare=options.compare, once=options.once)
    if options.suite == "show":
        finish(Run.load(options.file), options.file, console)
        return 0
    suites: Sequence[str] = ("egress", "model") if options.suite == "all" else (options.suite,)
    statuses = [run_suite(suite, options, console) for suite in suites]
    if options.suite == "all":
        statuses.append(run_micro())
    return max(statuses)


if __name__ == "__main__":
    sys.exit(main())
