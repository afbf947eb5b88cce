"""What a start would do is said without doing it."""

from control.plan.reconcile import Adopt, CleanUp, Fail, Refuse, Relaunch, RemoveStray, Requeue
from control.plan.session import SessionState
from control.sessions.preview import describe, preview
from tests.control.conftest import Host


async def test_nothing_changes_by_looking_and_the_start_then_does_it(host: Host) -> None:
    session = await host.launch("sleep", "1000")
    await host.state(session, SessionState.RUNNING)
    journal = host.root / "sessions" / session / "events.jsonl"
    store, folder = host.manager.store, host.root / "sessions"
    found = await preview(store, host.engine, folder)
    assert [type(each) for each in found] == [Adopt]
    # A torn line stays as it is: the daemon that writes it may be in the middle.
    with journal.open("ab") as file:
        file.write(b'{"torn')
    calls = list(host.engine.calls)
    before = (await store.get(session), journal.read_bytes())
    assert await preview(store, host.engine, folder) == found
    assert (await store.get(session), journal.read_bytes()) == before
    assert [call for call in host.engine.calls[len(calls) :] if call in ("stop", "kill", "remove", "create")] == []


def test_every_action_is_one_sentence() -> None:
    actions = (
        Requeue("s"),
        Relaunch("s", "c" * 64),
        Adopt("s", "c" * 64),
        Refuse("s", "c" * 64),
        Fail("s", vanished=True),
        Fail("s", vanished=False),
        CleanUp("s"),
        RemoveStray("c" * 64, "s", ran=True),
    )
    said = [describe(each) for each in actions]
    assert len(set(said)) == len(actions)
    assert all("session s" in each and "c" * 13 not in each for each in said)
