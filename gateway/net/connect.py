"""CONNECT, from its head to the open tunnel: a callback state machine, no task and no coroutine per connection.

The order is DESIGN's: credentials, level and rules, budget, slot, name, addresses, connection, ClientHello, splice. Every
decision is asked of `gateway.core`; here is what happens between two of them, and that each path gives everything back.
"""

import socket
from typing import TYPE_CHECKING, Final

from gateway.core.authority import Authority, AuthorityError, parse_authority
from gateway.core.clienthello import HelloError, parse_client_hello
from gateway.core.credentials import parse_basic
from gateway.core.decide import decide_addresses, decide_hello, decide_host
from gateway.core.head import Head, HeadError
from gateway.core.incomplete import Incomplete
from gateway.core.replies import ALERT_UNRECOGNIZED_NAME, ESTABLISHED, refusal
from gateway.core.status import RETRY_AFTER_S, status_of
from gateway.core.verdict import CloseReason, Deny, DenyReason
from gateway.net.decisions import Decision
from gateway.net.dial import Connected, Dial, DialError
from gateway.net.plain import PlainRelay
from gateway.net.resolve import Answer, ResolveError
from gateway.net.services import Services, milliseconds_since
from gateway.net.splice import Splicer
from gateway.registry import IPAddress, Session

if TYPE_CHECKING:
    from gateway.net.arrival import Arrival

HTTPS: Final = 443
HTTP: Final = 80
# Bytes taken from a client that talks before it was answered; a ClientHello fits, more waits in the socket.
EARLY_BYTES: Final = 16 * 1024


class Connect:
    """One CONNECT. Owns the client's socket from `start` on; `_finish` gives back all that it holds."""

    __slots__ = (
        "_address", "_addresses", "_authority", "_buffer", "_caller", "_credentials", "_decision", "_dial", "_has_slot",
        "_key", "_pending_name", "_rule", "_services", "_session", "_splicer", "_started", "_upstream", "_waited", "_watching", "sock",
    )  # fmt: skip

    def __init__(self, services: Services, arrival: "Arrival", early: bytes, key: bytes) -> None:
        self._services = services
        self._caller: IPAddress | None = arrival.caller
        self._started = arrival.started
        self._watching = arrival.watching
        self.sock = arrival.sock
        self._buffer = early
        # Where to remember what is decided, and what was remembered.
        self._key = key
        self._decision: Decision | None = None
        self._authority: Authority
        self._credentials: tuple[str, str]
        self._session: Session | None = None
        self._dial: Dial | None = None
        self._pending_name: str | None = None
        self._upstream: socket.socket | None = None
        self._address = ""
        self._addresses: tuple[IPAddress, ...] = ()
        self._rule = ""
        self._splicer: Splicer | None = None
        self._has_slot = False
        self._waited = 0.0

    # -- who asks, and for what

    def start(self, head: Head) -> None:
        """Judge the request as far as that needs nobody else, and go on from there."""
        try:
            self._authority = parse_authority(head.target)
            credentials = head.get(b"proxy-authorization")
            host = head.get(b"host")
            # RFC 9112 §3.2.3: the Host of a CONNECT is its target. Two different answers to "which host" are a bypass.
            if (
                host
                and host != head.target
                and parse_authority(host, default_port=self._authority.port).host != self._authority.host
            ):
                raise AuthorityError("the Host header names another host than the request")
        except AuthorityError as error:
            self._refuse(Deny(DenyReason.MALFORMED_AUTHORITY, str(error)))
            return
        except HeadError as error:
            self._refuse(Deny(error.reason, error.message))
            return
        if credentials is None:
            self._refuse(Deny(DenyReason.CREDENTIALS_MISSING, "proxy credentials are needed: session and token"))
            return
        parsed = parse_basic(credentials)
        if parsed is None:
            self._refuse(Deny(DenyReason.CREDENTIALS_WRONG, "the proxy credentials are not of the Basic scheme"))
            return
        self._credentials = parsed
        registry = self._services.gateway.registry
        if not registry.ready and registry.get(parsed[0]) is None:
            registry.when_ready(self._authenticate)
            self._services.waits.ready.add(self)
            self._watch()
            return
        self._authenticate()

    def not_ready(self) -> None:
        """Control has not said which sessions there are within the wait."""
        self._refuse(Deny(DenyReason.NOT_READY, "the gateway does not know its sessions yet; try again"))

    def _authenticate(self) -> None:
        self._services.waits.ready.discard(self)
        found = self._services.gateway.registry.authenticate(*self._credentials, self._caller)
        if isinstance(found, Deny):
            self._refuse(found)
            return
        self._session = found
        # Not needed any more, and nothing to keep for as long as a tunnel lives.
        del self._credentials
        verdict = decide_host(found.policy, self._authority)
        if isinstance(verdict, Deny):
            self._refuse(verdict)
            return
        self._rule = verdict.rule
        self._admit(found)

    def resume(self, decision: Decision) -> None:
        """Do the same for a request that was judged before, in the same words and by the same grant."""
        self._authority = decision.authority
        self._rule = decision.rule
        self._decision = decision
        found = self._services.gateway.registry.admit(decision.session, self._caller)
        if isinstance(found, Deny):
            self._refuse(found)
            return
        self._session = found
        self._admit(found)

    def _admit(self, session: Session) -> None:
        if session.bytes_left <= 0:
            self._refuse(Deny(DenyReason.BUDGET_EXHAUSTED, "the session's egress budget is used up"))
            return
        session.add_closer(self.revoke)
        if self._authority.port == HTTP:
            self._relay_plain()
            return
        self._take_slot(session)

    def _relay_plain(self) -> None:
        """Port 80: what the tunnel carries is HTTP, and each request in it is judged."""
        session, authority = self._session, self._authority
        assert session is not None
        self._unwatch()
        sock, early = self.sock, self._buffer
        session.remove_closer(self.revoke)
        try:
            sock.send(ESTABLISHED)
        except OSError:
            self._services.poller.forget(sock.fileno())
            sock.close()
            return
        relay = PlainRelay(self._services, self._caller, tunnel=(session, authority))
        self._services.handover.give(sock, relay, early)

    # -- a slot of the session

    def _take_slot(self, session: Session) -> None:
        if session.slots.crowded:
            self._refuse(Deny(DenyReason.NO_FREE_SLOT, "too many connections of the session wait for a slot"))
            return
        if session.slots.acquire(self._on_slot):
            self._has_slot = True
            self._resolve()
            return
        self._waited = self._services.loop.time()
        self._services.waits.slot.add(self)
        self._watch()

    def _on_slot(self) -> None:
        self._has_slot = True
        self._services.waits.slot.discard(self)
        self._services.gateway.metrics.slot_wait_seconds.observe(self._services.loop.time() - self._waited)
        self._resolve()

    def no_slot(self) -> None:
        """No connection of the session ended within the wait."""
        self._refuse(Deny(DenyReason.NO_FREE_SLOT, "all connections of the session are in use"))

    # -- where it leads

    def _resolve(self) -> None:
        authority = self._authority
        if authority.address is not None:
            self._judge(self._decision.addresses if self._decision is not None else (authority.address,))
            return
        answer = self._services.resolver.cached(authority.host)
        if answer is not None:
            self._on_answer(answer)
            return
        assert self._session is not None
        self._pending_name = authority.host
        self._services.resolver.resolve(authority.host, self._session.id, self._on_answer)
        self._watch()

    def _on_answer(self, answer: Answer) -> None:
        self._pending_name = None
        if isinstance(answer, ResolveError):
            self._refuse(Deny(answer.reason, answer.message))
        else:
            self._judge(answer.addresses)

    def _judge(self, addresses: tuple[IPAddress, ...]) -> None:
        services, session, decision = self._services, self._session, self._decision
        assert session is not None
        self._addresses = addresses
        facts = services.facts
        if decision is None or decision.addresses is not addresses or decision.facts is not facts:
            verdict = decide_addresses(session.policy, self._authority, addresses, facts)
            if isinstance(verdict, Deny):
                self._refuse(verdict)
                return
            decision = Decision(self._authority, session, session.grant, self._rule, addresses, facts)
            services.decisions.remember(self._key, decision)
        # Connect to the addresses that were judged, never to the name again: a second look-up may answer differently
        # (DNS rebinding).
        dial = services.dialer.dial(addresses, self._authority.port, self._on_dialled)
        if not dial.finished:
            self._dial = dial
            self._watch()

    def _on_dialled(self, result: Connected | DialError) -> None:
        self._dial = None
        if isinstance(result, DialError):
            self._refuse(Deny(result.reason, result.message))
            return
        self._upstream = result.sock
        self._address = result.text
        try:
            self.sock.send(ESTABLISHED)
        except OSError:
            self._abort(CloseReason.CLIENT_GONE)
            return
        services = self._services
        if self._authority.port == HTTPS and services.gateway.config.egress.check_sni:
            services.waits.hello.add(self)
            self._watch()
            if self._buffer:
                self._read_hello()
            return
        self._open()

    # -- what it says first

    def _read_hello(self) -> None:
        session = self._session
        assert session is not None
        try:
            hello = parse_client_hello(self._buffer, self._services.gateway.config.limits.hello_bytes)
        except HelloError as error:
            self._refuse_hello(Deny(error.reason, str(error)))
            return
        if isinstance(hello, Incomplete):
            if len(self._buffer) >= self._services.gateway.config.limits.hello_bytes:
                self._refuse_hello(Deny(DenyReason.HELLO_MALFORMED, "the ClientHello is too large"))
            return
        verdict = decide_hello(session.policy, self._authority, hello)
        if isinstance(verdict, Deny):
            self._refuse_hello(verdict)
            return
        self._services.waits.hello.discard(self)
        self._open()

    def no_hello(self) -> None:
        """The ClientHello was not whole within its time."""
        self._refuse_hello(Deny(DenyReason.HELLO_TIMEOUT, "no whole ClientHello arrived in time"))

    def _refuse_hello(self, deny: Deny) -> None:
        """Inside a tunnel nobody reads HTTP any more: a fatal TLS alert, a close, and the audit line that says why."""
        self._log("refuse", deny.reason)
        self._services.count_refusal(self._session, "connect", deny)
        self._give_back()
        self._services.lingering.close_with(self.sock, ALERT_UNRECOGNIZED_NAME)

    # -- the tunnel

    def _open(self) -> None:
        services, session, upstream = self._services, self._session, self._upstream
        assert session is not None
        assert upstream is not None
        self._upstream = None
        session.egress_allowed += 1
        metrics = services.gateway.metrics
        metrics.allowed["connect"].inc()
        metrics.tunnels.inc()
        self._log("allow", self._rule)
        splicer = Splicer(services.poller, services.pipes, session, self.sock, upstream, self._on_close)
        self._splicer = splicer
        services.idle.add(splicer)
        early, self._buffer = self._buffer[: session.bytes_left], b""
        if early:
            # Read here, not by the splicer, so counted here.
            session.bytes_up += len(early)
            session.bytes_left -= len(early)
        splicer.start(early)

    def _on_close(self, reason: CloseReason) -> None:
        services, session, splicer = self._services, self._session, self._splicer
        assert session is not None
        assert splicer is not None
        self._splicer = None
        services.idle.discard(splicer)
        session.remove_closer(self.revoke)
        session.slots.release()
        metrics = services.gateway.metrics
        metrics.tunnels.dec()
        metrics.closed[reason].inc()
        metrics.bytes_up.inc(splicer.up.count)
        metrics.bytes_down.inc(splicer.down.count)
        self._log("close", reason, splicer.up.count, splicer.down.count)

    # -- the client while it waits

    def _watch(self) -> None:
        """Notice when the client leaves, and take what it says early."""
        self._watching = True
        self._services.poller.add_reader(self.sock.fileno(), self._on_client)

    def _unwatch(self) -> None:
        if self._watching:
            self._watching = False
            self._services.poller.remove_reader(self.sock.fileno())

    def _on_client(self) -> None:
        room = EARLY_BYTES - len(self._buffer)
        if room <= 0:
            self._unwatch()
            return
        try:
            data = self.sock.recv(room)
        except BlockingIOError:
            return
        except OSError:
            self._abort(CloseReason.CLIENT_GONE)
            return
        if not data:
            if self._buffer and self._upstream is None:
                # It said all it had to say and half-closed; the tunnel will see the same end again.
                self._unwatch()
            else:
                self._abort(CloseReason.CLIENT_GONE)
            return
        self._buffer += data
        if self._upstream is not None:
            self._read_hello()

    # -- ends

    def revoke(self, reason: CloseReason) -> None:
        """The session is over: close at once, whatever stage this is in."""
        if self._splicer is not None:
            self._splicer.close(reason)
        else:
            self._abort(reason)

    def _refuse(self, deny: Deny) -> None:
        status = status_of(deny.reason)
        authority = getattr(self, "_authority", None)
        self._services.count_refusal(self._session, "connect", deny)
        if self._session is not None:
            self._log("refuse", deny.reason)
        self._give_back()
        reply = refusal(
            status,
            deny.reason,
            deny.message,
            host=authority.host if authority else None,
            port=authority.port if authority else None,
            retry_after_s=RETRY_AFTER_S if status in (429, 503) else None,
        )
        self._services.lingering.close_with(self.sock, reply)

    def _abort(self, reason: CloseReason) -> None:
        """Close without an answer: nobody is there to read it, or nobody may."""
        if self._session is not None:
            self._log("refuse" if self._splicer is None else "close", reason)
        self._give_back()
        self._services.poller.forget(self.sock.fileno())
        self.sock.close()

    def _give_back(self) -> None:
        """Return everything but the client's socket. Called once, on every path that does not become a tunnel."""
        self._unwatch()
        services, session = self._services, self._session
        services.waits.ready.discard(self)
        services.waits.slot.discard(self)
        services.waits.hello.discard(self)
        services.gateway.registry.stop_waiting(self._authenticate)
        if self._pending_name is not None:
            services.resolver.forget(self._pending_name, self._on_answer)
        if self._dial is not None:
            self._dial.cancel()
        if self._upstream is not None:
            services.dialer.discard(self._upstream)
            self._upstream = None
        if session is not None:
            session.remove_closer(self.revoke)
            if self._has_slot:
                self._has_slot = False
                session.slots.release()
            else:
                session.slots.cancel(self._on_slot)

    def _log(self, event: str, reason: DenyReason | CloseReason | str, up: int = 0, down: int = 0) -> None:
        assert self._session is not None
        authority = self._authority
        address = self._address or (str(self._addresses[0]) if self._addresses else "")
        self._services.gateway.audit.write(
            self._session.id, event, "connect", authority.host, authority.port, address, reason,
            up, down, milliseconds_since(self._started),
        )  # fmt: skip
