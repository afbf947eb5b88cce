"""A reload puts a new process in the place of the running one: tunnels move, and a model stream ends where it began."""

import asyncio
import contextlib
import os
import re
import signal
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gateway.contract.policy import Grant
from tests.model.wire import STREAM_HEAD, Peer, chunked, scripted
from tests.net.test_contract import Control, contracted, grant
from tests.net.test_model import KEY, connected, message, write_key
from tests.net.test_plain import ask
from tests.net.test_tunnel import opened
from tests.support.gateway_process import GatewayProcess, gateway_process
from tests.support.origin import Exchange, origin, say_hello
from tests.support.patience import PATIENCE_S, until
from tests.support.sockets import echo_server

START = b'event: message_start\ndata: {"type":"message_start","message":{"model":"m","usage":{"input_tokens":7,"output_tokens":1}}}\n\n'
DELTA = b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"text":"more"}}\n\n'
END = (
    b'event: message_delta\ndata: {"type":"message_delta","usage":{"output_tokens":42}}\n\n'
    b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
)
TOLD = b"0\r\n\r\n"


async def reloaded(gateway: GatewayProcess) -> None:
    assert gateway.manager is not None
    await asyncio.to_thread(gateway.manager.reload)


class Story:
    """A provider's streams that the test tells piece by piece, each by its number in the order in which they begin."""

    def __init__(self) -> None:
        self._pieces: defaultdict[int, asyncio.Queue[bytes]] = defaultdict(asyncio.Queue)
        self._begun = 0
        self._changed = asyncio.Event()

    def add(self, *pieces: bytes, stream: int = 0) -> None:
        """Tell these as soon as the stream has begun."""
        for piece in pieces:
            self._pieces[stream].put_nowait(piece)

    async def begun(self, streams: int = 1) -> None:
        """Wait until so many streams have begun."""
        async with asyncio.timeout(PATIENCE_S):
            while self._begun < streams:
                self._changed.clear()
                await self._changed.wait()

    async def tell(self, peer: Peer) -> None:
        while True:
            await peer.request()
            pieces = self._pieces[self._begun]
            self._begun += 1
            await peer.send(STREAM_HEAD)
            self._changed.set()
            while (piece := await pieces.get()) != TOLD:
                await peer.send(chunked(piece)[: -len(TOLD)])
            await peer.send(TOLD)


@asynccontextmanager
async def telling(tell: Callable[[Peer], Awaitable[None]], **more: object) -> AsyncIterator[GatewayProcess]:
    """A gateway whose provider tells a story."""
    async with scripted(tell) as upstream:
        config = {"model": {"upstream": upstream.url}, "limits": {"drain_ms": 5000}, **more}
        with gateway_process(config, [{"id": "s1"}], stored=8) as gateway:
            key = gateway.base / "key"
            write_key(key, KEY)
            gateway.config["model"]["api_key_file"] = str(key)
            gateway.write_files()
            # With the key from the beginning: the first process had none.
            await asyncio.to_thread(gateway.restart)
            yield gateway


async def test_a_plain_connection_moves_between_two_requests_or_ends_with_its_present_one() -> None:
    released = asyncio.Event()

    async def answer_the_second_late(exchange: Exchange) -> None:
        if exchange.number == 1:
            await released.wait()
        await say_hello(exchange)

    with gateway_process(stored=8) as gateway:
        async with (
            origin(answer_the_second_late) as server,
            await gateway.client() as idle,
            await gateway.client() as busy,
        ):
            assert (await idle.ask(ask(server))).status == 200
            await busy.send(ask(server))
            await server.until(lambda: len(server.exchanges) == 2)
            await reloaded(gateway)
            assert (await idle.ask(ask(server))).status == 200
            released.set()
            reply = await busy.reply()
            assert (reply.body, reply.headers["connection"]) == (b"hello", "close")
            assert await busy.read_to_end() == b""
            assert gateway.manager is not None
            await until(gateway.manager.drained)
            assert (await idle.ask(ask(server))).status == 200


async def test_a_tunnel_moves_to_the_new_process_and_the_old_one_ends() -> None:
    with gateway_process(stored=8) as gateway:
        async with echo_server() as server, await opened(gateway, f"127.0.0.1:{server.port}") as client:
            await client.send(b"before")
            assert await client.read_exactly(6) == b"before"
            first = gateway.pid
            await reloaded(gateway)
            assert gateway.manager is not None
            await until(gateway.manager.drained)
            assert gateway.pid != first
            await client.send(b"after!!")
            assert await client.read_exactly(7) == b"after!!"
            # And once more, by a process that came so itself; then by a restart.
            await reloaded(gateway)
            await asyncio.to_thread(gateway.restart)
            await client.send(b"again")
            assert await client.read_exactly(5) == b"again"
        line = await gateway.await_audit("s1", event="close")
        assert (line["bytes_up"], line["bytes_down"], line["reason"]) == (18, 18, "done")
        assert [each["event"] for each in gateway.audit("s1")] == ["allow", "close"]


async def test_a_model_stream_goes_on_in_the_old_process_and_is_counted_in_the_new() -> None:
    story = Story()
    async with telling(story.tell) as gateway, connected(gateway) as client:
        await client.send(message(stream=True))
        await story.begun()
        story.add(START)
        first = gateway.pid
        await reloaded(gateway)
        assert gateway.manager is not None
        assert not gateway.manager.drained()
        # The next request is the new process' while the old one still streams.
        async with connected(gateway) as other:
            await other.send(message(stream=True))
            await story.begun(2)
            story.add(DELTA, END, TOLD)
            story.add(START, END, TOLD, stream=1)
            replies = await asyncio.gather(client.reply(), other.reply())
            assert all(b"message_stop" in each.body for each in replies)
        await until(gateway.manager.drained)
        assert gateway.pid != first

        def closes() -> list[str]:
            return [line["reason"] for line in gateway.audit("s1") if line["event"] == "close"]

        await until(lambda: len(closes()) == 2)
        assert closes() == ["done", "done"]


async def test_connections_are_served_during_a_reload_without_a_gap() -> None:
    with gateway_process(stored=8) as gateway:
        async with echo_server() as server:
            over = asyncio.Event()
            served = 0

            async def connect_again_and_again() -> None:
                nonlocal served
                while not over.is_set():
                    async with await opened(gateway, f"127.0.0.1:{server.port}") as client:
                        await client.send(b"x")
                        assert await client.read_exactly(1) == b"x"
                    served += 1

            tasks = [asyncio.create_task(connect_again_and_again()) for _ in range(4)]
            for _ in range(3):
                await reloaded(gateway)
            over.set()
            await asyncio.gather(*tasks)
            assert served
            assert {line["reason"] for line in gateway.audit("s1") if line["event"] == "close"} <= {"done", "reset"}


# Granted no more, or under a policy under which the stream was not let in.
@pytest.mark.parametrize(("reloads", "then"), [(1, []), (2, []), (2, [grant("s1", allow=("other.example",))])])
async def test_a_session_whose_grant_ends_after_a_reload_loses_its_stream_in_an_old_process(
    tmp_path: Path, reloads: int, then: list[Grant]
) -> None:
    story = Story()
    async with scripted(story.tell) as upstream:
        async with contracted(tmp_path, stored=8, model={"upstream": upstream.url}) as (gateway, path):
            first = await Control.connect(path)
            await first.welcome()
            await first.snapshot(grant("s1"))
            async with connected(gateway) as client:
                await client.send(message(stream=True))
                await story.begun()
                story.add(START)
                for _ in range(reloads):
                    await reloaded(gateway)
                second = await Control.connect(path)
                await second.welcome()
                assert gateway.manager is not None
                assert not gateway.manager.drained()
                await second.snapshot(*then)
                await until(gateway.manager.drained)
                with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                    await client.reply()
            await first.close()
            await second.close()


@pytest.mark.parametrize("reloads", [1, 2])
async def test_what_an_old_process_streams_is_reported_by_the_newest(tmp_path: Path, reloads: int) -> None:
    story = Story()
    async with scripted(story.tell) as upstream:
        async with contracted(tmp_path, stored=8, model={"upstream": upstream.url}) as (gateway, path):
            first = await Control.connect(path)
            epoch = (await first.welcome()).epoch
            await first.snapshot(grant("s1"))
            async with connected(gateway) as client:
                await client.send(message(stream=True))
                await story.begun()
                story.add(START)
                for _ in range(reloads):
                    await reloaded(gateway)
                second = await Control.connect(path)
                assert (await second.welcome()).epoch == epoch
                await second.snapshot(grant("s1"))
                story.add(END, TOLD)
                await client.reply()
            report = await second.reported("s1", lambda each: each.usage.output_tokens == 42)
            assert (report.usage.model_requests, report.usage.input_tokens) == (1, 7)
            await first.close()
            await second.close()


async def test_what_an_old_process_streams_until_a_restart_is_counted_after_it(tmp_path: Path) -> None:
    story = Story()
    async with scripted(story.tell) as upstream:
        model, limits = {"upstream": upstream.url}, {"drain_ms": 60_000}
        async with contracted(tmp_path, stored=8, model=model, limits=limits) as (gateway, path):
            manager = gateway.manager
            assert manager is not None
            first = await Control.connect(path)
            await first.welcome()
            await first.snapshot(grant("s1"))
            async with connected(gateway) as client:
                await client.send(message(stream=True))
                await story.begun()
                story.add(START)
                await reloaded(gateway)
                restarting = asyncio.create_task(asyncio.to_thread(manager.restart))
                await until(lambda: any("STOPPING=1" in each for each in manager.messages))
                story.add(END, TOLD)
                await client.reply()
            await restarting
            second = await Control.connect(path)
            await second.welcome()
            await second.snapshot(grant("s1"))
            await second.reported("s1", lambda each: each.usage.output_tokens == 42)
            await first.close()
            await second.close()


@pytest.mark.parametrize("reloads", [1, 2])
async def test_a_stream_that_outlives_the_drain_of_a_restart_is_counted_after_it(tmp_path: Path, reloads: int) -> None:
    story = Story()
    async with scripted(story.tell) as upstream:
        model, limits = {"upstream": upstream.url}, {"drain_ms": 60_000}
        async with contracted(tmp_path, stored=8, model=model, limits=limits) as (gateway, path):
            first = await Control.connect(path)
            await first.welcome()
            await first.snapshot(grant("s1"))
            async with connected(gateway) as client:
                await client.send(message(stream=True))
                await story.begun()
                story.add(START)
                await client.reader.readuntil(b"message_start")
                # The old one alone would drain for longer than the test runs: the new one must have it end.
                gateway.config["limits"]["drain_ms"] = 200
                gateway.write_files()
                for _ in range(reloads):
                    await reloaded(gateway)
                await asyncio.to_thread(gateway.restart)
                assert b"message_stop" not in await client.closed()
            second = await Control.connect(path)
            await second.welcome()
            await second.snapshot(grant("s1"))
            report = await second.reported("s1", lambda each: each.usage.model_requests == 1)
            assert report.usage.input_tokens == 7
            await first.close()
            await second.close()


@pytest.mark.parametrize("reloads", [1, 2])
async def test_a_revocation_is_answered_with_what_an_old_process_used_until_it_cut_its_stream(
    tmp_path: Path, reloads: int
) -> None:
    story = Story()
    async with scripted(story.tell) as upstream:
        async with contracted(tmp_path, stored=8, model={"upstream": upstream.url}) as (gateway, path):
            first = await Control.connect(path)
            await first.welcome()
            await first.snapshot(grant("s1"))
            async with connected(gateway) as client:
                await client.send(message(stream=True))
                await story.begun()
                story.add(START)
                await client.reader.readuntil(b"message_start")
                for _ in range(reloads):
                    await reloaded(gateway)
                second = await Control.connect(path)
                await second.welcome()
                await second.snapshot(grant("s1"))
                assert not (await second.revoke("s1")).problems
                last = second.usage["s1"]
                assert (last.final, last.usage.model_requests, last.usage.input_tokens) == (True, 1, 7)
            await first.close()
            await second.close()


async def test_an_old_process_keeps_nothing_for_longer_than_a_stream_may_last() -> None:
    async def begin_to_answer(exchange: Exchange) -> None:
        await exchange.answer(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n")
        await exchange.reader.read()

    # Of all that goes on in it only this has no end of its own before the limit.
    with gateway_process({"limits": {"model_total_timeout_ms": 500}}, stored=8) as gateway:
        async with origin(begin_to_answer) as server, await gateway.client() as client:
            await client.send(ask(server))
            await client.reader.readuntil(b"\r\n\r\n")
            await reloaded(gateway)
            assert gateway.manager is not None
            await until(gateway.manager.drained)
            assert "the time to drain is over: what still went on here is cut, 1 in number" in gateway.log()
            with contextlib.suppress(ConnectionError):
                assert await client.reader.read() == b""
            assert (await gateway.await_audit("s1", event="close", kind="http"))["reason"] == "shutdown"


async def test_the_old_process_ends_at_once_with_the_service() -> None:
    story = Story()
    async with telling(story.tell, limits={"drain_ms": 200}) as gateway, connected(gateway) as client:
        await client.send(message(stream=True))
        await story.begun()
        await reloaded(gateway)
        assert gateway.manager is not None
        assert await asyncio.to_thread(gateway.manager.stop) == 0
        assert gateway.manager.drained()
        line = await gateway.await_audit("s1", event="close", kind="model")
        assert line["reason"] == "shutdown"


@pytest.mark.parametrize("reloads", [1, 2])
async def test_old_processes_end_with_a_new_one_that_crashes_and_another_can_start(reloads: int) -> None:
    story = Story()
    async with telling(story.tell) as gateway:
        manager = gateway.manager
        assert manager is not None
        async with connected(gateway) as client:
            await client.send(message(stream=True))
            await story.begun()
            story.add(START)
            for _ in range(reloads):
                await reloaded(gateway)
            assert not manager.drained()
            os.kill(gateway.pid, signal.SIGKILL)
            # Nobody tells them to stop, and the stream would go on.
            await until(lambda: manager.drained() and not manager.running)
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await client.reply()
        cut = "what still went on here is cut, 1 in number"
        assert re.search(
            rf"the gateway that took over (has ended .a crash, or killed.|is ending): {cut}", gateway.log()
        )
        assert (await gateway.await_audit("s1", event="close", kind="model"))["reason"] == "shutdown"
        await asyncio.to_thread(manager.start)
        story.add(START, END, TOLD, stream=1)
        async with connected(gateway) as other:
            await other.send(message(stream=True))
            assert b"message_stop" in (await other.reply()).body


@pytest.mark.parametrize("by", ["restart", "reload"])
async def test_a_model_connection_between_two_requests_goes_on(by: str) -> None:
    story = Story()
    async with telling(story.tell) as gateway, connected(gateway) as client:
        for number in range(3):
            story.add(START, END, TOLD, stream=number)
            await client.send(message(stream=True))
            assert b"message_stop" in (await client.reply()).body
            assert gateway.manager is not None
            await asyncio.to_thread(gateway.manager.restart if by == "restart" else gateway.manager.reload)


async def test_only_the_main_process_feeds_the_watchdog() -> None:
    story = Story()
    async with telling(story.tell) as gateway:
        manager = gateway.manager
        assert manager is not None
        manager.watchdog_s = 0.3
        await asyncio.to_thread(gateway.restart)
        async with connected(gateway) as client:
            await client.send(message(stream=True))
            await story.begun()
            await reloaded(gateway)
            manager.messages.clear()
            manager.unheard.clear()
            # Both have had the time for it many times over.
            await until(lambda: manager.messages.count("WATCHDOG=1") >= 10)
            assert not manager.drained()
            assert manager.unheard == []
            story.add(START, END, TOLD)
            await client.reply()
        await until(manager.drained)
        assert "Traceback" not in gateway.log()
