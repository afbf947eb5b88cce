"""A bad wire between gateway and model provider: a reply is whole or seen to be cut, what was used is booked, nobody else waits."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import pytest

from gateway.core.providers import ProviderSettings
from gateway.core.verdict import CloseReason
from tests.model.harness import Proxy, running_proxy
from tests.model.wire import STREAM_HEAD, Peer, Reply, Upstream, ask, chunked, connected, reply, request, scripted
from tests.support.faults import Fault, FaultProxy, Kind, Way
from tests.support.patience import PATIENCE_S, until

SLOW: Final = (
    Fault(Kind.DELAY, seconds=0.01),
    Fault(Kind.STALL, after=3_000),
    Fault(Kind.SPLIT, size=23),
    Fault(Kind.BANDWIDTH, rate=256 * 1024),
)
# Both ends or the reply's way only: the gateway sees a reset, an end, an end.
CUTTING: Final = pytest.mark.parametrize("kind", [Kind.RESET, Kind.TRUNCATE, Kind.HALF_CLOSE])
PLACES: Final = pytest.mark.parametrize("place", ["head", "body", "last"])
# More than the wire's sockets hold.
LONG: Final = b'{"model":"m","content":"' + b"x" * 20_000_000 + b'"}'
_DELTA: Final = b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"text":"%b"}}\n\n'


def _event(kind: str, **data: object) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **data})}\n\n".encode()


EVENTS: Final = (
    _event("message_start", message={"model": "m", "usage": {"input_tokens": 25, "output_tokens": 1}}),
    *(_DELTA % os.urandom(300).hex().encode() for _ in range(20)),
    _event("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 15}),
    _event("message_stop"),
)
_MESSAGE: Final = json.dumps(
    {"model": "m", "content": os.urandom(6_000).hex(), "usage": {"input_tokens": 25, "output_tokens": 15}}
).encode()


@dataclass(frozen=True)
class Framed:
    """A reply: as the provider sends it, and its body without framing."""

    whole: bytes
    body: bytes

    def length(self, place: str) -> int:
        """Return how many bytes come before a cut at a place."""
        return {"head": 20, "body": len(self.whole) // 2, "last": len(self.whole) - 3}[place]


REPLIES: Final = {
    "stream": Framed(STREAM_HEAD + chunked(*EVENTS), b"".join(EVENTS)),
    "stream to the end": Framed(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + b"".join(EVENTS), b"".join(EVENTS)
    ),
    "json": Framed(reply(_MESSAGE), _MESSAGE),
}
FRAMINGS: Final = pytest.mark.parametrize("framing", list(REPLIES))


@asynccontextmanager
async def bad_wire(framing: str, silence_ms: int = 60_000) -> AsyncIterator[tuple[Proxy, FaultProxy, Upstream]]:
    """A proxy whose provider is behind a bad wire; its provider `good` is the same without one."""
    limits = {"model_idle_timeout_ms": silence_ms, "model_first_byte_timeout_ms": silence_ms}

    async def answer(peer: Peer) -> None:
        while True:
            await peer.request()
            await peer.send(REPLIES[framing].whole)
            if framing == "stream to the end":
                return

    async with scripted(answer) as upstream:
        with FaultProxy(("127.0.0.1", upstream.port)) as wire:
            url = "http://{}:{}".format(*wire.address)
            good = ProviderSettings(name="good", upstream=upstream.url, shape="anthropic")
            async with running_proxy(url, limits=limits, providers=(good,)) as proxy:
                proxy.put("second")
                yield proxy, wire, upstream


async def neighbour_is_served(proxy: Proxy, framing: str) -> None:
    data = request(path="/model/second/good/v1/messages")
    assert (await ask(proxy.port, data)).body == REPLIES[framing].body


async def refused_or_cut(proxy: Proxy, data: bytes) -> int:
    """Ask; return the status of the refusal, 0 if the reply began and is seen to be cut. A whole reply fails the test."""
    async with connected(proxy.port) as client:
        # It may be answered before it has said all.
        sending = asyncio.create_task(client.send(data))
        try:
            answer = await client.reply()
        except (EOFError, ConnectionError):
            return 0
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        assert answer.status >= 500, answer
        return answer.status


def last_line(proxy: Proxy) -> tuple[str, str]:
    line = proxy.audit.lines[-1]
    return line.event, line.reason


@FRAMINGS
@pytest.mark.parametrize("fault", SLOW, ids=lambda fault: str(fault.kind))
async def test_a_slow_wire_brings_the_reply_whole_and_stops_nobody_else(framing: str, fault: Fault) -> None:
    async with bad_wire(framing) as (proxy, wire, _):
        wire.set(fault)
        asking: asyncio.Task[Reply] = asyncio.create_task(ask(proxy.port, request()))
        await until(lambda: bool(wire.acted))
        await neighbour_is_served(proxy, framing)
        if fault.kind is Kind.STALL:
            assert not asking.done()
            wire.clear()
        assert (await asking).body == REPLIES[framing].body
        await proxy.settled()
        used = proxy.usage()
        assert (used.model_requests, used.input_tokens, used.output_tokens) == (1, 25, 15)


@FRAMINGS
@PLACES
@CUTTING
async def test_a_reply_that_the_wire_cuts_never_looks_whole_and_is_booked_as_far_as_it_came(
    framing: str, place: str, kind: Kind
) -> None:
    async with bad_wire(framing) as (proxy, wire, upstream):
        wire.set(Fault(kind, after=REPLIES[framing].length(place), way=Way.DOWN))
        status = await refused_or_cut(proxy, request())
        # What a reset overtakes is lost, the head too.
        assert status == 502 if place == "head" else status == 0 or kind is Kind.RESET
        await proxy.settled()
        assert last_line(proxy) == ("close", CloseReason.UPSTREAM_FAILED)
        used = proxy.usage()
        assert used.model_requests == 1
        if status == 0 and framing != "json" and kind is not Kind.RESET:
            assert (used.input_tokens, used.output_tokens) == (25, 15 if place == "last" else 1)
        # Not asked again by the gateway: it cannot know what the first request has done.
        assert upstream.requests == 1
        wire.clear()
        assert (await ask(proxy.port, request())).body == REPLIES[framing].body


@CUTTING
async def test_a_request_that_the_wire_cuts_is_refused_and_never_sent_again(kind: Kind) -> None:
    async with bad_wire("json") as (proxy, wire, upstream):
        wire.set(Fault(kind, after=50_000, way=Way.UP))
        assert await refused_or_cut(proxy, request(LONG)) == 502
        await proxy.settled()
        assert last_line(proxy)[1] == "upstream_failed"
        assert upstream.requests == 1
        assert len(upstream.received[0]) < len(LONG)
        wire.clear()
        assert (await ask(proxy.port, request())).body == _MESSAGE


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        (Fault(Kind.STALL), 504),
        (Fault(Kind.STALL, after=50_000, way=Way.UP), 504),
        (Fault(Kind.STALL, after=20, way=Way.DOWN), 504),
        (Fault(Kind.STALL, after=3_000, way=Way.DOWN), 0),
    ],
    ids=["all", "request", "head", "body"],
)
async def test_a_wire_that_stalls_for_good_is_given_up_in_time(fault: Fault, status: int) -> None:
    async with bad_wire("stream", silence_ms=1_000) as (proxy, wire, upstream):
        wire.set(fault)
        asking = asyncio.create_task(refused_or_cut(proxy, request(LONG if fault.way is Way.UP else b"{}")))
        await until(lambda: bool(wire.acted))
        await neighbour_is_served(proxy, "stream")
        async with asyncio.timeout(PATIENCE_S):
            assert await asking == status
        await proxy.settled()
        assert last_line(proxy)[1] in ("timeout", "upstream_timeout")
        assert sum(b" HTTP/1.1" in data for data in upstream.received) <= 2
