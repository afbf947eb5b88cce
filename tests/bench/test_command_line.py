"""The command line: what cannot be measured or kept is refused before hours are spent, and nothing that was measured is lost."""

import signal
import sys
from pathlib import Path

import pytest

import bench.__main__ as program
from bench import egress, micro_runs
from bench.peers.base import Direct
from bench.peers.proxies import CommandPeer, Squid
from bench.records import Record, Run, summarize
from bench.rounds import Settings
from bench.suites import Job

# CONNECT is answered so often; with the next one the program ends.
_DYING = """
import itertools, os, socket, sys, threading
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
def serve(sock):
    head = b""
    while not head.endswith(b"\\r\\n\\r\\n"):
        head += sock.recv(1)
    host, _, port = head.split()[1].decode().rpartition(":")
    there = socket.create_connection((host, int(port)))
    sock.sendall(b"HTTP/1.1 200 OK\\r\\n\\r\\n")
    there.sendall(sock.recv(1))
    sock.sendall(there.recv(1))
# The first asks only whether somebody listens.
server.accept()
for _ in range(int(sys.argv[2])):
    threading.Thread(target=serve, args=server.accept()[:1], daemon=True).start()
server.accept()
os._exit(3)
"""


def run_program(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    # What ends the tests stays as it is.
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    return program.main()


@pytest.mark.parametrize(
    "arguments",
    [
        ("egress", "--rounds", "0"),
        ("egress", "--seconds", "-1"),
        ("curves", "--seconds", "nan"),
        ("model", "--rounds", "none"),
        ("egress", "--idle", "0"),
        ("sandbox", "--starts", "-1"),
        ("handover", "--tunnels", "0"),
        ("handover", "--gigabytes", "0"),
        ("api", "--stored", "many"),
        ("profile", "echo", "--seconds", "0"),
    ],
)
def test_a_size_that_measures_nothing_is_refused(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run_program(monkeypatch, *arguments)
    assert ended.value.code == 2
    assert f"argument {arguments[-2]}" in capsys.readouterr().err


def test_a_congestion_control_that_the_kernel_does_not_have_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_program(monkeypatch, "egress", "--quick", "--congestion", "none-such") == 2
    assert "no congestion control 'none-such'" in capsys.readouterr().out


def test_a_folder_that_cannot_be_written_is_found_out_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "run_job", lambda *_: pytest.fail("something was measured"))
    (tmp_path / "file").write_text("")
    assert run_program(monkeypatch, "egress", "--quick", "--out", str(tmp_path / "file/folder")) == 2
    assert "cannot be written" in capsys.readouterr().out


def test_a_file_without_results_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, text in enumerate(("no JSON", "[]", "{}", '{"records": [{"a": 1}]}')):
        file = tmp_path / f"{number}.json"
        file.write_text(text)
        assert run_program(monkeypatch, "show", str(file)) == 2
    assert run_program(monkeypatch, "show", str(tmp_path / "none.json")) == 2
    assert capsys.readouterr().out.count("holds no results") == 5


def test_a_suite_that_breaks_off_keeps_what_it_has_and_the_next_one_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Breaking(Job):
        def plan(self) -> str:
            return "one number"

        def expected_s(self) -> float:
            return 1

        def run(self, run: Run, say: object) -> None:
            del say
            run.records.append(Record("egress", "echo", "gateway", 0, {"p50_us": 1.0}))
            if self.name == "egress":
                raise ZeroDivisionError

    monkeypatch.setattr(program, "job", lambda name, _: Breaking(name))
    monkeypatch.setattr(program, "SUITES", {"egress": "one", "model": "another"})
    monkeypatch.setattr(micro_runs, "run", lambda **_: 0)
    assert run_program(monkeypatch, "all", "--quick", "--out", str(tmp_path)) == 1
    first, second = (Run.load(tmp_path / f"{name}.json") for name in ("egress", "model"))
    assert (len(first.records), first.failed) == (1, ["ZeroDivisionError: "])
    assert (len(second.records), second.failed) == (1, [])


def test_a_peer_that_cannot_be_run_is_named_and_the_others_are_measured() -> None:
    run = Run("", "", {})
    (echo,) = (each for each in egress.scenarios() if each.name == "echo")
    peers = [CommandPeer("absent", "no-such-program {port} {else}"), CommandPeer("false", "false {port}"), Direct()]
    egress.run(run, "egress", peers, [echo], Settings.quick(), print)
    absent, false = sorted(run.failed)
    assert "no-such-program cannot be run" in absent
    assert "ended with status 1" in false
    assert summarize(run.records, "echo", "direct", "p50_us") is not None


def test_a_peer_that_dies_is_no_result_in_any_scenario() -> None:
    chosen = [each for each in egress.scenarios() if each.name in ("bulk-1-down", "connections", "echo", "idle")]
    for scenario in chosen:
        run = Run("", "", {})
        # The first one or two prove that it works.
        peer = CommandPeer("dying", f"{sys.executable} -c '{_DYING}' {{port}} 2")
        egress.run(run, "egress", [peer], [scenario], Settings.quick(), print)
        assert all(record.problems for record in run.records)
        assert len(run.records) + len(run.failed) == 1


@pytest.mark.skipif(bool(Squid.missing()), reason="Squid is not installed")
def test_squid_runs_beside_another_squid() -> None:
    class Another(Squid):
        uid = Squid.uid + 4

    run = Run("", "", {})
    (echo,) = (each for each in egress.scenarios() if each.name == "echo")
    peers = [Squid(), Another()]
    egress.run(run, "egress", peers, [echo], Settings.quick(), print)
    assert run.failed == []
