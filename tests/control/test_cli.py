"""The command line against a real daemon over a real unix socket, as a process of its own."""

import asyncio
import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from control.cli.app import app
from control.cli.parse import ParseError, duration_ms, size_bytes
from control.plan.session import SessionState
from gateway.runtime.version import version
from tests.control.conftest import Host
from tests.support.patience import PATIENCE_S, until

_started: list[asyncio.subprocess.Process] = []


@pytest.fixture(autouse=True)
async def programs_end_with_their_test() -> AsyncIterator[None]:
    yield
    while _started:
        process = _started.pop()
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def start(host: Host, *arguments: str) -> asyncio.subprocess.Process:
    environment = {**os.environ, "OPIFICIA_CONTROL": f"unix:{host.api}"}
    process = await asyncio.create_subprocess_exec(
        # A shell has what it runs in the background ignore Ctrl-C, and all that it starts.
        *("env", "--default-signal=INT"),
        sys.executable,
        "-m",
        "control.cli",
        *arguments,
        env=environment,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    _started.append(process)
    return process


async def over(process: asyncio.subprocess.Process, stdin: bytes | None = None) -> tuple[bytes, bytes]:
    """Wait for the end of a program; return what it has said."""
    async with asyncio.timeout(PATIENCE_S):
        return await process.communicate(stdin)


async def heeds_signals(process: asyncio.subprocess.Process) -> None:
    """Wait until a `run` has its own answer to Ctrl-C: it catches SIGTERM after SIGINT, which Python never does by itself."""

    def catches() -> bool:
        status = dict(line.split(":\t") for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
        return bool(int(status["SigCgt"], 16) >> (signal.SIGTERM - 1) & 1)

    await until(catches, "the handler of signals")


async def opificia(host: Host, *arguments: str, stdin: bytes = b"") -> tuple[int, str, str]:
    process = await start(host, *arguments)
    out, err = await over(process, stdin)
    assert process.returncode is not None
    return process.returncode, out.decode("utf-8", "surrogateescape"), err.decode()


async def test_run_keeps_outputs_apart_and_returns_the_commands_exit_code(host: Host) -> None:
    found = await opificia(host, "run", "sandbox", "--cwd", "/tmp", "--", "sh", "-c", "echo out; echo err >&2; exit 7")
    assert found == (7, "out\n", "err\n")


async def test_run_passes_input_environment_and_results(host: Host, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "task.txt").write_text("the task")
    (tmp_path / "in" / "link").symlink_to("task.txt")
    os.mkfifo(tmp_path / "in" / "fifo")
    host.engine.out = {"deep/result.txt": b"the result"}
    code, out, err = await opificia(
        host,
        *("run", "sandbox", "--cwd", "/tmp", "--in", str(tmp_path / "in"), "--out", str(tmp_path / "out")),
        *("--env", "GIVEN=value", "--env", "PATH", "--name", "mine", "--", "sh", "-c", "echo $GIVEN"),
    )
    assert (code, out, err) == (0, "value\n", "")
    assert (tmp_path / "out/deep/result.txt").read_text() == "the result"
    inside = host.root / "sessions/mine/in"
    assert sorted(path.name for path in inside.iterdir()) == ["link", "task.txt"]


async def test_run_tells_programs_every_state(host: Host) -> None:
    code, out, _ = await opificia(
        host, "run", "sandbox", "--json", "--cwd", "/tmp", "--", "sh", "-c", "echo hi; exit 2"
    )
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 2
    assert {line["type"] for line in lines} == {"state", "output", "ended"}
    assert next(line["data"] for line in lines if line["type"] == "output") == "hi\n"
    assert lines[-1]["session"]["exit_code"] == 2


async def test_ctrl_c_stops_the_session(host: Host) -> None:
    process = await start(host, "run", "sandbox", "--cwd", "/tmp", "--name", "mine", "--", "sleep", "1000")
    await until(lambda: host.manager.record("mine") is not None, "the session")
    await host.state("mine", SessionState.RUNNING)
    await heeds_signals(process)
    process.send_signal(signal.SIGINT)
    _, err = await over(process)
    assert process.returncode == 143
    assert "stopped_by_user" in err.decode()
    assert (await host.ended("mine")).life.state is SessionState.STOPPED


async def test_run_says_what_is_missing_of_results_though_the_command_ended_well(host: Host, tmp_path: Path) -> None:
    host.engine.out_truncated = True
    code, out, err = await opificia(host, "run", "sandbox", "--cwd", "/tmp", "--", "echo", "done")
    assert (code, out) == (0, "done\n")
    assert "exited, exit_code: the results are cut at the limit of /out" in err


async def test_a_second_ctrl_c_gives_no_grace(stopped_host: Host) -> None:
    host = stopped_host
    host.settings["limits"]["stop_grace_ms"] = 600_000
    host.engine.images["deaf"] = ["sh", "-c", "trap '' TERM; exec sleep 1000"]
    await host.start()
    process = await start(host, "run", "deaf", "--name", "mine", "--", "true")
    await until(lambda: "start" in host.engine.calls, "the start")
    await heeds_signals(process)
    process.send_signal(signal.SIGINT)
    await until(lambda: "stop" in host.engine.calls, "the stop")
    process.send_signal(signal.SIGINT)
    await over(process)
    assert process.returncode == 143


async def test_run_goes_on_across_a_restart_of_the_daemon(host: Host) -> None:
    script = "echo one; until [ -e $0 ]; do sleep 0.05; done; echo two; exit 6"
    go = host.root / "go"
    process = await start(host, "run", "sandbox", "--cwd", "/tmp", "--name", "mine", "--", "sh", "-c", script, str(go))
    await until(lambda: host.manager.record("mine") is not None, "the session")
    await host.state("mine", SessionState.RUNNING)
    # The program is past the launch, which is asked for once, and follows.
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE_S):
        assert await process.stdout.readline() == b"one\n"
    await host.stop()
    go.touch()
    await host.start()
    out, err = await over(process)
    assert (process.returncode, out, err) == (6, b"two\n", b"")


async def test_run_whose_output_is_closed_stops_the_session(host: Host) -> None:
    process = await start(host, "run", "sandbox", "--cwd", "/tmp", "--name", "mine", "--", "sh", "-c", "yes; true")
    assert process.stdout is not None
    await process.stdout.readline()
    process.stdout._transport.close()  # type: ignore[attr-defined]
    await until(lambda: host.manager.record("mine") is not None, "the session")
    assert (await host.ended("mine")).life.state is SessionState.STOPPED
    await process.wait()


async def test_run_says_why_the_host_could_not(host: Host) -> None:
    code, out, err = await opificia(host, "run", "missing", "--", "true")
    assert (code, out) == (125, "")
    assert "image_missing" in err
    assert "opificia images" in err
    code, _, err = await opificia(host, "run", "sandbox", "--cpus", "nan", "--", "true")
    assert (code, err) == (2, "opificia: --cpus is a number above 0, such as 0.5 or 2\n")
    code, _, err = await opificia(host, "run", "BAD", "--allow", "a b", "--", "true")
    assert code == 125
    assert [line.strip().split(":")[0] for line in err.splitlines()] == [
        "opificia",
        "image",
        "allow",
    ]


async def test_run_that_fails_says_that_requests_were_refused(host: Host) -> None:
    log = host.root / "egress" / "mine.log"
    refusal = '{"event":"refuse","host":"a","reason":"host_not_listed"}'
    script = ("sh", "-c", f"echo '{refusal}' > {log}; echo '{{}}' >> {log}; exit $0")
    code, _, err = await opificia(host, "run", "sandbox", "--cwd", "/tmp", "--name", "mine", "--", *script, "3")
    assert (code, err) == (3, "opificia: 1 request was refused by the gateway; see `opificia egress mine`\n")
    code, _, err = await opificia(host, "run", "sandbox", "--cwd", "/tmp", "--", *script, "0")
    assert (code, err) == (0, "")


async def test_the_time_limit_is_exit_code_124(host: Host) -> None:
    code, _, err = await opificia(
        host, "run", "sandbox", "--cwd", "/tmp", "--time-limit", "1500ms", "--", "sleep", "99"
    )
    assert (code, "time_limit" in err) == (124, True)


async def test_input_that_cannot_be_packed_leaves_no_session_behind(host: Host) -> None:
    code, _, err = await opificia(host, "run", "sandbox", "--in", "/nowhere", "--", "true")
    assert code == 125
    assert err == "opificia: /nowhere is not a folder; check --in\n"
    code, out, _ = await opificia(host, "sessions", "--json")
    assert (code, json.loads(out)["sessions"]) == (0, [])


async def test_sessions_logs_events_and_egress_are_shown(host: Host) -> None:
    go = host.root / "go"
    script = "echo out; until [ -e $0 ]; do sleep 0.02; done; echo err >&2; exit 3"
    session = await host.launch("sh", "-c", script, str(go))
    await until(lambda: "start" in host.engine.calls, "the start")
    await until(lambda: host.log(session) == b"out\n", "its output")
    go.touch()
    await host.ended(session)
    await host.cleaned(session)
    (host.root / "egress" / f"{session}.log").write_text(
        '{"ts":"2026-01-01T00:00:00Z","event":"refuse","kind":"connect","host":"evil\\u001b[2J.example","port":443,'
        '"reason":"host_not_listed"}\n{"event":"close","host":"files.example.com","port":443,"bytes_up":1,"bytes_down":2}\n'
    )
    code, out, _ = await opificia(host, "sessions")
    assert code == 0
    assert re.search(rf"{session} +exited +exit_code +3 +none +sandbox", out)
    code, out, _ = await opificia(host, "sessions", "--json", "--state", "exited")
    assert json.loads(out)["sessions"][0]["id"] == session
    assert await opificia(host, "logs", session) == (0, "out\n", "err\n")
    _, out, _ = await opificia(host, "logs", session, "--timestamps")
    assert [line.split()[1:] for line in out.splitlines()] == [["stdout", "out"], ["stderr", "err"]]
    _, out, _ = await opificia(host, "events", session)
    assert [line.split()[1] for line in out.splitlines()][-2:] == ["container_exited", "ended"]
    _, out, _ = await opificia(host, "egress", session)
    assert "evil\\x1b[2J.example:443  host_not_listed" in out
    assert "\x1b" not in out
    _, out, _ = await opificia(host, "egress", session, "--refused", "--json")
    assert [json.loads(line)["event"] for line in out.splitlines()] == ["refuse"]
    _, out, _ = await opificia(host, "show", session)
    assert json.loads(out)["state"] == "exited"


async def test_exec_runs_beside_and_stop_ends(host: Host) -> None:
    session = await host.launch()
    await host.state(session, SessionState.CONNECTED)
    found = await opificia(
        host, "exec", session, "-i", "--cwd", "/tmp", "--", "sh", "-c", "cat; echo err >&2; exit 4", stdin=b"\xff\x00in"
    )
    assert found == (4, b"\xff\x00in".decode("utf-8", "surrogateescape"), "err\n")
    code, _, err = await opificia(host, "exec", session, "--timeout", "100ms", "--cwd", "/tmp", "--", "sleep", "100")
    assert (code, err) == (124, "")
    code, out, _ = await opificia(host, "stop", session, "--wait", "--json")
    assert (code, json.loads(out)["state"]) == (0, "stopped")
    code, _, err = await opificia(host, "exec", session, "--", "true")
    assert (code, "connected" in err) == (125, True)


async def test_results_of_an_ended_session_are_fetched(host: Host, tmp_path: Path) -> None:
    host.engine.out = {"r": b"1"}
    session = await host.launch("true")
    await host.ended(session)
    assert await opificia(host, "out", "get", session, str(tmp_path / "results")) == (0, "", "")
    assert (tmp_path / "results/r").read_bytes() == b"1"


async def test_programs_get_json_of_exec_and_out(host: Host, tmp_path: Path) -> None:
    host.engine.out = {"r": b"123"}
    session = await host.launch()
    await host.state(session, SessionState.CONNECTED)
    code, out, _ = await opificia(host, "exec", session, "--cwd", "/tmp", "--json", "--", "sh", "-c", "echo a; exit 3")
    lines = [json.loads(line) for line in out.splitlines()]
    assert (code, lines[0]["type"], lines[0]["data"], lines[-1]["exit_code"]) == (3, "output", "a\n", 3)
    await opificia(host, "stop", session, "--wait")
    code, out, _ = await opificia(host, "out", "get", session, str(tmp_path / "r"), "--json")
    found = json.loads(out)
    assert (code, found["bytes"], found["left_out"]) == (0, 3, [])


async def test_results_are_listed_without_steering_the_terminal(host: Host) -> None:
    host.engine.out = {"deep/result.txt": b"12345", "x\x1b[2J": b""}
    session = await host.launch("true")
    await host.ended(session)
    code, out, _ = await opificia(host, "out", "ls", session)
    assert code == 0
    assert re.search(r"deep/result.txt +file +5", out)
    assert "x\\x1b[2J" in out
    code, out, _ = await opificia(host, "out", "ls", session, "--json")
    assert {"path": "deep/result.txt", "kind": "file", "bytes": 5} in json.loads(out)


async def test_json_too_steers_no_terminal_and_tells_names_that_are_no_text(host: Host, tmp_path: Path) -> None:
    host.engine.out = {"x\u009b2J\u202e\x7f\u2028": b"", os.fsdecode(b"../\xff"): b""}
    session = await host.launch("printf", r"\302\2332J\177")
    await host.ended(session)
    code, out, err = await opificia(host, "out", "ls", session, "--json")
    assert (code, err) == (0, "")
    assert out.isascii()
    assert {each["path"] for each in json.loads(out)} == {"x\u009b2J\u202e\x7f\u2028", "../\\xff"}
    code, out, err = await opificia(host, "out", "get", session, str(tmp_path / "results"), "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["left_out"] == ["./../\\xff: leads out of the folder"]
    code, out, _ = await opificia(host, "logs", session, "--json")
    assert (code, out.isascii(), json.loads(out)["data"]) == (0, True, "\u009b2J\x7f")


async def test_egress_is_summed_up_by_host(host: Host) -> None:
    session = await host.launch("true")
    await host.ended(session)
    entries = [
        {"event": "allow", "host": "files.example.com", "port": 443},
        {"event": "close", "host": "files.example.com", "port": 443, "bytes_up": 10, "bytes_down": 20},
        {"event": "allow", "host": "files.example.com", "port": 443},
        {"event": "refuse", "host": "evil.example", "port": 443, "reason": "host_not_listed"},
        {"event": "refuse", "reason": "malformed_authority"},
    ]
    text = "".join(json.dumps({"ts": "t", "kind": "connect", **entry}) + "\n" for entry in entries)
    (host.root / "egress" / f"{session}.log").write_text(text)
    code, out, _ = await opificia(host, "egress", session, "--summary")
    assert code == 0
    assert [line.split() for line in out.splitlines()[1:]] == [
        ["-", "0", "1", "0", "0", "malformed_authority"],
        ["evil.example:443", "0", "1", "0", "0", "host_not_listed"],
        ["files.example.com:443", "2", "0", "10", "20"],
    ]
    _, out, _ = await opificia(host, "egress", "show", session, "--summary", "--json")
    assert json.loads(out.splitlines()[-1])["allowed"] == 2


async def test_sessions_are_listed_past_a_page_and_watched(host: Host) -> None:
    process = await start(host, "sessions", "--watch", "--json")
    assert process.stdout is not None
    assert json.loads(await process.stdout.readline())["sessions"] == []
    session = await host.launch("true")
    while not any(each["state"] == "exited" for each in json.loads(await process.stdout.readline())["sessions"]):
        pass
    process.send_signal(signal.SIGINT)
    await over(process)
    assert process.returncode == 130
    _, out, _ = await opificia(host, "sessions", "--limit", "2000", "--json")
    assert [each["id"] for each in json.loads(out)["sessions"]] == [session]


async def test_the_gateway_is_shown_with_what_it_serves(host: Host) -> None:
    session = await host.launch("sleep", "1000")
    await host.state(session, SessionState.RUNNING)
    code, out, _ = await opificia(host, "gateway", "status")
    assert (code, out) == (0, f"connected, epoch {host.gateway.epoch}, 1 sessions\n")
    _, out, _ = await opificia(host, "gateway", "sessions", "--json")
    assert [each["id"] for each in json.loads(out)] == [session]
    _, out, _ = await opificia(host, "gateway", "sessions")
    assert out.splitlines()[1].split()[:2] == [session, "none"]
    code, _, err = await opificia(host, "gateway", "status", "--surprise")
    assert (code, len(err.splitlines())) == (2, 1)
    await host.gateway.stop()
    await until(lambda: not host.control.link.connected, "the gateway's end")
    code, out, _ = await opificia(host, "gateway", "status", "--json")
    assert (code, json.loads(out)["connected"]) == (1, False)


async def test_doctor_and_status_say_whether_the_host_is_ready(host: Host) -> None:
    await until(lambda: host.control.link.connected, "the gateway")
    code, out, _ = await opificia(host, "doctor", "--no-sandbox")
    # Clock and kernel are the machine's, which need not be set up as a sandbox host.
    assert {line.split()[1] for line in out.splitlines() if "✗" in line} <= {"clock", "sysctl"}
    assert out.count("✓") >= 4
    host.host_problems.append("the firewall is not loaded; opificia host prepare")
    await host.stop()
    await host.start()
    code, out, _ = await opificia(host, "doctor", "--no-sandbox", "--json")
    assert {
        "part": "host",
        "check": "host",
        "ok": False,
        "detail": "the firewall is not loaded",
        "remedy": "opificia host prepare",
    } in json.loads(out)
    assert code == 1
    code, out, _ = await opificia(host, "control", "status")
    assert json.loads(out)["status"] == "degraded"
    await host.stop()
    code, out, _ = await opificia(host, "doctor", "--json")
    assert code == 1
    assert not json.loads(out)[-1]["ok"]


async def test_without_a_configuration_it_says_how_to_name_one(host: Host) -> None:
    code, _, err = await opificia(host, "host", "verify", "--config", "/nowhere/control.toml")
    assert (code, err) == (78, "opificia: there is no /nowhere/control.toml; name yours with --config\n")


async def test_without_a_daemon_it_says_what_to_look_at(host: Host) -> None:
    await host.stop()
    code, out, err = await opificia(host, "sessions")
    assert (code, out) == (1, "")
    assert len(err.splitlines()) == 1
    assert "is opificia-control running" in err
    assert (await opificia(host, "run", "sandbox", "--", "true"))[0] == 125


@pytest.mark.parametrize("address", ["bogus", "127.0.0.1:1", "unix:", "http://", "ftp://host"])
async def test_an_address_that_is_none_is_one_sentence(host: Host, address: str) -> None:
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "control.cli", "sessions"],
        env={**os.environ, "OPIFICIA_CONTROL": address},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "neither unix:/path nor http://host:port" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("program", ["gateway", "control", "control.cli"])
def test_every_program_says_which_release_it_is(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", program, "--version"], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == f"{version()}\n"


async def test_wrong_usage_is_one_sentence(host: Host) -> None:
    for arguments in (
        ("run", "sandbox"),
        ("run", "sandbox", "--network", "all", "--", "true"),
        ("run", "sandbox", "--time-limit", "long", "--", "true"),
        ("run", "sandbox", "--memory", "much", "--", "true"),
        ("run", "sandbox", "--env", "NOT_THERE", "--", "true"),
        ("sessions", "--state", "dead"),
        ("logs", "x", "--stream", "stdin"),
    ):
        code, out, err = await opificia(host, *arguments)
        assert (code, out, len(err.splitlines())) == (2, "", 1), arguments


@pytest.mark.parametrize(
    ("read", "text"), [(duration_ms, "0s"), (duration_ms, "0.4ms"), (size_bytes, "0"), (size_bytes, "0.0g")]
)
def test_a_limit_of_nothing_is_not_taken_for_none(read: Callable[[str, str], int], text: str) -> None:
    with pytest.raises(ParseError, match="--limit must be above 0"):
        read("--limit", text)
    # Not given; and no grace at all.
    assert read("--limit", "") == 0
    assert duration_ms("--grace", "0s", least=0) == 0


async def test_a_closed_pipe_is_no_error(host: Host) -> None:
    session = await host.launch("sh", "-c", "seq 200000")
    await host.ended(session)
    environment = {**os.environ, "OPIFICIA_CONTROL": f"unix:{host.api}"}
    process = await asyncio.create_subprocess_exec(
        "bash",
        "-c",
        f"set -o pipefail; {sys.executable} -m control.cli logs {session} | head -1",
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    _started.append(process)
    out, err = await over(process)
    assert (process.returncode, out, err) == (0, b"1\n", b"")


def test_help_starts_fast() -> None:
    # Seconds of CPU: what a test that runs beside others can tell of 0.3 s to a person.
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "control.cli", "--help"], stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(times) < 0.3


def _commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, (*path, name))
        else:
            yield (*path, name), command


def test_every_command_has_an_example_that_names_it_and_speaks_to_programs() -> None:
    found = dict(_commands(typer.main.get_command(app)))
    assert len(found) > 15
    for path, command in found.items():
        # `egress SESSION` is short for `egress show SESSION`.
        name = " ".join(part for part in path if path != ("egress", "show") or part != "show")
        assert f"Example: opificia {name}" in (command.help or ""), path
        options = {option for each in command.params for option in each.opts}
        assert "--json" in options or path in (("show",), ("control",), ("gateway",)), path


@pytest.mark.parametrize("part", ["app", "sessions", "streams", "run", "gateway"])
def test_help_and_what_only_asks_the_daemon_import_nothing_heavy(part: str) -> None:
    heavy = {"sqlalchemy", "aiohttp", "rich", "docker"}
    check = f"import sys, control.cli.{part}; print(*({heavy!r} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", check], stdout=subprocess.PIPE, check=True).stdout == b"\n"
