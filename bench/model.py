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
        total = stage.settings.connections if self._body == _SMALL_BODY else stage.settings.connections // 4
        options = ["--connections", str(stage.settings.concurrency), "--body", str(self._body)]
        warmup = Client("requests", route, [*options, "--total", str(max(100, total // 20))], program="model").run()
        client = Client("requests", route, [*options, "--total", str(total)], program="model")
        result, usage = run_client(client, peer.pids(), stage.server, settled=True)
        take_usage(record, usage)
        record.values["requests_per_s"] = result["finished"] / result["seconds"]
        record.values["cpu_us_per_request"] = usage.peer / max(1, result["finished"]) * 1e6
        take_latency(record, result)
        return [warmup, result]


class FirstByte(Scenario):
    """How long a reply's first byte takes on a calm host: at `rate` requests a second, or a quarter of what the peer can do (None)."""

    _CONNECTIONS: Final = 256

    def __init__(self, rate: float | None) -> None:
        super().__init__("first-byte" if rate is None else f"first-byte-{rate:.0f}")
        self._rate = rate

    def expected_s(self, settings: Settings) -> float:
        return super().expected_s(settings) + (2 if self._rate is None else 0)

    def run(self, peer: Peer, stage: Stage, record: Record) -> list[dict[str, Any]]:
        route = cast(ModelPeer, peer).model_route()
        results, rate = [], self._rate
        if rate is None:
            most = stage.settings.connections // 4
            options = ["--connections", str(stage.settings.concurrency), "--total", str(most)]
            saturated = Client("requests", route, options, program="model").run()
            results.append(saturated)
            rate = saturated["finished"] / saturated["seconds"] * _QUARTER
        seconds = str(stage.settings.seconds)
        options = ["--connections", str(self._CONNECTIONS), "--rate", str(rate), "--seconds", seconds]
        client = Client("rated", route, options, program="model")
        result, usage = run_client(client, peer.pids(), stage.server, settled=False)
        take_usage(record, usage)
        record.values["requests_per_s"] = result["requests"] / (result["seconds"] + _WARMUP_S)
        take_latency(record, result, "first_us", "first_")
        return [*results, result]


class Memory(Scenario):
    """The gateway's resident memory before and after very many requests, which have to leave nothing behind."""

    def applies(self, peer: Peer, stage: Stage) -> bool:
        return peer.name == ModelGateway.name

    def expected_s(self, settings: Settings) -> float:
        return settings.connections * 5 / 4_000

    def run(self, peer: Peer, stage: Stage, record: Record) -> list[dict[str, Any]]:
        route, pids = cast(ModelPeer, peer).model_route(), peer.pids()
        total = stage.settings.connections * 5
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
    """Streams whose provider sends each event by itself, as fast as it is taken."""

    _STREAMS: Final = 16
    _EVENTS: Final = 200

    def run(self, peer: Peer, stage: Stage, record: Record) -> list[dict[str, Any]]:
        route = cast(ModelPeer, peer).model_route().asking(f"bench=events:{self._EVENTS}")
        options = ["--connections", str(self._STREAMS), "--seconds", str(stage.settings.seconds)]
        client = Client("events", route, options, program="model")
        result, usage = run_client(client, peer.pids(), stage.server, settled=False)
        take_usage(record, usage)
        record.values["events_per_s"] = result["events"] / result["seconds"]
        if result["events"]:
            record.values["cpu_us_per_event"] = usage.peer / result["events"] * 1e6
        take_latency(record, result, "first_us", "first_")
        return [result]


class Paced(Scenario):
    """Streams at the pace of a model: how late an event comes, and what many open streams cost."""

    def __init__(self, streams: int, per_second: int) -> None:
        super().__init__(f"paced-{streams}" if per_second == _CALM else f"paced-{streams}-fast")
        self._streams = streams
        self._per_second = per_second

    def run(self, peer: Peer, stage: Stage, record: Record) -> list[dict[str, Any]]:
        seconds = stage.settings.seconds
        # Every stream outlasts the measured window.
        events = int((seconds + _WARMUP_S + 1.5) * self._per_second)
        pace = 1000 // self._per_second
        route = cast(ModelPeer, peer).model_route().asking(f"bench=paced:{events}:{pace}")
        # A quick run has fewer.
        streams = min(self._streams, stage.settings.connections // 3)
        options = ["--connections", str(streams), "--seconds", str(seconds), "--warmup", str(_WARMUP_S)]
        options += ["--pace", str(pace)]
        client = Client("paced", route, options, program="model")
        pids = peer.pids()
        result, usage = run_client(client, pids, stage.server, settled=False)
        take_usage(record, usage)
        record.values["events_per_s"] = result["events"] / result["seconds"]
        record.values["delivered"] = result["events"] / result["seconds"] / (streams * self._per_second)
        if result["events"]:
            record.values["cpu_us_per_event"] = usage.peer / result["events"] * 1e6
        record.values["rss_mb"] = rss_bytes(pids) / 1e6
        take_latency(record, result, "late_us", "late_")
        return [result]


def scenarios() -> list[Scenario]:
    """Return all scenarios, in the order they are run."""
    return [
        Requests("requests-small", _SMALL_BODY),
        Requests("requests-large", _LARGE_BODY),
        FirstByte(None),
        FirstByte(_SAME_RATE),
        Events("events-stream"),
        Paced(1000, _CALM),
        Paced(1000, _FAST),
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
