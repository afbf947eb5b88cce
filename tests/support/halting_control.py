"""The control daemon, stopped dead at chosen steps: `python halting_control.py FOLDER HOW CONTROL'S-ARGUMENTS…`.

HOW is one of

- `hold`: a session is held at a step by its name, `<life>--<step>--<when>` (`exit--journal-ended--before`). Held, it makes a
  file of its name in FOLDER and goes no further; whoever started us kills us when all sessions are where they should be,
  which is what a crash between two steps is;
- `<step>--<when>`: this process kills itself at that step, whichever session it is taken for;
- a number: it kills itself before that write of its own (journal or database);
- `go`: nothing is stopped.

Steps are `journal-<event>`, `stored-<event>`, `store-<call>`, `engine-<call>`, `link-<call>`; when is `before`, `after`,
and for the journal also `torn`: half of the line is on disk. The product knows nothing of this.

Limits that end a session are a second for the lives that are about them, and for no other.
"""

import asyncio
import dataclasses
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
from control.sessions import journal, record, retention, usage
from control.sessions.launch import Services
from control.sessions.life import Life

_SOON = {"silent": {"hello_timeout_ms": 1_000}, "lost": {"runner_reconnect_ms": 1_000}}
# Longer than ended sessions are kept.
_LATER_MS = 366 * 24 * 3_600_000

_folder, _how = Path(sys.argv[1]), sys.argv[2]
_writes_left = int(_how) if _how.isdigit() else 0
_sessions: dict[str, str] = {}


def _is_stop(session: str, steps: Iterable[str], when: str) -> bool:
    places = [f"{step}--{when}" for step in steps]
    return _how in places or (_how == "hold" and any(session.endswith(f"--{place}") for place in places))


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _count_write() -> None:
    global _writes_left
    _writes_left -= 1
    if _writes_left == 0:
        _die()


def _tell(session: str) -> None:
    """Tell that a session is held; or die."""
    if _how != "hold":
        _die()
    (_folder / session).touch()


def _tags(events: Sequence[StoredEvent]) -> list[str]:
    return [str(each.event.__struct_config__.tag).replace("_", "-") for each in events]


def _hold_journal() -> None:
    append = journal.append
    # Held threads are many.
    record._SYNC_THREADS = 256  # type: ignore[misc]

    def held(path: Path, events: Sequence[StoredEvent]) -> None:
        session, steps = path.parent.name, [f"journal-{tag}" for tag in _tags(events)]
        if _is_stop(session, steps, "torn"):
            line = b"".join(msgspec.json.encode(event) + b"\n" for event in events)
            with path.open("ab") as file:
                file.write(line[: len(line) // 2])
        for when in ("torn", "before"):
            if _is_stop(session, steps, when):
                _tell(session)
                threading.Event().wait()
        _count_write()
        append(path, events)
        if _is_stop(session, steps, "after"):
            _tell(session)
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
            if _is_stop(session, steps, "before"):
                _tell(session)
                await asyncio.Event().wait()
            if writes:
                _count_write()
            result = await call(self, first, *arguments, **named)
            if owner is DockerService and name == "create":
                _sessions[result] = session
            if _is_stop(session, steps, "after"):
                _tell(session)
                await asyncio.Event().wait()
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


def _end_soon() -> None:
    make = Life.__init__

    @functools.wraps(make)
    def made(self: Life, of: record.Record, services: Services, *arguments: Any, **named: Any) -> None:
        soon = _SOON.get(of.id.removeprefix("again--").split("--")[0], {})
        limits = msgspec.structs.replace(services.limits, **soon)
        make(self, of, dataclasses.replace(services, limits=limits), *arguments, **named)

    Life.__init__ = made  # type: ignore[method-assign, assignment]


def _sweep_only_to_die() -> None:
    """Keep what has ended for the daemon that is to die of it; it finds all of it older than it may become."""
    if _how.startswith("store-forget--"):
        retention.now_ms = lambda: record.now_ms() + _LATER_MS  # type: ignore[attr-defined]
    elif not _how.startswith("store-put-sizes--"):

        async def never(_: retention.Retention) -> None:
            await asyncio.Event().wait()

        retention.Retention.sweep = never  # type: ignore[method-assign, assignment]


_hold_journal()
_end_soon()
usage.USAGE_S = 0.1  # type: ignore[misc]
_sweep_only_to_die()
_STORE = ("insert", "append", "release_address", "mark_cleaned", "put_usage", "put_sizes", "forget")
_hold_calls(Store, "store", _STORE, writes=True)
_ENGINE = (
    "create", "declare_out_volume", "create_out_volume", "start", "stop", "archive_out", "remove", "remove_made_for",
    "remove_out_volume",
)  # fmt: skip
_hold_calls(DockerService, "engine", _ENGINE)
_hold_calls(GatewayLink, "link", ("put", "revoke"))
del sys.argv[1:3]
control_main.main()
