"""What two gateways of which one replaces the other say to each other: all of it comes, and what cannot be read is no leave."""

import asyncio
import socket
from collections.abc import Iterator

import pytest

from gateway.beside import Predecessor, Successor
from gateway.channel import Channel, Cut, End, Revoked, Spent
from gateway.contract.ids import token_sha256
from gateway.contract.policy import Grant, Usage
from gateway.core.parked import Parked
from gateway.core.rules import RegistryList
from gateway.core.verdict import CloseReason
from gateway.registry import Registry, Session
from tests.support.patience import until

# More than the socket between them holds.
MANY = 1000


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    near, far = (Channel(end) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    yield near, far
    near.close()
    far.close()


def registry_of(count: int) -> Registry:
    registry = Registry(RegistryList(), require_address=False, ready=True)
    assert registry.replace_all(Grant(session=f"s{n}", token_sha256=token_sha256("t")) for n in range(count)) == ()
    return registry


async def test_a_process_before_hears_of_a_thousand_sessions_that_are_over_at_once(
    ends: tuple[Channel, Channel],
) -> None:
    near, far = ends
    registry = registry_of(MANY)
    registry.on_cut = Predecessor(near).cut
    registry.replace_all([])
    heard = [await far.read() for _ in range(MANY)]
    assert {each.session for each in heard if isinstance(each, Revoked)} == {f"s{n}" for n in range(MANY)}


async def test_a_next_process_hears_what_a_thousand_sessions_have_used(ends: tuple[Channel, Channel]) -> None:
    near, far = ends
    registry, successor = registry_of(MANY), Successor(near, pid=0)
    successor.begin(registry)
    for session in registry:
        session.bytes_up = 7
    successor.tell()
    assert not successor.has_heard
    heard = [await far.read() for _ in range(MANY)]
    assert {each.session for each in heard if isinstance(each, Spent)} == {f"s{n}" for n in range(MANY)}
    assert {each.usage for each in heard if isinstance(each, Spent)} == {Usage(egress_bytes_up=7)}
    assert successor.has_heard


async def test_a_process_that_has_ended_keeps_nobody_waiting(ends: tuple[Channel, Channel]) -> None:
    near, far = ends
    far.close()
    successor = Successor(near, pid=0)
    registry = registry_of(1)
    successor.begin(registry)
    next(iter(registry)).bytes_up = 7
    successor.tell()
    assert successor.has_heard


async def test_the_last_words_of_a_process_that_ended_before_it_heard_all_are_heard(
    ends: tuple[Channel, Channel],
) -> None:
    near, far = ends
    words = [Spent("s0", Usage(egress_bytes_up=number), 0) for number in (1, 2)]
    for word in words:
        near.post(word)
    far.post(End())
    near.close()
    assert [await far.read() for _ in range(3)] == [*words, None]


@pytest.mark.parametrize("said", [b"\x81", b"\x81\xa4type\xa6of old"])
async def test_what_cannot_be_understood_cuts_what_an_old_process_kept(
    ends: tuple[Channel, Channel], said: bytes
) -> None:
    near, far = ends
    registry = registry_of(2)
    cut: list[CloseReason] = []
    for session in registry:
        session.add_closer(cut.append)
    far.sock.send(said)
    await Successor(near, pid=0).follow(registry)
    assert cut == [CloseReason.REVOKED, CloseReason.REVOKED]


async def test_what_was_used_until_the_cut_is_counted_for_a_session_that_is_known_no_more(
    ends: tuple[Channel, Channel],
) -> None:
    near, far = ends
    registry, predecessor = registry_of(1), Predecessor(near)
    registry.on_cut, registry.has_cut = predecessor.cut, predecessor.has_cut
    session = registry.revoke("s0")
    assert session is not None
    assert await far.read() == Revoked("s0")
    cutting = asyncio.ensure_future(registry.has_cut(session))
    following = asyncio.ensure_future(predecessor.follow(registry))
    far.post(Spent("s0", Usage(egress_bytes_up=7)))
    far.post(Cut("s0"))
    await cutting
    assert session.usage() == Usage(egress_bytes_up=7)
    far.close()
    await following
    # One that has ended has nothing to tell, and nobody waits for it.
    predecessor.cut(session)
    await predecessor.has_cut(session)


async def test_a_process_before_that_ends_instead_of_answering_keeps_nobody_waiting(
    ends: tuple[Channel, Channel],
) -> None:
    near, far = ends
    registry, predecessor = registry_of(1), Predecessor(near)
    (session,) = registry
    predecessor.cut(session)
    cutting = asyncio.ensure_future(predecessor.has_cut(session))
    following = asyncio.ensure_future(predecessor.follow(registry))
    await asyncio.sleep(0)
    far.close()
    await asyncio.gather(cutting, following)


async def test_each_process_takes_from_the_budget_and_the_slots_what_the_other_uses_and_counts_it_once(
    ends: tuple[Channel, Channel],
) -> None:
    before, after = registry_of(2), registry_of(2)
    old, new = before.get("s0"), after.get("s0")
    assert old is not None
    assert new is not None
    successor, predecessor = Successor(ends[0], pid=0), Predecessor(ends[1])
    old.slots.hold()
    successor.begin([old])
    predecessor.begin(after, Parked(epoch="e", sessions=tuple(each.parked(0) for each in before)))
    assert new.slots.elsewhere == 1
    left = new.bytes_left
    following = [asyncio.ensure_future(successor.follow(before)), asyncio.ensure_future(predecessor.follow(after))]

    def uses(session: Session, size: int) -> None:
        session.bytes_up += size
        session.bytes_left -= size

    for number in range(1, 4):
        uses(old, 7)
        successor.tell()
        uses(new, 100)
        new.slots.hold()
        await until(lambda n=number: (old.bytes_left, new.bytes_left) == (left - 107 * n,) * 2)  # type: ignore[misc]
        assert (old.slots.elsewhere, new.slots.elsewhere) == (number, 1)
    assert (old.usage(), new.usage()) == (Usage(egress_bytes_up=21), Usage(egress_bytes_up=321))
    following[0].cancel()
    await asyncio.gather(following[0], return_exceptions=True)
    successor.close()
    await following[1]
    assert new.slots.elsewhere == 0


async def test_a_process_before_tells_what_a_session_used_before_it_says_that_it_has_cut_it(
    ends: tuple[Channel, Channel],
) -> None:
    near, far = ends
    registry, successor = registry_of(2), Successor(near, pid=0)
    successor.begin(registry)
    session = registry.get("s1")
    assert session is not None

    def close(_: CloseReason) -> None:
        session.bytes_down = 9

    session.add_closer(close)
    following = asyncio.ensure_future(successor.follow(registry))
    far.post(Revoked("s1"))
    assert await far.read() == Spent("s1", Usage(egress_bytes_down=9))
    assert await far.read() == Cut("s1")
    # Also of one that it does not know, or has come to know since: somebody waits for the answer.
    assert registry.put(Grant(session="new", token_sha256=token_sha256("t"))) == ()
    for name in ("unknown", "new"):
        far.post(Revoked(name))
        assert await far.read() == Cut(name)
    assert not successor.wants_end
    far.post(End())
    far.close()
    await following
    assert successor.wants_end
