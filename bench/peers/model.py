"""Ways to a model provider: straight, through the gateway, and through other relays."""

import json
import os
import shlex
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

from bench.machine import version_of
from bench.peers.base import CheckError, Direct, Ground, Peer
from bench.peers.gateway import SESSION, TOKEN, GatewayPeer
from bench.peers.proxies import ProgramPeer
from bench.processes import FIRST_UID, free_port

KEY: Final = "the-operators-key-of-a-benchmark"
# What the provider of `load/model.c` says that each request used.
INPUT_TOKENS: Final = 25


@dataclass(frozen=True, slots=True)
class ModelRoute:
    """Where to send model requests: the address, what stands before `/v1`, and credentials."""

    via: str
    prefix: str = ""
    token: str = ""
    query: str = "bench=small"
    # Whether the provider is told by the model's name, because the peer passes no query on.
    by_model: bool = False
    # Further header lines.
    headers: tuple[str, ...] = ()

    def asking(self, query: str) -> "ModelRoute":
        """Return the same route with another query, which says how the provider is to answer."""
        return replace(self, query=query)

    def arguments(self) -> list[str]:
        """Return the load program's arguments for it."""
        found = ["--via", self.via, "--path", f"{self.prefix}/v1/messages?{self.query}"]
        if self.by_model:
            found += ["--model", self.query]
        for header in self.headers:
            found += ["--header", header]
        return [*found, "--token", self.token] if self.token else found


class ModelPeer(Protocol):
    """What the model suite asks of a peer beyond being one."""

    def model_route(self) -> ModelRoute:
        """Return the way to the provider."""


class DirectModel(Direct):
    """The provider itself: what it and the load can do at most."""

    def model_route(self) -> ModelRoute:
        """Return the provider's own address."""
        assert self._ground is not None
        return ModelRoute(self._ground.plain)

    def _verify(self, ground: Ground) -> None:
        pass


class ModelGateway(GatewayPeer):
    """The gateway with all checks of the model proxy: credentials, allowed models, token budgets (so each body is read)."""

    name = "gateway"
    checks = "credentials, models, request and token budgets, usage, audit log, metrics"

    def model_route(self) -> ModelRoute:
        """Return the gateway's address and the session's path."""
        return ModelRoute(f"127.0.0.1:{self._port}", f"/model/{SESSION}", TOKEN)

    def _config(self, ground: Ground, directory: Path) -> str:
        key = directory / "key"
        key.write_text(KEY)
        key.chmod(0o400)
        if os.geteuid() == 0:
            os.chown(key, self.uid, self.uid)
        # A thousand streams of one session, where a real host has a few of each session.
        return (
            super()._config(ground, directory)
            + "model_requests_per_session = 2_000\nmodel_upstream_connections = 2_000\n"
            + f'[model]\nupstream = "http://{ground.plain}"\napi_key_file = "{key}"\n'
        )

    def _session(self) -> str:
        return (
            f'[[session]]\nid = "{SESSION}"\ntoken = "{TOKEN}"\nnetwork = "none"\nmodels = ["claude-*"]\n'
            f"model_budget = {{ requests_per_minute = {10**9}, input_tokens = {10**15}, output_tokens = {10**15} }}\n"
        )

    def _verify(self, ground: Ground) -> None:
        for path, token, status in (
            (f"/model/{SESSION}/v1/messages", TOKEN + "x", 401),
            (f"/model/{SESSION}/v1/other", TOKEN, 404),
        ):
            reply = self._post(path, token, "claude-bench")
            if not reply.startswith(f"HTTP/1.1 {status} ".encode()):
                raise CheckError(f"gateway: POST {path} was answered {reply[:80]!r}, not {status}")
        reply = self._post(f"/model/{SESSION}/v1/messages", TOKEN, "gpt-bench")
        if not reply.startswith(b"HTTP/1.1 403 "):
            raise CheckError(f"gateway: a model that is not allowed was answered {reply[:80]!r}")
        reply = self._post(f"/model/{SESSION}/v1/messages?bench=small", TOKEN, "claude-bench")
        if not reply.startswith(b"HTTP/1.1 200 "):
            raise CheckError(f"gateway: the right request was answered {reply[:80]!r}")
        self._settle(lambda: self._audit.exists() and b'"close"' in self._audit.read_bytes())
        self._offset = self._audit.stat().st_size

    def _post(self, path: str, token: str, model: str) -> bytes:
        body = f'{{"model":"{model}","max_tokens":16,"messages":[]}}'.encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: gateway\r\nAuthorization: Bearer {token}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        with socket.create_connection(("127.0.0.1", self._port), timeout=10) as client:
            client.sendall(head.encode() + body)
            reply = b""
            while data := client.recv(4096):
                reply += data
            return reply

    def compare(self, results: Sequence[dict[str, Any]]) -> list[str]:
        """One `allow` and one `close` line for each request, no refusal; tokens as the provider said, bytes as the load received them."""
        requests = sum(result["finished"] for result in results)
        self._settle(lambda: self._read_costs()["close"] >= requests)
        found = self._read_costs()
        self._offset = self._audit.stat().st_size
        problems = [
            f"the audit log has {found[event]} `{event}` lines for {requests} requests"
            for event in ("allow", "close")
            if found[event] != requests
        ]
        if found["refuse"]:
            problems.append(f"{found['refuse']} requests were refused")
        for name, made, who in (
            ("input_tokens", requests * INPUT_TOKENS, "provider"),
            ("output_tokens", sum(result["output_tokens"] for result in results), "provider"),
            ("bytes_down", sum(result["body_down"] for result in results), "load"),
        ):
            if found[name] != made:
                problems.append(f"the audit log counts {found[name]} {name.replace('_', ' ')}, the {who} {made}")
        return problems

    def _read_costs(self) -> Counter[str]:
        """Count the lines since the last comparison, by event, and what the requests that ended cost."""
        found: Counter[str] = Counter()
        with self._audit.open("rb") as file:
            file.seek(self._offset)
            for text in file:
                if not text.endswith(b"\n"):
                    break
                line = json.loads(text)
                found[line["event"]] += 1
                if line["event"] == "close":
                    found["bytes_down"] += line["bytes_down"]
                    for name in ("input_tokens", "output_tokens"):
                        found[name] += line["model"][name]
        return found


class AiohttpRelay(ProgramPeer):
    """The plainest relay one would write on aiohttp server and client (`relay.py`). It leaves a line a request, as the gateway does."""

    name = "aiohttp-relay"
    checks = "nothing; access log on"
    uid = FIRST_UID + 1
    _log = "access.log"

    @classmethod
    def missing(cls) -> str:
        return ""

    def about(self) -> str:
        return version_of(sys.executable, "-c", "import aiohttp; print('aiohttp', aiohttp.__version__, 'on uvloop')")

    def _start(self, ground: Ground, directory: Path) -> None:
        self._port = free_port()
        program = directory / "relay.py"
        program.write_text((Path(__file__).parent / "relay.py").read_text())
        log = ""
        if self._log:
            file = directory / self._log
            file.touch()
            if os.geteuid() == 0:
                os.chown(file, self.uid, self.uid)
            log = str(file)
        self._run([sys.executable, str(program), str(self._port), ground.plain, KEY, log], directory, self._port)

    def model_route(self) -> ModelRoute:
        """Return the relay's address."""
        return ModelRoute(f"127.0.0.1:{self._port}", token="any")

    def _verify(self, ground: Ground) -> None:
        pass


class QuietAiohttpRelay(AiohttpRelay):
    """The same without its log."""

    name = "aiohttp-quiet"
    checks = "nothing; no log"
    uid = FIRST_UID + 3
    _log = ""


class ModelCommand(ProgramPeer):
    """Any other relay, given as a command with `{port}` and `{upstream}` in it."""

    name = "command"
    uid = FIRST_UID + 2

    def __init__(self, name: str, command: str) -> None:
        super().__init__()
        self.name = name  # type: ignore[misc]  # one class, many peers
        self._command = command

    def about(self) -> str:
        return self._command

    def _start(self, ground: Ground, directory: Path) -> None:
        self._port = free_port()
        line = self._command.replace("{port}", str(self._port)).replace("{upstream}", f"http://{ground.plain}")
        self._run(shlex.split(line), directory, self._port)

    def model_route(self) -> ModelRoute:
        """Return the relay's address."""
        return ModelRoute(f"127.0.0.1:{self._port}", token="any")

    def _verify(self, ground: Ground) -> None:
        pass


MODEL_PEERS: Final[tuple[type[Peer], ...]] = (DirectModel, ModelGateway, AiohttpRelay, QuietAiohttpRelay)
