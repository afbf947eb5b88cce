"""Targets on the caller's side of control: what a caller asks, what the daemon answers, and what reaches a terminal."""

import asyncio
import contextlib
import io
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from control.api.problems import ProblemError
from control.api.sessions import MAX_PROBLEM_CHARACTERS, MAX_PROBLEMS, decode_body
from control.api.types import EgressCheck, EventView, LogLine, RunOutput, RunRequest, StopRequest
from control.cli.streams import show_egress, show_events, show_logs, summarize_egress
from control.cli.text import Escaper, escape, escape_json, escape_line
from control.client import ControlUnavailableError, _decoded, _problem
from control.doctor.trial import CHECKS, _findings
from control.exchange import Answer, ExchangeError
from control.sessions.logs import BYTES_AT_ONCE, PieceReader
from control.spec import Bounds, SandboxSpec, command_problems, is_image, spec_problems
from tests.fuzz.properties import check_bounded, pieces

_BOUNDS = Bounds(
    memory_bytes=1 << 32, min_memory_bytes=1 << 27, cpus=4, pids=1024, session_time_ms=86_400_000, in_roots=("/srv/in",)
)
# By their code points: who writes them down as text cannot see what stands there.
_STEERING = {
    *map(chr, (*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))),
    *"\u061c\u200e\u200f\u2028\u2029\ufeff",
} - {"\n", "\t"}


def spec(data: bytes) -> None:
    """`decode_body`, `spec_problems`: what is accepted is within every bound, what is not is told in bounded sentences."""
    for kind in (SandboxSpec, EgressCheck, RunRequest, StopRequest):
        try:
            body = decode_body(data, kind)
        except ProblemError as error:
            refused = error.problem
        else:
            refused = None
        if refused is not None:
            assert refused.status == 422
            assert len(refused.problems) <= MAX_PROBLEMS
            assert all(len(each) <= MAX_PROBLEM_CHARACTERS for each in refused.problems)
            continue
        # The first thing that is done with it is to store it.
        assert decode_body(msgspec.json.encode(body), kind) == body
        if isinstance(body, RunRequest):
            for problem in command_problems(body.argv, body.cwd, body.env):
                check_bounded(problem, data)
        if isinstance(body, SandboxSpec):
            problems = spec_problems(body, _BOUNDS)
            for problem in problems:
                assert problem.partition(":")[0].split(".")[0] in SandboxSpec.__struct_fields__
                check_bounded(problem, data)
            if not problems:
                assert is_image(body.image)
                assert body.image.isascii()
                assert not body.in_dir or Path(body.in_dir).is_relative_to("/srv/in")
                assert ".." not in Path(body.in_dir).parts
                assert "\0" not in "".join((*body.command, *body.env, *body.env.values(), body.cwd))
                assert not any(name.upper().startswith("OPIFICIA_") for name in body.env)
                assert 0 <= body.resources.memory_bytes <= _BOUNDS.memory_bytes


def answer(data: bytes) -> None:
    """`Answer`: a status and a body that do not depend on how they arrive, or an error that says why."""

    async def read(parts: list[bytes]) -> tuple[int, bytes, list[bytes]] | str:
        found: list[Any] = []
        for take in (Answer.chunks, Answer.lines):
            stream = asyncio.StreamReader()
            got = Answer(stream)
            reading = asyncio.ensure_future(_all(got, take))
            for part in parts:
                stream.feed_data(part)
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            stream.feed_eof()
            try:
                found.append(await reading)
            except ExchangeError as error:
                check_bounded(str(error), b"")
                return "failed"
        (status, chunks), (_, lines) = found
        body = b"".join(chunks)
        assert body == b"".join(lines)
        assert all(line.find(b"\n") in (-1, len(line) - 1) for line in lines)
        assert len(body) <= len(data)
        assert status >= 200
        return status, body, lines

    loop = asyncio.new_event_loop()
    try:
        whole = loop.run_until_complete(read([data]))
        cut = loop.run_until_complete(read(pieces(data, 80)))
        # What follows a whole answer is a fault where it comes with it, and never read where it comes later.
        assert cut == whole or whole == "failed"
    finally:
        loop.close()


async def _all(got: Answer, take: Callable[[Answer], AsyncIterator[bytes]]) -> tuple[int, list[bytes]]:
    await got.head()
    return got.status, [piece async for piece in take(got)]


class _Client:
    """Yields what a daemon's stream of these bytes would."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def _lines(self, kind: Any) -> AsyncIterator[Any]:
        for line in self._data.split(b"\n"):
            if line:
                yield _decoded(line, kind)

    def egress(self, _session: str) -> AsyncIterator[Any]:
        return self._lines(dict[str, Any])

    def events(self, _session: str, *, follow: bool) -> AsyncIterator[Any]:
        return self._lines(EventView)

    def logs(self, _session: str) -> AsyncIterator[Any]:
        return self._lines(LogLine)


def shown_stream(data: bytes) -> None:
    """`show_egress`, `summarize_egress`, `show_events`, `show_logs`: a stream's lines steer no terminal, or are an error."""
    client: Any = _Client(data)
    shows = (
        lambda json: show_egress(client, "s", False, False, json),
        lambda json: summarize_egress(client, "s", False, json),
        lambda json: show_events(client, "s", False, json),
        lambda json: show_logs(client, "s", ("stdout", "stderr"), False, True, False, json),
    )
    loop = asyncio.new_event_loop()
    try:
        for show in shows:
            for json in (False, True):
                raw = io.BytesIO()
                with contextlib.redirect_stdout(io.TextIOWrapper(raw, "utf-8", write_through=True)) as out:
                    try:
                        loop.run_until_complete(show(json))
                    except ControlUnavailableError as error:
                        check_bounded(str(error), data)
                    out.detach()
                shown = raw.getvalue().decode()
                assert not set(shown) & _STEERING, shown
    finally:
        loop.close()


def daemon_words(data: bytes) -> None:
    """`_decoded`, `_problem`: an answer of the API of its type, or an error that says so."""
    for kind in (EventView, LogLine, RunOutput, dict[str, Any]):
        try:
            found = _decoded(data, kind)
        except ControlUnavailableError as error:
            check_bounded(str(error), data)
        else:
            assert _decoded(msgspec.json.encode(found), kind) == found
    assert len(_problem(500, data).detail) <= max(500, 6 * len(data))


def probe_words(data: bytes) -> None:
    """`_findings`: a finding for each check, in their order, well only where the probe said so of it."""
    for text in (data.decode("utf-8", "replace"), data.decode("utf-8", "surrogateescape")):
        found = _findings(text, "it ended")
        assert [finding.check for finding in found] == [title for title, _ in CHECKS.values()]
        for name, finding in zip(CHECKS, found, strict=True):
            assert not finding.ok or (name in text or "\\u" in text)
            assert finding.ok == (not finding.remedy)
            assert len(finding.detail) <= 500


def terminal(data: bytes) -> None:
    """`Escaper`, `escape_line`, `escape_json`: nothing that steers a terminal, the same however it arrives."""

    def shown(parts: list[bytes]) -> str:
        escaper = Escaper()
        return "".join(escaper.feed(part) for part in parts) + escaper.feed(b"", final=True)

    whole = shown([data])
    assert shown(pieces(data)) == whole
    assert not set(whole) & _STEERING
    assert len(whole) <= 6 * len(data)
    text = data.decode("utf-8", "replace")
    assert escape(escape(text)) == escape(text)
    assert not set(escape_line(text)) & (_STEERING | {"\n", "\t"})
    encoded = msgspec.json.encode({text: [text]})
    assert msgspec.json.decode(escape_json(encoded)) == {text: [text]}
    assert not set(escape_json(encoded).decode()) & _STEERING


def log_index(data: bytes) -> None:
    """`PieceReader`: pieces that lie behind each other, at times that can be said, a bounded number of bytes at once."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "logs.index").write_bytes(data)
        reader, offsets, count = PieceReader(folder), {"stdout": 0, "stderr": 0}, 0
        while found := reader.next():
            assert sum(piece.length for piece in found[:-1]) <= BYTES_AT_ONCE
            for piece in found:
                assert piece.offset == offsets[piece.stream.value]
                offsets[piece.stream.value] += piece.length
                count += 1
        assert count <= len(data) // 13
        behind = PieceReader(folder)
        behind.skip(count)
        assert behind.next() == []


CLIENT_TARGETS = {
    "spec": spec,
    "answer": answer,
    "shown_stream": shown_stream,
    "daemon_words": daemon_words,
    "probe_words": probe_words,
    "terminal": terminal,
    "log_index": log_index,
}
