"""Transfers under restarts of the gateway: every byte checked, no connection lost, and what the restarts cost.

The gateway runs under a manager with a descriptor store, as under systemd, and is restarted (or reloaded: the next process
starts beside it) each time that another share of the bytes has come. The same transfer without that is the measure. Needs
root, as the tests' manager does.
"""

import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench import checked
from bench.processes import FIRST_UID, free_port
from bench.records import Record, Run

SUITE: Final = "handover"
_TOKEN: Final = "a-token-for-benchmarks-only-0123456789abcdef"
_GB: Final = 1e9


@dataclass(frozen=True, slots=True)
class Size:
    """How much is moved, and how often the gateway is restarted meanwhile."""

    gigabytes: float
    tunnels: int
    restarts: int

    @property
    def per_tunnel(self) -> int:
        """Bytes of one tunnel."""
        return int(self.gigabytes * _GB / self.tunnels)


def expected_s(size: Size, rounds: int) -> float:
    """Return about how long `run` takes: both ends of a checked transfer are Python."""
    return rounds * (3 * (size.gigabytes / 0.6 + 2) + 2 * size.restarts)


def run(run: Run, size: Size, rounds: int, say: Callable[[str], None]) -> None:
    """Run interleaved rounds, without, with restarts and with reloads. Raises RuntimeError where it cannot run."""
    if os.geteuid() != 0:
        raise RuntimeError("it needs root: the gateway runs as a user of its own")
    ways = ((0, "restarts"), (size.restarts, "restarts"), (size.restarts, "reloads"))
    for count, kind in ways:
        about = f"{size.gigabytes:g} GB in {size.tunnels} tunnels, {count} {kind} of the gateway meanwhile"
        run.peers[f"{count}-{kind}"] = {"about": about, "checks": "", "forward_proxy": False}
    for number in range(rounds):
        for turn in range(len(ways)):
            record = _measure(size, *ways[(number + turn) % len(ways)], number)
            run.records.append(record)
            say(
                f"round {number + 1}, {record.peer}: {record.values['gb_per_s']:.2f} GB/s, {len(record.problems)} errors"
            )


def _measure(size: Size, count: int, kind: str, number: int) -> Record:
    # From the checkout only: the tests know how to be a service manager.
    from tests.support.manager import Manager

    record = Record(SUITE, "transfer", f"{count}-{kind}", number, {})
    with tempfile.TemporaryDirectory(prefix="bench-handover-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        port = _write_files(folder, size)
        progress = folder / "progress"
        progress.write_bytes(bytes(checked.PROGRESS_BYTES))
        code = Path(__file__).parents[1]
        manager = Manager(
            [sys.executable, "-m", "gateway", "--config", str(folder / "gateway.toml")],
            uid=FIRST_UID,
            environment={**os.environ, "PYTHONPATH": str(_readable(folder, code)), "HOME": "/nonexistent"},
            log=folder / "log",
            folder=folder,
        )
        command = [sys.executable, "-m", "bench.checked"]
        serve = [*command, "serve", str(size.per_tunnel), str(progress)]
        with subprocess.Popen(serve, cwd=code, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                target = f"127.0.0.1:{server.stdout.readline().strip()}"
                before = resource.getrusage(resource.RUSAGE_CHILDREN)
                manager.start()
                ask = [*command, "load", str(port), target, f"bench:{_TOKEN}"]
                ask += [str(size.tunnels), str(size.per_tunnel), str(progress)]
                with subprocess.Popen(ask, cwd=code, stdout=subprocess.PIPE, text=True) as load:
                    assert load.stdout is not None
                    load.stdout.readline()
                    renew = manager.reload if kind == "reloads" else manager.restart
                    took = _disturb(renew, load, progress, size, count)
                    checked.say_over(progress)
                    result = json.loads(load.stdout.readline() or "{}")
                    # The gateway's lives are all that has been waited for until here.
                    manager.stop()
                    after = resource.getrusage(resource.RUSAGE_CHILDREN)
            finally:
                server.kill()
                manager.close()
        _judge(record, result, folder, size, took)
        # One that had nothing to hand over shows nothing.
        handed_over = len(re.findall(r"took up [1-9]\d* connections", manager.log()))
        if handed_over != count:
            record.problems.append(f"{handed_over} processes took up tunnels, after {count} {kind}")
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        # A process of a reload is nobody's child here, so what it used is not known.
        if kind != "reloads":
            record.values["cpu_s_per_gb"] = used / size.gigabytes
    return record


def _disturb(
    renew: Callable[[], None], load: "subprocess.Popen[str]", progress: Path, size: Size, count: int
) -> list[float]:
    """Renew the gateway each time that another share of the bytes has come; return how long each time took."""
    took: list[float] = []
    # The last tunnel waits for the end of this.
    whole = size.per_tunnel * (size.tunnels - 1)
    while len(took) < count and load.poll() is None:
        if checked.moved(progress) >= whole * (len(took) + 1) / (count + 1):
            started = time.monotonic()
            renew()
            took.append(time.monotonic() - started)
        else:
            time.sleep(0.005)
    return took


def _judge(record: Record, result: dict[str, Any], folder: Path, size: Size, took: list[float]) -> None:
    """Take over what was measured, and say what is wrong with it: errors, or audit lines that do not say the same."""
    record.problems += result.get("errors", ["the load ended before its time"])
    seconds = result.get("seconds", 0.0)
    record.values["gb_per_s"] = result.get("bytes", 0) / _GB / seconds if seconds else 0.0
    record.values["seconds"] = seconds
    record.values["restarts"] = len(took)
    if took:
        record.values["restart_s"] = statistics.median(took)
    lines = [json.loads(line) for line in (folder / "egress/bench.log").read_text().splitlines()]
    ends = [line for line in lines if line["event"] == "close"]
    if len(lines) != 2 * size.tunnels or len(ends) != size.tunnels or {line["reason"] for line in ends} != {"done"}:
        record.problems.append(f"{len(lines)} audit lines, {len(ends)} ends, for {size.tunnels} tunnels")
    # Requests of 5 bytes go up beside the transfers, digests of 32 come down after uploads.
    moved = sum(line["bytes_up"] + line["bytes_down"] for line in ends)
    wanted = size.per_tunnel * size.tunnels + 5 * size.tunnels + 32 * (size.tunnels // 2)
    if moved != wanted:
        record.problems.append(f"the audit lines say {moved} bytes, and {wanted} were moved")


def _write_files(folder: Path, size: Size) -> int:
    port = free_port()
    audit = folder / "egress"
    audit.mkdir()
    os.chown(audit, FIRST_UID, FIRST_UID)
    (folder / "gateway.toml").write_text(
        f'[listen]\nsandbox = "127.0.0.1:{port}"\n[sessions]\nfile = "{folder}/sessions.toml"\n'
        f'[egress]\nallow_loopback = true\n[audit]\ndir = "{audit}"\n'
    )
    (folder / "sessions.toml").write_text(
        f'[[session]]\nid = "bench"\ntoken = "{_TOKEN}"\nnetwork = "open"\n'
        f"egress_budget = {{ bytes = {10**15}, connections = {size.tunnels} }}\n"
    )
    return port


def _readable(folder: Path, code: Path) -> Path:
    """Copy the gateway to where its user can read it, compiled: it starts often and may not write there."""
    import compileall
    import shutil

    copy = folder / "code"
    shutil.copytree(code / "gateway", copy / "gateway", ignore=shutil.ignore_patterns("__pycache__"))
    compileall.compile_dir(copy, quiet=1)
    return copy
