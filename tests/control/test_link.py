"""Grants are in force when they are said to be, whatever happens to the gateway or the connection."""

import asyncio
import re
import select
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from control.link import FIRST_RETRY_S, GatewayLink, GatewayUnavailableError, GrantRefusedError, UsageBook
from control.plan.grants import latest, policy_digest
from control.spec import SandboxSpec
from gateway.contract.framing import FrameReader, encode
from gateway.contract.limits import GatewayLimits
from gateway.contract.messages import PROTOCOL_VERSION, Ack, FromControl, Snapshot, Welcome
from gateway.contract.policy import EgressBudget, Grant, NetworkLevel, Usage
from gateway.runtime.addresses import UnixAddress, listen
from tests.support.fake_gateway import FakeGateway
from tests.support.paths import CHECKOUT
from tests.support.patience import PATIENCE_S, until


@pytest.fixture
async def gateway() -> AsyncIterator[FakeGateway]:
    with tempfile.TemporaryDirectory(prefix="opificia-") as folder:
        gateway = FakeGateway(Path(folder) / "gateway.sock", Path(folder) / "runner.sock")
        await gateway.start()
        yield gateway
        await gateway.stop()


@pytest.fixture
async def link(gateway: FakeGateway) -> AsyncIterator[GatewayLink]:
    link = GatewayLink(UnixAddress(str(gateway.contract)), UsageBook())
    running = asyncio.create_task(link.run())
    yield link
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def grant(session: str) -> Grant:
    return Grant(session=session, token_sha256="0" * 64, address="10.0.0.16")


async def test_a_grant_is_in_force_when_put_returns(link: GatewayLink, gateway: FakeGateway) -> None:
    await link.put(grant("s1"), PATIENCE_S)
    assert gateway.grants == {"s1": grant("s1")}
    await link.revoke("s1")
    assert gateway.grants == {}


async def test_a_refused_grant_is_told_and_not_held(link: GatewayLink, gateway: FakeGateway) -> None:
    gateway.refuse["s1"] = ("allow: bad", "deny: worse")
    with pytest.raises(GrantRefusedError) as refused:
        await link.put(grant("s1"), PATIENCE_S)
    assert refused.value.problems == ("allow: bad", "deny: worse")
    gateway.cut()
    await until(lambda: gateway.snapshots == 2, "the second snapshot")
    assert gateway.grants == {}


async def test_no_answer_is_unavailable_and_the_grant_is_not_held(link: GatewayLink, gateway: FakeGateway) -> None:
    await until(lambda: link.connected, "the connection")
    gateway.answering.clear()
    with pytest.raises(GatewayUnavailableError):
        await link.put(grant("s1"), 0.1)
    gateway.answering.set()
    gateway.cut()
    await until(lambda: gateway.snapshots == 2, "the second snapshot")
    assert gateway.grants == {}


async def test_a_cut_before_the_acknowledgement_is_no_loss(link: GatewayLink, gateway: FakeGateway) -> None:
    await until(lambda: link.connected, "the connection")
    gateway.answering.clear()
    putting = asyncio.create_task(link.put(grant("s1"), PATIENCE_S))
    revoking = asyncio.create_task(link.revoke("s0"))
    await asyncio.sleep(0)
    gateway.cut()
    gateway.answering.set()
    await asyncio.gather(putting, revoking)
    assert gateway.grants == {"s1": grant("s1")}


async def test_a_new_gateway_gets_the_whole_picture(link: GatewayLink, gateway: FakeGateway) -> None:
    for number in range(20):
        await link.put(grant(f"s{number}"), PATIENCE_S)
    await link.revoke("s3")
    await gateway.stop()
    await until(lambda: not link.connected, "the loss")
    revoking = asyncio.create_task(link.revoke("s4"))
    await asyncio.sleep(0)
    await gateway.start()
    await revoking
    assert set(gateway.grants) == {f"s{number}" for number in range(20)} - {"s3", "s4"}


async def test_grants_held_before_the_first_connection_come_with_the_snapshot(gateway: FakeGateway) -> None:
    link = GatewayLink(UnixAddress(str(gateway.contract)), UsageBook())
    link.hold([grant("old")])
    running = asyncio.create_task(link.run())
    await until(lambda: link.connected, "the connection")
    assert gateway.log == [("snapshot", "old")]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_no_restart_of_the_gateway_refills_a_budget(link: GatewayLink, gateway: FakeGateway) -> None:
    await link.put(grant("s1"), PATIENCE_S)
    for number in range(1, 4):
        await gateway.report("s1", Usage(egress_bytes_up=10))
        await until(lambda: link.usage.total("s1").egress_bytes_up >= 10 * number, "the report")  # noqa: B023 - at once
        await gateway.stop()
        await gateway.start()
        await until(lambda: "s1" in gateway.grants, "the snapshot")
        assert gateway.grants["s1"].used.egress_bytes_up == 10 * number


async def test_a_connection_that_comes_back_to_the_same_gateway_counts_nothing_twice(
    link: GatewayLink, gateway: FakeGateway
) -> None:
    await link.put(grant("s1"), PATIENCE_S)
    await gateway.report("s1", Usage(egress_bytes_up=10))
    await until(lambda: link.usage.total("s1").egress_bytes_up == 10, "the report")
    gateway.cut()
    await until(lambda: gateway.snapshots == 2, "the second snapshot")
    assert gateway.grants["s1"].used == Usage()
    await gateway.report("s1", Usage(egress_bytes_up=10))
    assert link.usage.total("s1").egress_bytes_up == 10


def test_a_late_report_takes_nothing_back() -> None:
    assert latest(Usage(5, 1), Usage(3, 2)) == Usage(5, 2)
    assert latest(None, Usage(3)) == Usage(3)


def test_the_book_keeps_what_the_store_has_not_taken() -> None:
    book = UsageBook()
    book.report("s1", "e1", Usage(1))
    assert book.take_unstored() == [("s1", "e1", Usage(1))]
    assert book.take_unstored() == []
    book.not_stored("s1", "e1")
    assert book.take_unstored() == [("s1", "e1", Usage(1))]
    book.report("s1", "e1", Usage(1))
    assert book.take_unstored() == []


def test_the_digest_tells_policies_apart_and_not_their_spelling() -> None:
    one = SandboxSpec(image="a", allow=("x", "y"), network=NetworkLevel.OPEN)
    assert policy_digest(one) == policy_digest(SandboxSpec(image="b", allow=("y", "x"), network=NetworkLevel.OPEN))
    assert policy_digest(one) != policy_digest(SandboxSpec(image="a", allow=("x",), network=NetworkLevel.OPEN))


def test_the_digest_of_a_policy_is_the_same_in_every_release() -> None:
    # A container outlives an upgrade of control, and is stopped when the digest on its label is not its session's.
    policy = SandboxSpec(image="a", allow=("x",), network=NetworkLevel.OPEN, egress_budget=EgressBudget(5, 6))
    assert policy_digest(policy) == "a7525b9b30e099ab"


async def test_after_a_crash_of_the_gateway_the_grants_are_the_first_thing_that_the_next_one_gets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all waits between a crash and the grants only two are timers of ours: together they are below a second."""
    path = tmp_path / "gateway.sock"
    # As systemd does: the socket outlives the process.
    with listen(UnixAddress(str(path))) as listening:
        link = GatewayLink(UnixAddress(str(path)), UsageBook())
        link.hold([grant("s1")])
        naps: list[float] = []
        sleep = asyncio.sleep

        async def noted(seconds: float) -> None:
            if asyncio.current_task() is running:
                naps.append(seconds)
            await sleep(seconds)

        monkeypatch.setattr(asyncio, "sleep", noted)
        running = asyncio.create_task(link.run())
        for crashes in range(3):
            # It is there before a gateway is, and none has to wait for it.
            await until(lambda: bool(select.select([listening], [], [], 0)[0]), "control at the socket")
            async with asyncio.timeout(PATIENCE_S):
                sock, _ = await asyncio.get_running_loop().sock_accept(listening)
                reader, writer = await asyncio.open_unix_connection(sock=sock)
                writer.write(encode(Welcome(PROTOCOL_VERSION, f"epoch{crashes}")))
                brought = await FrameReader[FromControl](reader, FromControl).read()
                assert isinstance(brought, Snapshot)
                assert [each.session for each in brought.grants] == ["s1"]
                writer.write(encode(Ack(brought.serial)))
                await until(lambda: link.connected, "the acknowledgement")
                writer.close()
                await until(lambda: not link.connected, "the end of the connection")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    unit = (CHECKOUT / "systemd/opificia-gateway.service").read_text()
    restart_s = int(re.findall(r"^RestartSec=(\d+)ms$", unit, re.MULTILINE)[0]) / 1000
    assert len(naps) in (2, 3)
    assert max(naps) <= FIRST_RETRY_S
    assert FIRST_RETRY_S + restart_s < 1 < GatewayLimits().resync_wait_ms / 1000
