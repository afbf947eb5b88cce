"""The model proxy between a client and a provider, over real sockets, without the rest of the gateway."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from gateway.access import AuditLog, ModelCost
from gateway.config import GatewayConfig, ListenSettings, ModelSettings, SessionsSettings
from gateway.context import Gateway
from gateway.contract.ids import token_sha256
from gateway.contract.limits import GatewayLimits
from gateway.contract.policy import Grant, ModelBudget, Usage
from gateway.core.providers import ProviderSettings, ShapeName
from gateway.core.rules import load_registries
from gateway.metrics import Metrics
from gateway.net.model import IPAddress, ModelClient
from gateway.net.poller import Poller
from gateway.registry import Registry, Session
from tests.support.listener import bound
from tests.support.patience import until

TOKEN = "token-of-session-s1"
KEY = "sk-operator-key-0123456789"
REGISTRIES = Path(__file__).parents[2] / "gateway/data/registries.toml"


@dataclass
class Line:
    """One audit line that was written."""

    session: str
    event: str
    reason: str
    details: dict[str, Any]


class RecordingAudit(AuditLog):
    """Keeps lines instead of writing them."""

    def __init__(self) -> None:
        super().__init__("", 1000)
        self.lines: list[Line] = []

    def write(self, session: str, event: str, kind: str, host: str, port: int, address: str, reason: str,
              bytes_up: int = 0, bytes_down: int = 0, ms: int = 0, model: ModelCost | None = None) -> None:  # fmt: skip
        assert kind == "model"
        details = {
            "host": host,
            "port": port,
            "address": address,
            "bytes_up": bytes_up,
            "bytes_down": bytes_down,
            "ms": ms,
        }
        self.lines.append(Line(session, event, str(reason), details | {"model": model}))


@dataclass
class Proxy:
    """A running model proxy."""

    gateway: Gateway
    port: int
    audit: RecordingAudit
    key: bytearray
    clients: list[ModelClient] = field(default_factory=list)
    # What was read of connections that were given away.
    given: list[bytes] = field(default_factory=list)

    def route_again(self, sock: socket.socket, caller: IPAddress | None, data: bytes, session: Session | None) -> None:
        """Stand in for the router of connections."""
        assert all(client.is_closed for client in self.clients if client.sock is sock)
        self.given.append(data)
        sock.close()

    @property
    def base_url(self) -> str:
        """What a sandbox has as ANTHROPIC_BASE_URL."""
        return f"http://127.0.0.1:{self.port}/model/s1"

    def usage(self, session: str = "s1") -> Usage:
        """What a session used."""
        found = self.gateway.registry.get(session)
        assert found is not None
        return found.model.usage()

    def put(self, session: str = "s1", token: str = TOKEN, **grant: Any) -> None:
        """Put a grant in force."""
        problems = self.gateway.registry.put(Grant(session=session, token_sha256=token_sha256(token), **grant))
        assert not problems, problems

    async def settled(self) -> None:
        """Wait until no request is in flight."""
        await until(lambda: self.gateway.model.running == 0)


@contextlib.asynccontextmanager
async def running_proxy(
    upstream: str,
    *,
    limits: dict[str, int] | None = None,
    budget: ModelBudget | None = None,
    models: tuple[str, ...] = (),
    providers: tuple[ProviderSettings, ...] = (),
    ca_file: str = "",
    shape: ShapeName = "anthropic",
    ready: bool = True,
    caller: str | None = None,
) -> AsyncIterator[Proxy]:
    """Run a proxy with session `s1`; at the end it must have let go of everything."""
    config = GatewayConfig(
        listen=ListenSettings(proxy_protocol=caller is not None),
        sessions=SessionsSettings(file="unused.toml"),
        limits=GatewayLimits(**(limits or {})),
        model=ModelSettings(upstream=upstream, shape=shape, ca_file=ca_file, provider=providers),
    )
    registry = Registry(
        load_registries(REGISTRIES.read_text()), require_address=caller is not None, ready=ready, max_waiters=100
    )
    audit = RecordingAudit()
    key = bytearray(KEY.encode())
    gateway = Gateway(config, registry, audit, Metrics(), lambda: bytes(key))
    proxy = Proxy(gateway, 0, audit, key)
    if ready:
        proxy.put(model_budget=budget or ModelBudget(), models=models)
    loop = asyncio.get_running_loop()
    poller = Poller(loop)
    gateway.model.start(poller)
    listening = bound(("127.0.0.1", 0))
    listening.setblocking(False)
    proxy.port = listening.getsockname()[1]

    def accept() -> None:
        sock, _ = listening.accept()
        sock.setblocking(False)
        source = ip_address(caller) if caller else None
        proxy.clients.append(ModelClient(gateway, poller, sock, source, proxy.route_again))

    # Not `sock_accept`: cancelled in the turn in which it accepted, it loses the socket.
    loop.add_reader(listening.fileno(), accept)
    try:
        yield proxy
        await proxy.settled()
    finally:
        loop.remove_reader(listening.fileno())
        listening.close()
        await gateway.model.close()
        await until(lambda: gateway.model.client_count == 0)
        poller.close()
    assert gateway.model.held_bytes == gateway.model._waiting == gateway.model._lingering == 0
    for session in registry:
        assert session.open_count == session.model.kept.size == 0
