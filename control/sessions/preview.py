"""What a start of the daemon would do about sessions and containers, found out without doing any of it."""

import asyncio
from pathlib import Path
from typing import assert_never

from control.db.store import Store
from control.plan.grants import policy_digest
from control.plan.reconcile import Action, Adopt, CleanUp, Fail, Refuse, Relaunch, RemoveStray, Requeue, reconcile
from control.sessions import journal
from control.sessions.engine import Engine
from control.sessions.record import replay
from control.sessions.strays import sandboxes


async def preview(store: Store, engine: Engine, sessions_folder: Path) -> list[Action]:
    """Return the actions of `reconcile` on what database, journals and engine hold now; nothing is written.

    While a daemon runs, what lives is what it would take up again. Raises StoreUnavailableError, EngineError.
    """
    lives, policies = {}, {}
    for stored in await store.unfinished():
        policies[stored.id] = policy_digest(stored.spec)
        path = sessions_folder / stored.id / "events.jsonl"
        events = await asyncio.to_thread(journal.read, path, stored.last_event, repair=False)
        lives[stored.id], _ = replay(stored.life, stored.last_event, events)
    return reconcile(lives, policies, await sandboxes(engine))


def describe(action: Action) -> str:
    """Return an action as one sentence."""
    match action:
        case Requeue(session):
            return f"session {session} would wait for room again"
        case Relaunch(session, _container):
            return f"session {session} would be launched anew: its launch was cut before its container was started"
        case Adopt(session, container):
            return f"session {session} would be taken up with its container {container[:12]}"
        case Refuse(session, container):
            return (
                f"session {session} would be ended, its logs and results kept: its container {container[:12]} was made under "
                "another policy"
            )
        case Fail(session, vanished):
            why = "its container is gone" if vanished else "its launch was cut off"
            return f"session {session} would be marked failed: {why}"
        case CleanUp(session):
            return f"session {session} has ended; what it left would be cleaned up"
        case RemoveStray(container, session, _ran):
            return (
                f"container {container[:12]} of session {session} belongs to nobody and would be removed, its logs kept"
            )
        case _:
            assert_never(action)
