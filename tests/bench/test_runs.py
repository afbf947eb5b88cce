"""Every suite once, for correctness: a run with errors, or whose audit lines do not equal what was made, must say so."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import egress, model, sandbox
from bench.load import Client
from bench.peers import Peer
from bench.peers.gateway import SESSION, TOKEN, GatewayPeer
from bench.peers.model import ModelGateway
from bench.processes import NotRunningError, Process, family, lacks_pipes
from bench.records import Record, Run, summarize
from bench.rounds import Scenario, Settings, Stage
from tests.support.paths import CHECKOUT

# A user of whom nothing else runs.
USER = 60_704
DROPPING = Path(__file__).with_name("dropping_proxy.py")


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench", *arguments], cwd=CHECKOUT, capture_output=True, text=True, check=False
    )


def test_every_micro_benchmark_works() -> None:
    done = bench("micro", "--once")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_egress_suite_runs_without_an_error(tmp_path: Path) -> None:
    # Of each kind one; nightly runs all.
    kinds = ("bulk-16-both", "connections", "echo-stalled-readers", "idle")
    peers = ("direct", "c-splicer", "gateway", "gateway+forwarder")
    chosen = [word for kind in kinds for word in ("--scenario", kind)] + [
        word for peer in peers for word in ("--peer", peer)
    ]
    done = bench("egress", "--quick", "--out", str(tmp_path), *chosen)
    assert done.returncode == 0, done.stdout + done.stderr
    run = Run.load(tmp_path / "egress.json")
    for scenario in ("bulk-16-both", "connections", "connections-tls", "echo-stalled-readers"):
        assert {each.peer for each in run.records if each.scenario == scenario} == set(peers)
    assert "goals" in done.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="a network namespace needs root")
def test_another_congestion_control_is_that_of_the_run_and_not_of_the_machine(tmp_path: Path) -> None:
    setting = Path("/proc/sys/net/ipv4/tcp_congestion_control")
    before = setting.read_text()
    # Every kernel has it; where it is the default already nothing has to be changed.
    arguments = ("egress", "--quick", "--congestion", "reno", "--out", str(tmp_path), "--peer", "direct")
    done = bench(*arguments, "--scenario", "echo")
    assert done.returncode == 0, done.stdout + done.stderr
    assert setting.read_text() == before
    run = Run.load(tmp_path / "egress-reno.json")
    assert run.machine["settings"]["net/ipv4/tcp_congestion_control"] == "reno"
    assert "--congestion reno" in run.command
    assert {each.peer for each in run.records} == {"direct"}


def test_the_model_suite_runs_without_an_error(tmp_path: Path) -> None:
    done = bench("model", "--quick", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"direct", "gateway", "aiohttp-relay", "aiohttp-quiet"} <= {
        each.peer for each in Run.load(tmp_path / "model.json").records
    }


def test_the_api_suite_runs_without_an_error(tmp_path: Path) -> None:
    done = bench("api", "--quick", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert {each.peer for each in Run.load(tmp_path / "api.json").records} == {"sqlite", "postgresql"}


@pytest.mark.skipif(os.geteuid() != 0, reason="a private engine needs root")
@pytest.mark.timeout(600)
def test_the_sandbox_suite_runs_without_an_error(tmp_path: Path) -> None:
    # One at once is as right as eight, and sooner over.
    program = "import sys; from bench import __main__, sandbox; sandbox.AT_ONCE = 1; sys.exit(__main__.main())"
    arguments = ("sandbox", "--starts", "1", "--sessions", "2", "--out", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=CHECKOUT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    measured = {(each.scenario, each.peer) for each in Run.load(tmp_path / "sandbox.json").records}
    assert measured >= {("start-1", peer) for peer in (sandbox.OURS, sandbox.ENGINE)}
    assert ("sessions-2", sandbox.OURS) in measured


def test_a_checked_transfer_survives_restarts(tmp_path: Path) -> None:
    done = bench("handover", "--quick", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert {each.peer for each in Run.load(tmp_path / "handover.json").records} == {
        "0-restarts", "2-restarts", "2-reloads",
    }  # fmt: skip


@pytest.mark.skipif(os.geteuid() != 0, reason="takes another user's pipes")
def test_no_peer_runs_as_a_user_whose_pipe_memory_others_use_up(tmp_path: Path) -> None:
    hog = (
        "import fcntl, os, sys\n"
        "try:\n  while True: fcntl.fcntl(os.pipe()[1], 1031, 1 << 20)\n"
        "except OSError: print('full', flush=True)\n"
        "sys.stdin.read()\n"
    )
    who: dict[str, Any] = {"user": USER, "group": USER, "extra_groups": []}
    assert not lacks_pipes(USER)
    with subprocess.Popen([sys.executable, "-c", hog], stdin=subprocess.PIPE, stdout=subprocess.PIPE, **who) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"full\n"
        with pytest.raises(NotRunningError, match="pipe memory"):
            Process(["true"], log=tmp_path / "log", uid=USER)
        process.communicate()
    assert not lacks_pipes(USER)


def test_a_peer_that_drops_every_hundredth_connection_is_no_result(tmp_path: Path) -> None:
    command = f"dropping={sys.executable} {DROPPING} {{port}}"
    chosen = ("--peer", "direct", "--scenario", "connections", "--command", command)
    done = bench("egress", "--quick", "--out", str(tmp_path), *chosen)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "no result" in done.stdout
    records = Run.load(tmp_path / "egress.json").records
    assert [each.problems[0].partition(" ")[2][:6] for each in records if each.peer == "dropping"][:1] == ["errors"]
    assert summarize(records, "connections", "dropping", "connections_per_s") is None
    assert summarize(records, "connections", "direct", "connections_per_s") is not None


class _Impatient(GatewayPeer):
    settle_s = 5


class _Connections(Scenario):
    """Twenty connections, about which something else is claimed."""

    def __init__(self, name: str, claimed: dict[str, int]) -> None:
        super().__init__(name)
        self._claimed = claimed

    def run(self, peer: Peer, stage: Stage, record: Record) -> list[dict[str, Any]]:
        result = Client("connect", peer.route(), ["--total", "20"]).run()
        record.values["connections_per_s"] = 1
        return [result | {name: result[name] + more for name, more in self._claimed.items()}]


def test_audit_lines_or_bytes_that_do_not_equal_what_was_made_are_no_result() -> None:
    claims = {
        "true": {},
        "a byte more up": {"total_up": 1},
        "a byte less down": {"total_down": -1},
        # Last, because the gateway is given time for a line that never comes.
        "a tunnel more": {"tunnels": 1},
    }
    run = Run("", "", {})
    scenarios = [_Connections(name, claimed) for name, claimed in claims.items()]
    egress.run(run, "egress", [_Impatient()], scenarios, Settings.quick(), print)
    counted = {name: summarize(run.records, name, "gateway", "connections_per_s") is not None for name in claims}
    assert counted == {name: name == "true" for name in claims}, [each.problems for each in run.records]


class _ImpatientModel(ModelGateway):
    settle_s = 5

    def refuse_one(self) -> None:
        self._post(f"/model/{SESSION}/v1/messages", TOKEN, "gpt-bench")

    def claim(self, event: str) -> None:
        with self._audit.open("a") as file:
            file.write(f'{{"event":"{event}"}}\n')


class _Requests(Scenario):
    """Twenty requests and three streams, about which something else is claimed, or beside which something else happened."""

    def __init__(self, name: str, claimed: dict[str, int], happened: Callable[[_ImpatientModel], None]) -> None:
        super().__init__(name)
        self._claimed = claimed
        self._happened = happened

    def run(self, peer: Peer, stage: Stage, record: Record) -> list[dict[str, Any]]:
        assert isinstance(peer, _ImpatientModel)
        self._happened(peer)
        route = peer.model_route()
        short = Client("requests", route, ["--total", "20"], program="model").run()
        streams = Client("requests", route.asking("bench=events:30"), ["--total", "3"], program="model").run()
        record.values["requests_per_s"] = 1
        return [short | {name: short[name] + more for name, more in self._claimed.items()}, streams]


def test_audit_lines_tokens_or_bytes_of_requests_that_do_not_equal_what_was_made_are_no_result() -> None:
    def nothing(_: _ImpatientModel) -> None:
        pass

    wrong: dict[str, tuple[dict[str, int], Callable[[_ImpatientModel], None], str]] = {
        "an output token more": ({"output_tokens": 1}, nothing, "counts 430 output tokens, the provider 431"),
        "a byte less": ({"body_down": -1}, nothing, "bytes down, the load"),
        "a refusal": ({}, _ImpatientModel.refuse_one, "1 requests were refused"),
        "an allow line more": ({}, lambda peer: peer.claim("allow"), "24 `allow` lines for 23 requests"),
        # Last, because the gateway is given time for a line that never comes.
        "a request more": ({"finished": 1}, nothing, "23 `close` lines for 24 requests"),
    }
    run = Run("", "", {})
    scenarios = [_Requests("true", {}, nothing)]
    scenarios += [_Requests(name, claimed, happened) for name, (claimed, happened, _) in wrong.items()]
    model.run(run, [_ImpatientModel()], scenarios, Settings.quick(), print)
    problems = {record.scenario: "; ".join(record.problems) for record in run.records}
    assert problems.pop("true") == ""
    assert problems.keys() == wrong.keys()
    for name, (_, _, text) in wrong.items():
        assert text in problems[name]


def test_a_gateway_that_does_not_refuse_what_it_should_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    # The deny rule that the check asks about is gone.
    monkeypatch.setattr("bench.peers.gateway._DENY", ("paste.example",))
    run = Run("", "", {})
    egress.run(run, "egress", [GatewayPeer()], [_Connections("true", {})], Settings.quick(), print)
    assert not run.records
    assert "host.internal.bench.example" in run.failed[0]


def test_a_run_that_is_told_to_end_again_and_again_leaves_no_peer_behind(tmp_path: Path) -> None:
    arguments = ("--peer", "direct", "--peer", "c-splicer", "--peer", "gateway", "--scenario", "bulk-1-down")
    command = [sys.executable, "-m", "bench", "egress", *arguments, "--seconds", "600", "--out", str(tmp_path)]
    with subprocess.Popen(command, cwd=CHECKOUT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert any(line.startswith("round 1/") for line in process.stdout)
        started = family(process.pid)[1:]
        assert len(started) >= 2, started
        while process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.05)
    assert process.returncode == 128 + signal.SIGTERM
    assert [pid for pid in started if Path(f"/proc/{pid}").exists()] == []
