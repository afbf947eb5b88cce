"""The real gateway as a process of its own unprivileged user, on loopback, with limits as small as a test wants."""

import asyncio
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any, Final, Self

from tests.support.code import readable_code
from tests.support.daemon import Daemon
from tests.support.forwarded import Forwarded
from tests.support.identities import FORWARDER, GATEWAY
from tests.support.manager import Manager
from tests.support.patience import PATIENCE_S
from tests.support.sockets import Client

TOKEN: Final = "token-of-a-test"


def toml_value(value: object) -> str:
    """Return a TOML value; JSON's strings, numbers, booleans and lists are TOML's too."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {toml_value(each)}" for key, each in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(each) for each in value) + "]"
    return json.dumps(value)


def toml(tables: dict[str, Any]) -> str:
    """Return tables as TOML; a list of tables becomes `[[name]]`."""
    lines: list[str] = []
    for name, table in tables.items():
        for each in table if isinstance(table, list) else [table]:
            lines.append(f"[[{name}]]" if isinstance(table, list) else f"[{name}]")
            lines += [f"{key} = {toml_value(value)}" for key, value in each.items()]
    return "\n".join(lines) + "\n"


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that nobody has at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class _Doors:
    """Which way clients take: directly to a port of 127.0.0.1, or (set by a fixture) from a container."""

    forwarded: Forwarded | None = None


doors = _Doors()


class GatewayProcess:
    """One gateway. `sessions` are tables of sessions.toml; the first one's token is TOKEN unless it says otherwise."""

    def __init__(
        self,
        base: Path,
        config: dict[str, Any],
        sessions: Sequence[dict[str, Any]],
        nofile: int | None = None,
        stored: int | None = None,
    ) -> None:
        """`stored`: run it under a manager with a descriptor store of this size."""
        self.base = base
        self.port = free_port()
        self.metrics_port = free_port()
        self.audit_dir = base / "egress"
        self._config_file = base / "gateway.toml"
        self._sessions_file = base / "sessions.toml"
        argv = [sys.executable, "-W", "error", "-m", "gateway", "--config", str(self._config_file)]
        argv += ["--log-level", "DEBUG"]
        argv = argv if nofile is None else ["prlimit", f"--nofile={nofile}", "--", *argv]
        environment = {**os.environ, "PYTHONPATH": str(readable_code()), "HOME": "/nonexistent"}
        log, notify = base / "gateway.log", base / "notify.sock"
        common: dict[str, Any] = {"uid": GATEWAY, "groups": [FORWARDER], "environment": environment, "log": log}
        self.manager = None if stored is None else Manager(argv, folder=base, maximum=stored, **common)
        self._daemon = self.manager or Daemon(argv, notify=notify, **common)
        self.forwarded = doors.forwarded
        self._socket = Path("/nonexistent") if self.forwarded is None else self.forwarded.folder / f"{self.port}.sock"
        sandbox = f"127.0.0.1:{self.port}" if self.forwarded is None else f"unix:{self._socket}"
        self.config: dict[str, Any] = {
            "listen": {"sandbox": sandbox, "metrics": f"127.0.0.1:{self.metrics_port}"},
            "sessions": {"file": str(self._sessions_file)},
            "audit": {"dir": str(self.audit_dir)},
            "egress": {"allow_loopback": True},
            "limits": {"drain_ms": 100},
        }
        if self.forwarded is not None:
            self.config["listen"]["proxy_protocol"] = True
        for name, table in config.items():
            self.config[name] = {**self.config.get(name, {}), **table} if isinstance(table, dict) else table
        self.sessions = [{"token": TOKEN, "network": "open", **session} for session in sessions]
        self._places: dict[str, IPv4Address] = {}
        if self.forwarded is not None:
            for session, address in zip(self.sessions, self.forwarded.addresses, strict=False):
                self._places[session["id"]] = address
                session.setdefault("address", str(address))

    def write_files(self) -> None:
        """Write both files as the gateway's user can read them."""
        self._config_file.write_text(toml(self.config))
        self._sessions_file.write_text(toml({"session": self.sessions}))

    def start(self) -> None:
        """Start as the gateway's uid and wait until it serves."""
        self.audit_dir.mkdir(exist_ok=True)
        os.chown(self.audit_dir, GATEWAY, GATEWAY)
        self.write_files()
        self._daemon.start()
        if self.forwarded is not None:
            self.forwarded.open_for(self._socket)

    @property
    def pid(self) -> int:
        """The gateway's process id."""
        return self._daemon.pid

    def restart(self) -> None:
        """Restart it under its manager, which keeps what it left."""
        assert self.manager is not None
        self.manager.restart()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self._daemon.signal(number)

    def stop(self) -> int:
        """End it; returns the exit status."""
        if self.forwarded is not None:
            self.forwarded.close_for(self._socket)
        if self.manager is not None:
            self.manager.close()
            return 0
        return self._daemon.stop()

    def log(self) -> str:
        """Return what it has logged."""
        return self._daemon.log()

    def audit(self, session: str) -> list[dict[str, Any]]:
        """Return a session's audit lines so far."""
        file = self.audit_dir / f"{session}.log"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    async def await_audit(self, session: str, **wanted: object) -> dict[str, Any]:
        """Wait for an audit line with these fields and return it."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for line in self.audit(session):
                    if all(line.get(key) == value for key, value in wanted.items()):
                        return line
                await asyncio.sleep(0.01)

    def descriptors(self) -> int:
        """Return how many descriptors the process has open."""
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def rss_bytes(self) -> int:
        """Return its resident memory."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def cpu_seconds(self) -> float:
        """Return the CPU seconds it has used."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def client(self, session: str = "s1", *, proxy: bytes = b"") -> Client:
        """Return a raw connection to the sandbox port, from where the session's sandbox is: an address of its own."""
        if self.forwarded is None:
            number = next((n for n, each in enumerate(self.sessions, 1) if each["id"] == session), 1)
            return await Client.connect(("127.0.0.1", self.port), proxy=proxy, source=f"127.0.0.{number}")
        return await self.forwarded.client(self._places.get(session, self.forwarded.addresses[0]))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


@contextmanager
def gateway_process(
    config: dict[str, Any] | None = None,
    sessions: Sequence[dict[str, Any]] = ({"id": "s1"},),
    *,
    nofile: int | None = None,
    stored: int | None = None,
) -> Iterator[GatewayProcess]:
    """Run a gateway for the length of a test."""
    base = Path(tempfile.mkdtemp(prefix="opificia-gateway-"))
    base.chmod(0o755)
    try:
        with GatewayProcess(base, config or {}, sessions, nofile, stored) as process:
            yield process
    finally:
        shutil.rmtree(base, ignore_errors=True)


__all__ = ["TOKEN", "GatewayProcess", "free_port", "gateway_process", "toml"]
