"""`opificia run`: from an image and a command to its output and exit code, with the session's states on the way."""

import asyncio
import contextlib
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, TextIO

from control.api.types import SessionView
from control.archive import ArchiveError
from control.cli.archive import pack
from control.cli.output import EXIT_HOST, as_json, fail
from control.cli.results import fetch_out
from control.cli.text import Escaper, escape_line
from control.client import ControlClient, ControlError, ControlUnavailableError
from control.plan.session import Reason, SessionState
from control.runner.messages import encode_data
from control.spec import SandboxSpec

# timeout(1) and the shell's 128 + N.
_EXIT_OF_REASON: Final = {
    Reason.TIME_LIMIT: 124,
    Reason.OOM_KILLED: 137,
    Reason.KILLED_OUTSIDE: 137,
    Reason.STOPPED_OUTSIDE: 143,
    Reason.STOPPED_BY_USER: 143,
}
_QUEUE_POLL_S: Final = 1.0
# A restart of the daemon takes seconds, an upgrade a little longer; sessions go on meanwhile.
PATIENCE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What `run` does beside the session itself."""

    in_dir: Path | None
    out_dir: Path | None
    json: bool
    raw: bool
    quiet: bool


def exit_code(session: SessionView) -> int:
    """Return the exit code that stands for the end of a session: the command's own where it ended by itself."""
    if session.state is SessionState.EXITED and session.exit_code is not None:
        return session.exit_code
    return _EXIT_OF_REASON.get(session.reason, EXIT_HOST) if session.reason else EXIT_HOST


class Progress:
    """Tells the states on the way, on stderr: one changing line for people, nothing where nobody looks."""

    def __init__(self, options: RunOptions) -> None:
        self._json = options.json
        self._status: Any = None
        if sys.stderr.isatty() and not options.quiet and not options.json:
            from rich.console import Console

            self._status = Console(stderr=True, highlight=False).status("creating the session")
            self._status.start()

    def update(self, session: SessionView) -> None:
        """Show where the session is."""
        if self._json:
            as_json({"type": "state", "session": session})
        elif self._status is not None:
            self._status.update(f"{session.id}: {_describe(session)}")
            if session.state in (SessionState.RUNNING, *_FINAL):
                self.close()

    def close(self) -> None:
        """Take the line away: output comes now."""
        if self._status is not None:
            self._status.stop()
            self._status = None


_FINAL: Final = (SessionState.EXITED, SessionState.FAILED, SessionState.STOPPED)


def _describe(session: SessionView) -> str:
    if session.queue_position is not None:
        return f"waiting for room, number {session.queue_position} in the queue"
    return {SessionState.CREATED: "created", SessionState.LAUNCHING: "starting"}.get(session.state, session.state.value)


async def run_session(client: ControlClient, spec: SandboxSpec, options: RunOptions) -> int:
    """Run a session to its end and return the exit code of this program."""
    progress = Progress(options)
    try:
        async with _packed(options.in_dir) as archive:
            session = await client.create(spec)
            try:
                if archive is not None:
                    await client.put_input(session.id, archive)
                progress.update(await client.launch(session.id))
                session = await _follow(client, session.id, progress, options)
            except BaseException:
                # Nobody would see its end: our output is closed, or it would wait for its launch for ever.
                with contextlib.suppress(ControlError, ControlUnavailableError):
                    await client.stop(session.id)
                raise
    finally:
        progress.close()
    if options.out_dir is not None:
        await fetch_out(client, session.id, options.out_dir, quiet=options.quiet)
    if options.json:
        as_json({"type": "ended", "session": session})
    elif session.message or session.reason is not Reason.EXIT_CODE:
        # Also where the command ended well: something of its logs or results may be missing.
        detail = f": {escape_line(session.message)}" if session.message else ""
        print(f"opificia: session {session.id} {session.state}, {session.reason}{detail}", file=sys.stderr)
    if exit_code(session) and not (options.json or options.quiet):
        await _hint(client, session.id)
    return exit_code(session)


async def _hint(client: ControlClient, session: str) -> None:
    """Say that requests were refused: what a client shows of it is often only a number."""
    # The session is over and its exit code known; that this cannot be read changes neither.
    with contextlib.suppress(ControlError, ControlUnavailableError):
        refused = [entry async for entry in client.egress(session) if entry.get("event") == "refuse"]
        if refused:
            what = "1 request was" if len(refused) == 1 else f"{len(refused)} requests were"
            print(f"opificia: {what} refused by the gateway; see `opificia egress {session}`", file=sys.stderr)


@contextlib.asynccontextmanager
async def _packed(folder: Path | None) -> AsyncIterator[BinaryIO | None]:
    """The folder as a tar, made before there is a session: one that cannot be read must not leave one behind."""
    if folder is None:
        yield None
        return
    with tempfile.TemporaryFile() as archive:
        try:
            await asyncio.to_thread(pack, folder, archive)
        except ArchiveError as error:
            fail(f"{error}; check --in", EXIT_HOST)
        archive.seek(0)
        yield archive


async def _follow(client: ControlClient, session: str, progress: Progress, options: RunOptions) -> SessionView:
    stops = 0

    def on_interrupt() -> None:
        nonlocal stops
        stops += 1
        if stops > 2:
            raise SystemExit(130)
        # The second time the sandbox gets no grace.
        group.create_task(client.stop(session, None if stops == 1 else 0))

    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as group:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_interrupt)
        try:
            watching = group.create_task(_watch(client, session, progress))
            for stream in ("stdout", "stderr"):
                group.create_task(_copy(client, session, stream, options))
            ended = await watching
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
    return ended


async def _watch(client: ControlClient, session: str, progress: Progress) -> SessionView:
    queueing = asyncio.create_task(_watch_queue(client, session, progress))
    try:
        seen = None
        async for _event in client.follow_events(session, PATIENCE_S):
            try:
                view = await client.get(session)
            except ControlUnavailableError:
                continue
            if (view.state, view.queue_position) != seen:
                seen = (view.state, view.queue_position)
                progress.update(view)
    finally:
        queueing.cancel()
        await asyncio.gather(queueing, return_exceptions=True)
    return await client.get(session, PATIENCE_S)


async def _watch_queue(client: ControlClient, session: str, progress: Progress) -> None:
    """The place in the queue changes with other sessions' events, not with this one's."""
    place = None
    with contextlib.suppress(ControlUnavailableError):
        while (view := await client.get(session)).state is SessionState.CREATED:
            if view.queue_position != place:
                place = view.queue_position
                progress.update(view)
            await asyncio.sleep(_QUEUE_POLL_S)


async def _copy(client: ControlClient, session: str, stream: str, options: RunOptions) -> None:
    own = sys.stdout if stream == "stdout" else sys.stderr
    writer = StreamWriter(own, raw=options.raw)
    async for data in client.follow_log(session, stream, PATIENCE_S):
        if options.json:
            text, encoding = encode_data(data)
            as_json({"type": "output", "stream": stream, "data": text, "encoding": encoding})
        else:
            writer.write(data)
    if not options.json:
        writer.close()


class StreamWriter:
    """Writes a sandbox's output to one of our own: escaped when that is a terminal, byte for byte when it is not."""

    def __init__(self, own: TextIO, *, raw: bool) -> None:
        self._own = own
        self._bytes: BinaryIO = own.buffer
        self._escaper = Escaper() if own.isatty() and not raw else None

    def write(self, data: bytes) -> None:
        """Write the next bytes."""
        if self._escaper is None:
            self._bytes.write(data)
            self._bytes.flush()
        else:
            self._own.write(self._escaper.feed(data))
            self._own.flush()

    def close(self) -> None:
        """Write what was held back for its second half."""
        if self._escaper is not None:
            self._own.write(self._escaper.feed(b"", final=True))
            self._own.flush()
