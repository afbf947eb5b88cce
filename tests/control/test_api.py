"""The API over a real unix socket: what it gives, what it refuses, and how it says so."""

import asyncio
import contextlib
import io
import json
import os
import socket
import tarfile
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import yarl

from control.api.routes import OPERATIONS
from control.api.types import RunBroken, RunCompleted, RunOutput, RunRequest
from control.client import ControlClient, ControlError, ControlUnavailableError
from control.db.database import StoreUnavailableError
from control.plan.session import Reason, SessionState
from control.runner.messages import Encoding, Stream
from control.sessions import folders
from control.spec import SandboxSpec
from gateway.contract.policy import Usage
from tests.control.conftest import Host
from tests.support.gateway_process import free_port
from tests.support.patience import PATIENCE_S, until

S = SessionState
TOKEN = "t" * 40


@pytest.fixture
async def http(host: Host) -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.UnixConnector(str(host.api))
    async with aiohttp.ClientSession("http://control", connector=connector) as session:
        yield session


def spec(*command: str, **fields: Any) -> SandboxSpec:
    return msgspec.convert({"image": "sandbox", "cwd": "/tmp", "command": command, **fields}, SandboxSpec)


async def launched(client: ControlClient, *command: str, **fields: Any) -> str:
    session = await client.create(spec(*command, **fields))
    await client.launch(session.id)
    return session.id


async def taken(chunks: AsyncIterator[bytes]) -> bytes:
    return b"".join([chunk async for chunk in chunks])


async def problem(client_call: Any) -> tuple[int, str]:
    with pytest.raises(ControlError) as refused:
        await client_call
    found = refused.value.problem
    assert found.type == f"urn:opificia:problem:{found.reason}"
    assert found.title
    assert found.detail
    return found.status, found.reason


async def test_a_session_from_creation_to_its_end(client: ControlClient, host: Host) -> None:
    session = await client.create(spec("sh", "-c", "echo out; exit 3", env={"SECRET": "hidden"}))
    assert (session.state, session.queue_position) == (S.CREATED, None)
    assert "hidden" not in str(session)
    await client.launch(session.id)
    ended = await client.ended(session.id)
    assert (ended.state, ended.reason, ended.exit_code) == (S.EXITED, Reason.EXIT_CODE, 3)
    assert ended.created_at <= (ended.launched_at or "") <= (ended.ended_at or "")
    assert await taken(client.log(session.id, "stdout")) == b"out\n"
    events = [event async for event in client.events(session.id, follow=False)]
    assert [event.number for event in events] == list(range(1, len(events) + 1))


async def test_what_a_session_used_is_known_after_its_end(client: ControlClient, host: Host) -> None:
    session = await launched(client, "sleep", "1000")
    await host.state(session, S.RUNNING)
    await host.gateway.report(session, Usage(egress_bytes_up=7, egress_refused=2))
    await until(lambda: host.manager.used(session).egress_bytes_up == 7, "the report")
    await client.stop(session, 0)
    await host.cleaned(session)
    assert (await client.get(session)).usage == Usage(egress_bytes_up=7, egress_refused=2)


async def test_the_same_key_makes_one_session(client: ControlClient) -> None:
    first = await client.create(spec("true"), "key-1")
    again = await client.create(spec("true"), "key-1")
    assert first.id == again.id
    assert await problem(client.create(spec("false"), "key-1")) == (422, "idempotency_key_reused")


async def test_every_problem_of_a_spec_at_once(client: ControlClient) -> None:
    with pytest.raises(ControlError) as refused:
        await client.create(spec("true", image="BAD", allow=("a b",), time_limit_ms=-1))
    found = refused.value.problem
    assert (found.status, found.reason) == (422, "invalid_spec")
    assert [each.split(":")[0] for each in found.problems] == ["image", "allow", "time_limit_ms"]


async def test_every_problem_of_a_bodys_shape_at_once(http: aiohttp.ClientSession) -> None:
    body = {"command": ["ok", 7], "network": "all", "resources": {"cpus": "two", "gpus": 1}, "env": [], "surprise": 1}
    async with http.post("/v1/sessions", json=body) as answer:
        found = await answer.json(content_type=None)
    assert (answer.status, found["reason"]) == (422, "invalid_body")
    assert sorted(each.split(":")[0] for each in found["problems"]) == [
        *("command[1]", "env", "image", "network", "resources.cpus", "resources.gpus", "surprise")
    ]


async def test_an_answer_about_many_problems_stays_small(http: aiohttp.ClientSession) -> None:
    async with http.post("/v1/sessions", json={"image": "x", "command": [1] * 100_000}) as answer:
        raw = await answer.read()
    assert len(raw) < 40_000
    assert len(json.loads(raw)["problems"]) == 100


async def test_what_does_not_exist_and_what_comes_at_the_wrong_time(client: ControlClient, host: Host) -> None:
    assert await problem(client.get("unknown")) == (404, "no_such_session")
    assert await problem(client.get("UPPER")) == (404, "no_such_session")
    assert await problem(client.launch("unknown")) == (404, "no_such_session")
    assert await problem(client.stop("unknown")) == (404, "no_such_session")
    session = (await client.create(spec("true", session_id="mine"))).id
    assert await problem(client.create(spec("true", session_id="mine"))) == (409, "session_exists")
    with pytest.raises(ControlError, match="ended"):
        await client.out(session, host.root / "x")
    await client.stop(session)
    assert await problem(client.launch(session)) == (409, "wrong_state")
    assert await problem(client.out(session, host.root / "x")) == (404, "no_results")


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "reason"),
    [
        ("GET", "/nowhere", None, 404, "not_found"),
        ("DELETE", "/v1/sessions", None, 405, "method_not_allowed"),
        ("POST", "/v1/sessions", b"{", 422, "invalid_body"),
        ("POST", "/v1/sessions", b"[]", 422, "invalid_body"),
        ("POST", "/v1/sessions", b"{}", 422, "invalid_body"),
        ("POST", "/v1/sessions", b'{"image":"x","surprise":1}', 422, "invalid_body"),
        ("POST", "/v1/sessions", b'{"image":"x","network":"all"}', 422, "invalid_body"),
        ("POST", "/v1/sessions", b"[" * 50_000, 422, "invalid_body"),
        ("POST", "/v1/sessions", b"x" * 3_000_000, 413, "request_entity_too_large"),
        ("GET", "/v1/sessions?limit=0", None, 422, "invalid_query"),
        ("GET", "/v1/sessions?limit=9999", None, 422, "invalid_query"),
        ("GET", "/v1/sessions?limit=x", None, 422, "invalid_query"),
        ("GET", "/v1/sessions?cursor=%00", None, 422, "invalid_query"),
        ("GET", f"/v1/sessions?cursor={'0' * 19}1{'9' * 30}", None, 422, "invalid_query"),
        ("GET", f"/v1/sessions?cursor={'0' * 19}1{'9' * 5_000}", None, 422, "invalid_query"),
        ("GET", "/v1/sessions?image=%00", None, 422, "invalid_query"),
        ("GET", "/v1/sessions?image=%ff", None, 422, "invalid_query"),
        ("GET", "/v1/sessions?state=dead", None, 422, "invalid_query"),
        ("GET", "/v1/sessions?reason=bored", None, 422, "invalid_query"),
        ("GET", "/v1/sessions/..%2f..%2fetc", None, 404, "no_such_session"),
        ("GET", "/v1/sessions/a%0ab", None, 404, "no_such_session"),
    ],
)
async def test_bad_requests_are_problems(
    http: aiohttp.ClientSession, method: str, path: str, body: bytes | None, status: int, reason: str
) -> None:
    data = None if body is None else io.BytesIO(body)
    async with http.request(method, yarl.URL(path, encoded=True), data=data) as answer:
        found = await answer.json(content_type=None)
        assert (answer.status, found["reason"]) == (status, reason)
        assert answer.content_type == "application/problem+json"


@pytest.mark.parametrize("key", ["caf\u00e9", "a\tb", "x" * 256])
async def test_an_idempotency_key_that_no_store_could_keep_is_refused(http: aiohttp.ClientSession, key: str) -> None:
    async with http.post("/v1/sessions", json={"image": "x"}, headers={"Idempotency-Key": key}) as answer:
        assert (answer.status, (await answer.json(content_type=None))["reason"]) == (422, "invalid_key")


async def test_a_body_that_is_not_encoded_as_its_head_says_is_the_callers_fault(
    http: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    headers = {"Content-Encoding": "deflate", "Content-Type": "application/json"}
    async with http.post("/v1/sessions", data=b"xxxx", headers=headers, skip_auto_headers=()) as answer:
        assert (answer.status, (await answer.json(content_type=None))["reason"]) == (400, "bad_request")
    assert "Traceback" not in caplog.text


async def test_an_offset_beyond_every_file_is_refused(client: ControlClient, http: aiohttp.ClientSession) -> None:
    session = await launched(client, "echo", "x")
    await client.ended(session)
    path = f"/v1/sessions/{session}/logs?stream=stdout&offset="
    for digits in ("0" * 20 + "9" * 30, "0" * 20 + "9" * 5_000):
        async with http.get(path + digits) as answer:
            assert answer.status == 422


async def test_lists_go_page_by_page(client: ControlClient) -> None:
    made = [(await client.create(spec("true"))).id for _ in range(5)]
    await client.stop(made[1])
    first = await client.list(limit=2)
    assert first.next is not None
    rest = await client.list(limit=10, cursor=first.next)
    assert [each.id for each in (*first.sessions, *rest.sessions)] == made[::-1]
    assert rest.next is None
    assert [each.id for each in (await client.list([S.STOPPED])).sessions] == [made[1]]
    by_user = await client.list(reasons=[Reason.STOPPED_BY_USER, Reason.TIME_LIMIT])
    assert [each.id for each in by_user.sessions] == [made[1]]
    assert (await client.list(reasons=[Reason.TIME_LIMIT])).sessions == ()
    assert len((await client.list(image="sandbox")).sessions) == len(made)
    assert (await client.list(image="sand")).sessions == ()


async def test_events_go_on_where_a_client_left_off(client: ControlClient, http: aiohttp.ClientSession) -> None:
    session = await launched(client, "true")
    await client.ended(session)
    async with http.get(f"/v1/sessions/{session}/events", headers={"Last-Event-ID": "3"}) as answer:
        assert answer.content_type == "text/event-stream"
        text = await answer.text()
    first = text.split("\n\n")[0].split("\n")
    assert first[:2] == ["id: 4", "event: runner_connected"]
    assert json.loads(first[2].removeprefix("data: "))["number"] == 4


async def test_followers_see_events_as_they_come(client: ControlClient, host: Host) -> None:
    session = await client.create(spec("sleep", "1000"))
    kinds: list[str] = []

    async def follow() -> None:
        async for event in client.events(session.id):
            kinds.append(str(event.event.__struct_config__.tag))  # noqa: PERF401 - looked at while it grows

    following = asyncio.create_task(follow())
    await client.launch(session.id)
    await until(lambda: "command_sent" in kinds, "the command")
    assert not following.done()
    await client.stop(session.id, 0)
    async with asyncio.timeout(PATIENCE_S):
        await following
    assert kinds[-1] == "ended"


async def test_logs_can_be_followed_from_anywhere(client: ControlClient, host: Host) -> None:
    script = "for word in one two; do echo $word; until [ -e $0/$word ]; do sleep 0.02; done; done; echo oops >&2; echo three"
    session = await launched(client, "sh", "-c", script, str(host.root))
    following = client.log(session, "stdout", follow=True)
    for word in ("one", "two"):
        assert await anext(following) == f"{word}\n".encode()
        (host.root / word).touch()
    assert await taken(following) == b"three\n"
    assert await taken(client.log(session, "stdout", offset=4)) == b"two\nthree\n"
    assert await taken(client.log(session, "stderr", follow=True)) == b"oops\n"
    lines = [line async for line in client.logs(session)]
    assert [(line.stream, line.data) for line in lines[:2]] == [(Stream.STDOUT, "one\n"), (Stream.STDOUT, "two\n")]
    assert {(line.stream, line.data) for line in lines[2:]} == {(Stream.STDERR, "oops\n"), (Stream.STDOUT, "three\n")}
    assert [line.at for line in lines] == sorted(line.at for line in lines)


async def test_the_merged_log_can_be_followed(client: ControlClient, host: Host) -> None:
    go = host.root / "go"
    session = await launched(client, "sh", "-c", "echo a; until [ -e $0 ]; do sleep 0.02; done; echo b >&2", str(go))
    following = client.logs(session, follow=True)
    assert (await anext(following)).data == "a\n"
    go.touch()
    assert [line.data async for line in following] == ["b\n"]


async def test_the_egress_log_is_shown_in_whole_lines(client: ControlClient, host: Host) -> None:
    session = await launched(client, "sleep", "1000")
    path = host.root / "egress" / f"{session}.log"
    seen: list[dict[str, Any]] = []

    async def follow() -> None:
        async for entry in client.egress(session, follow=True):
            seen.append(entry)  # noqa: PERF401 - looked at while it grows

    following = asyncio.create_task(follow())
    await asyncio.to_thread(path.write_text, '{"host":"a"}\n{"host":')
    await until(lambda: len(seen) == 1, "the first line")
    with path.open("a") as file:
        file.write('"b"}\n')
    await until(lambda: len(seen) == 2, "the second line")
    await client.stop(session, 0)
    async with asyncio.timeout(PATIENCE_S):
        await following
    assert [entry["host"] for entry in seen] == ["a", "b"]


async def test_neither_a_link_nor_a_fifo_among_the_egress_logs_is_followed(
    client: ControlClient, host: Host, tmp_path: Path
) -> None:
    session = await launched(client, "sleep", "1000")
    path = host.root / "egress" / f"{session}.log"
    (tmp_path / "other").write_text('{"host":"nobody\'s to show"}\n')
    path.symlink_to(tmp_path / "other")
    assert [entry async for entry in client.egress(session)] == []
    path.unlink()
    os.mkfifo(path)
    try:
        async with asyncio.timeout(PATIENCE_S):
            assert [entry async for entry in client.egress(session)] == []
    finally:
        # Whoever waits for a writer waits no more.
        os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
    await client.stop(session, 0)


async def test_results_come_as_a_tar(client: ControlClient, host: Host, tmp_path: Path) -> None:
    host.engine.out = {"result.txt": b"the result"}
    session = await launched(client, "true")
    await client.ended(session)
    await client.out(session, tmp_path / "out.tar")
    with tarfile.open(tmp_path / "out.tar") as tar:
        found = tar.extractfile("./result.txt")
        assert found is not None
        assert found.read() == b"the result"


def archive(name: str = "task.txt", data: bytes = b"the task", link: str = "") -> io.BytesIO:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        if link:
            info.type, info.linkname, info.size = tarfile.SYMTYPE, link, 0
        tar.addfile(info, io.BytesIO(data))
    made.seek(0)
    return made


async def test_input_is_unpacked_before_the_launch(client: ControlClient, host: Host) -> None:
    session = (await client.create(spec("true"))).id
    await client.put_input(session, archive())
    folder = host.root / "sessions" / session
    assert (folder / "in/task.txt").read_bytes() == b"the task"
    assert sorted(path.name for path in folder.iterdir()) == ["in"]
    await client.launch(session)
    assert await problem(client.put_input(session, archive())) == (409, "wrong_state")
    await client.ended(session)


async def test_neither_a_launch_nor_another_input_comes_between_while_input_is_unpacked(
    client: ControlClient, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    unpack_input = folders.unpack_input

    def slowly(*arguments: Any) -> None:
        begun.set()
        go_on.wait()
        unpack_input(*arguments)

    monkeypatch.setattr(folders, "unpack_input", slowly)
    session = (await client.create(spec("true"))).id
    first = asyncio.create_task(client.put_input(session, archive()))
    try:
        await asyncio.to_thread(begun.wait, PATIENCE_S)
        assert await problem(client.launch(session)) == (409, "wrong_state")
        assert await problem(client.put_input(session, archive())) == (409, "wrong_state")
    finally:
        go_on.set()
        await first
    await client.launch(session)
    await client.ended(session)


@pytest.mark.parametrize(
    "bad", [archive("../escape"), archive("x", link="/etc/shadow"), io.BytesIO(b"no tar")], ids=["name", "link", "junk"]
)
async def test_input_that_leads_out_is_refused(client: ControlClient, host: Host, bad: io.BytesIO) -> None:
    session = (await client.create(spec("true"))).id
    bad.seek(0)
    assert await problem(client.put_input(session, io.BytesIO(bad.getvalue()))) == (422, "invalid_input")
    assert list((host.root / "sessions" / session / "in").iterdir()) == []
    assert not (host.root / "sessions" / session / "escape").exists()


async def test_input_for_a_session_that_has_ended_is_not_even_taken(client: ControlClient, host: Host) -> None:
    session = (await client.create(spec("true"))).id
    await client.stop(session)

    class Endless(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            buffer[:] = bytes(len(buffer))
            return len(buffer)

    with pytest.raises((ControlError, ControlUnavailableError)):
        await client.put_input(session, io.BufferedReader(Endless()))
    assert not list((host.root / "sessions" / session).glob("in-*.tar"))


async def test_input_that_is_too_large_is_refused(stopped_host: Host) -> None:
    stopped_host.settings["limits"]["in_bytes"] = 1000
    await stopped_host.start()
    async with ControlClient(f"unix:{stopped_host.api}") as client:
        session = (await client.create(spec("true"))).id
        assert await problem(client.put_input(session, archive(data=bytes(5000)))) == (413, "input_too_large")


async def test_a_command_runs_in_a_session_and_its_output_comes_as_it_is(client: ControlClient, host: Host) -> None:
    session = await launched(client)
    await host.state(session, S.CONNECTED)
    request = RunRequest(argv=("sh", "-c", "cat; echo err >&2; exit 5"), cwd="/tmp", stdin="in")
    lines = [line async for line in client.run(session, request)]
    assert lines[-1] == RunCompleted(5)
    assert {(line.stream, line.data) for line in lines[:-1] if isinstance(line, RunOutput)} == {
        (Stream.STDOUT, "in"),
        (Stream.STDERR, "err\n"),
    }
    await client.stop(session, 0)


async def test_stdin_that_is_not_encoded_as_it_says_is_refused(client: ControlClient, host: Host) -> None:
    """The runner could not give it to the command, which nobody would then ever see end."""
    session = await launched(client)
    await host.state(session, S.CONNECTED)
    request = RunRequest(argv=("cat",), cwd="/tmp", stdin="a", stdin_encoding=Encoding.BASE64)
    with pytest.raises(ControlError, match="stdin"):
        _ = [line async for line in client.run(session, request)]
    await client.stop(session, 0)


async def test_a_command_whose_caller_goes_away_is_cancelled(client: ControlClient, host: Host) -> None:
    session = await launched(client)
    await host.state(session, S.CONNECTED)
    async for line in client.run(session, RunRequest(argv=("sh", "-c", "echo up; exec sleep 1000"), cwd="/tmp")):
        assert isinstance(line, RunOutput)
        break
    record = host.manager.record(session)
    assert record is not None
    await until(lambda: not record.life.open_runs, "the end of the command")
    await client.stop(session, 0)


async def test_a_command_is_told_when_its_session_ends(client: ControlClient, host: Host) -> None:
    session = await launched(client)
    await host.state(session, S.CONNECTED)
    last = None
    async for line in client.run(session, RunRequest(argv=("sh", "-c", "echo up; exec sleep 1000"), cwd="/tmp")):
        last = line
        if isinstance(line, RunOutput):
            await client.stop(session, 0)
    assert isinstance(last, RunBroken | RunCompleted)


async def test_commands_that_cannot_be_run_are_refused(client: ControlClient, host: Host) -> None:
    session = (await client.create(spec())).id

    async def run(request: RunRequest) -> None:
        async for _ in client.run(session, request):
            pass

    assert await problem(run(RunRequest(argv=("true",)))) == (409, "wrong_state")
    assert await problem(run(RunRequest(argv=()))) == (422, "invalid_command")
    assert await problem(run(RunRequest(argv=("x",), env={"HTTP_PROXY": "x"}))) == (422, "invalid_command")


async def test_health_says_what_is_wrong(client: ControlClient, host: Host) -> None:
    await until(lambda: host.control.link.connected, "the gateway")
    assert (await client.health()).status == "ok"
    await host.gateway.stop()
    await until(lambda: not host.control.link.connected, "the loss of the gateway")
    health = await client.health()
    assert health.status == "degraded"
    assert "opificia-gateway" in health.problems[0]
    await host.gateway.start()


async def test_without_the_database_nothing_new_starts_and_what_runs_goes_on(
    client: ControlClient, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await launched(client, "sh", "-c", "sleep 0.5; exit 4")
    await host.state(running, S.RUNNING)
    created = (await client.create(spec("true"))).id

    async def away(*_: object, **__: object) -> None:
        raise StoreUnavailableError("the database is away")

    with monkeypatch.context() as patch:
        for name in ("append", "insert", "ping", "get", "page", "events", "put_usage", "mark_cleaned", "_update"):
            patch.setattr(host.manager.store, name, away)
        assert await problem(client.create(spec("true"))) == (503, "store_unavailable")
        assert await problem(client.launch(created)) == (503, "store_unavailable")
        record = host.manager.record(running)
        assert record is not None
        await until(lambda: record.life.state.final, "the end")
        assert (await client.get(running)).exit_code == 4
    await host.cleaned(running)
    stored = await host.manager.store.get(running)
    assert stored is not None
    assert stored.life.state is S.EXITED


@pytest.mark.parametrize("name", ["api.sock", "runner.sock"])
async def test_hundreds_who_call_at_once_are_none_too_many(host: Host, name: str) -> None:
    # The daemon is in this loop, which does not turn meanwhile: all of them wait to be accepted.
    with contextlib.ExitStack() as callers:
        for _ in range(500):
            caller = callers.enter_context(socket.socket(socket.AF_UNIX))
            caller.setblocking(False)
            caller.connect(str(host.root / name))


async def test_metrics_are_prometheus_text(http: aiohttp.ClientSession, client: ControlClient) -> None:
    await client.create(spec("true"))
    async with http.get("/metrics") as answer:
        text = await answer.text()
    assert 'opificia_control_sessions{state="created"} 1.0' in text
    assert "opificia_control_waiting 0.0" in text


async def test_the_document_describes_every_route(http: aiohttp.ClientSession) -> None:
    async with http.get("/openapi.json") as answer:
        document = await answer.json()
    assert document["openapi"] == "3.1.0"
    found = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert found == {(each.method, each.path) for each in OPERATIONS}
    text = json.dumps(document)
    for reference in {part.split('"')[0] for part in text.split('"$ref": "')[1:]}:
        name = reference.removeprefix("#/components/schemas/")
        assert name in document["components"]["schemas"], reference


@pytest.fixture
async def on_tcp(stopped_host: Host, monkeypatch: pytest.MonkeyPatch) -> str:
    """The API on TCP, where callers have little time for the token and room for few; its address."""
    monkeypatch.setattr("control.api.bearer.TOKEN_WITHIN_S", 2.0)
    monkeypatch.setattr("control.api.bearer.MAX_STRANGERS", 3)
    token = stopped_host.root / "token"
    token.write_text(TOKEN + "\n")
    address = f"127.0.0.1:{free_port()}"
    stopped_host.settings["listen"] = {"tcp": address, "token_file": str(token)}
    await stopped_host.start()
    return address


async def test_on_tcp_every_request_needs_the_token(on_tcp: str) -> None:
    async with ControlClient(f"http://{on_tcp}", TOKEN) as client:
        assert (await client.list()).sessions == ()
    for wrong in ("", "x" * 40, TOKEN[1:]):
        async with ControlClient(f"http://{on_tcp}", wrong) as client:
            assert await problem(client.list()) == (401, "unauthorized")


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET /v1/sessions HTTP/1.1\r\nHost:",
        b"GET /v1/sessions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer x\r\n\r\n",
    ],
    ids=["nothing", "half a head", "a wrong token"],
)
async def test_on_tcp_a_caller_without_the_token_is_cut(on_tcp: str, said: bytes) -> None:
    reader, writer = await asyncio.open_connection(*on_tcp.split(":"))
    writer.write(said)
    async with asyncio.timeout(60):
        with contextlib.suppress(ConnectionResetError):
            while await reader.read(4096):
                pass
    writer.close()


async def test_on_tcp_a_caller_with_the_token_stays(on_tcp: str) -> None:
    reader, writer = await asyncio.open_connection(*on_tcp.split(":"))
    stranger, strangers_writer = await asyncio.open_connection(*on_tcp.split(":"))
    request = f"GET /v1/sessions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
    for _ in range(2):
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
        # The second time after a stranger who came later has been cut.
        async with asyncio.timeout(60):
            with contextlib.suppress(ConnectionResetError):
                assert await stranger.read() == b""
    for each in (writer, strangers_writer):
        each.close()


async def test_on_tcp_a_crowd_without_the_token_keeps_nobody_out(on_tcp: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Whoever is cut is cut for the crowd, not for the time.
    monkeypatch.setattr("control.api.bearer.TOKEN_WITHIN_S", 3600.0)
    crowd = [await asyncio.open_connection(*on_tcp.split(":")) for _ in range(10)]
    async with ControlClient(f"http://{on_tcp}", TOKEN) as client:
        assert (await client.list()).sessions == ()
    async with asyncio.timeout(60):
        with contextlib.suppress(ConnectionResetError):
            assert await crowd[0][0].read() == b""
    for _, writer in crowd:
        writer.close()


async def test_no_daemon_is_told(tmp_path: Path) -> None:
    async with ControlClient(f"unix:{tmp_path}/none.sock") as client:
        with pytest.raises(ControlUnavailableError, match="No such file"):
            await client.list()
