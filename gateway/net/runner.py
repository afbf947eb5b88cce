"""/runner: the sandbox's runner is authenticated here and handed to control by splice.

Control never sees the sandbox's own request: the gateway writes an upgrade head of its own, with the session's id and no
token. Only when control has answered that it speaks WebSocket now do the runner's bytes pass: to a control that still
reads HTTP they could be a request in another session's name. No budget and no egress idle limit apply.
"""

import asyncio
import logging
import re
import socket
from dataclasses import dataclass
from typing import Final

from gateway.core.credentials import parse_bearer
from gateway.core.head import Head, HeadError
from gateway.core.replies import refusal
from gateway.core.verdict import CloseReason, Deny, DenyReason
from gateway.net.services import Services
from gateway.net.splice import Splicer
from gateway.registry import IPAddress, Session
from gateway.runtime.addresses import UnixAddress, parse_address
from gateway.runtime.log import Seldom

log = logging.getLogger("gateway.runner")
# A sandbox can connect thousands of times while control is away, or does not take it.
log.addFilter(Seldom())

# Control answers on the same host; longer means that it is not there.
HANDOFF_S: Final = 5.0
# RFC 6455 §4.1: 16 bytes in base64.
_WEBSOCKET_KEY: Final = re.compile(rb"[A-Za-z0-9+/]{22}==")
_TARGET: Final = re.compile(rb"/runner\?session=([a-z0-9-]{1,64})")
# Control's answer to the upgrade has some 200 bytes.
MAX_ANSWER_BYTES: Final = 8 * 1024
_END: Final = b"\r\n\r\n"
_SWITCHED: Final = b"HTTP/1.1 101 "
_TOO_MANY: Final = b"HTTP/1.1 429 "


class _ControlRefusesError(Exception):
    """Control answered, and does not take the runner."""

    def __init__(self, answer: bytes) -> None:
        super().__init__(answer[:12].decode("latin-1"))
        self.too_many = answer.startswith(_TOO_MANY)


@dataclass(frozen=True, slots=True)
class Upgrade:
    """What a head at /runner asks for. `session_id` is empty where it names none, `key` where it asks for no WebSocket."""

    session_id: str
    token: str | None
    key: bytes


def read_upgrade(head: Head, target: bytes) -> Upgrade:
    """Understand a head. Raises HeadError where a header that must stand once stands twice."""
    # Exactly as it stands in OPIFICIA_RUNNER_URL; anything else names no session.
    named = _TARGET.fullmatch(target)
    token = parse_bearer(head.get(b"authorization") or b"")
    key = head.get(b"sec-websocket-key") or b""
    upgrade = (head.get(b"upgrade") or b"").lower()
    websocket = head.method == b"GET" and upgrade == b"websocket" and _WEBSOCKET_KEY.fullmatch(key) is not None
    return Upgrade("" if named is None else named[1].decode("ascii"), token, key if websocket else b"")


def upgrade_head(session_id: str, key: bytes) -> bytes:
    """Return the head that control gets: RFC 6455 §4.2.1 and the authenticated session."""
    return (
        b"GET /runner HTTP/1.1\r\nHost: control\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: %b\r\nX-Opificia-Session: %b\r\n\r\n"
        % (key, session_id.encode())
    )


class RunnerHandoff:
    """One runner's connection, from its head to the splice."""

    def __init__(self, services: Services, caller: IPAddress | None, sock: socket.socket) -> None:
        self._services = services
        self._caller = caller
        self._sock = sock
        self._upstream: socket.socket | None = None
        self.session: Session | None = None
        self.splicer: Splicer | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self, head: Head, target: bytes, early: bytes) -> asyncio.Task[None]:
        """Begin; the returned task ends when the connection is spliced or refused. Raises HeadError on a bad head."""
        if not self._services.gateway.config.runner.upstream:
            raise HeadError(404, DenyReason.NOT_FOUND, "this gateway has no control daemon to hand a runner to")
        self._task = self._services.loop.create_task(self._run(read_upgrade(head, target), early))
        return self._task

    async def _run(self, asked: Upgrade, early: bytes) -> None:
        gateway = self._services.gateway
        session_id, token = asked.session_id, asked.token
        if token is None:
            self._refuse(401, Deny(DenyReason.CREDENTIALS_MISSING, "the session's token is needed"))
            return
        if not await gateway.registry.wait_ready(session_id, gateway.config.limits.resync_wait_ms / 1000):
            self._refuse(503, Deny(DenyReason.NOT_READY, "the gateway does not know its sessions yet; try again"))
            return
        session = gateway.registry.authenticate(session_id, token, self._caller)
        if isinstance(session, Deny):
            self._refuse(401, session)
            return
        if not asked.key:
            self._refuse(400, Deny(DenyReason.MALFORMED_REQUEST, "/runner is a WebSocket"))
            return
        self.session = session
        self._services.runners.add(self)
        # A runner connects again and resumes, so a stop of the gateway need not wait for it: it would, for every session.
        session.add_closer(self._revoke, resumes=True)
        try:
            async with asyncio.timeout(HANDOFF_S):
                await self._hand_over(session, asked.key, early)
        except asyncio.CancelledError:
            # Revoked while control was being reached.
            self._give_back()
            self._sock.close()
        except _ControlRefusesError as error:
            log.warning("runner of session %s: control does not take it: %s", session.id, error)
            self._give_back()
            if error.too_many:
                self._refuse(429, Deny(DenyReason.NO_FREE_SLOT, "the session has too many runner connections"))
            else:
                self._refuse(503, Deny(DenyReason.NOT_READY, "control does not know the session as live; try again"))
        except (OSError, TimeoutError) as error:
            log.warning("runner of session %s: control cannot be reached: %s", session.id, type(error).__name__)
            self._give_back()
            self._refuse(503, Deny(DenyReason.NOT_READY, "the control daemon cannot be reached; try again"))
        except BaseException:
            # Whatever it was, nothing stays behind: the session would hold the connection as long as it lives.
            self._give_back()
            self._sock.close()
            raise

    async def _hand_over(self, session: Session, key: bytes, early: bytes) -> None:
        services = self._services
        upstream = parse_address(services.gateway.config.runner.upstream)
        if isinstance(upstream, UnixAddress):
            sock = self._upstream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            sock.setblocking(False)
            await services.loop.sock_connect(sock, upstream.path)
        else:
            sock = self._upstream = socket.socket(
                socket.AF_INET6 if ":" in upstream.host else socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK
            )
            sock.setblocking(False)
            await services.loop.sock_connect(sock, (upstream.host, upstream.port))
        await services.loop.sock_sendall(sock, upgrade_head(session.id, key))
        answer = await self._await_switch(sock)
        self._upstream = None
        services.gateway.metrics.allowed["runner"].inc()
        self.splicer = Splicer(
            services.poller, services.pipes, services.runner_account, self._sock, sock, self.on_close
        )
        self.splicer.start(early, answer)

    async def _await_switch(self, sock: socket.socket) -> bytes:
        """Return control's answer and what it said after it. Raises _ControlRefusesError if it still speaks HTTP."""
        answer = b""
        while _END not in answer:
            piece = await self._services.loop.sock_recv(sock, MAX_ANSWER_BYTES - len(answer))
            if not piece:
                raise _ControlRefusesError(answer)
            answer += piece
        if not answer.startswith(_SWITCHED):
            raise _ControlRefusesError(answer)
        return answer

    def take_up(self, session: Session, splicer: Splicer) -> None:
        """Go on with a connection that an earlier process had joined to control."""
        self.session = session
        session.add_closer(self._revoke, resumes=True)
        self._services.runners.add(self)
        self.splicer = splicer
        splicer.go_on()

    def let_go(self) -> None:
        """Forget a joined connection: another process goes on with it."""
        assert self.splicer is not None
        self._give_back()
        self.splicer.let_go()

    def _revoke(self, reason: CloseReason) -> None:
        if self.splicer is not None:
            self.splicer.close(reason)
        elif self._task is not None:
            self._task.cancel()

    def on_close(self, reason: CloseReason) -> None:
        """The connection has ended."""
        self._give_back()

    def _give_back(self) -> None:
        self._services.runners.discard(self)
        if self.session is not None:
            self.session.remove_closer(self._revoke)
        if self._upstream is not None:
            self._upstream.close()
            self._upstream = None

    def _refuse(self, status: int, deny: Deny) -> None:
        self._services.gateway.metrics.refused["runner", deny.reason].inc()
        reply = refusal(status, deny.reason, deny.message, retry_after_s=1 if status in (429, 503) else None)
        self._services.lingering.close_with(self._sock, reply)
