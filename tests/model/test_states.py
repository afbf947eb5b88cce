"""Clients and a provider that do anything in any order: whatever they do, counts are right and nothing is left open."""

import asyncio
import socket
import struct
import time
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import uvloop
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gateway.contract.policy import ModelBudget
from gateway.core.verdict import CloseReason
from tests.model.harness import Proxy, running_proxy
from tests.model.wire import STREAM_HEAD, reply, request
from tests.support.listener import bound
from tests.support.patience import until

BODY = b'{"model":"m","max_tokens":50,"stream":true}'
REQUESTS = {
    "plain": request(BODY, path="/model/s1/v1/messages"),
    "held": request(BODY, path="/model/s2/v1/messages"),
    "unmetered": request(b"", method="GET", path="/model/s1/v1/models"),
    "refused": request(b'{"model":"other"}', path="/model/s2/v1/messages"),
    "large": request(b'{"model":"m","x":"' + b"y" * 200_000 + b'"}', path="/model/s2/v1/messages"),
}
EVENTS = b'data: {"type":"message_start","message":{"usage":{"input_tokens":9,"output_tokens":1}}}\n\n'
ANSWERS = {
    "whole": reply(b'{"usage":{"input_tokens":1,"output_tokens":2}}'),
    "error": reply(b"{}", status="529 Overloaded"),
    "interim": b"HTTP/1.1 100 Continue\r\n\r\n",
    "stream begun": STREAM_HEAD + b"%x\r\n%b\r\n" % (len(EVENTS), EVENTS),
    "stream ended": b"0\r\n\r\n",
    "half a head": b"HTTP/1.1 200 OK\r\ncontent-le",
    "nonsense": b"\0\1\2\r\n\r\n",
    "bulk": STREAM_HEAD + (b"%x\r\n" % 300_000) + b"x" * 300_000 + b"\r\n0\r\n\r\n",
}
RESET = struct.pack("ii", 1, 0)
MOST = 5


def open_descriptors() -> int:
    """Count what this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


class Far:
    """The far end of a connection: what it did not send yet, and whether it reads."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.unsent = b""
        self.reads = True
        self.got = b""
        self.has_ended = False
        self.asked = 0

    def work(self) -> None:
        """Send and read what can be."""
        with suppress(BlockingIOError, BrokenPipeError, ConnectionError):
            while self.unsent:
                self.unsent = self.unsent[self.sock.send(self.unsent) :]
        with suppress(BlockingIOError):
            while self.reads and not self.has_ended:
                try:
                    data = self.sock.recv(1 << 20)
                except ConnectionError:
                    data = b""
                self.got += data
                self.has_ended = not data

    def answers(self) -> int:
        """Return how many final replies have begun: no body here holds a status line."""
        return self.got.count(b"HTTP/1.1 ") - self.got.count(b"HTTP/1.1 100")

    def end(self, how: str) -> None:
        """End it."""
        if how == "reset":
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        if how == "half-close":
            with suppress(OSError):
                self.sock.shutdown(socket.SHUT_WR)
        else:
            self.sock.close()


class ModelConnections(RuleBasedStateMachine):
    """The real proxy on real sockets; nothing here waits for a time to pass.

    How far things came when a rule is done differs from run to run. So no rule has a precondition on it, which Hypothesis would
    take for a strategy that is not the same twice.
    """

    def __init__(self) -> None:
        super().__init__()
        # The first loop of a process leaves descriptors that all later ones share.
        uvloop.new_event_loop().close()
        self.before = open_descriptors()
        self.loop = uvloop.new_event_loop()
        self.stack = AsyncExitStack()
        self.clients: list[Far] = []
        self.providers: list[Far] = []
        self.faults: list[str] = []
        self.loop.set_exception_handler(lambda _loop, context: self.faults.append(str(context)))

    @initialize(connections=st.integers(1, 3))
    def start(self, connections: int) -> None:
        """Run a proxy whose provider is this machine, with two sessions: one free, one under rules."""
        self.listening = bound(("127.0.0.1", 0))
        self.listening.setblocking(False)
        url = f"http://127.0.0.1:{self.listening.getsockname()[1]}"
        limits = {"model_upstream_connections": connections}
        self.proxy: Proxy = self.loop.run_until_complete(
            self.stack.enter_async_context(running_proxy(url, limits=limits))
        )
        self.proxy.put("s2", models=("m",), model_budget=ModelBudget(output_tokens=1 << 40))
        self.sessions = list(self.proxy.gateway.registry)

    # --- clients

    @rule(
        kinds=st.lists(st.sampled_from(sorted(REQUESTS)), min_size=1, max_size=3), cut=st.none() | st.integers(1, 400)
    )
    def a_client_asks(self, kinds: list[str], cut: int | None) -> None:
        """Connect and send requests, or their first bytes only."""
        if len(self.clients) == MOST:
            return
        sock = socket.create_connection(("127.0.0.1", self.proxy.port))
        sock.setblocking(False)
        self.clients.append(Far(sock))
        self._send(self.clients[-1], kinds, cut)

    @rule(which=st.integers(0, MOST), kinds=st.lists(st.sampled_from(sorted(REQUESTS)), min_size=1, max_size=2))
    def a_client_asks_again(self, which: int, kinds: list[str]) -> None:
        """Send more, after whatever was sent before."""
        if not self.clients:
            return
        client = self.clients[which % len(self.clients)]
        if client.asked >= 0:
            self._send(client, kinds, None)

    @rule(which=st.integers(0, MOST))
    def a_client_stops_reading_or_goes_on(self, which: int) -> None:
        if not self.clients:
            return
        client = self.clients[which % len(self.clients)]
        client.reads = not client.reads
        self._work()

    @rule(which=st.integers(0, MOST), how=st.sampled_from(["close", "reset", "half-close"]))
    def a_client_leaves(self, which: int, how: str) -> None:
        if not self.clients:
            return
        client = self.clients[which % len(self.clients)]
        client.end(how)
        # Whoever half-closes is taken for gone.
        client.asked = -1
        if how != "half-close":
            self.clients.remove(client)
        self._work()

    # --- the provider

    @rule(which=st.integers(0, MOST), what=st.sampled_from([*sorted(ANSWERS), "whole", "whole"]))
    def the_provider_sends(self, which: int, what: str) -> None:
        """Answer, also before it was asked, or with nonsense."""
        if not self.providers:
            return
        provider = self.providers[which % len(self.providers)]
        provider.unsent += ANSWERS[what]
        self._work()

    @rule(which=st.integers(0, MOST))
    def the_provider_stops_reading_or_goes_on(self, which: int) -> None:
        if not self.providers:
            return
        provider = self.providers[which % len(self.providers)]
        provider.reads = not provider.reads
        self._work()

    @rule(which=st.integers(0, MOST), how=st.sampled_from(["close", "reset", "half-close"]))
    def the_provider_ends_a_connection(self, which: int, how: str) -> None:
        if not self.providers:
            return
        provider = self.providers[which % len(self.providers)]
        provider.end(how)
        if how != "half-close":
            self.providers.remove(provider)
        self._work()

    # --- the gateway

    @rule(seconds=st.sampled_from([4.0, 1000.0, 10_000.0]))
    def time_passes(self, seconds: float) -> None:
        """Have all clients look at their clocks."""

        async def look() -> None:
            for client in list(self.proxy.gateway.model._clients):
                client.tick(time.monotonic() + seconds)

        self.loop.run_until_complete(look())
        self._work()

    @rule(which=st.sampled_from(["s1", "s2"]))
    def a_session_is_cut(self, which: str) -> None:
        """Close all that is open in its name, as a narrower grant does."""
        session = self.proxy.gateway.registry.get(which)
        assert session is not None

        async def cut() -> None:
            session.close(CloseReason.REVOKED)

        self.loop.run_until_complete(cut())
        for client in self.clients:
            client.asked = -1
        self._work()

    @invariant()
    def counts_are_those_of_what_is_open(self) -> None:
        if not hasattr(self, "proxy"):
            return
        model = self.proxy.gateway.model
        assert not self.faults
        exchanges = [client._exchange for client in self.proxy.clients if client._exchange is not None]
        assert model.running == len(exchanges) == sum(each.model.in_flight for each in self.sessions)
        assert model.held_bytes == sum(exchange._held_bytes for exchange in exchanges)
        assert model._lingering == sum(client._lingers for client in self.proxy.clients)
        assert model._waiting == 0
        pool = model.default.pool
        assert len(pool._open) - pool.idle_count == sum(exchange._upstream is not None for exchange in exchanges)
        for session in self.sessions:
            assert session.model.connections == session.open_count
            assert session.model._reserved_output >= 0 <= session.model._reserved_input

    def teardown(self) -> None:
        """The provider dies: then every request is answered or cut, and nothing is left."""
        try:
            if hasattr(self, "proxy"):
                self.loop.run_until_complete(self._finish())
                self._check_lines()
        finally:
            for far in (*self.clients, *self.providers):
                far.sock.close()
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
            self.loop.close()
        assert not self.faults
        assert open_descriptors() == self.before

    async def _finish(self) -> None:
        self.listening.close()
        for client in self.clients:
            client.reads = True
        for provider in self.providers:
            provider.end("reset")
        self.providers.clear()

        def is_over() -> bool:
            for client in self.clients:
                client.work()
            return all(client.has_ended or client.answers() >= client.asked for client in self.clients)

        await until(is_over)
        for client in self.clients:
            client.end("close")
        self.clients.clear()
        await until(lambda: self.proxy.gateway.model.client_count == 0)
        assert [(each.model.in_flight, each.model.connections) for each in self.sessions] == [(0, 0), (0, 0)]
        assert all(each.model._reserved_output == each.model._reserved_input == 0 for each in self.sessions)
        await self.stack.aclose()

    def _check_lines(self) -> None:
        lines = self.proxy.audit.lines
        events = [line.event for line in lines]
        assert events.count("allow") == events.count("close")
        free, ruled = (sum(line.session == name and line.event != "allow" for line in lines) for name in ("s1", "s2"))
        assert free == self.sessions[0].model.requests
        # One that left while its body was held was neither let pass nor refused.
        assert ruled <= self.sessions[1].model.requests

    # --- within

    def _send(self, client: Far, kinds: list[str], cut: int | None) -> None:
        data = b"".join(REQUESTS[kind] for kind in kinds)
        client.unsent += data if cut is None else data[:cut]
        if cut is not None:
            # What follows would be the rest of it.
            client.asked = -1
        elif client.asked >= 0:
            client.asked += len(kinds)
        self._work()

    def _work(self) -> None:
        self.loop.run_until_complete(self._turns())

    async def _turns(self) -> None:
        """Let things happen for a while; how far they come is for no rule to know."""
        for _ in range(30):
            with suppress(BlockingIOError):
                sock, _address = self.listening.accept()
                sock.setblocking(False)
                self.providers.append(Far(sock))
            for far in (*self.clients, *self.providers):
                far.work()
            await asyncio.sleep(0)


ModelConnections.TestCase.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
test_clients_and_a_provider_in_any_order_leave_right_counts_and_nothing_open = ModelConnections.TestCase
