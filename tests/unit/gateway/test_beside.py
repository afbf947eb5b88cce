"""What two gateways of which one replaces the other say to each other: all of it comes, and what cannot be read is no leave."""

import socket
from collections.abc import Iterator

import pytest

from gateway.beside import Channel, Predecessor, Revoked, Spent, Successor
from gateway.contract.ids import token_sha256
from gateway.contract.policy import Grant, Usage
from gateway.core.rules import RegistryList
from gateway.core.verdict import CloseReason
from gateway.registry import Registry

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
    successor.tell(registry)
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
    successor.tell(registry)
    assert successor.has_heard


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
