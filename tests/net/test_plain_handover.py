"""HTTP connections between two requests go on in the next process, in their session's name, whatever way they came."""

import asyncio
import shutil
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from gateway.core.parked import VERSION
from gateway.net.linger import LINGER_S
from tests.model.wire import Client as ModelClient
from tests.model.wire import Peer, scripted
from tests.net.test_contract import contracted
from tests.net.test_handover import restarted, was_read
from tests.net.test_model import message
from tests.net.test_plain import GOOD, HTTP_ADDRESS, ask, tunnel
from tests.net.test_plain_limits import ends
from tests.net.test_reload import reloaded
from tests.support.code import readable_code
from tests.support.gateway_process import TOKEN, GatewayProcess, gateway_process
from tests.support.origin import Exchange, Origin, origin, say_hello
from tests.support.patience import until
from tests.support.processes import ConditionTimeoutError
from tests.support.sockets import Client, proxy_v2

# As behind the forwarder, so that both processes know whose address a connection has.
PROXIED: dict[str, Any] = {"listen": {"proxy_protocol": True}, "limits": {"unauthenticated_per_source": 4}}
ADDRESS = "10.231.0.16"
GET = f"GET / HTTP/1.1\r\nHost: {HTTP_ADDRESS}\r\n\r\n".encode()


async def fails_to_reload(gateway: GatewayProcess) -> None:
    """Reload into a release that cannot take up the record: it says so when all has been paused."""
    manager = gateway.manager
    assert manager is not None
    newer = gateway.base / f"newer-{len(list(gateway.base.iterdir()))}"
    shutil.copytree(readable_code() / "gateway", newer / "gateway", ignore=shutil.ignore_patterns("__pycache__"))
    module = newer / "gateway/core/parked.py"
    module.write_text(module.read_text().replace(f"VERSION: Final = {VERSION}", f"VERSION: Final = {VERSION + 1}"))
    gateway.base.joinpath("current").unlink()
    gateway.base.joinpath("current").symlink_to(newer)
    with pytest.raises(ConditionTimeoutError, match="not replaced"):
        await reloaded(gateway)
    assert "this gateway goes on" in gateway.log()
    gateway.base.joinpath("current").unlink()
    gateway.base.joinpath("current").symlink_to(readable_code())


async def begun_by_link(gateway: GatewayProcess) -> None:
    """Start it anew by a link, under which another release can be put."""
    assert gateway.manager is not None
    gateway.base.joinpath("current").symlink_to(readable_code())
    gateway.manager.environment["PYTHONPATH"] = str(gateway.base / "current")
    await restarted(gateway)


async def served_once(client: Client, server: Origin) -> Client:
    """Return a client that has had an answer: it is known who it is."""
    assert (await client.ask(ask(server))).status == 200
    return client


async def test_idle_connections_count_to_their_session_through_a_reload_that_fails_a_reload_and_a_restart() -> None:
    with gateway_process(PROXIED, [{"id": "s1", "address": ADDRESS}], stored=8) as gateway:
        async with origin() as server, AsyncExitStack() as stack:

            async def connected() -> Client:
                return await stack.enter_async_context(await gateway.client(proxy=proxy_v2(ADDRESS)))

            await begun_by_link(gateway)
            # More than a source may have that have not said who they are; and almost as many of those as it may have.
            served = [await served_once(await connected(), server) for _ in range(15)]
            idle, half = served[:12], served[12:]
            unknown = [await connected() for _ in range(3)]
            for client in half:
                await client.send(ask(server)[:30])
            for client in unknown:
                await client.send(ask(server)[:4])
            for hand_over in (fails_to_reload, reloaded, restarted):
                await hand_over(gateway)
                newcomer = await connected()
                await newcomer.send(ask(server)[:30])
                assert (await newcomer.ask(ask(server)[30:])).status == 200
                assert (await half.pop().ask(ask(server)[30:])).status == 200
                for client in idle:
                    assert (await client.ask(ask(server))).status == 200
            for client in unknown:
                assert (await client.ask(ask(server)[4:])).status == 200


async def test_idle_connections_to_the_model_proxy_count_to_their_session_too() -> None:
    async def answer(peer: Peer) -> None:
        while True:
            await peer.request()
            await peer.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")

    async with scripted(answer) as upstream, AsyncExitStack() as stack:
        config = {**PROXIED, "model": {"upstream": upstream.url}}
        with gateway_process(config, [{"id": "s1", "address": ADDRESS}], stored=8) as gateway:
            await begun_by_link(gateway)
            clients: list[ModelClient] = []
            while len(clients) < 8:
                raw = await stack.enter_async_context(await gateway.client(proxy=proxy_v2(ADDRESS)))
                clients.append(ModelClient(raw.reader, raw.writer))
                await clients[-1].send(message())
                assert (await clients[-1].reply()).status == 200
            for hand_over in (fails_to_reload, reloaded, restarted):
                await hand_over(gateway)
                for client in clients:
                    await client.send(message())
                    assert (await client.reply()).status == 200


async def test_idle_connections_of_one_session_are_bounded_by_its_slots_after_a_restart_as_before() -> None:
    limits = {"limits": {"egress_waiters_per_session": 4}}
    with gateway_process(limits, [{"id": "s1", "egress_budget": {"connections": 1}}], stored=8) as gateway:
        clients = [await gateway.client() for _ in range(5)]
        for client in clients:
            assert (await client.tunnel(f"{HTTP_ADDRESS}:80", GOOD)).status == 200
        await restarted(gateway)
        async with await gateway.client() as extra:
            assert (await extra.tunnel(f"{HTTP_ADDRESS}:80", GOOD)).status == 200
            assert (await extra.reply()).reason == "no_free_slot"
        async with origin(host=HTTP_ADDRESS, port=80):
            for client in clients:
                assert (await client.ask(GET)).status == 200
                await client.close()


@pytest.mark.parametrize("by", [fails_to_reload, reloaded, restarted])
async def test_a_tunnel_to_port_80_goes_on_between_two_requests(by: Any) -> None:
    with gateway_process(stored=8) as gateway:
        await begun_by_link(gateway)
        async with tunnel(gateway) as (client, _), await gateway.client() as half:
            assert (await half.tunnel(f"{HTTP_ADDRESS}:80", GOOD, early=GET[:20])).status == 200
            # What has no request yet, and what has had one.
            for _ in range(2):
                await by(gateway)
                assert (await client.ask(GET)).body == b"hello"
            assert (await half.ask(GET[20:])).body == b"hello"
            # It still leads to its own host only, and to nothing of the gateway's.
            assert (await client.ask(GET.replace(HTTP_ADDRESS.encode(), b"other.example"))).status == 400


async def test_a_tunnel_to_port_80_that_begins_while_the_gateway_leaves_goes_on_in_the_next() -> None:
    released = asyncio.Event()

    async def answer_late(exchange: Exchange) -> None:
        await released.wait()
        await say_hello(exchange)

    with gateway_process({"limits": {"drain_ms": 20_000}}, stored=8) as gateway:
        manager = gateway.manager
        assert manager is not None
        async with origin(answer_late) as slow, await gateway.client() as busy, await gateway.client() as client:
            await busy.send(ask(slow))
            await slow.until(lambda: bool(slow.heads))
            restarting = asyncio.create_task(restarted(gateway))
            await until(lambda: any("STOPPING=1" in message for message in manager.messages))
            first = gateway.pid
            assert (await client.tunnel(f"{HTTP_ADDRESS}:80", GOOD, early=GET)).status == 200
            assert gateway.pid == first
            released.set()
            assert (await busy.reply()).status == 200
            async with origin(host=HTTP_ADDRESS, port=80):
                await restarting
                assert (await client.reply()).body == b"hello"
                assert (await client.ask(GET)).body == b"hello"


async def test_the_process_before_stays_until_its_last_reply_had_the_time_to_be_read() -> None:
    released = asyncio.Event()

    async def answer_late(exchange: Exchange) -> None:
        await released.wait()
        await say_hello(exchange)

    with gateway_process(stored=8) as gateway:
        assert gateway.manager is not None
        async with origin(answer_late) as server, await gateway.client() as client:
            await client.send(ask(server))
            await server.until(lambda: bool(server.heads))
            await reloaded(gateway)
            # What the client sends to a process that has ended is answered by a reset, which takes an unread reply along.
            began = time.monotonic()
            released.set()
            reply = await client.reply()
            assert (reply.body, reply.headers["connection"]) == (b"hello", "close")
            assert await client.read_to_end() == b""
            await until(gateway.manager.drained)
            assert time.monotonic() - began >= LINGER_S


async def test_a_request_that_waits_for_the_sessions_at_a_reload_is_answered(tmp_path: Path) -> None:
    async with contracted(tmp_path, stored=8, limits={"resync_wait_ms": 2_000}) as (gateway, _):
        async with await gateway.client() as plain, await gateway.client() as model:
            await plain.send(ask("127.0.0.1:9"))
            await model.send(message())
            for client in (plain, model):
                await until(lambda client=client: was_read(client))  # type: ignore[misc]
            await reloaded(gateway)
            # Control tells the next process only, so this one cannot serve them; but it says so.
            assert (await plain.reply()).reason == "not_ready"
            assert (await model.reply()).reason == "not_ready"


async def test_requests_of_one_sandbox_that_wait_for_the_next_process_take_no_room_from_others_and_all_are_answered() -> (
    None
):
    released = asyncio.Event()

    async def answer_late(exchange: Exchange) -> None:
        await released.wait()
        await say_hello(exchange)

    limits = {"drain_ms": 60_000, "unauthenticated_total": 8, "unauthenticated_per_source": 4}
    with gateway_process({"limits": limits}, [{"id": "s1"}, {"id": "s2"}], stored=8) as gateway:
        manager = gateway.manager
        assert manager is not None
        async with origin(answer_late) as slow, origin() as server, AsyncExitStack() as stack:
            busy = await stack.enter_async_context(await gateway.client())
            await busy.send(ask(slow))
            await slow.until(lambda: bool(slow.heads))
            restarting = asyncio.create_task(restarted(gateway))
            await until(lambda: any("STOPPING=1" in message for message in manager.messages))
            first = gateway.pid
            crowd = []
            for number in range(9):
                crowd.append(await stack.enter_async_context(await gateway.client("s1")))
                await crowd[-1].send(ask(server))
                await until(lambda: was_read(crowd[-1]))
                # Those that have to wait are as many as a source may have; the others are answered by the one that leaves.
                await server.until(lambda number=number: len(server.heads) >= number - 3)  # type: ignore[misc]
            other = await stack.enter_async_context(await gateway.client("s2"))
            await other.send(ask(server, credentials=("s2", TOKEN)))
            await until(lambda: was_read(other))
            assert (gateway.pid, len(server.heads)) == (first, 5)
            released.set()
            await restarting
            for client in (busy, *crowd, other):
                assert (await client.reply()).body == b"hello"


async def test_a_tunnel_to_port_80_whose_session_is_gone_at_the_restart_is_closed() -> None:
    with gateway_process(sessions=[{"id": "s1"}, {"id": "s2"}], stored=8) as gateway:
        async with tunnel(gateway) as (client, server):
            assert (await client.ask(GET)).status == 200
            gateway.sessions = gateway.sessions[1:]
            gateway.write_files()
            await restarted(gateway)
            await client.send(GET)
            assert await ends(client)
            assert len(server.heads) == 1
