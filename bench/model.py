"""Scenarios of the model proxy: requests one after the other, streams of events, and a thousand paced streams at once."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, cast

from bench.load import Client, Server
from bench.measure import run_client
from bench.peers.base import Ground, Peer
from bench.peers.model import MODEL_PEERS, ModelCommand, ModelGateway, ModelPeer
from bench.processes import rss_bytes
from bench.records import Record, Run
from bench.rounds import Scenario, Settings, Stage, run_rounds, take_latency, take_usage

SUITE: Final = "model"
# Of the rate at which a peer is saturated, when its delay is asked for.
_QUARTER: Final = 0.25
# Requests a second, about that quarter for a relay on aiohttp: at its own quarter a peer that can do more is asked more.
_SAME_RATE: Final = 1_000
# Of a load client, before what it measures.
_WARMUP_S: Final = 0.5
# How long a peer is saturated to find out what it can do.
_SATURATED_S: Final = 1.0
# A gateway that keeps a little of each request shows it only after so many.
MANY_REQUESTS: Final = 100_000
_PACED_STREAMS: Final = 1_000
# Events of a stream in a second.
_CALM: Final = 10
_FAST: Final = 50
# What a coding agent sends: a conversation of some length.
_LARGE_BODY: Final = 115_000
_SMALL_BODY: Final = 2_000


class Requests(Scenario):
    """Requests with a short JSON reply: what a request costs beside its bytes, or with a body as agents send it."""

    def __init__(self, name: str, body: int) -> None:
        super().__init__(name)
        self._body = body

    def run(self, peer: Peer, stage: Stage, record: Record) -> list[dict[str, Any]]:
        route = cast(ModelPeer, peer).model_route()
        options = ["--connections", str(stage.settings.concurrency), "--body", str(self._body)]
        client = Client("requests", route, [*options, *_by_time(stage.settings.seconds)], program="model")
        # What is still to be logged at the end of the window is what was at its beginning.
        result, usage = run_client(client, peer.pids(), stage.server, settled=False)
        take_usage(record, usage)
        record.values["requests_per_s"] = result["measured"] / result["seconds"]
        if result["measured"]:
            record.values["cpu_us_per_request"] = usage.peer / result["measured"] * 1e6
        take_latency(record, result)
        return [result]


class FirstByte(Scenario):
    """How long a reply's first byte takes on a calm host: at `rate` requests a second, or a quarter of what the peer can do (None)."""

    _CONNECTIONS: Final = 256

    def __init__(self, rate: float | None) -> None:
        super().__init__("first-byte" if rate is None else f"first-byte-{rate:.0f}")
        self._rate = rate

    def expected_s(self, settings: Settings) -> float:
        return super().expected_s(settings) + (_SATURATED_S + _WARMUP_S if self._rate is None else 0)

    def run(self, peer: Peer, stage: Stage, record: Record) -> list[dict[str, Any]]:
        route = cast(ModelPeer, peer).model_route()
        results, rate = [], self._rate
        if rate is None:
            options = ["--connections", str(stage.settings.concurrency), *_by_time(_SATURATED_S)]
            saturated = Client("requests", route, options, program="model").run()
            results.append(saturated)
            # One that answered nothing in time is asked something all the same: its errors are the result.
            rate = max(1.0, saturated["measured"] / saturated["seconds"] * _QUARTER)
        options = ["--connections", str(self._CONNECTIONS), "--rate", str(rate), *_by_time(stage.settings.seconds)]
        client = Client("rated", route, options, program="model")
        result, usage = run_client(client, peer.pids(), stage.server, settled=False)
        take_usage(record, usage)
        record.values["requests_per_s"] = result["measured"] / result["seconds"]
        take_latency(record, result, "first_us", "first_")
        return [*results, result]


class Memory(Scenario):
    """The gateway's resident memory before and after very many requests, which have to leave nothing behind."""

    def applies(self, peer: Peer, stage: Stage) -> bool:
        return peer.name == ModelGateway.name

    def expected_s(self, settings: Settings) -> float:
        return _many_requests(settings) / 4_000

    def run(self, peer: Peer, stage: Stage, record: Record) -> list[dict[str, Any]]:
        route, pids = cast(ModelPeer, peer).model_route(), peer.pids()
        total = _many_requests(stage.settings)
        options = ["--connections", str(stage.settings.concurrency)]
        warmup = Client("requests", route, [*options, "--total", str(total // 5)], program="model").run()
        before = rss_bytes(pids)
        client = Client("requests", route, [*options, "--total", str(total)], program="model")
        result, usage = run_client(client, pids, stage.server, settled=True)
        take_usage(record, usage)
        record.values["requests"] = result["finished"]
        record.values["rss_mb"] = rss_bytes(pids) / 1e6
        record.values["growth_mb"] = (rss_bytes(pids) - before) / 1e6
        return [warmup, result]


class Events(Scenario):
    """Streams whose provider sends each event by itself, as fast as it is taken: CPU, and how long an event is on its way."""

    _STREAMS: Final = 16
    _EVENTS: Final = 200

    def run(self, peer: Peer, stage: Stage, record: Record) -> list[dict[str, Any]]:
        route = cast(ModelPeer, peer).model_route().asking(f"bench=events:{self._EVENTS}")
        options = ["--connections", str(self._STREAMS), *_by_time(stage.settings.seconds)]
        client = Client("events", route, options, program="model")
        result, usage = run_client(client, peer.pids(), stage.server, settled=False)
        take_usage(record, usage)
        record.values["events_per_s"] = result["events"] / result["seconds"]
        if result["events"]:
            record.values["cpu_us_per_event"] = usage.peer / result["events"] * 1e6
        take_latency(record, result, "first_us", "first_")
        take_latency(record, result, "late_us", "late_")
        return [result]


class Paced(Scenario):
    """A thousand streams at the pace of a model: how late an event comes after it was due, and what many open streams cost."""

    def __init__(self, name: str, per_second: int) -> None:
        super().__init__(name)
        self._per_second = per_second

    def run(self, peer: Peer, stage: Stage, record: Record) -> list[dict[str, Any]]:
        seconds = stage.settings.seconds
        # Every stream outlasts the measured window.
        events = int((seconds + _WARMUP_S + 1.5) * self._per_second)
        pace = 1000 // self._per_second
        route = cast(ModelPeer, peer).model_route().asking(f"bench=paced:{events}:{pace}")
        streams = _PACED_STREAMS // 10 if _is_quick(stage.settings) else _PACED_STREAMS
        options = ["--connections", str(streams), *_by_time(seconds), "--pace", str(pace)]
        client = Client("paced", route, options, program="model")
        pids = peer.pids()
        result, usage = run_client(client, pids, stage.server, settled=False)
        take_usage(record, usage)
        record.values["events_per_s"] = result["events"] / result["seconds"]
        # Less than all when the peer falls behind: then the lateness is only of those that came within the window.
        record.values["delivered"] = result["events"] / result["seconds"] / (streams * self._per_second)
        if result["events"]:
            record.values["cpu_us_per_event"] = usage.peer / result["events"] * 1e6
        record.values["rss_mb"] = rss_bytes(pids) / 1e6
        take_latency(record, result, "late_us", "late_")
        return [result]


def _by_time(seconds: float) -> list[str]:
    return ["--seconds", str(seconds), "--warmup", str(_WARMUP_S)]


def _is_quick(settings: Settings) -> bool:
    return settings == Settings.quick()


def _many_requests(settings: Settings) -> int:
    return MANY_REQUESTS // 100 if _is_quick(settings) else MANY_REQUESTS


def scenarios() -> list[Scenario]:
    """Return all scenarios, in the order they are run."""
    return [
        Requests("requests-small", _SMALL_BODY),
        Requests("requests-large", _LARGE_BODY),
        FirstByte(None),
        FirstByte(_SAME_RATE),
        Events("events-stream"),
        Paced("paced-1000", _CALM),
        Paced("paced-1000-fast", _FAST),
        Memory("memory"),
    ]


def choose_peers(names: Sequence[str], commands: Sequence[str]) -> list[Peer]:
    """Return the peers that are named (none: all), and others given as `NAME=COMMAND`. Raises ValueError."""
    known = {peer.name: peer for peer in MODEL_PEERS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"no such peer: {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    found: list[Peer] = [kind() for name, kind in known.items() if not names or name in names]
    for text in commands:
        name, separator, line = text.partition("=")
        if not separator or "{port}" not in line:
            raise ValueError(f"{text!r} is not NAME=COMMAND with {{port}} and {{upstream}} in it")
        found.append(ModelCommand(name, line))
    return found


def run(
    run_: Run, peers: Sequence[Peer], chosen: Sequence[Scenario], settings: Settings, say: Callable[[str], None]
) -> None:
    """Run the rounds and add their records to `run_`. Raises LoadError without a C compiler."""
    server = Server(["127.0.0.1:0"], program="model")
    try:
        stage = Stage(settings, server, Ground(server.addresses[0], "", "", "", ""), Path())
        run_rounds(run_, SUITE, peers, chosen, stage, say)
    finally:
        server.stop()
