"""`python -m bench SUITE`: prints its plan and progress, then tables; writes raw JSON and plots."""

import argparse
import errno
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from rich.console import Console

from bench import micro_runs, profile, publish
from bench.congestion import CongestionError, under
from bench.load import LoadError
from bench.machine import describe
from bench.plots import PlotsUnavailableError, draw
from bench.records import Run
from bench.report import print_report
from bench.suites import SUITES, Job, job

RESULTS: Final = Path(__file__).parent / "results"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = parser.add_subparsers(dest="command_name", required=True)
    for name, text in {**SUITES, "all": "all of these, then micro"}.items():
        _add_suite(commands.add_parser(name, help=text, description=text), name)
    micro = commands.add_parser("micro", help="every pure hot function by itself")
    what = micro.add_mutually_exclusive_group()
    what.add_argument("--save", action="store_true", help="keep the result as the baseline")
    what.add_argument(
        "--compare", action="store_true", help="fail where a function has become slower than noise explains"
    )
    what.add_argument("--once", action="store_true", help="run each function once: is it correct, not how fast is it")
    where = commands.add_parser("profile", help="where the gateway's time goes in a scenario")
    where.add_argument("scenario", help="of the egress or model suite")
    where.add_argument("--seconds", type=positive, default=5.0)
    show = commands.add_parser("show", help="print and draw results again")
    show.add_argument("file", type=Path, nargs="+")
    readme = commands.add_parser("readme", help="put the tables and plots of a folder of results into README.md")
    readme.add_argument("folder", type=Path)
    return parser


def at_least(least: int) -> Callable[[str], int]:
    """Return what reads an option's whole number of at least `least`."""

    def whole(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        return int(text)

    return whole


def positive(text: str) -> float:
    """Read an option's number above 0."""
    if not 0 < float(text) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not more than 0")
    return float(text)


def _add_suite(suite: argparse.ArgumentParser, name: str) -> None:
    proxies, everything = name in ("egress", "curves", "model"), name == "all"
    suite.set_defaults(peer=[], command=[], scenario=[])
    if proxies:
        suite.add_argument("--peer", action="append", metavar="NAME", help="only this one (again for more)")
        suite.add_argument(
            "--command",
            action="append",
            metavar="NAME=COMMAND",
            help="one more peer; {port} is where it must listen, {upstream} (model) the provider's URL",
        )
        suite.add_argument("--scenario", action="append", metavar="NAME", help="only this, or all that begin so")
    suite.set_defaults(fetch=[], congestion="")
    if name == "egress":
        suite.add_argument(
            "--congestion",
            metavar="NAME",
            help="TCP congestion control of all, in a network namespace of its own (root), such as reno; into egress-NAME.json",
        )
    if name == "model":
        suite.add_argument(
            "--litellm",
            action="append_const",
            dest="fetch",
            const="litellm",
            help="also LiteLLM's proxy, installed from PyPI at first",
        )
        suite.add_argument(
            "--portkey",
            action="append_const",
            dest="fetch",
            const="portkey",
            help="also Portkey's gateway, installed from npm at first",
        )
    if name != "sandbox":
        suite.add_argument("--rounds", type=at_least(1), default=3)
    if proxies or everything:
        suite.add_argument("--seconds", type=positive, default=3.0, help="of one measurement")
        suite.add_argument("--idle", type=at_least(10), default=5_000, metavar="TUNNELS")
    if name == "sandbox" or everything:
        suite.add_argument(
            "--starts", type=at_least(0), default=10, metavar="ROUNDS", help="of session starts; 0: none"
        )
        suite.add_argument("--sessions", type=at_least(0), default=100, help="in all, eight at a time; 0: none")
    if name == "handover" or everything:
        suite.add_argument("--gigabytes", type=positive, default=10.0, help="of a checked transfer")
        suite.add_argument("--tunnels", type=at_least(1), default=100)
        suite.add_argument("--restarts", type=at_least(0), default=10, help="of the gateway meanwhile")
    if name == "api" or everything:
        suite.add_argument("--requests", type=at_least(1), default=1_000, help="API requests of one measurement")
        suite.add_argument("--stored", type=at_least(1), default=10_000, help="sessions in the database")
    suite.add_argument("--quick", action="store_true", help="one short round: does it work, not how fast is it")
    suite.add_argument("--out", type=Path, metavar="FOLDER", help="of raw results (default: bench/results/DATE-TIME; a quick run: a temporary one)")  # fmt: skip


def run_job(work: Job, folder: Path, console: Console, congestion: str = "") -> int:
    """Run a suite. Returns the exit status: 1 when a result does not count, 2 when nothing could be run."""
    now = datetime.now(UTC)
    run = Run(now.strftime("%Y-%m-%d %H:%M UTC"), shlex.join(["python", "-m", "bench", *sys.argv[1:]]), describe())
    run.missing = [f"not measured: {text}" for text in work.missing]
    try:
        work.run(run, lambda text: console.print(text, style="dim", highlight=False))
    except (RuntimeError, LoadError) as error:
        run.failed.append(str(error))
    except Exception as error:
        # A mistake of ours. The suites after this one can still be measured.
        console.print_exception()
        run.failed.append(f"{type(error).__name__}: {error}")
    if run.failed and not run.records:
        console.print(f"{work.name}: not measured: {'; '.join(run.failed)}", style="red", markup=False)
        return 2
    file = folder / (f"{work.name}-{congestion}.json" if congestion else f"{work.name}.json")
    run.save(file)
    finish(run, file, console)
    # A peer that did not start is no result either.
    return 1 if not run.records or any(record.problems for record in run.records) or run.failed else 0


def run_suites(names: Sequence[str], options: argparse.Namespace, console: Console) -> int:
    """Print the plan with its minutes, then run the suites one after the other. Returns the worst exit status."""
    try:
        jobs = [job(name, options) for name in names]
    except ValueError as error:
        console.print(str(error), style="red")
        return 2
    for each in jobs:
        console.print(f"{each.name:8} {each.expected_s() / 60:5.1f} min  {each.plan()}", highlight=False)
    console.print(
        f"together {sum(each.expected_s() for each in jobs) / 60:5.1f} min on an idle machine", highlight=False
    )
    scratch = Path(tempfile.mkdtemp(prefix="bench-")) if options.quick and not options.out else None
    folder = options.out or scratch or RESULTS / f"{datetime.now(UTC):%Y-%m-%d-%H%M}"
    try:
        # Before hours are spent on what could not be kept.
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        console.print(f"{folder} cannot be written: {error.strerror}", style="red", markup=False)
        return 2
    return max(run_job(each, folder, console, options.congestion) for each in jobs)


def finish(run: Run, file: Path, console: Console) -> None:
    """Print the tables and draw the plots of a run."""
    print_report(run, console)
    console.print(f"raw results: {file}")
    try:
        for path in draw(run, file.with_suffix("")):
            console.print(f"plot: {path}")
    except PlotsUnavailableError as error:
        console.print(f"no plots: {error}", style="yellow")


def _show(file: Path, console: Console) -> int:
    """Print and draw the results of one file. Returns 2 when it holds none."""
    try:
        run = Run.load(file)
    except (OSError, ValueError, TypeError, KeyError) as error:
        console.print(f"{file} holds no results: {error}", style="red", markup=False)
        return 2
    finish(run, file, console)
    return 0


def _end(number: int, _frame: object) -> None:
    """End as with Ctrl-C: what was started is stopped. Once: timeout(1) signals the process and then its group."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def main() -> int:
    """Run the command line."""
    options = _parser().parse_args()
    signal.signal(signal.SIGTERM, _end)
    # Tables need room; a file or a pipe has as much as they want.
    console = Console() if sys.stdout.isatty() else Console(width=130)
    match options.command_name:
        case "micro":
            return micro_runs.run(keep=options.save, compare=options.compare, once=options.once)
        case "profile":
            return profile.run(options.scenario, options.seconds, console)
        case "readme":
            return publish.update(options.folder, console)
        case "show":
            return max(_show(file, console) for file in options.file)
        case "all":
            status = run_suites(list(SUITES), options, console)
            return max(status, micro_runs.run(once=options.quick))
        case name:
            if options.congestion:
                try:
                    under(options.congestion, sys.argv[1:])
                except CongestionError as error:
                    console.print(str(error), style="red", markup=False)
                    return 2
            return run_suites([name], options, console)


if __name__ == "__main__":
    sys.exit(main())
