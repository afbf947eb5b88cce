"""Restarts of the gateway under a manager with a descriptor store: not a byte, a tunnel or a count is lost."""

import asyncio
import contextlib
import hashlib
import os
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from tests.net.test_contract import Control, contracted, grant
from tests.net.test_plain import ask
from tests.net.test_runner_handoff import control, url
from tests.net.test_tunnel import HTTPS_ADDRESS, opened, server_on
from tests.support.dns_server import DnsServer, Records, Silence
from tests.support.gateway_process import TOKEN, GatewayProcess, gateway_process
from tests.support.origin import Exchange, origin, say_hello
from tests.support.patience import PATIENCE_S, until
from tests.support.sockets import Client, basic, echo, echo_server
from tests.support.tls_server import Authority, client_hello

GOOD = ("s1", TOKEN)


async def restarted(gateway: GatewayProcess) -> None:
    """Restart without stopping the test's own loop."""
    await asyncio.to_thread(gateway.restart)


def was_read(client: Client) -> bool:
    """Tell whether the gateway has read all that the client sent: nothing of it waits in its socket (proc(5))."""
    raw = client.writer.get_extra_info("socket")
    ends = [f"0100007F:{raw.getpeername()[1]:04X}", _hex_address(raw.getsockname())]
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [fields[4].split(":")[1] for fields in lines if fields[1:3] == ends] == ["00000000"]


def _hex_address(address: tuple[str, int]) -> str:
    return f"{socket.inet_aton(address[0])[::-1].hex().upper()}:{address[1]:04X}"


def left(gateway: GatewayProcess) -> list[tuple[int, int, int]]:
    """Return what each stop left: connections, bytes in pipes, bytes in the record."""
    line = r"left (\d+) connections to the next process, (\d+) bytes on their way in pipes and (\d+) in the record"
    return [(int(each[0]), int(each[1]), int(each[2])) for each in re.findall(line, gateway.log())]


async def test_a_tunnel_goes_on_after_a_restart_and_is_logged_as_one() -> None:
    with gateway_process(stored=8) as gateway:
        async with echo_server() as server, await opened(gateway, f"127.0.0.1:{server.port}") as client:
            await client.send(b"before")
            assert await client.read_exactly(6) == b"before"
            first = gateway.pid
            await restarted(gateway)
            assert gateway.pid != first
            await client.send(b"after!!")
            assert await client.read_exactly(7) == b"after!!"
            client.end()
            assert await client.read_to_end() == b""
            line = await gateway.await_audit("s1", event="close")
            assert (line["host"], line["port"], line["reason"]) == ("127.0.0.1", server.port, "done")
            assert (line["bytes_up"], line["bytes_down"]) == (13, 13)
            assert line["ms"] >= 100
            assert [each["event"] for each in gateway.audit("s1")] == ["allow", "close"]


async def test_bytes_in_a_pipe_reach_a_reader_that_had_stalled() -> None:
    data = os.urandom(1 << 20) * 32

    async def pour(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()
        writer.write_eof()

    with gateway_process(stored=8) as gateway:
        async with server_on(pour) as server, await opened(gateway, f"127.0.0.1:{server.port}") as client:
            # It reads nothing, so sooner or later a pipe is full; each restart finds it as the last one left it.
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            while not any(in_pipes for _, in_pipes, _ in left(gateway)):
                await restarted(gateway)
            client.writer.transport.resume_reading()  # type: ignore[attr-defined]
            digest, size = hashlib.sha256(), 0
            async with asyncio.timeout(PATIENCE_S):
                while chunk := await client.reader.read(1 << 20):
                    digest.update(chunk)
                    size += len(chunk)
            assert size == len(data)
            assert digest.digest() == hashlib.sha256(data).digest()
        assert (await gateway.await_audit("s1", event="close"))["bytes_down"] == len(data)


async def test_a_half_closed_side_with_unread_data_stays_half_closed() -> None:
    data = os.urandom(3_000_001)
    reading = asyncio.Event()
    got = bytearray()

    async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await reading.wait()
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        got.extend(await reader.read())
        writer.write(b"all of it")

    with gateway_process(stored=8) as gateway:
        async with server_on(late) as server, await opened(gateway, f"127.0.0.1:{server.port}") as client:
            client.writer.write(data)
            client.end()
            await restarted(gateway)
            await restarted(gateway)
            reading.set()
            assert await client.read_to_end() == b"all of it"
            assert got == data
        line = await gateway.await_audit("s1", event="close")
        assert (line["bytes_up"], line["bytes_down"], line["reason"]) == (len(data), 9, "done")


async def test_an_end_that_was_passed_on_before_is_not_forgotten() -> None:
    with gateway_process(stored=8) as gateway:
        ended, answer = asyncio.Event(), asyncio.Event()

        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            assert await reader.read() == b"question"
            ended.set()
            await answer.wait()
            writer.write(b"answer")

        async with server_on(handler) as server, await opened(gateway, f"127.0.0.1:{server.port}") as client:
            await client.send(b"question")
            client.end()
            await ended.wait()
            await restarted(gateway)
            answer.set()
            assert await client.read_to_end() == b"answer"
        assert (await gateway.await_audit("s1", event="close"))["reason"] == "done"


async def test_a_peer_that_resets_while_parked_is_found_out() -> None:
    with gateway_process(stored=8) as gateway:
        async with server_on(None) as server:  # type: ignore[arg-type]
            client = await opened(gateway, f"127.0.0.1:{server.port}")
            other = await opened(gateway, f"127.0.0.1:{server.port}")
            await client.send(b"x")
            await other.send(b"y")
            await server.until(lambda: [bytes(each.received) for each in server.conversations] == [b"x", b"y"])
            assert gateway.manager is not None
            await asyncio.to_thread(gateway.manager.stop)
            client.reset()
            await until(lambda: client.writer.transport.is_closing())
            await asyncio.to_thread(gateway.manager.start)
            await server.until(lambda: server.conversations[0].ended is not None)
            assert (await gateway.await_audit("s1", event="close"))["reason"] == "reset"
            assert server.conversations[1].ended is None
            await other.close()


async def test_a_client_hello_may_come_in_two_lives() -> None:
    authority = Authority()
    async with DnsServer() as names, server_on(echo, 443, authority.server_context("site.example")):
        names.script("site.example", Records((HTTPS_ADDRESS,)))
        with gateway_process({"egress": {"nameservers": [names.address]}}, stored=8) as gateway:
            async with (
                await opened(gateway, "site.example:443") as client,
                await opened(gateway, "site.example:443") as other,
            ):
                hello = client_hello("site.example")
                await client.send(hello[:50])
                wrong = client_hello("other.example")
                await other.send(wrong[:50])
                await restarted(gateway)
                await client.send(hello[50:])
                assert (await client.read_exactly(1)) == b"\x16"
                # The rule holds over the restart too.
                await other.send(wrong[50:])
                assert (await other.read_to_end())[-2:] == b"\x02\x70"
            assert (await gateway.await_audit("s1", event="refuse"))["reason"] == "sni_mismatch"
            line = await gateway.await_audit("s1", event="close")
            assert line["bytes_up"] == len(hello)


async def test_a_client_hello_has_one_deadline_over_all_restarts() -> None:
    async with server_on(None, 443):  # type: ignore[arg-type]
        with gateway_process({"limits": {"hello_timeout_ms": 1600}}, stored=8) as gateway:
            async with await opened(gateway, f"{HTTPS_ADDRESS}:443") as client:
                await client.send(b"\x16\x03\x01")
                ended = asyncio.create_task(client.read_to_end())
                # Each life is shorter than the limit; if it began anew each time this would go on for ever.
                async with asyncio.timeout(PATIENCE_S):
                    while not ended.done():
                        await asyncio.wait([ended], timeout=0.4)
                        await restarted(gateway)
                assert (await ended)[:1] == b"\x15"
            assert (await gateway.await_audit("s1", event="refuse"))["reason"] == "hello_timeout"


async def test_what_is_not_connected_yet_is_dialled_again() -> None:
    with gateway_process(stored=8) as gateway, socket.socket() as server:
        # A full queue drops what comes, as a host that is slow to answer.
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        port = server.getsockname()[1]
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        async with await gateway.client() as client:
            asked = asyncio.create_task(client.tunnel(f"127.0.0.1:{port}", GOOD, early=b"said early"))
            await asyncio.sleep(0)
            await until(lambda: any("02 " in line for line in _connecting(port)))
            await restarted(gateway)
            assert not asked.done()
            for filler in fillers:
                filler.close()
            server.listen(16)
            accepted = asyncio.create_task(asyncio.to_thread(_accept_that_says, server, b"said early"))
            assert (await asked).status == 200
            upstream = await accepted
            with upstream:
                await asyncio.to_thread(upstream.sendall, b"hello")
                assert await client.read_exactly(5) == b"hello"


def _connecting(port: int) -> list[str]:
    """Return the lines of connections to a local port that wait for an answer (SYN_SENT, proc(5))."""
    wanted = f"0100007F:{port:04X}"
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [f"{fields[3]} " for fields in lines if fields[2] == wanted and fields[3] == "02" and fields[7] == "60601"]


def _accept_that_says(server: socket.socket, text: bytes) -> socket.socket:
    """Accept connections until one brings `text`; the fillers bring nothing."""
    server.settimeout(PATIENCE_S)
    while True:
        sock, _ = server.accept()
        sock.settimeout(PATIENCE_S)
        with contextlib.suppress(OSError):
            if sock.recv(64) == text:
                return sock
        sock.close()


async def test_a_name_that_is_being_looked_up_is_looked_up_again() -> None:
    async with DnsServer() as names, echo_server() as server:
        names.script("slow.example", Silence())
        with gateway_process({"egress": {"nameservers": [names.address]}}, stored=8) as gateway:
            async with await gateway.client() as client:
                asked = asyncio.create_task(client.tunnel(f"slow.example:{server.port}", GOOD))
                await until(lambda: "slow.example" in str(names.queries))
                names.script("slow.example", Records(("127.0.0.1",)))
                await restarted(gateway)
                assert (await asked).status == 200


async def test_a_head_may_come_in_two_lives() -> None:
    with gateway_process(stored=8) as gateway:
        async with echo_server() as server, await gateway.client() as client, await gateway.client() as silent:
            target = f"127.0.0.1:{server.port}"
            await client.send(f"CONNECT {target} HTTP/1.1\r\nHo".encode())
            await until(lambda: gateway.descriptors() > 0)
            await restarted(gateway)
            reply = await client.ask(
                f"st: {target}\r\nProxy-Authorization: {basic(*GOOD)}\r\n\r\n".encode(), body=False
            )
            assert reply.status == 200
            assert (await silent.tunnel(target, GOOD)).status == 200


async def test_a_refusal_that_is_being_read_is_not_cut_off() -> None:
    with gateway_process(stored=8) as gateway:
        async with await gateway.client() as client:
            head = f"CONNECT example.com:443 HTTP/1.1\r\nProxy-Authorization: {basic('s1', 'wrong')}\r\n\r\n"
            await client.send(head.encode())
            assert (await client.reader.read(1)) == b"H"
            await restarted(gateway)
            # Its client still talks, as one does that has not read the refusal; a reset would take the refusal with it.
            assert left(gateway) == [(1, 0, 0)]
            await client.send(b"x" * 50_000)
            assert (await client.read_exactly(11)) == b"TTP/1.1 407"


async def test_a_byte_budget_goes_on_to_its_last_byte() -> None:
    session = {"id": "s1", "egress_budget": {"bytes": 1000, "connections": 8}}
    with gateway_process(sessions=[session], stored=8) as gateway:
        async with server_on(None) as server:  # type: ignore[arg-type]
            async with await opened(gateway, f"127.0.0.1:{server.port}") as client:
                await client.send(b"x" * 900)
                await server.until(lambda: bool(server.conversations) and len(server.conversations[0].received) == 900)
                await restarted(gateway)
                await client.send(b"y" * 900)
                await server.until(lambda: server.conversations[0].ended is not None)
                assert server.conversations[0].received == b"x" * 900 + b"y" * 100
            line = await gateway.await_audit("s1", event="close")
            assert (line["bytes_up"], line["reason"]) == (1000, "budget_exhausted")
            async with await gateway.client() as client:
                assert (await client.tunnel(f"127.0.0.1:{server.port}", GOOD)).reason == "budget_exhausted"


async def test_slots_are_held_and_waited_for_over_a_restart() -> None:
    session = {"id": "s1", "egress_budget": {"bytes": 0, "connections": 2}}
    with gateway_process({"limits": {"egress_slot_wait_ms": 120_000}}, [session], stored=8) as gateway:
        async with echo_server() as server:
            target = f"127.0.0.1:{server.port}"
            first, second = await opened(gateway, target), await opened(gateway, target)
            third, fourth = await gateway.client(), await gateway.client()
            waiting = []
            for client in (third, fourth):
                waiting.append(asyncio.create_task(client.tunnel(target, GOOD)))
                await asyncio.sleep(0)
                await until(lambda client=client: was_read(client))  # type: ignore[misc]
            await restarted(gateway)
            assert not any(task.done() for task in waiting)
            await first.close()
            assert (await waiting[0]).status == 200
            assert not waiting[1].done()
            await second.close()
            assert (await waiting[1]).status == 200
            await third.close()
            await fourth.close()


async def test_the_idle_limit_counts_over_restarts() -> None:
    with gateway_process({"limits": {"egress_idle_ms": 1600}}, stored=8) as gateway:
        async with echo_server() as server, await opened(gateway, f"127.0.0.1:{server.port}") as client:
            ended = asyncio.create_task(client.read_to_end())
            # Each life is shorter than the limit.
            async with asyncio.timeout(PATIENCE_S):
                while not ended.done():
                    await asyncio.wait([ended], timeout=0.5)
                    await restarted(gateway)
            assert await ended == b""
            assert (await gateway.await_audit("s1", event="close"))["reason"] == "idle"


@asynccontextmanager
async def stored_runner() -> AsyncIterator[GatewayProcess]:
    async with control() as (path, _):
        with gateway_process({"runner": {"upstream": f"unix:{path}"}}, stored=8) as gateway:
            yield gateway


async def test_a_runners_connection_goes_on() -> None:
    async with stored_runner() as gateway, aiohttp.ClientSession() as http:
        async with http.ws_connect(url(gateway), headers={"Authorization": f"Bearer {TOKEN}"}) as ws:
            for text in ("hello", "x" * 200_000, "again"):
                await ws.send_str(text)
                assert (await ws.receive_str()) == text
                await restarted(gateway)
            # It is the session's still: a session that is gone takes it along.
            gateway.sessions = [{"id": "other", "token": TOKEN, "network": "open"}]
            gateway.write_files()
            await restarted(gateway)
            async with asyncio.timeout(PATIENCE_S):
                assert (await ws.receive()).type in (aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.CLOSE)


async def test_a_tunnel_whose_session_is_gone_at_the_restart_is_cut_and_logged() -> None:
    with gateway_process(sessions=[{"id": "s1"}, {"id": "s2"}], stored=8) as gateway:
        async with echo_server() as server, await opened(gateway, f"127.0.0.1:{server.port}") as client:
            gateway.sessions = gateway.sessions[1:]
            gateway.write_files()
            await restarted(gateway)
            assert await client.read_to_end() == b""
            assert (await gateway.await_audit("s1", event="close"))["reason"] == "revoked"


async def test_a_place_that_is_another_sessions_in_the_next_picture_keeps_nothing_open_and_forgets_no_count() -> None:
    places = ("10.231.0.16", "10.231.0.17")
    budget = {"bytes": 10, "connections": 8}
    sessions = [{"id": f"s{n}", "address": places[n - 1], "egress_budget": budget} for n in (1, 2)]
    with gateway_process(sessions=sessions, stored=8) as gateway:
        async with echo_server() as server, await opened(gateway, f"127.0.0.1:{server.port}") as client:
            await client.send(b"x" * 5)
            assert await client.read_exactly(5) == b"x" * 5
            assert (await gateway.await_audit("s1", event="close"))["reason"] == "budget_exhausted"
            async with await gateway.client("s2") as other:
                assert (await other.tunnel(f"127.0.0.1:{server.port}", ("s2", TOKEN))).status == 200
                for each, place in zip(gateway.sessions, reversed(places), strict=True):
                    each["address"] = place
                gateway.write_files()
                await restarted(gateway)
                assert await other.read_to_end() == b""
            assert (await gateway.await_audit("s2", event="close"))["reason"] == "revoked"
            async with await gateway.client() as again:
                refused = await again.tunnel(f"127.0.0.1:{server.port}", GOOD)
                assert refused.reason == "budget_exhausted"
        assert "ERROR" not in gateway.log()


async def test_connections_that_come_while_no_gateway_runs_are_served_by_the_next() -> None:
    with gateway_process(stored=8) as gateway:
        async with echo_server() as server:
            assert gateway.manager is not None
            await asyncio.to_thread(gateway.manager.stop)
            clients = [await gateway.client() for _ in range(50)]
            asked = [asyncio.create_task(each.tunnel(f"127.0.0.1:{server.port}", GOOD)) for each in clients]
            await asyncio.to_thread(gateway.manager.start)
            assert [reply.status for reply in await asyncio.gather(*asked)] == [200] * 50
            for client in clients:
                await client.close()


async def test_grants_are_in_force_before_control_is_back_and_usage_goes_on(tmp_path: Path) -> None:
    async with contracted(tmp_path, stored=8) as (gateway, path), echo_server() as server:
        first = await Control.connect(path)
        epoch = (await first.welcome()).epoch
        assert not (await first.snapshot(grant("s1"))).problems
        client = await opened(gateway, f"127.0.0.1:{server.port}")
        await client.send(b"x" * 10)
        assert await client.read_exactly(10) == b"x" * 10
        await restarted(gateway)
        # Nobody has brought a grant to this process.
        other = await opened(gateway, f"127.0.0.1:{server.port}")
        await client.send(b"y" * 5)
        assert await client.read_exactly(5) == b"y" * 5
        second = await Control.connect(path)
        assert (await second.welcome()).epoch == epoch
        assert not (await second.snapshot(grant("s1"))).problems
        report = await second.reported("s1", lambda each: each.usage.egress_bytes_up == 15)
        assert (report.usage.egress_allowed, report.usage.egress_bytes_down) == (2, 15)
        # What control does not grant any more is over, parked or not.
        assert not (await second.snapshot()).problems
        assert await client.read_to_end() == b""
        assert await other.read_to_end() == b""
        await client.close()
        await other.close()
        await first.close()
        await second.close()


async def test_two_hundred_tunnels_under_load_lose_nothing_in_five_restarts() -> None:
    tunnels, size = 200, 400_000
    with gateway_process({"limits": {"unauthenticated_per_source": 1000}}, [_wide()], stored=8) as gateway:
        async with echo_server() as server:
            clients = [await opened(gateway, f"127.0.0.1:{server.port}") for _ in range(tunnels)]
            over = asyncio.Event()
            checks = [asyncio.create_task(_exchange(client, size, over)) for client in clients]
            before = gateway.descriptors()
            for _ in range(5):
                await restarted(gateway)
            over.set()
            sizes = await asyncio.gather(*checks)
            assert min(sizes) >= size
            for client in clients:
                client.end()
                assert await client.read_to_end() == b""
                await client.close()
            closes = [line for line in gateway.audit("s1") if line["event"] == "close"]
            async with asyncio.timeout(PATIENCE_S):
                while len(closes) < tunnels:
                    await asyncio.sleep(0.01)
                    closes = [line for line in gateway.audit("s1") if line["event"] == "close"]
            assert sorted(line["bytes_up"] for line in closes) == sorted(sizes)
            assert sorted(line["bytes_down"] for line in closes) == sorted(sizes)
            assert {line["reason"] for line in closes} == {"done"}
            assert gateway.descriptors() <= before - 2 * tunnels + 128


def _wide() -> dict[str, object]:
    return {"id": "s1", "egress_budget": {"bytes": 0, "connections": 1000}}


async def _exchange(client: Client, size: int, over: asyncio.Event) -> int:
    """Send random bytes to an echo until `size` are back and `over` is set; every byte must come back as it went."""
    sent = 0
    while sent < size or not over.is_set():
        data = os.urandom(50_000)
        client.writer.write(data)
        sent += len(data)
        async with asyncio.timeout(PATIENCE_S):
            assert await client.reader.readexactly(len(data)) == data
        await asyncio.sleep(0)
    return sent


async def test_a_plain_connection_goes_on_after_a_restart_with_its_next_request() -> None:
    released = asyncio.Event()

    async def answer_the_second_late(exchange: Exchange) -> None:
        if exchange.number == 1:
            await released.wait()
        await say_hello(exchange)

    with gateway_process({"limits": {"drain_ms": 60_000}}, stored=8) as gateway:
        manager = gateway.manager
        assert manager is not None
        async with (
            origin(answer_the_second_late) as server,
            await gateway.client() as idle,
            await gateway.client() as busy,
        ):
            assert (await idle.ask(ask(server))).status == 200
            await idle.send(ask(server)[:10])
            await busy.send(ask(server) + ask(server))
            await server.until(lambda: len(server.exchanges) == 2)
            restarting = asyncio.create_task(restarted(gateway))
            await until(lambda: any("STOPPING=1" in message for message in manager.messages))
            released.set()
            await restarting
            assert (await busy.reply()).headers.get("connection") is None
            assert (await busy.reply()).status == 200
            assert (await idle.ask(ask(server)[10:])).status == 200
            assert (await busy.ask(ask(server))).status == 200


async def test_a_connect_in_the_name_of_no_session_spoils_no_hand_over(tmp_path: Path) -> None:
    async with contracted(tmp_path, stored=8) as (gateway, path), echo_server() as server:
        first = await Control.connect(path)
        await first.welcome()
        await first.snapshot(grant("s1"))
        async with await opened(gateway, f"127.0.0.1:{server.port}") as client:
            await first.close()
            # From here on an unknown session may only be not known yet, so that its requests wait.
            await restarted(gateway)
            async with await gateway.client() as other:
                assert (await other.tunnel(f"127.0.0.1:{server.port}", ("Not An Id", TOKEN))).status == 407
                await restarted(gateway)
            await client.send(b"x")
            assert await client.read_exactly(1) == b"x"
