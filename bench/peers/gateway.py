"""The gateway as a peer, with everything on: credentials, rules, a resolved and cached name, address classes, budget, slots,
ClientHello check, audit log, metrics. That it is on is proved before anything is measured and after each run.
"""

import base64
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar, Final

import control
import gateway
from bench.load import Route
from bench.names import client_hello
from bench.peers.base import CheckError, Ground, Peer
from bench.processes import FIRST_UID, Process, accepts, free_port
from control.plan.host import ForwarderSettings

# What the forwarder's image holds, and the door there.
_FORWARDER: Final = Path(control.__file__).parent / "images/forwarder/haproxy.cfg"
_DOOR: Final = "/door/sandbox.sock"

SESSION: Final = "bench"
TOKEN: Final = "a-token-for-benchmarks-only-0123456789abcdef"
_ALERT: Final = 0x15
# Rules beside the one that matches: a grant of some size, as a real session has it.
_ALLOW: Final = (*(f"*.team{number}.example" for number in range(12)), "git.example.org:22", "192.0.2.7:443")
_DENY: Final = ("*.telemetry.example", "paste.example", "198.51.100.9", "*.internal.bench.example")


class GatewayPeer(Peer):
    """One gateway process, reached over loopback as a sandbox reaches it through the forwarder."""

    name = "gateway"
    checks = "credentials, rules, cached DNS, address classes, budget, slots, ClientHello on 443, audit log, metrics"
    reads_hello = True
    uid = FIRST_UID
    # How long the gateway may take to write its last audit lines.
    settle_s: ClassVar[float] = 30

    def __init__(self) -> None:
        super().__init__()
        self._port = 0
        self._metrics_port = 0
        self._audit = Path()
        self._offset = 0

    def about(self) -> str:
        return f"opificia-gateway {metadata.version('opificia-sandbox-host')}, uvloop {metadata.version('uvloop')}"

    def _listen(self, directory: Path) -> str:
        """Return the lines of [listen] that say where sandboxes come in."""
        del directory
        self._port = free_port()
        return f'sandbox = "127.0.0.1:{self._port}"\n'

    def _config(self, ground: Ground, directory: Path) -> str:
        self._metrics_port = free_port()
        # No limit of [limits] is off; the audit log keeps every line because every line is compared. All of the
        # load is one source, where sandboxes have an address each.
        nameservers = [ground.nameserver] if ground.nameserver else []
        return (
            f'[listen]\n{self._listen(directory)}metrics = "127.0.0.1:{self._metrics_port}"\n'
            f'[sessions]\nfile = "{directory}/sessions.toml"\n'
            f"[egress]\nallow_loopback = true\nnameservers = {json.dumps(nameservers)}\n"
            f'[audit]\ndir = "{directory}/egress"\n'
            f"[limits]\nmax_egress_log_lines = 1_000_000_000\n"
            f"unauthenticated_per_source = 10_000\nunauthenticated_total = 10_000\n"
        )

    def _session(self) -> str:
        return (
            f'[[session]]\nid = "{SESSION}"\ntoken = "{TOKEN}"\nnetwork = "registries"\n'
            f"allow = {json.dumps(['*.bench.example', *_ALLOW])}\ndeny = {json.dumps(_DENY)}\n"
            f"egress_budget = {{ bytes = {10**15}, connections = 10_000 }}\n"
        )

    def _start(self, ground: Ground, directory: Path) -> None:
        # The checkout may be in a home that the gateway's user cannot enter.
        package = Path(gateway.__file__).parent
        shutil.copytree(package, directory / "code/gateway", ignore=shutil.ignore_patterns("__pycache__"))
        self._audit = directory / "egress" / f"{SESSION}.log"
        self._offset = 0
        self._audit.parent.mkdir()
        (directory / "gateway.toml").write_text(self._config(ground, directory))
        (directory / "sessions.toml").write_text(self._session())
        if os.geteuid() == 0:
            os.chown(self._audit.parent, self.uid, self.uid)
        path = os.pathsep.join(filter(None, (str(directory / "code"), os.environ.get("PYTHONPATH"))))
        process = Process(
            [sys.executable, "-m", "gateway", "--config", str(directory / "gateway.toml")],
            log=directory / "log",
            uid=self.uid,
            cwd=directory,
            environment={**os.environ, "PYTHONPATH": path, "HOME": "/nonexistent"},
        )
        self._processes.append(process)
        process.wait_for(lambda: accepts(self._metrics_port) and self._is_up(), self.name)

    def _is_up(self) -> bool:
        return accepts(self._port)

    def route(self, *, tls: bool = False) -> Route:
        assert self._ground is not None
        target = self._ground.tls_name if tls else self._ground.plain_name
        return Route(f"127.0.0.1:{self._port}", target, f"{SESSION}:{TOKEN}")

    def _verify(self, ground: Ground) -> None:
        """Prove that each check refuses what it should, then that the right request passes."""
        good = f"{SESSION}:{TOKEN}"
        for target, credentials, status in (
            (ground.plain_name, "", 407),
            (ground.plain_name, f"{SESSION}:{TOKEN}x", 407),
            ("host.internal.bench.example:443", good, 403),
            ("elsewhere.example:443", good, 403),
            ("127.0.0.1:9", good, 403),
            (f"{ground.plain_name.partition(':')[0]}:{self._metrics_port}", good, 403),
        ):
            reply = self._ask(target, credentials)
            if not reply.startswith(f"HTTP/1.1 {status} ".encode()):
                raise CheckError(f"gateway: CONNECT {target} was answered {reply[:80]!r}, not {status}")
        if ground.tls:
            reply = self._ask(ground.tls_name, good, client_hello("another.bench.example"))
            if not reply or reply[0] != _ALERT:
                raise CheckError(f"gateway: a ClientHello for another host was answered {reply[:80]!r}")
        self._verify_open(ground, good)
        self._settle(lambda: self._read_audit()["close"] >= (2 if ground.tls else 1))
        self._offset = self._audit.stat().st_size

    def _verify_open(self, ground: Ground, credentials: str) -> None:
        """The right request passes, and ends. Bytes without a ClientHello to port 443 do not."""
        reply = self._ask(ground.plain_name, credentials, b"1")
        if reply != b"1":
            raise CheckError(f"gateway: the right request was answered {reply[:80]!r}")
        if ground.tls:
            reply = self._ask(ground.tls_name, credentials, client_hello(ground.tls_name.partition(":")[0]) + b"1")
            if reply != b"1":
                raise CheckError(f"gateway: the right ClientHello was answered {reply[:80]!r}")
            reply = self._ask(ground.tls_name, credentials, b"1")
            if not reply or reply[0] != _ALERT:
                raise CheckError(f"gateway: no TLS on port 443 was answered {reply[:80]!r}")

    def _ask(self, target: str, credentials: str, first: bytes = b"") -> bytes:
        """Send a CONNECT, and `first` once it is answered 200; return the last answer, read to its end."""
        head = f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n"
        if credentials:
            head += f"Proxy-Authorization: Basic {base64.b64encode(credentials.encode()).decode()}\r\n"
        with socket.create_connection(("127.0.0.1", self._port), timeout=10) as client:
            client.sendall(head.encode() + b"\r\n")
            reply = client.recv(4096)
            if not reply.startswith(b"HTTP/1.1 200 ") or not first:
                return reply
            client.sendall(first)
            reply = b""
            while data := client.recv(4096):
                reply += data
            return reply

    def compare(self, results: Sequence[dict[str, Any]]) -> list[str]:
        """One `allow` and one `close` line for each tunnel, and the bytes of both directions in the `close` lines."""
        tunnels = sum(result["tunnels"] for result in results)
        self._settle(lambda: self._read_audit()["close"] >= tunnels)
        found = self._read_audit()
        self._offset = self._audit.stat().st_size
        problems = [
            f"the audit log has {found[event]} `{event}` lines for {tunnels} tunnels"
            for event in ("allow", "close")
            if found[event] != tunnels
        ]
        if found["refuse"]:
            problems.append(f"{found['refuse']} requests were refused")
        for way, total in (("up", "total_up"), ("down", "total_down")):
            made = sum(result[total] for result in results)
            # Tunnels that the load cut off (stalled readers) have taken in more than came out.
            cut_off = any(result.get("cut_off") for result in results)
            if (found[way] < made) if cut_off else (found[way] != made):
                problems.append(f"the audit log counts {found[way]} bytes {way}, the load {made}")
        return problems

    def _settle(self, done: Callable[[], bool]) -> None:
        end = time.monotonic() + self.settle_s
        while not done() and time.monotonic() < end:
            time.sleep(0.05)

    def _read_audit(self) -> dict[str, int]:
        """Count the lines since the last comparison, by event, and the bytes of tunnels that ended."""
        found = {"allow": 0, "close": 0, "refuse": 0, "up": 0, "down": 0}
        if not self._audit.exists():
            return found
        with self._audit.open("rb") as file:
            file.seek(self._offset)
            for text in file:
                if not text.endswith(b"\n"):
                    break
                line = json.loads(text)
                found[line["event"]] += 1
                if line["event"] == "close":
                    found["up"] += line["bytes_up"]
                    found["down"] += line["bytes_down"]
        return found


class ForwardedGateway(GatewayPeer):
    """The same behind HAProxy with the configuration of the forwarder's image: TCP in, PROXY v2 out, through a unix socket."""

    name = "gateway+forwarder"
    uid = FIRST_UID + 6
    forwarder_uid = FIRST_UID + 7

    @classmethod
    def missing(cls) -> str:
        return "" if shutil.which("haproxy") else "haproxy is not installed"

    def about(self) -> str:
        return super().about() + ", behind HAProxy with PROXY v2 over a unix socket"

    def _listen(self, directory: Path) -> str:
        door = directory / "door"
        door.mkdir()
        if os.geteuid() == 0:
            os.chown(door, self.uid, self.forwarder_uid)
            door.chmod(0o2750)
        return f'sandbox = "unix:{door}/sandbox.sock"\nproxy_protocol = true\n'

    def _session(self) -> str:
        return super()._session() + 'address = "127.0.0.1"\n'

    def _start(self, ground: Ground, directory: Path) -> None:
        self._port = free_port()
        config = directory / "haproxy.cfg"
        shipped = _FORWARDER.read_text()
        if shipped.count(_DOOR) != 1:
            raise CheckError(f"{_FORWARDER.name} has another socket than {_DOOR}")
        config.write_text(shipped.replace(_DOOR, f"{directory}/door/sandbox.sock"))
        super()._start(ground, directory)
        plan = ForwarderSettings()
        # All of the load is one source.
        settings = {
            "OPIFICIA_CONNECTIONS": plan.connections,
            "OPIFICIA_CONNECTIONS_PER_SOURCE": plan.connections,
            "OPIFICIA_IDLE_TIMEOUT": f"{plan.idle_timeout_s}s",
            "OPIFICIA_LISTEN": f"127.0.0.1:{self._port}",
            "OPIFICIA_PIPES": plan.pipes,
        }
        forwarder = Process(
            # As the image starts it.
            ["haproxy", "-W", "-db", "-f", str(config)],
            log=directory / "forwarder.log",
            uid=self.forwarder_uid,
            cwd=directory,
            environment={**os.environ, **{name: str(value) for name, value in settings.items()}},
        )
        self._processes.append(forwarder)
        forwarder.wait_for(lambda: accepts(self._port), "the forwarder")

    def _is_up(self) -> bool:
        return True
