"""CONNECT, from its head to the open tunnel: a callback state machine, no task and no coroutine per connection.

The order is DESIGN's: credentials, level and rules, budget, slot, name, addresses, connection, ClientHello, splice. Every
decision is asked of `gateway.core`; here is what happens between two of them, and that each path gives everything back.
"""

import socket
from typing import TYPE_CHECKING, Final

from gateway.core.authority import Authority
from gateway.core.clienthello import HelloError, parse_client_hello
from gateway.core.connect_request import Unacceptable, read_connect
from gateway.core.decide import decide_addresses, decide_hello, decide_host
from gateway.core.head import Head
from gateway.core.incomplete import Incomplete
from gateway.core.replies import ALERT_UNRECOGNIZED_NAME, ESTABLISHED, refusal_of
from gateway.core.verdict import CloseReason, Deny, DenyReason
from gateway.net.decisions import Decision
from gateway.net.dial import Connected, Dial, DialError
from gateway.net.plain import PlainRelay
from gateway.net.resolve import Answer, ResolveError
from gateway.net.services import Services, milliseconds_since
from gateway.net.tunnel import Tunnel
from gateway.registry import IPAddress, Session, hash_of

if TYPE_CHECKING:
    from gateway.net.arrival import Arrival

HTTPS: Final = 443
HTTP: Final = 80
# Bytes taken from a client that talks before it was answered; a ClientHello fits, more waits in the socket.
EARLY_BYTES: Final = 16 * 1024


class Connect:
    """One CONNECT. Owns the client's socket from `start` on; `_finish` gives back all that it holds."""

    __slots__ = (
        "_addresses", "_decision", "_dial", "_key", "_pending_name", "_ready_left_s", "_services", "_slot_until", "_waited", "_watching",
        "address", "authority", "buffer", "caller", "credentials", "has_slot", "rule", "session", "sock", "started", "upstream",
    )  # fmt: skip

    def __init__(self, services: Services, arrival: "Arrival", early: bytes, key: bytes) -> None:
        self._services = services
        self.caller: IPAddress | None = arrival.caller
        self.started = arrival.started
        self._watching = arrival.watching
        self.sock = arrival.sock
        self.buffer = early
        # Where to remember what is decided, and what was remembered.
        self._key = key
        self._decision: Decision | None = None
        self.authority: Authority
        # Session id and the SHA-256 of the token, until they are known to be good.
        self.credentials: tuple[str, bytes] | None = None
        self.session: Session | None = None
        self._dial: Dial | None = None
        self._pending_name: str | None = None
        self.upstream: socket.socket | None = None
        self.address = ""
        self._addresses: tuple[IPAddress, ...] = ()
        self.rule = ""
        self.has_slot = False
        self._waited = 0.0
        # What an earlier process left of the time to wait for the sessions, and until when it may wait for a slot.
        self._ready_left_s: float | None = None
        self._slot_until: float | None = None

    # -- who asks, and for what

    def start(self, head: Head) -> None:
        """Judge the request as far as that needs nobody else, and go on from there."""
        request = read_connect(head)
        if isinstance(request, Unacceptable):
            self._answer(request.deny, request.authority)
            return
        self.authority = request.authority
        self.introduce((request.session_id, hash_of(request.token)))

    def introduce(self, credentials: tuple[str, bytes]) -> None:
        """Go on as the sender of these, once it can be said whose they are."""
        self.credentials = credentials
        registry = self._services.gateway.registry
        if not registry.ready and registry.get(credentials[0]) is None:
            registry.when_ready(self._authenticate)
            self._services.waits.ready.add(self, self._ready_left_s)
            self._watch()
            return
        self._authenticate()

    def not_ready(self) -> None:
        """Control has not said which sessions there are within the wait."""
        self._refuse(Deny(DenyReason.NOT_READY, "the gateway does not know its sessions yet; try again"))

    def _authenticate(self) -> None:
        self._services.waits.ready.discard(self)
        assert self.credentials is not None
        found = self._services.gateway.registry.authenticate_hash(*self.credentials, self.caller)
        if isinstance(found, Deny):
            self._refuse(found)
            return
        self.session = found
        # Not needed any more, and nothing to keep for as long as a tunnel lives.
        self.credentials = None
        verdict = decide_host(found.policy, self.authority)
        if isinstance(verdict, Deny):
            self._refuse(verdict)
            return
        self.rule = verdict.rule
        self._admit(found)

    def resume(self, decision: Decision) -> None:
        """Do the same for a request that was judged before, in the same words and by the same grant."""
        self.authority = decision.authority
        self.rule = decision.rule
        self._decision = decision
        found = self._services.gateway.registry.admit(decision.session, self.caller)
        if isinstance(found, Deny):
            self._refuse(found)
            return
        self.session = found
        self._admit(found)

    def _admit(self, session: Session) -> None:
        if session.bytes_left <= 0:
            self._refuse(Deny(DenyReason.BUDGET_EXHAUSTED, "the session's egress budget is used up"))
            return
        session.add_closer(self.revoke)
        self._services.connects.add(self)
        if self.authority.port == HTTP:
            self._relay_plain()
            return
        self._take_slot(session)

    def _relay_plain(self) -> None:
        """Port 80: what the tunnel carries is HTTP, and each request in it is judged."""
        session, authority = self.session, self.authority
        assert session is not None
        self._unwatch()
        sock, early = self.sock, self.buffer
        session.remove_closer(self.revoke)
        self._services.connects.discard(self)
        try:
            sock.send(ESTABLISHED)
        except OSError:
            self._services.poller.forget(sock.fileno())
            sock.close()
            return
        PlainRelay(self._services, self.caller, session, authority).start(sock, early)

    # -- a slot of the session

    def _take_slot(self, session: Session) -> None:
        if session.slots.crowded:
            self._refuse(Deny(DenyReason.NO_FREE_SLOT, "too many connections of the session wait for a slot"))
            return
        if session.slots.acquire(self._on_slot):
            self.has_slot = True
            self._resolve()
            return
        self._waited = self._services.loop.time()
        self._services.waits.slot.add(self, None if self._slot_until is None else self._slot_until - self._waited)
        self._watch()

    def _on_slot(self) -> None:
        self.has_slot = True
        self._services.waits.slot.discard(self)
        self._services.gateway.metrics.slot_wait_seconds.observe(self._services.loop.time() - self._waited)
        self._resolve()

    def no_slot(self) -> None:
        """No connection of the session ended within the wait."""
        self._refuse(Deny(DenyReason.NO_FREE_SLOT, "all connections of the session are in use"))

    # -- where it leads

    def _resolve(self) -> None:
        authority = self.authority
        if authority.address is not None:
            self._judge(self._decision.addresses if self._decision is not None else (authority.address,))
            return
        answer = self._services.resolver.cached(authority.host)
        if answer is not None:
            self._on_answer(answer)
            return
        assert self.session is not None
        self._pending_name = authority.host
        self._services.resolver.resolve(authority.host, self.session.id, self._on_answer)
        self._watch()

    def _on_answer(self, answer: Answer) -> None:
        self._pending_name = None
        if isinstance(answer, ResolveError):
            self._refuse(Deny(answer.reason, answer.message))
        else:
            self._judge(answer.addresses)

    def _judge(self, addresses: tuple[IPAddress, ...]) -> None:
        services, session, decision = self._services, self.session, self._decision
        assert session is not None
        self._addresses = addresses
        facts = services.facts
        if decision is None or decision.addresses is not addresses or decision.facts is not facts:
            verdict = decide_addresses(session.policy, self.authority, addresses, facts)
            if isinstance(verdict, Deny):
                self._refuse(verdict)
                return
            decision = Decision(self.authority, session, session.grant, self.rule, addresses, facts)
            if self._key:
                services.decisions.remember(self._key, decision)
        # Connect to the addresses that were judged, never to the name again: a second look-up may answer differently
        # (DNS rebinding).
        dial = services.dialer.dial(addresses, self.authority.port, self._on_dialled)
        if not dial.finished:
            self._dial = dial
            self._watch()

    def _on_dialled(self, result: Connected | DialError) -> None:
        self._dial = None
        if isinstance(result, DialError):
            self._refuse(Deny(result.reason, result.message))
            return
        self.upstream = result.sock
        self.address = result.text
        try:
            self.sock.send(ESTABLISHED)
        except OSError:
            self._abort(CloseReason.CLIENT_GONE)
            return
        services = self._services
        if self.authority.port == HTTPS and services.gateway.config.egress.check_sni:
            self.await_hello()
            if self.buffer:
                self._read_hello()
            return
        self._open()

    # -- what it says first

    def _read_hello(self) -> None:
        session = self.session
        assert session is not None
        try:
            hello = parse_client_hello(self.buffer, self._services.gateway.config.limits.hello_bytes)
        except HelloError as error:
            self._refuse_hello(Deny(error.reason, str(error)))
            return
        if isinstance(hello, Incomplete):
            if len(self.buffer) >= self._services.gateway.config.limits.hello_bytes:
                self._refuse_hello(Deny(DenyReason.HELLO_MALFORMED, "the ClientHello is too large"))
            return
        verdict = decide_hello(session.policy, self.authority, hello)
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
        self._services.count_refusal(self.session, "connect", deny)
        self._give_back()
        self._services.lingering.close_with(self.sock, ALERT_UNRECOGNIZED_NAME)

    # -- the tunnel

    def _open(self) -> None:
        services, session, upstream = self._services, self.session, self.upstream
        assert session is not None
        assert upstream is not None
        # From here on the sockets and the slot are the tunnel's.
        self.upstream = None
        session.remove_closer(self.revoke)
        services.connects.discard(self)
        session.egress_allowed += 1
        services.gateway.metrics.allowed["connect"].inc()
        self._log("allow", self.rule)
        Tunnel(services, session, self.authority, self.address, self.started, self.sock, upstream).start(self.buffer)

    # -- from one process to the next

    @property
    def left_s(self) -> float | None:
        """What is left of the time of what this waits for; None when it waits for none of the shared queues."""
        waits = self._services.waits
        for queue in (waits.ready, waits.slot, waits.hello):
            if self in queue:
                return queue.left_s(self)
        return None

    def adopt(self, session: Session) -> None:
        """Belong to a session and hold one of its slots, as in an earlier process."""
        self.session = session
        self.has_slot = True
        session.slots.hold()
        session.add_closer(self.revoke)
        self._services.connects.add(self)

    def ask_again(
        self, authority: Authority, credentials: tuple[str, bytes], left_s: float | None, *, admitted: bool
    ) -> None:
        """Begin anew what an earlier process had not connected yet; `left_s` is of its wait for a slot if it was admitted."""
        self.authority = authority
        if not admitted:
            self._ready_left_s = left_s
        elif left_s is not None:
            self._slot_until = self._services.loop.time() + left_s
        self.introduce(credentials)

    def await_hello(self, left_s: float | None = None) -> None:
        """Wait for the whole ClientHello."""
        self._services.waits.hello.add(self, left_s)
        self._watch()

    def let_go(self) -> None:
        """Forget all of it, without an answer or an audit line: another process goes on with it."""
        self._give_back()
        self.sock.close()

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
        room = EARLY_BYTES - len(self.buffer)
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
            if self.buffer and self.upstream is None:
                # It said all it had to say and half-closed; the tunnel will see the same end again.
                self._unwatch()
            else:
                self._abort(CloseReason.CLIENT_GONE)
            return
        self.buffer += data
        if self.upstream is not None:
            self._read_hello()

    # -- ends

    def revoke(self, reason: CloseReason) -> None:
        """The session is over: close at once, whatever stage this is in."""
        self._abort(reason)

    def _refuse(self, deny: Deny) -> None:
        if self.session is not None:
            self._log("refuse", deny.reason)
        self._answer(deny, self.authority)

    def _answer(self, deny: Deny, authority: Authority | None) -> None:
        self._services.count_refusal(self.session, "connect", deny)
        self._give_back()
        self._services.lingering.close_with(self.sock, refusal_of(deny, authority))

    def _abort(self, reason: CloseReason) -> None:
        """Close without an answer: nobody is there to read it, or nobody may."""
        if self.session is not None:
            self._log("refuse", reason)
        self._give_back()
        self._services.poller.forget(self.sock.fileno())
        self.sock.close()

    def _give_back(self) -> None:
        """Return everything but the client's socket. Called once, on every path that does not become a tunnel."""
        self._unwatch()
        services, session = self._services, self.session
        services.waits.ready.discard(self)
        services.waits.slot.discard(self)
        services.waits.hello.discard(self)
        services.gateway.registry.stop_waiting(self._authenticate)
        if self._pending_name is not None:
            services.resolver.forget(self._pending_name, self._on_answer)
        if self._dial is not None:
            self._dial.cancel()
        if self.upstream is not None:
            services.dialer.discard(self.upstream)
            self.upstream = None
        if session is not None:
            session.remove_closer(self.revoke)
            services.connects.discard(self)
            if self.has_slot:
                self.has_slot = False
                session.slots.release()
            else:
                session.slots.cancel(self._on_slot)

    def _log(self, event: str, reason: DenyReason | CloseReason | str) -> None:
        assert self.session is not None
        authority = self.authority
        address = self.address or (str(self._addresses[0]) if self._addresses else "")
        self._services.gateway.audit.write(
            self.session.id, event, "connect", authority.host, authority.port, address, reason,
            ms=milliseconds_since(self.started),
        )  # fmt: skip
