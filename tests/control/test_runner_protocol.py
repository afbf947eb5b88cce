"""Runner protocol 1 over real WebSockets: the reference runner as a process, and peers that do not keep to it."""

import ast
import asyncio
import base64
import contextlib
import gc
import hashlib
import json
import os
import signal
import sys
import tempfile
import weakref
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Literal, cast

import aiohttp
import msgspec
import pytest
from aiohttp import WSMsgType, web

from control.db.rows import StoredSession
from control.db.store import Store
from control.plan.session import (
    CommandCompleted,
    ContainerCreated,
    LaunchStarted,
    RunnerConnected,
    RunnerStatus,
    Session,
    SessionState,
    ToolCalled,
)
from control.runner import channel as channel_module
from control.runner import client, server
from control.runner.channel import Channel, RunFailedError, RunHandle
from control.runner.messages import Completed, Encoding, Hello, Output, Run, Stream, ToolCall
from control.sessions import journal
from control.sessions.record import Record, Recorder
from control.spec import SandboxSpec
from gateway.contract.ids import token_sha256
from gateway.contract.policy import Grant
from tests.support.app_server import AppServer
from tests.support.fake_gateway import FakeGateway
from tests.support.patience import PATIENCE_S, until
from tests.support.processes import state

TOKEN = "token-of-the-test"
FRAME = 64 * 1024


class Line:
    """One session with its channel, the runner socket, and a gateway in front of it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.gateway = FakeGateway(root / "gateway.sock", root / "runner.sock")
        self.store = Store(f"sqlite:///{root}/control.db")
        self.recorder = Recorder(self.store)
        self.record: Record
        self.channel: Channel
        self._stack = AsyncExitStack()

    async def start(self) -> None:
        await self.store.migrate()
        spec = SandboxSpec(image="sandbox")
        new = StoredSession(
            id="s1", run_id="r", position=1, created_at=1, memory_bytes=1, cpus=1, spec=spec, life=Session()
        )
        await self.store.insert(new)
        self.record = Record(new, self.root)
        await self.recorder.record(self.record, LaunchStarted("10.0.0.16", token_sha256(TOKEN)))
        await self.recorder.record(self.record, ContainerCreated("c", "i"))
        self.channel = Channel(self.record, self.recorder, FRAME)
        self._keeping = asyncio.create_task(self.channel.keep())
        runners = server.RunnerServer(lambda name: self.channel if name == "s1" else None, FRAME)
        app = AppServer(runners.application(), shutdown_timeout=0.1)
        self._stack.push_async_callback(app.close)
        await app.listen(self.root / "runner.sock")
        await self.gateway.start()
        self.gateway.grants["s1"] = Grant(session="s1", token_sha256=token_sha256(TOKEN))
        self.url = f"{self.gateway.runner_url}?session=s1"

    async def restart_control(self) -> None:
        """What a new process knows: the record, from the journal."""
        self._keeping.cancel()
        await self.channel.close("restart")
        stored = await self.store.get("s1")
        assert stored is not None
        self.record = Record(stored, self.root)
        await self.recorder.restore(self.record)
        self.channel = Channel(self.record, self.recorder, FRAME)
        self._keeping = asyncio.create_task(self.channel.keep())

    async def close(self) -> None:
        self._keeping.cancel()
        await self.channel.close("over")
        await self.gateway.stop()
        await self._stack.aclose()
        await self.recorder.close()
        await self.store.close()

    def events(self) -> list[Any]:
        return [stored.event for stored in journal.read(self.root / "events.jsonl")]

    async def process(self) -> asyncio.subprocess.Process:
        """Start the reference runner."""
        environment = {
            "OPIFICIA_RUNNER_URL": self.url,
            "OPIFICIA_RUNNER_TOKEN": TOKEN,
            "PATH": os.environ["PATH"],
            "MARK": "of the runner",
        }
        # Files, because an engine takes all that a container prints, however slow its readers are.
        with (self.root / "stdout").open("wb") as out, (self.root / "stderr").open("wb") as err:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                "-S",
                client.__file__,
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )

    def printed(self) -> tuple[bytes, bytes]:
        """Return what the runner itself has printed."""
        return (self.root / "stdout").read_bytes(), (self.root / "stderr").read_bytes()

    async def run(self, name: str, *argv: str, **fields: Any) -> RunHandle:
        message = Run(run=name, argv=argv, **{"cwd": "/tmp", **fields})
        return await self.channel.run(message, main=False, follow=True)


@pytest.fixture
async def line() -> AsyncIterator[Line]:
    with tempfile.TemporaryDirectory(prefix="opificia-") as folder:
        line = Line(Path(folder))
        await line.start()
        try:
            yield line
        finally:
            await line.close()


@pytest.fixture
async def runner(line: Line) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await line.process()
    try:
        async with asyncio.timeout(PATIENCE_S):
            await line.channel.present.wait()
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def followed(handle: RunHandle) -> tuple[dict[Stream, bytes], Completed]:
    """Take a run's output to its end."""
    taken = dict.fromkeys(Stream, b"")
    async with asyncio.timeout(PATIENCE_S):
        while True:
            message = await handle.next()
            if isinstance(message, Completed):
                return taken, message
            taken[message.stream] += message.content()


async def test_outputs_come_apart_and_the_end_is_recorded(line: Line, runner: asyncio.subprocess.Process) -> None:
    handle = await line.run("r1", "sh", "-c", "echo out; echo err >&2; exit 3")
    taken, completed = await followed(handle)
    assert taken == {Stream.STDOUT: b"out\n", Stream.STDERR: b"err\n"}
    assert (completed.exit_code, completed.timed_out, completed.error) == (3, False, "")
    assert [event for event in line.events() if isinstance(event, CommandCompleted)] == [
        CommandCompleted(completed.seq, "r1", False, 3)
    ]
    assert line.record.life.state is SessionState.RUNNING


async def test_output_also_goes_to_the_runners_own_outputs(line: Line, runner: asyncio.subprocess.Process) -> None:
    await followed(await line.run("r1", "sh", "-c", "echo out; echo err >&2"))
    await line.channel.shutdown(5, 1000)
    assert await runner.wait() == 5
    assert line.printed() == (b"out\n", b"err\n")


async def test_environment_folder_and_stdin_are_as_asked(line: Line, runner: asyncio.subprocess.Process) -> None:
    data = bytes(range(256)) * 100
    handle = await line.run(
        "r1",
        "sh",
        "-c",
        "pwd; echo $MARK $OWN; sha256sum",
        cwd="/usr",
        env={"OWN": "ü"},
        stdin=base64.b64encode(data).decode(),
        stdin_encoding=Encoding.BASE64,
    )
    taken, _ = await followed(handle)
    digest = hashlib.sha256(data).hexdigest()
    assert taken[Stream.STDOUT].decode() == f"/usr\nof the runner ü\n{digest}  -\n"


async def test_characters_are_never_cut_and_other_bytes_come_as_base64(
    line: Line, runner: asyncio.subprocess.Process
) -> None:
    # Long enough for several reads, each of which ends inside a character somewhere.
    handle = await line.run("r1", sys.executable, "-c", "import sys; sys.stdout.write('a' + '€' * 200_000)")
    encodings = set()
    taken = b""
    while not isinstance(message := await handle.next(), Completed):
        encodings.add(message.encoding)
        taken += message.content()
    assert taken.decode() == "a" + "€" * 200_000
    assert encodings == {Encoding.UTF8}
    taken_bytes, _ = await followed(await line.run("r2", "printf", r"\377\376 \303"))
    assert taken_bytes[Stream.STDOUT] == b"\xff\xfe \xc3"


@pytest.mark.parametrize(
    ("argv", "cwd", "code"),
    [
        (("/nowhere/program",), "/tmp", 127),
        (("/etc/passwd",), "/tmp", 126),
        (("true",), "/nowhere", 127),
        (("sh", "-c", "kill -9 $$"), "/tmp", 137),
    ],
)
async def test_exit_codes_follow_the_shell(
    line: Line, runner: asyncio.subprocess.Process, argv: tuple[str, ...], cwd: str, code: int
) -> None:
    taken, completed = await followed(await line.run("r1", *argv, cwd=cwd))
    assert completed.exit_code == code
    assert bool(completed.error) is (code in (126, 127))
    assert (completed.error.encode() in taken[Stream.STDERR]) is True


async def test_a_timeout_ends_the_command_and_its_children(line: Line, runner: asyncio.subprocess.Process) -> None:
    handle = await line.run("r1", "sh", "-c", "trap '' TERM; sleep 1000 & echo $!; wait", timeout_ms=2_000)
    taken, completed = await followed(handle)
    assert completed.timed_out
    assert completed.exit_code == 137
    child = int(taken[Stream.STDOUT])
    await until(lambda: state(child) in ("", "Z", "X"), "the end of the child")


async def test_cancel_ends_a_command(line: Line, runner: asyncio.subprocess.Process) -> None:
    handle = await line.run("r1", "sh", "-c", "echo started; exec sleep 1000")
    assert isinstance(await handle.next(), Output)
    await line.channel.cancel("r1", 5000)
    _, completed = await followed(handle)
    assert completed.exit_code == 143


_BACKGROUND = "(while :; do echo; sleep 0.01; done) & echo $! >&2; head -c 300000 /dev/zero"


async def test_a_process_left_in_the_background_does_not_hold_up_the_end(
    line: Line, runner: asyncio.subprocess.Process
) -> None:
    taken, completed = await followed(await line.run("r1", "sh", "-c", _BACKGROUND))
    assert completed.exit_code == 0
    assert taken[Stream.STDOUT].count(b"\0") == 300_000
    os.kill(int(taken[Stream.STDERR]), signal.SIGKILL)


async def test_a_cut_connection_is_resumed_without_loss_or_duplicate(
    line: Line, runner: asyncio.subprocess.Process
) -> None:
    # A sixth of it is said after each cut, so that no message holds it all, however late it is read.
    script = "import os,sys,time\nfor n in range(3000):\n while not os.path.exists(f'{sys.argv[1]}/go{n // 500}'): time.sleep(0.01)\n print(n, flush=True)"
    handle = await line.run("r1", sys.executable, "-c", script, str(line.root))
    (line.root / "go0").touch()
    taken = b""
    cuts = 0
    async with asyncio.timeout(PATIENCE_S):
        while not isinstance(message := await handle.next(), Completed):
            taken += message.content()
            if cuts < 5 and taken.count(b"\n") == (cuts + 1) * 500:
                cuts += 1
                (line.root / f"go{cuts}").touch()
                line.gateway.cut_runners()
    assert taken == b"".join(b"%d\n" % number for number in range(3000))
    assert cuts == 5
    assert sum(isinstance(event, RunnerConnected) for event in line.events()) >= 2
    assert sum(isinstance(event, CommandCompleted) for event in line.events()) == 1


async def test_a_command_given_while_the_runner_is_away_is_run_once_when_it_is_back(
    line: Line, runner: asyncio.subprocess.Process
) -> None:
    await line.gateway.stop()
    await line.channel.gone.wait()
    handle = await line.run("r1", "sh", "-c", "echo once")
    await line.gateway.start()
    line.gateway.grants["s1"] = Grant(session="s1", token_sha256=token_sha256(TOKEN))
    taken, _ = await followed(handle)
    assert taken[Stream.STDOUT] == b"once\n"


async def test_what_happened_while_control_was_away_is_told_when_it_is_back(
    line: Line, runner: asyncio.subprocess.Process
) -> None:
    message = Run(run="main", argv=("sh", "-c", "read x; echo done; exit 4"), cwd="/tmp", stdin="go\n")
    await line.channel.run(message, main=True, follow=False)
    await line.restart_control()
    handle = line.channel.adopt(message)
    assert (await asyncio.wait_for(handle.completed, PATIENCE_S)).exit_code == 4
    assert line.record.life.claimed_code == 4
    assert sum(isinstance(event, CommandCompleted) for event in line.events()) == 1


async def test_a_runner_is_told_to_stop_by_its_signal(line: Line, runner: asyncio.subprocess.Process) -> None:
    handle = await line.run("r1", "sh", "-c", "trap 'echo bye; exit 9' TERM; echo up; while :; do sleep 0.05; done")
    await handle.next()
    runner.terminate()
    assert await runner.wait() == 143
    assert line.printed()[0] == b"up\nbye\n"


def test_the_reference_runner_is_one_file_for_python_3_8() -> None:
    tree = ast.parse(Path(client.__file__).read_text(), feature_version=(3, 8))
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module or "")
    assert imported <= sys.stdlib_module_names


async def test_a_runner_without_its_settings_says_so() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", client.__file__, env={}, stderr=asyncio.subprocess.PIPE
    )
    _, err = await process.communicate()
    assert process.returncode == 1
    assert err.startswith(b"opificia-runner: OPIFICIA_RUNNER_URL is not set")


# Peers that do not keep to the protocol.


@pytest.fixture
async def http(line: Line) -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.UnixConnector(str(line.root / "runner.sock"))
    async with aiohttp.ClientSession("http://control", connector=connector) as session:
        yield session


def connect(http: aiohttp.ClientSession, session: str = "s1") -> Any:
    return http.ws_connect("/runner", headers={"X-Opificia-Session": session}, max_msg_size=0)


async def greet(http: aiohttp.ClientSession, instance: str = "i1") -> aiohttp.ClientWebSocketResponse:
    socket: aiohttp.ClientWebSocketResponse = await connect(http)
    await socket.send_json({"type": "hello", "version": 1, "instance": instance})
    assert (await receive(socket))["type"] == "welcome"
    return socket


async def receive(socket: aiohttp.ClientWebSocketResponse) -> dict[str, Any]:
    """Return the next message that is no ping."""
    while True:
        message: dict[str, Any] = await socket.receive_json(timeout=PATIENCE_S)
        if message["type"] != "ping":
            return message


async def ended(socket: aiohttp.ClientWebSocketResponse) -> None:
    """Wait for the end of a connection."""
    async with asyncio.timeout(PATIENCE_S):
        while not socket.closed:
            await socket.receive()


async def test_an_unknown_session_is_not_found(http: aiohttp.ClientSession) -> None:
    for name in ("other", "../s1", ""):
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await connect(http, name)
        assert refused.value.status == 404


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        ('{"type":"nonsense"}', "unknown_type"),
        ('{"type":"welcome"}', "unknown_type"),
        ('{"type":"status","seq":1}', "invalid"),
        ('{"type":"status","seq":0,"status":"x"}', "invalid"),
        ('{"type":"status","seq":"1","status":"x"}', "invalid"),
        ('{"type":"completed","seq":1,"run":"r","exit_code":300}', "invalid"),
        ('{"type":"output","seq":1,"run":"r","stream":"stdin","data":""}', "invalid"),
        ("{", "malformed"),
        ("[]", "malformed"),
        ("", "malformed"),
        ("[" * 20_000, "malformed"),
        ('{"type":1}', "malformed"),
        ('{"type":"hello","version":1,"instance":"i1"}', "unexpected"),
        (b"\x00\x01", "malformed"),
    ],
)
async def test_a_frame_that_is_not_understood_is_an_error_and_the_connection_lives(
    line: Line, http: aiohttp.ClientSession, frame: str | bytes, reason: str
) -> None:
    socket = await greet(http)
    await (socket.send_bytes(frame) if isinstance(frame, bytes) else socket.send_str(frame))
    error = await receive(socket)
    assert (error["type"], error["reason"]) == ("error", reason)
    await socket.send_json({"type": "status", "seq": 1, "status": "alive"})
    assert await receive(socket) == {"type": "ack", "seq": 1}
    assert line.events()[-1] == RunnerStatus(1, "alive")
    await socket.close()


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        ('{"type":"status","seq":1,"status":"x"}', "hello_expected"),
        ('{"type":"hello","version":2,"instance":"i"}', "version"),
        ('{"type":"hello"}', "invalid"),
        ('{"type":"nonsense"}', "unknown_type"),
    ],
)
async def test_a_connection_begins_with_hello(http: aiohttp.ClientSession, first: str, reason: str) -> None:
    socket = await connect(http)
    await socket.send_str(first)
    assert (await receive(socket))["reason"] == reason
    await ended(socket)


async def test_a_second_runner_is_not_taken_for_the_first(line: Line, http: aiohttp.ClientSession) -> None:
    mine = await greet(http, "i1")
    other = await connect(http)
    await other.send_json({"type": "hello", "version": 1, "instance": "i2"})
    assert (await receive(other))["reason"] == "other_instance"
    await ended(other)
    assert line.channel.present.is_set()
    assert not mine.closed
    await mine.close()


async def test_a_newer_connection_replaces_the_older(line: Line, http: aiohttp.ClientSession) -> None:
    old = await greet(http)
    new = await greet(http)
    await ended(old)
    assert line.channel.present.is_set()
    await new.close()
    await asyncio.wait_for(line.channel.gone.wait(), PATIENCE_S)


async def test_events_sent_again_are_counted_once(line: Line, http: aiohttp.ClientSession) -> None:
    socket = await greet(http)
    call = {"type": "tool_call", "seq": 1, "call": "c1", "name": "bash", "arguments": {"a": [1, "\u0000"]}}
    await socket.send_json(call)
    assert await receive(socket) == {"type": "ack", "seq": 1}
    await socket.close()
    await line.channel.gone.wait()
    socket = await connect(http)
    await socket.send_json({"type": "hello", "version": 1, "instance": "i1"})
    assert (await receive(socket))["seq"] == 1
    await socket.send_json(call)
    await socket.send_json({"type": "status", "seq": 2, "status": "next"})
    assert await receive(socket) == {"type": "ack", "seq": 2}
    assert sum(isinstance(event, ToolCalled) for event in line.events()) == 1
    await socket.close()


async def test_a_gap_in_the_numbers_is_refused(line: Line, http: aiohttp.ClientSession) -> None:
    socket = await greet(http)
    await socket.send_json({"type": "status", "seq": 1, "status": "x"})
    await receive(socket)
    await socket.send_json({"type": "status", "seq": 9, "status": "x"})
    assert (await receive(socket))["reason"] == "sequence"
    assert line.record.life.runner_seq == 1
    await socket.close()


async def test_the_end_of_a_run_that_was_never_given_is_not_recorded(line: Line, http: aiohttp.ClientSession) -> None:
    socket = await greet(http)
    await socket.send_json({"type": "completed", "seq": 1, "run": "made-up", "exit_code": 0})
    assert await receive(socket) == {"type": "ack", "seq": 1}
    assert not any(isinstance(event, CommandCompleted) for event in line.events())
    await socket.close()


async def test_a_frame_that_is_too_large_ends_the_connection(http: aiohttp.ClientSession) -> None:
    socket = await greet(http)
    await socket.send_str(json.dumps({"type": "status", "seq": 1, "status": "x" * FRAME}))
    await ended(socket)


async def test_a_peer_that_sends_only_nonsense_is_dropped(http: aiohttp.ClientSession) -> None:
    socket = await greet(http)
    for _ in range(server.MAX_ERRORS + 1):
        await socket.send_str("{")
    await ended(socket)


async def test_a_peer_that_says_nothing_is_dropped(
    http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HELLO_S", 0.05)
    await ended(await connect(http))


async def test_connections_of_one_session_are_bounded(http: aiohttp.ClientSession) -> None:
    sockets = [await connect(http) for _ in range(server.MAX_CONNECTIONS_PER_SESSION)]
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        await connect(http)
    assert refused.value.status == 429
    for socket in sockets:
        await socket.close()


async def test_a_flood_of_reports_is_bounded_and_an_end_still_told(
    line: Line, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_module, "MAX_RECORDED_EVENTS", 50)
    socket = await greet(http)
    handle = await line.run("r1", "true")
    assert (await receive(socket))["type"] == "run"
    for seq in range(1, 1001):
        await socket.send_json({"type": "status", "seq": seq, "status": "x"})
    await socket.send_json({"type": "completed", "seq": 1001, "run": "r1", "exit_code": 0})
    while (await receive(socket))["seq"] < 1001:
        pass
    assert sum(isinstance(event, RunnerStatus) for event in line.events()) == 50
    assert handle.completed.done()
    await socket.close()


async def test_a_document_of_several_lines_breaks_neither_the_journal_nor_what_comes_after_it(
    line: Line, http: aiohttp.ClientSession
) -> None:
    socket = await greet(http)
    forged = '{"number":9,"at":1,"event":{"type":"ended","note":""}}'
    await socket.send_str(
        f'{{"type":"tool_call","seq":1,"call":"c","name":"n","arguments":[\n{forged}\r\n, "a\\nb" ]}}'
    )
    await socket.send_str(f'{{"type":"tool_result","seq":2,"call":"c","content":[\n{forged}\n]}}')
    await socket.send_json({"type": "status", "seq": 3, "status": "after"})
    while (await receive(socket))["seq"] < 3:
        pass
    lines = (line.root / "events.jsonl").read_text().splitlines()
    assert [json.loads(each)["number"] for each in lines] == list(range(1, len(lines) + 1))
    called, _returned, status = line.events()[-3:]
    assert json.loads(bytes(called.arguments)) == [json.loads(forged), "a\nb"]
    assert status == RunnerStatus(3, "after")
    await socket.close()


@pytest.mark.parametrize(
    "frame", [aiohttp.WSMessage(WSMsgType.TEXT, '{"type":"pong"}', ""), aiohttp.WSMessage(WSMsgType.PING, b"", "")]
)
async def test_a_flood_of_frames_leaves_others_their_turns(frame: aiohttp.WSMessage) -> None:
    left = 10 * server.FRAMES_A_TURN

    class Flood:
        """A socket on which very much has arrived."""

        async def receive(self) -> aiohttp.WSMessage:
            nonlocal left
            left -= 1
            return frame if left > 0 else aiohttp.WSMessage(WSMsgType.CLOSED, None, None)

        async def pong(self, _data: bytes) -> None:
            pass

    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    connection = server.RunnerConnection(cast(web.WebSocketResponse[Literal[True]], Flood()))
    others = asyncio.create_task(other())
    with contextlib.suppress(ConnectionError):
        while True:
            await connection.receive()
    others.cancel()
    assert turns >= 9


async def test_a_ping_of_the_websocket_itself_is_answered(http: aiohttp.ClientSession) -> None:
    socket = await http.ws_connect("/runner", headers={"X-Opificia-Session": "s1"}, autoping=False)
    await socket.ping(b"there?")
    assert await socket.receive(PATIENCE_S) == aiohttp.WSMessage(WSMsgType.PONG, b"there?", "")
    await socket.close()


async def test_what_waits_for_the_disk_is_bounded_in_bytes_too(line: Line) -> None:
    line._keeping.cancel()  # a disk that takes nothing
    document = msgspec.Raw(b'"%b"' % (b"x" * 60_000))
    taken = 0

    async def report() -> None:
        nonlocal taken
        for seq in range(1, channel_module.MAX_BATCH):
            await line.channel.receive(ToolCall(seq, "c", "n", document))
            taken = seq

    reporting = asyncio.create_task(report())
    await asyncio.sleep(0)
    assert not reporting.done()
    assert taken * 60_000 <= channel_module.MAX_BATCH_BYTES + 60_000
    reporting.cancel()


async def test_runs_that_ended_are_remembered_by_nobody(
    line: Line, runner: asyncio.subprocess.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    handles = [await line.run(f"r{number}", "true") for number in range(3)]
    known: list[tuple[str, ...]] = []
    back = asyncio.Event()
    hello = line.channel.hello

    async def listen(connection: channel_module.Connection, message: Hello) -> None:
        known.append(message.runs)
        await hello(connection, message)
        back.set()

    monkeypatch.setattr(line.channel, "hello", listen)
    for handle in handles:
        await followed(handle)
    kept = [weakref.ref(handle) for handle in handles]
    handles.clear()
    del handle
    going = await line.run("going", "sh", "-c", "echo up; exec sleep 1000")
    await going.next()
    # A cut may be faster than the last acknowledgement; the next connection's welcome says the same.
    for _ in range(20):
        back.clear()
        line.gateway.cut_runners()
        await asyncio.wait_for(back.wait(), PATIENCE_S)
        if known[-1] == ("going",):
            break
    assert known[-1] == ("going",)
    await line.channel.cancel("going", 0)
    await followed(going)
    gc.collect()
    assert [each() for each in kept] == [None, None, None]


async def test_a_large_document_is_told_by_its_size(line: Line, http: aiohttp.ClientSession) -> None:
    channel_limit = channel_module.MAX_DOCUMENT_BYTES
    line.channel._frame_bytes = FRAME
    assert channel_limit >= FRAME
    assert bytes(channel_module._bounded(msgspec.Raw(b'"%b"' % (b"x" * channel_limit)))) == (
        b'{"truncated":true,"bytes":%d}' % (channel_limit + 2)
    )


@pytest.mark.parametrize("data", ["x" * 20, ""])
async def test_output_that_nobody_reads_is_dropped_after_a_while_also_if_it_is_empty(
    line: Line, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch, data: str
) -> None:
    monkeypatch.setattr(channel_module, "MAX_UNREAD_BYTES", 10)
    monkeypatch.setattr(channel_module, "SLOW_READER_S", 0.05)
    socket = await greet(http)
    handle = await line.run("r1", "true")
    await receive(socket)
    for seq in range(1, 10):
        await socket.send_json({"type": "output", "seq": seq, "run": "r1", "stream": "stdout", "data": data})
    while (await receive(socket))["seq"] < 9:
        pass
    with pytest.raises(RunFailedError):
        await followed(handle)
    await socket.close()


async def test_output_that_is_not_what_it_says_does_not_hurt(line: Line, http: aiohttp.ClientSession) -> None:
    socket = await greet(http)
    await line.run("r1", "true")
    await receive(socket)
    bad = {"type": "output", "seq": 1, "run": "r1", "stream": "stdout", "data": "***", "encoding": "base64"}
    await socket.send_json(bad)
    answers = [await receive(socket), await receive(socket)]
    assert {answer["type"] for answer in answers} == {"ack", "error"}
    await socket.send_json({"type": "status", "seq": 2, "status": "alive"})
    assert await receive(socket) == {"type": "ack", "seq": 2}
    await socket.close()


async def test_no_runner_is_taken_by_a_session_that_is_over(line: Line, http: aiohttp.ClientSession) -> None:
    await line.channel.close("over")
    socket = await connect(http)
    await socket.send_json({"type": "hello", "version": 1, "instance": "i1"})
    assert (await receive(socket))["reason"] == "wrong_state"
    await ended(socket)


async def test_no_second_request_is_read_from_a_connection_whatever_the_first_came_to() -> None:
    """Behind the gateway's own request comes what a sandbox wrote, and it may name any session."""
    asked: list[str] = []

    def channel_of(session: str) -> Channel | None:
        asked.append(session)
        return None

    runners = server.RunnerServer(channel_of, FRAME)
    app = AppServer(runners.application(), shutdown_timeout=0.1)
    upgrade = "Host: control\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    upgrade += "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
    with tempfile.TemporaryDirectory(prefix="opificia-") as folder:
        await app.listen(Path(folder) / "runner.sock")
        for path in ("/runner", "/elsewhere"):
            reader, writer = await asyncio.open_unix_connection(f"{folder}/runner.sock")
            for session in ("s1", "s2"):
                writer.write(f"GET {path} HTTP/1.1\r\n{upgrade}X-Opificia-Session: {session}\r\n\r\n".encode())
            async with asyncio.timeout(PATIENCE_S):
                answer = await reader.read()
            writer.close()
            assert answer.count(b"HTTP/1.1 404") == 1
        await app.close()
    assert asked == ["s1"]


async def test_a_runner_that_connects_for_ever_fills_no_journal(
    line: Line, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_module, "MAX_HELLOS", 3)
    for _ in range(3):
        socket = await greet(http, "i1")
        await socket.close()
        await until(line.channel.gone.is_set)
    for _ in range(3):
        socket = await connect(http)
        await socket.send_json({"type": "hello", "version": 1, "instance": "i1"})
        assert (await receive(socket))["reason"] == "too_many_connections"
        await ended(socket)
    assert sum(isinstance(event, RunnerConnected) for event in line.events()) == 3
