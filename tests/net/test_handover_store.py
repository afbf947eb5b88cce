"""What a gateway leaves with its manager and finds there: crashes, records of other versions, managers that keep nothing."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gateway.beside import START_S
from gateway.contract.messages import UsageReport
from gateway.contract.policy import EgressBudget
from gateway.core.parked import MAX_BYTES, VERSION, decode_parked
from gateway.runtime import fdstore
from tests.net.test_contract import Control, contracted, grant
from tests.net.test_handover import GOOD, restarted, was_read
from tests.net.test_tunnel import opened
from tests.support.gateway_process import TOKEN, GatewayProcess, gateway_process
from tests.support.manager import Manager
from tests.support.patience import until
from tests.support.sockets import Client, Server, echo_server


@asynccontextmanager
async def stopped() -> AsyncIterator[tuple[GatewayProcess, Manager, Server, Client]]:
    """A gateway that was stopped with a tunnel open: everything is with the manager."""
    with gateway_process(stored=8) as gateway:
        assert gateway.manager is not None
        async with echo_server() as server, await opened(gateway, f"127.0.0.1:{server.port}") as client:
            await client.send(b"x")
            assert await client.read_exactly(1) == b"x"
            await asyncio.to_thread(gateway.manager.stop)
            yield gateway, gateway.manager, server, client


def taken_out(manager: Manager) -> tuple[bytes, list[int]]:
    """Take what was parked out of the store: the record and the descriptors."""
    ((name, descriptor),) = manager.stored
    assert name == "parked"
    manager.stored.clear()
    return fdstore.receive(descriptor, MAX_BYTES)


def put_back(manager: Manager, record: bytes, descriptors: list[int]) -> None:
    """Store another record in its place."""
    parcel = fdstore.Parcel(record, descriptors)
    manager.stored.append(("parked", os.dup(parcel.far.fileno())))
    parcel.close()
    for descriptor in descriptors:
        os.close(descriptor)


async def test_one_entry_with_a_short_name_holds_everything_and_no_token() -> None:
    async with stopped() as (_, manager, _, _):
        data, descriptors = taken_out(manager)
        record = decode_parked(data, len(descriptors))
        assert len(record.tunnels) == 1
        assert TOKEN.encode() not in data
        assert record.sessions[0].grant.token_sha256.encode() in data
        for descriptor in descriptors:
            os.close(descriptor)


async def test_what_was_taken_out_and_put_back_is_taken_up() -> None:
    async with stopped() as (_, manager, _, client):
        put_back(manager, *taken_out(manager))
        await asyncio.to_thread(manager.start)
        await client.send(b"y")
        assert await client.read_exactly(1) == b"y"
        # The store holds nothing of it any more: no other process could take it up again.
        assert manager.names == ["alive"]


@pytest.mark.parametrize("spoil", ["version", "byte", "cut", "descriptors", "kind", "garbage"])
async def test_a_record_that_cannot_be_taken_up_is_refused_and_the_gateway_serves(spoil: str) -> None:
    async with stopped() as (gateway, manager, server, client):
        data, descriptors = taken_out(manager)
        if spoil == "version":
            data = data[:16] + (VERSION + 1).to_bytes(4, "big") + data[20:]
        elif spoil == "byte":
            data = data[:-1] + bytes([data[-1] ^ 1])
        elif spoil == "cut":
            data = data[:-1]
        elif spoil == "descriptors":
            descriptors.append(os.dup(descriptors[0]))
        elif spoil == "kind":
            os.close(descriptors.pop())
            descriptors.append(os.memfd_create("no socket"))
        else:
            data = b"not a record"
        put_back(manager, data, descriptors)
        await asyncio.to_thread(manager.start)
        assert await client.read_to_end() == b""
        (line,) = [line for line in manager.log().splitlines() if line.startswith("ERROR")]
        assert "cannot be taken up" in line
        assert (f"it is of version {VERSION + 1}" in line) == (spoil == "version")
        async with await opened(gateway, f"127.0.0.1:{server.port}") as other:
            await other.send(b"z")
            assert await other.read_exactly(1) == b"z"


async def test_a_store_that_holds_something_else_is_no_parcel() -> None:
    async with stopped() as (gateway, manager, server, client):
        _, descriptors = taken_out(manager)
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        near.send(b"hello")
        manager.stored += [("parked", far.detach()), ("unknown", os.dup(near.fileno()))]
        # A process that ends over it would find it again at each start.
        manager.stored.append(("parked", os.memfd_create("no socket")))
        near.close()
        for descriptor in descriptors:
            os.close(descriptor)
        await asyncio.to_thread(manager.start)
        assert await client.read_to_end() == b""
        assert manager.log().count("cannot be taken up") == 2
        assert "passed as 'unknown' are not known" in manager.log()
        async with await opened(gateway, f"127.0.0.1:{server.port}"):
            pass


async def test_a_crash_loses_the_tunnels_and_says_so_and_a_stop_does_not() -> None:
    with gateway_process(stored=8) as gateway:
        manager = gateway.manager
        assert manager is not None
        async with echo_server() as server:
            await asyncio.to_thread(gateway.restart)
            assert "ended without handing over" not in manager.log()
            client = await opened(gateway, f"127.0.0.1:{server.port}")
            assert manager.names == ["alive"]
            manager.kill()
            await asyncio.to_thread(manager.start)
            assert await client.read_to_end() == b""
            assert manager.log().count("ended without handing over") == 1
            await client.close()
            async with await opened(gateway, f"127.0.0.1:{server.port}"):
                pass


async def test_after_a_crash_the_grants_are_back_with_control(tmp_path: Path) -> None:
    async with contracted(tmp_path, stored=8) as (gateway, path), echo_server() as server:
        manager = gateway.manager
        assert manager is not None
        first = await Control.connect(path)
        before = await first.welcome()
        await first.snapshot(grant("s1"))
        manager.kill()
        await asyncio.to_thread(manager.start)
        async with await gateway.client() as client:
            asked = asyncio.create_task(client.tunnel(f"127.0.0.1:{server.port}", ("s1", TOKEN)))
            second = await Control.connect(path)
            # Its counts begin anew, so its epoch does.
            assert (await second.welcome()).epoch != before.epoch
            await second.snapshot(grant("s1"))
            assert (await asked).status == 200
        await first.close()
        await second.close()


@pytest.mark.parametrize("offered", [False, True])
async def test_a_manager_that_keeps_nothing_gets_a_stop_that_drains(offered: bool) -> None:
    with gateway_process({"limits": {"drain_ms": 300}}, stored=8 if offered else 0) as gateway:
        manager = gateway.manager
        assert manager is not None
        # Offered, and then not kept: what FileDescriptorStoreMax=0 in a drop-in does.
        manager.maximum = 0
        async with echo_server() as server:
            client = await opened(gateway, f"127.0.0.1:{server.port}")
            stopping = asyncio.create_task(asyncio.to_thread(manager.stop))
            # Until its deadline it goes on.
            await client.send(b"x")
            assert await client.read_exactly(1) == b"x"
            assert await client.read_to_end() == b""
            assert await stopping == 0
            assert (await gateway.await_audit("s1", event="close"))["reason"] == "shutdown"
            assert ("keeps no descriptors" in manager.log()) == offered
            assert manager.names == []
            await client.close()


async def test_tunnels_that_nobody_takes_up_have_their_last_line_at_the_next_start() -> None:
    async with stopped() as (gateway, manager, _, client):
        # As after `systemctl stop`: the manager drops what it held.
        manager.forget()
        assert await client.read_to_end() == b""
        assert [line["event"] for line in gateway.audit("s1")] == ["allow"]
        await asyncio.to_thread(manager.start)
        line = await gateway.await_audit("s1", event="close")
        assert (line["reason"], line["bytes_up"], line["bytes_down"]) == ("shutdown", 1, 1)
        await asyncio.to_thread(gateway.restart)
        assert [line["event"] for line in gateway.audit("s1")] == ["allow", "close"]


@pytest.mark.parametrize("stored", [0, 8])
async def test_what_was_used_last_is_reported_at_a_stop(tmp_path: Path, stored: int) -> None:
    async with (
        contracted(tmp_path, stored=stored, limits={"drain_ms": 100}) as (gateway, path),
        echo_server() as server,
    ):
        assert gateway.manager is not None
        control = await Control.connect(path)
        await control.welcome()
        await control.snapshot(grant("s1"))
        async with await opened(gateway, f"127.0.0.1:{server.port}") as client:
            for number in range(1, 4):
                await client.send(b"x" * 1000)
                assert await client.read_exactly(1000) == b"x" * 1000
                # A report of each second is not waited for.
                if number == 2:
                    await control.reported("s1", lambda each: each.usage.egress_bytes_up >= 1000)
            await asyncio.to_thread(gateway.manager.stop)
            report = await control.reported("s1", lambda each: each.usage.egress_bytes_up == 3000)
            assert report.usage.egress_bytes_down == 3000
        await control.close()


@pytest.mark.parametrize("reads", [True, False])
async def test_a_gateway_that_ends_waits_for_control_to_take_its_last_reports_if_control_takes_anything(
    tmp_path: Path, reads: bool
) -> None:
    async with contracted(tmp_path, stored=8) as (gateway, path):
        manager = gateway.manager
        assert manager is not None
        there = await Control.connect(path)
        await there.welcome()
        # More reports than a socket holds.
        await there.snapshot(*(grant(f"s{number}") for number in range(5000)))
        if not reads:
            there.writer.transport.pause_reading()  # type: ignore[attr-defined]
        end = asyncio.create_task(asyncio.to_thread(manager.stop))
        while reads and (message := await there.read()) is not None:
            assert isinstance(message, UsageReport)
            there.usage[message.session] = message
        assert await end == 0
        assert len(there.usage) == 5000 or not reads
        assert "Traceback" not in gateway.log()
        await asyncio.to_thread(manager.start)
        await there.close()


async def test_a_stop_and_a_reload_ask_the_manager_for_the_time_that_they_may_take() -> None:
    with gateway_process({"limits": {"drain_ms": 90_000}}, stored=8) as gateway:
        manager = gateway.manager
        assert manager is not None

        def asked_after(what: str) -> int:
            last = max(number for number, message in enumerate(manager.messages) if message.startswith(what))
            said = "\n".join(manager.messages[last:]).splitlines()
            return next(int(line.split("=")[1]) for line in said if line.startswith("EXTEND_TIMEOUT_USEC="))

        await asyncio.to_thread(manager.reload)
        # Longer than the next process may take to say that it is ready.
        assert asked_after("RELOADING=1") > START_S * 1e6
        await asyncio.to_thread(manager.stop)
        assert asked_after("STOPPING=1") > 90e6


async def test_a_wait_for_a_slot_has_all_of_its_time_after_one_for_the_sessions_in_an_earlier_process(
    tmp_path: Path,
) -> None:
    limits = {"resync_wait_ms": 50_000, "egress_slot_wait_ms": 500_000}
    async with contracted(tmp_path, stored=8, limits=limits) as (gateway, path), echo_server() as server:
        manager, target = gateway.manager, f"127.0.0.1:{server.port}"
        assert manager is not None
        clients = [await gateway.client() for _ in range(4)]
        waiting = []
        for client in clients:
            # Nobody has said yet which sessions there are.
            waiting.append(asyncio.create_task(client.tunnel(target, GOOD)))
            await asyncio.sleep(0)
            await until(lambda client=client: was_read(client))  # type: ignore[misc]
        await restarted(gateway)
        first = await Control.connect(path)
        await first.welcome()
        await first.snapshot(grant("s1", egress_budget=EgressBudget(connections=1)))
        # First come, first served.
        assert (await waiting[0]).status == 200
        assert not any(task.done() for task in waiting[1:])
        await asyncio.to_thread(manager.stop)
        data, descriptors = taken_out(manager)
        record = decode_parked(data, len(descriptors))
        left = [each.left_s for each in record.asking if each.admitted and each.left_s is not None]
        assert len(left) == 3
        assert min(left) > 50
        put_back(manager, data, descriptors)
        await asyncio.to_thread(manager.start)
        # And what it has is its own limit's again: the next stop finds less of it.
        await asyncio.to_thread(manager.stop)
        data, descriptors = taken_out(manager)
        again = [each.left_s or 0 for each in decode_parked(data, len(descriptors)).asking]
        assert 50 < min(again) <= max(again) < max(left)
        put_back(manager, data, descriptors)
        await asyncio.to_thread(manager.start)
        for client, task in zip(clients, waiting, strict=True):
            assert (await task).status == 200
            await client.close()
        await first.close()
