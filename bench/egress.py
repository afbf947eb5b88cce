"""Scenarios of the egress proxy, run in interleaved rounds: every peer once a round, in another order each time."""

import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from bench.load import Client, LoadError, Server
from bench.measure import run_client
from bench.names import ZONE, NameServer, client_hello
from bench.peers import Peer
from bench.peers.base import Ground
from bench.processes import rss_bytes
from bench.records import Record, Run
from bench.rounds import Scenario, Settings, Stage, run_rounds, take_latency, take_usage

_PLAIN_NAME: Final = f"plain.{ZONE}"
_TLS_NAME: Final = f"tls.{ZONE}"
_GB: Final = 1e9
# Before connections are measured.
_WARMUP_S: Final = 0.5
# Longer than the gateway looks again and again for the next message (gateway/net/poller.py), and than a core stays awake.
_PACE_MS: Final = 2
# Tunnels of the curves. 5,000 take 10,000 descriptors of a proxy, which may have 20,000. Bulk ends earlier:
# what 1,000 tunnels have in flight is more than the kernel grants TCP in all (tcp_mem), and its pruning would be measured.
BULK_SCALE: Final = (1, 4, 16, 64, 256)
CONNECTION_SCALE: Final = (1, 8, 32, 128, 512, 2000, 5000)


class Bulk(Scenario):
    """Bytes through 1, 16 or 256 tunnels."""

    def __init__(self, tunnels: int, direction: str) -> None:
        super().__init__(f"bulk-{tunnels}-{direction}")
        self.tunnels = tunnels
        self.direction = direction

    def expected_s(self, settings: Settings) -> float:
        return settings.seconds + (1.0 if self.tunnels < 100 else 2.5)

    def run(self, peer: Peer, stage: Stage, record: Record) -> list[dict[str, Any]]:
        # Until buffers and pipes are full, what is sent is not yet what is moved.
        warmup = min(0.5 if self.tunnels < 100 else 1.5, stage.settings.seconds)
        options = ["--tunnels", str(self.tunnels), "--direction", self.direction]
        # What thousands of tunnels hold in buffers takes a while to end in order.
        options += ["--seconds", str(stage.settings.seconds), "--warmup", str(warmup), "--timeout", "30"]
        client = Client("bulk", peer.route(), options)
        result, usage = run_client(client, peer.pids(), stage.server, settled=False)
        take_usage(record, usage)
        record.values["gb_per_s"] = result["bytes"] / result["seconds"] / _GB
        if result["bytes"]:
            record.values["cpu_s_per_gb"] = usage.peer / (result["bytes"] / _GB)
        if result["most_bytes"]:
            record.values["fairness"] = result["least_bytes"] / result["most_bytes"]
        return [result]


class Connections(Scenario):
    """Connections one after the other: CONNECT, one byte there and back, close.

    `tls`: with a ClientHello first. `fresh`: no two heads are the same, so that nothing remembered about one helps.
    """

    def __init__(self, *, tls: bool = False, fresh: bool = False, concurrency: int | None = None) -> None:
        kind = "-tls" if tls else "-fresh" if fresh else ""
        super().__init__(f"connections{kind}" + (f"-{concurrency}" if concurrency else ""))
        self._tls = tls
        self._fresh = fresh
        self._concurrency = concurrency

    def applies(self, peer: Peer, stage: Stage) -> bool:
        if self._fresh and peer.route().connect is None:
            return False
        return not self._tls or bool(stage.ground.tls)

    def run(self, peer: Peer, stage: Stage, record: Record) -> list[dict[str, Any]]:
        settings = stage.settings
        options = ["--concurrency", str(self._concurrency or settings.concurrency), "--timeout", "30"]
        options += ["--seconds", str(settings.seconds), "--warmup", str(min(_WARMUP_S, settings.seconds))]
        if self._tls:
            options += ["--hello", str(stage.hello)]
        if self._fresh:
            options.append("--fresh")
        client = Client("connect", peer.route(tls=self._tls), options)
        # What is still to be closed and logged at the end of the window is what was at its beginning.
        result, usage = run_client(client, peer.pids(), stage.server, settled=False)
        take_usage(record, usage)
        record.values["connections_per_s"] = result["connections"] / result["seconds"]
        if result["connections"]:
            record.values["cpu_us_per_connection"] = usage.peer / result["connections"] * 1e6
        take_latency(record, result)
        return [result]


class Echo(Scenario):
    """One byte back and forth: what the peer adds to each message. Beside it nothing, bulk, or readers that stalled.

    With `pace_ms` a message is sent so often and timed from when it was due, otherwise as soon as the last is back.
    """

    def __init__(self, name: str, *, tunnels: int = 1, bulk: int = 0, stalled: int = 0, pace_ms: int = 0) -> None:
        super().__init__(name)
        self._tunnels = tunnels
        self._pace_ms = pace_ms
        self._bulk = bulk
        self._stalled = stalled

    def run(self, peer: Peer, stage: Stage, record: Record) -> list[dict[str, Any]]:
        route, seconds = peer.route(), stage.settings.seconds
        beside: list[Client] = []
        if self._stalled:
            stalled = Client("idle", route, ["--tunnels", str(self._stalled), "--stalled"])
            stalled.start()
            beside.append(stalled)
            stalled.wait_open()
        if self._bulk:
            options = ["--tunnels", str(self._bulk), "--seconds", str(seconds + 1), "--warmup", "0.2"]
            bulk = Client("bulk", route, options)
            bulk.start()
            beside.append(bulk)
        try:
            options = ["--tunnels", str(self._tunnels), "--seconds", str(seconds), "--pace", str(self._pace_ms)]
            result, usage = run_client(Client("echo", route, options), peer.pids(), stage.server, settled=False)
        finally:
            others = [client.finish() for client in beside]
        if self._stalled:
            others[0]["cut_off"] = True
        take_latency(record, result)
        if beside:
            record.values["bulk_gb_per_s"] = sum(other.get("bytes", 0) for other in others) / (seconds + 1) / _GB
        else:
            take_usage(record, usage)
            messages = result["latency_us"]["count"] if "latency_us" in result else 0
            if messages:
                record.values["cpu_us_per_message"] = usage.peer / messages / 2 * 1e6
        return [result, *others]


class Idle(Scenario):
    """Memory of tunnels that are only open."""

    _STEPS: Final = (0.2, 0.5, 1.0)

    def __init__(self) -> None:
        super().__init__("idle")

    def applies(self, peer: Peer, stage: Stage) -> bool:
        del stage
        return peer.name != "direct"

    def expected_s(self, settings: Settings) -> float:
        return settings.idle_tunnels / 2_000 + 0.5

    def run(self, peer: Peer, stage: Stage, record: Record) -> list[dict[str, Any]]:
        wanted, held = stage.settings.idle_tunnels, 0
        clients: list[Client] = []
        empty = rss_bytes(peer.pids())
        record.values["rss_mb_0"] = empty / 1e6
        try:
            for part in self._STEPS:
                more = int(wanted * part) - held
                client = Client("idle", peer.route(), ["--tunnels", str(more)])
                client.start()
                clients.append(client)
                held += client.wait_open()["tunnels"]
                record.values[f"rss_mb_{int(wanted * part)}"] = rss_bytes(peer.pids()) / 1e6
            full = rss_bytes(peer.pids())
        finally:
            results = [client.finish() for client in clients]
        record.values["rss_mb"] = full / 1e6
        if held:
            record.values["rss_kib_per_tunnel"] = (full - empty) / held / 1024
        return results


def scenarios() -> list[Scenario]:
    """Return all scenarios, in the order they are run."""
    found: list[Scenario] = [
        Bulk(tunnels, direction) for tunnels in (1, 16, 256) for direction in ("down", "up", "both")
    ]
    found += [Connections(), Connections(tls=True), Connections(fresh=True)]
    found += [
        Echo("echo"),
        Echo("echo-64", tunnels=64),
        Echo("echo-paced", pace_ms=_PACE_MS),
        Echo("echo-under-bulk", bulk=4),
        Echo("echo-stalled-readers", bulk=1, stalled=100),
    ]
    found.append(Idle())
    return found


def scaling() -> list[Scenario]:
    """Return the scenarios of the curves: throughput and rate against the number of tunnels, from one to thousands."""
    found: list[Scenario] = [Bulk(tunnels, "down") for tunnels in BULK_SCALE]
    return [*found, *(Connections(concurrency=number) for number in CONNECTION_SCALE)]


def run(
    run_: Run,
    suite: str,
    peers: Sequence[Peer],
    chosen: Sequence[Scenario],
    settings: Settings,
    say: Callable[[str], None],
) -> None:
    """Run the rounds and add their records to `run_` under the suite's name. `say` is told of each step."""
    # Port 443 of a loopback address that most likely nothing else uses.
    tls_address = "127.{}.{}.1".format(*random.sample(range(16, 240), 2))
    try:
        server = Server(["127.0.0.1:0", f"{tls_address}:443"])
    except LoadError as error:
        run_.notes.append(f"without TLS scenarios: {error}")
        server = Server(["127.0.0.1:0"])
    plain = server.addresses[0]
    tls = server.addresses[1] if len(server.addresses) > 1 else ""
    names = NameServer({_PLAIN_NAME: "127.0.0.1", _TLS_NAME: tls_address})
    port = plain.rpartition(":")[2]
    ground = Ground(plain, f"{_PLAIN_NAME}:{port}", tls, f"{_TLS_NAME}:443" if tls else "", names.address)
    try:
        with tempfile.TemporaryDirectory(prefix="bench-hello-") as directory:
            hello = Path(directory) / "hello"
            hello.write_bytes(client_hello(_TLS_NAME))
            stage = Stage(settings, server, ground, hello)
            run_rounds(run_, suite, peers, chosen, stage, say)
    finally:
        names.close()
        server.stop()
