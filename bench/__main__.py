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

from bench import egress, peers
from bench.load import compiler
from bench.machine import describe
from bench.plots import PlotsUnavailableError, draw
from bench.records import Run
from bench.report import print_report

RESULTS: Final = Path(__file__).parent / "results"
_MICRO: Final = Path(__file__).parent / "micro"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    what = parser.add_subparsers(dest="suite", required=True)
    for name, text in (
        ("egress", "the egress proxy against other proxies"),
        ("all", "egress, then micro"),
    ):
        suite = what.add_parser(name, help=text, description=text)
        suite.add_argument("--peer", action="append", default=[], metavar="NAME", help="only these (again for more)")
        suite.add_argument(
            "--command",
            action="append",
            default=[],
            metavar="NAME=COMMAND",
            help="one more CONNECT proxy; {port} in the command is where it must listen",
        )
        suite.add_argument(
            "--scenario", action="append", default=[], metavar="NAME", help="only these, or all that begin so"
        )
        suite.add_argument("--curves", action="store_true", help="also the curves from 1 to 1,000 tunnels")
        suite.add_argument("--rounds", type=int, default=3)
        suite.add_argument("--seconds", type=float, default=3.0, help="of one measurement")
        suite.add_argument("--connections", type=int, default=20_000, help="of one measurement")
        suite.add_argument("--idle", type=int, default=5_000, metavar="TUNNELS")
        suite.add_argument("--quick", action="store_true", help="one short round: does it work, not how fast is it")
        suite.add_argument("--out", type=Path, metavar="FILE", help=f"raw results (default: a new file in {RESULTS})")
    micro = what.add_parser(
        "micro", help="every pure hot function by itself", description="pytest-benchmark; further arguments are its own"
    )
    micro.add_argument("arguments", nargs=argparse.REMAINDER)
    show = what.add_parser("show", help="print and draw a result again")
    show.add_argument("file", type=Path)
    return parser  # fmt: skip


def run_micro(arguments: Sequence[str]) -> int:
    """Run the micro benchmarks; `--benchmark-compare` and the like pass through. Returns pytest's exit status."""
    command = [sys.executable, "-m", "pytest", str(_MICRO), "--override-ini=addopts=", "-p", "no:cacheprovider", "-q"]
    return subprocess.run([*command, *arguments], check=False).returncode


def _say(console: Console) -> Callable[[str], None]:
    return lambda text: console.print(text, style="dim", highlight=False)


def run_suites(options: argparse.Namespace, console: Console) -> int:
    """Run what was asked for; returns the exit status: 1 when a result does not count."""
    settings = egress.Settings(options.rounds, options.seconds, options.connections, options.idle)
    if options.quick:
        settings = egress.Settings(rounds=1, seconds=0.5, connections=500, idle_tunnels=200)
    try:
        chosen = egress.choose(options.scenario, curves=options.curves)
        found, missing = peers.choose(options.peer, options.command)
    except ValueError as error:
        console.print(str(error), style="red")
        return 2
    now = datetime.now(UTC)
    run = Run(now.strftime("%Y-%m-%d %H:%M UTC"), shlex.join(["python", "-m", "bench", *sys.argv[1:]]), describe())
    run.missing = [f"not measured: {text}" for text in missing]
    if compiler() is None:
        run.notes.append(
            "no C compiler: the load generator in Python is slow, and is what was measured where it says so"
        )
    console.print(
        f"{len(chosen)} scenarios, {len(found)} peers, {settings.rounds} rounds: {', '.join(p.name for p in found)}"
    )
    egress.run(run, found, chosen, settings, _say(console))
    out = options.out or RESULTS / f"egress-{now:%Y%m%d-%H%M%S}.json"
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
        return run_micro(options.arguments)
    if options.suite == "show":
        finish(Run.load(options.file), options.file, console)
        return 0
    status = run_suites(options, console)
    return max(status, run_micro([])) if options.suite == "all" else status


if __name__ == "__main__":
    sys.exit(main())
