"""The control daemon, stopped dead at chosen steps: `python halting_control.py FOLDER WRITES CONTROL'S-ARGUMENTS…`.

A session is held at a step by its name: `<life>--<step>--<when>` (`exit--journal-ended--before`). Held, it makes a file of
its name in FOLDER and goes no further; whoever started us kills us when all sessions are where they should be, which is what
a crash between two steps is. WRITES above 0: nobody is held, and this process kills itself before that write of its own
(journal or database).

Steps are `journal-<event>`, `stored-<event>`, `store-<call>`, `engine-<call>`, `link-<call>`; when is `before`, `after`,
and for the journal also `torn`: half of the line is on disk. The product knows nothing of this.
"""

import asyncio
import functools
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

import control.__main__ as control_main
from control.db.rows import StoredEvent
from control.db.store import Store
from control.docker.service import DockerService
from control.link import GatewayLink
from control.sessions import journal, record

_folder = Path(sys.argv[1])
_writes_left = int(sys.argv[2])
_holding = _writes_left == 0
_sessions: dict[str, str] = {}


def _named(session: str, steps: Iterable[str], when: str) -> bool:
    return _holding and any(session.endswith(f"--{step}--{when}") for step in steps)


def _count_write() -> None:
    global _writes_left
    _writes_left -= 1
    if _writes_left == 0:
        os.kill(os.getpid(), signal.SIGKILL)


async def _hold(session: str) -> None:
    (_folder / session).touch()
    await asyncio.Event().wait()


def _tags(events: Sequence[StoredEvent]) -> list[str]:
    return [str(each.event.__struct_config__.tag).replace("_", "-") for each in events]


def _hold_journal() -> None:
    append = journal.append
    # Held threads are many.
    record._SYNC_THREADS = 256  # type: ignore[misc]

    def held(path: Path, events: Sequence[StoredEvent]) -> None:
        session, steps = path.parent.name, [f"journal-{tag}" for tag in _tags(events)]
        if _named(session, steps, "torn"):
            line = b"".join(msgspec.json.encode(event) + b"\n" for event in events)
            with path.open("ab") as file:
                file.write(line[: len(line) // 2])
        for when in ("torn", "before"):
            if _named(session, steps, when):
                (_folder / session).touch()
                threading.Event().wait()
        _count_write()
        append(path, events)
        if _named(session, steps, "after"):
            (_folder / session).touch()
            threading.Event().wait()

    journal.append = held


def _hold_calls(owner: type, prefix: str, names: Sequence[str], *, writes: bool = False) -> None:
    """Hold coroutine methods whose first argument tells the session, or a container of one."""

    def wrap(name: str, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        @functools.wraps(call)
        async def held(self: object, first: Any, *arguments: Any, **named: Any) -> Any:
            session, steps = _session(first), [f"{prefix}-{name.replace('_', '-')}"]
            if name == "append":
                steps = [f"stored-{tag}" for tag in _tags(arguments[0])]
            if _named(session, steps, "before"):
                await _hold(session)
            if writes:
                _count_write()
            result = await call(self, first, *arguments, **named)
            if owner is DockerService and name == "create":
                _sessions[result] = session
            if _named(session, steps, "after"):
                await _hold(session)
            return result

        return held

    for name in names:
        setattr(owner, name, wrap(name, getattr(owner, name)))


def _session(first: Any) -> str:
    """Return the session of a call: its id, a container of it, its row, its grant or its container's plan."""
    if isinstance(first, str):
        return _sessions.get(first, first)
    name = getattr(first, "name", None) or getattr(first, "session", None) or getattr(first, "id", "")
    return str(name).removeprefix("opificia-")


_hold_journal()
_hold_calls(Store, "store", ("insert", "append", "release_address", "mark_cleaned", "put_usage"), writes=True)
_hold_calls(
    DockerService,
    "engine",
    ("create", "create_out_volume", "start", "stop", "archive_out", "remove", "remove_out_volume"),
)
_hold_calls(GatewayLink, "link", ("put", "revoke"))
del sys.argv[1:3]
control_main.main()
