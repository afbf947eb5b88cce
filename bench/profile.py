"""Where the time of the gateway (of control, for the API) goes while a scenario runs: the kernel's and the interpreter's functions, Python's, system calls.

Each profiler that is installed watches one run of its own: perf (samples of C and kernel functions), py-spy (samples of Python
functions), strace -c (counts of system calls; slows the process down a lot, so only the counts mean something).
"""

import contextlib
import re
import shutil
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from bench import api, egress, model
from bench.load import LoadError
from bench.peers.base import Peer
from bench.peers.gateway import GatewayPeer
from bench.peers.model import ModelGateway
from bench.records import Record, Run
from bench.rounds import Scenario, Settings, Stage

_LINES: Final = 25
_PERF: Final = "perf"
_PY_SPY: Final = "py-spy"
_STRACE: Final = "strace"


def run(name: str, seconds: float, console: Console) -> int:
    """Profile the gateway, or for the api suite control, in a scenario. Returns 2 when there is no such scenario or profiler."""
    suites = {"egress": [*egress.scenarios(), *egress.scaling()], "model": model.scenarios()}
    found = [(suite, each) for suite, known in suites.items() for each in known if each.name == name]
    if not found and name not in api.SCENARIOS:
        names = ", ".join([*(each.name for known in suites.values() for each in known), *api.SCENARIOS])
        console.print(f"no such scenario; there are {names}", style="red")
        return 2
    tools = [tool for tool in (_PERF, _PY_SPY, _STRACE) if shutil.which(tool)]
    if not tools:
        console.print("none of perf, py-spy and strace is installed", style="red")
        return 2
    run_ = Run("", "", {})
    say: Callable[[str], None] = lambda text: console.print(text, style="dim", highlight=False)  # noqa: E731
    try:
        if not found:
            plan = api.Plan(rounds=1, requests=int(seconds * 300), stored=2_000)
            api.watch(run_, plan, name, [partial(_watch, tool, console) for tool in tools], say)
        else:
            suite, scenario = found[0]
            settings = Settings(rounds=1, seconds=seconds)
            watched: list[Scenario] = [_Watched(scenario, tool, console) for tool in tools]
            if suite == "model":
                model.run(run_, [ModelGateway()], watched, settings, say)
            else:
                egress.run(run_, suite, [GatewayPeer()], watched, settings, say)
    except (LoadError, RuntimeError) as error:
        console.print(str(error), style="red")
        return 2
    problems = [*run_.failed, *(problem for record in run_.records for problem in record.problems)]
    for problem in problems:
        console.print(problem, style="red")
    return 1 if problems else 0


@contextlib.contextmanager
def _watch(tool: str, console: Console, pid: int, record: Record) -> Iterator[None]:
    """Have a profiler watch a process meanwhile, then print what it found."""
    with tempfile.TemporaryDirectory(prefix="bench-profile-") as folder:
        file = Path(folder) / "profile"
        profiler = subprocess.Popen(_command(tool, pid, file), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        try:
            yield
        finally:
            profiler.send_signal(signal.SIGINT)
            _, said = profiler.communicate()
        if not file.exists():
            record.problems.append(f"{tool}: {said.decode(errors='replace').strip()}")
            return
        console.print(f"\n{record.scenario} under {tool}", style="bold")
        for value, number in record.values.items():
            if "cpu" in value:
                console.print(f"  {value} {number:.4g}, the profiler's cost included", highlight=False)
        for line in _table(tool, file)[:_LINES]:
            console.print(line, highlight=False, markup=False)


class _Watched(Scenario):
    """A scenario with a profiler at the gateway's process."""

    def __init__(self, scenario: Scenario, tool: str, console: Console) -> None:
        super().__init__(scenario.name)
        self._scenario = scenario
        self._tool = tool
        self._console = console

    def applies(self, peer: Peer, stage: Stage) -> bool:
        return self._scenario.applies(peer, stage)

    def run(self, peer: Peer, stage: Stage, record: Record) -> list[dict[str, Any]]:
        with _watch(self._tool, self._console, peer.pids()[0], record):
            return self._scenario.run(peer, stage, record)


def _command(tool: str, pid: int, file: Path) -> Sequence[str]:
    if tool == _PERF:
        return (_PERF, "record", "--freq", "499", "--pid", str(pid), "--output", str(file))
    if tool == _PY_SPY:
        return (_PY_SPY, "record", "--rate", "250", "--pid", str(pid), "--format", "raw", "--output", str(file), "--nonblocking", "--duration", "3600")  # fmt: skip
    return (_STRACE, "-f", "-c", "-U", "name,calls,errors,time", "-p", str(pid), "-o", str(file))


def _table(tool: str, file: Path) -> list[str]:
    if tool == _PERF:
        report = (_PERF, "report", "--input", str(file), "--stdio", "--no-children", "--fields", "overhead,dso,symbol", "--percent-limit", "0.5")  # fmt: skip
        text = subprocess.run(report, check=True, capture_output=True, text=True).stdout
        return [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if tool == _PY_SPY:
        return python_table(file.read_text())
    return file.read_text().splitlines()


def python_table(text: str) -> list[str]:
    """Sum up py-spy's raw stacks (`a;b;c 12`): by function, samples in it and in what it calls."""
    own: Counter[str] = Counter()
    whole: Counter[str] = Counter()
    for line in text.splitlines():
        stack, _, count = line.rpartition(" ")
        # `name (file:line)`: lines of one function are one.
        functions = [re.sub(r":\d+\)$", ")", frame) for frame in stack.split(";")]
        own[functions[-1]] += int(count)
        whole.update(dict.fromkeys(functions, int(count)))
    total = max(1, sum(own.values()))
    ordered = sorted(whole, key=lambda name: (-own[name], -whole[name]))
    head = f"{'own':>7} {'with calls':>10}  function"
    return [head, *(f"{own[name] / total:7.1%} {whole[name] / total:10.1%}  {name}" for name in ordered)]
