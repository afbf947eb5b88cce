"""Plain HTTP: `GET http://host/…` at the sandbox port, and what a CONNECT to port 80 carries.

One coroutine a client connection; it is not the hot path. Every request is judged as a CONNECT is: credentials, level and
rules, budget, slot, name, addresses. Requests may be pipelined and are answered in order, one at a time. A connection to
a host may serve the next request to the same host, never one to another. A request to the gateway itself on the same
connection takes the connection back to the router.
"""

import asyncio
import time
from typing import Final

from gateway.core.authority import Authority
from gateway.core.credentials import parse_basic
from gateway.core.decide import decide_host
from gateway.core.head import Head, HeadError, parse_head
from gateway.core.incomplete import Incomplete
from gateway.core.plain_head import PlainRequest, names_one_of, read_request
from gateway.core.replies import refusal_of
from gateway.core.verdict import CloseReason, Deny, DenyReason, Verdict
from gateway.net.plain_exchange import Ending, Exchange
from gateway.net.plain_stream import Stream
from gateway.net.plain_upstream import HeldUpstream, Unreached, Upstream, reach
from gateway.net.services import Services, milliseconds_since
from gateway.registry import IPAddress, Session

# A client that half-closed may still read its response; one that left looks the same. When nothing has moved for this
# long it counts as gone. (nginx and Go take it for gone at once.)
HALF_CLOSED_S: Final = 5.0

_MISSING: Final = Deny(DenyReason.CREDENTIALS_MISSING, "proxy credentials are needed: session and token")
_NOT_BASIC: Final = Deny(DenyReason.CREDENTIALS_WRONG, "the proxy credentials are not of the Basic scheme")
_NOT_READY: Final = Deny(DenyReason.NOT_READY, "the gateway does not know its sessions yet; try again")
_EXHAUSTED: Final = Deny(DenyReason.BUDGET_EXHAUSTED, "the session's egress budget is used up")
_CROWDED: Final = Deny(DenyReason.NO_FREE_SLOT, "too many connections of the session are open")
_NO_ANSWER: Final = Deny(DenyReason.UPSTREAM_TIMEOUT, "the host did not answer in time")


class PlainRelay(asyncio.Protocol):
    """Serves one client connection. `caller` is the sandbox's own address, None on a port without PROXY headers.

    `tunnel`: the session that a CONNECT to port 80 authenticated, and where it leads.
    """

    def __init__(
        self, services: Services, caller: IPAddress | None, tunnel: tuple[Session, Authority] | None = None
    ) -> None:
        self._services = services
        self._caller = caller
        self._client = Stream(services.loop, self._wake, self._on_client_lost)
        self._held = HeldUpstream(services)
        self._task: asyncio.Task[None] | None = None
        self._waker: asyncio.Future[None] | None = None
        self._gone_timer: asyncio.TimerHandle | None = None
        self._closed = False
        # Nothing follows the present request here: the gateway ends. Whether another process may go on.
        self._is_last = services.is_ending
        self._is_kept = False
        # The connection is routed anew: by the next process, or because its next request is for the gateway itself.
        self._goes_back = False
        # Whose connections and slots are in use here: the session of the tunnel, or of the latest request.
        self._session: Session | None = None
        self._is_crowded = False
        self._tunnel: Authority | None = None
        # The request being served. `_asker` is None until its own credentials are known to be good.
        self._is_serving = False
        self._is_head = False
        self._asker: Session | None = None
        self._authority: Authority | None = None
        self._address = ""
        self._started = 0.0
        self._exchange: Exchange | None = None
        if tunnel is not None:
            session, self._tunnel = tunnel
            self._adopt(session)

    # -- what the hand-over calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection; from here on its transport speaks to the stream."""
        transport.set_protocol(self._client)
        self._client.connection_made(transport)
        if self._closed:
            # The session was revoked while the socket changed hands.
            transport.abort()
            return
        self._task = self._services.loop.create_task(self._run())
        self._services.handover.keep(self._task)
        self._services.relays.add(self)

    def data_received(self, data: bytes) -> None:
        """Take what was read before the hand-over."""
        self._client.feed(data)

    # -- the connection

    async def _run(self) -> None:
        try:
            while await self._serve():
                pass
            await self._leave()
        except asyncio.CancelledError:
            # Session revoked, client gone, or the gateway stops. Nothing is awaited any more; `_close` gives all back.
            pass
        finally:
            self._close(CloseReason.SHUTDOWN)

    async def _serve(self) -> bool:
        """Serve one request; True if another may follow."""
        self._asker = self._session if self._tunnel is not None else None
        self._authority = self._tunnel
        self._address = ""
        self._is_head = False
        self._started = time.monotonic()
        if self._is_crowded:
            self._refuse(_CROWDED)
            return False
        try:
            head = await self._read_head()
            if head is None:
                return False
            self._is_serving = True
            self._started = time.monotonic()
            self._is_head = head.method == b"HEAD"
            request = read_request(head, self._tunnel)
            self._authority = request.authority
            found = self._asker or await self._authenticate(head)
        except HeadError as error:
            self._refuse(Deny(error.reason, error.message), error.status)
            return False
        result = found if isinstance(found, Deny) else await self._carry(found, request)
        if isinstance(result, Deny):
            self._refuse(result)
            return False
        self._is_serving = False
        if result.deny is not None:
            self._reply(result.deny)
        elif result.is_cut:
            self._client.abort(reset=True)
        return result.keep_client

    async def _read_head(self) -> Head | None:
        """Return the next request's head, None when there is no other to be served here. Raises HeadError."""
        loop, client, limits = self._services.loop, self._client, self._services.gateway.config.limits
        overdue: float | None = None
        while True:
            if client.data:
                head = parse_head(client.data, limits.head_bytes)
                if not isinstance(head, Incomplete):
                    if self._is_kept or (self._tunnel is None and names_one_of(self._services.gateway.names, head)):
                        self._goes_back = True
                        return None
                    del client.data[: head.size]
                    client.taken()
                    return head
                if overdue is None:
                    overdue = loop.time() + limits.head_timeout_ms / 1000
            until = client.active + limits.egress_idle_ms / 1000 if overdue is None else overdue
            if client.ended:
                return None
            if self._is_last:
                self._goes_back = self._is_kept
                return None
            if loop.time() >= until:
                if overdue is None:
                    return None
                raise HeadError(408, DenyReason.HEAD_TIMEOUT, "the request head did not arrive in time")
            await self._wait(min(until, self._held.tend(until)))

    # -- the verdict

    async def _authenticate(self, head: Head) -> Session | Deny:
        """Return the session whose credentials the request carries. Raises HeadError if it carries two."""
        gateway = self._services.gateway
        value = head.get(b"proxy-authorization")
        credentials = None if value is None else parse_basic(value)
        if credentials is None:
            return _MISSING if value is None else _NOT_BASIC
        if not await gateway.registry.wait_ready(credentials[0], gateway.config.limits.resync_wait_ms / 1000):
            return _NOT_READY
        return gateway.registry.authenticate(*credentials, self._caller)

    def _adopt(self, session: Session) -> None:
        """Serve in the name of this session from now on."""
        self._held.drop()
        if self._session is not None:
            self._session.remove_closer(self._stop)
        self._session = session
        # A connection between two requests holds no slot, so those are bounded here.
        waiters = self._services.gateway.config.limits.egress_waiters_per_session
        self._is_crowded = session.open_count >= session.slots.capacity + waiters
        session.add_closer(self._stop)

    def _judge(self, session: Session, authority: Authority) -> Verdict:
        verdict = decide_host(session.policy, authority)
        if isinstance(verdict, Deny):
            return verdict
        if session.bytes_left <= 0:
            return _EXHAUSTED
        return _CROWDED if self._is_crowded else verdict

    # -- the exchange

    async def _carry(self, session: Session, request: PlainRequest) -> Ending | Deny:
        """Judge a request and carry it out."""
        self._asker = session
        if session is not self._session:
            self._adopt(session)
        verdict = self._judge(session, request.authority)
        if isinstance(verdict, Deny):
            return verdict
        upstream = self._held.take(session, request)
        if upstream is not None:
            ending = await self._exchange_over(upstream, session, request, verdict.rule)
            if not ending.is_stale:
                return ending
            # The host closed it as we sent. The request changes nothing, so it may be sent twice (RFC 9110 §9.2.2).
        reached = await reach(self._services, session, request.authority, self._wake)
        if isinstance(reached, Unreached):
            self._address = reached.address
            return reached.deny
        self._held.put(session, reached)
        return await self._exchange_over(reached, session, request, verdict.rule)

    async def _exchange_over(self, upstream: Upstream, session: Session, request: PlainRequest, rule: str) -> Ending:
        self._address = str(upstream.address)
        session.egress_allowed += 1
        self._services.gateway.metrics.allowed["http"].inc()
        self._log("allow", rule)
        exchange = self._exchange = Exchange(session, request, self._client, upstream.stream)
        exchange.is_last = self._is_last and not self._is_kept
        ending = await self._drive(exchange)
        if ending.keep_upstream:
            self._held.keep()
        else:
            self._held.drop()
        self._end_exchange(ending.reason)
        return ending

    async def _drive(self, exchange: Exchange) -> Ending:
        """Step until the exchange ends, or nothing moves for the idle limit."""
        loop = self._services.loop
        idle_s = self._services.gateway.config.limits.egress_idle_ms / 1000
        exchange.start()
        while exchange.ending is None:
            if exchange.step():
                # Others get their turn between two steps, however fast both ends are.
                await asyncio.sleep(0)
            elif exchange.ending is None:
                until = exchange.active + idle_s
                if loop.time() >= until:
                    return Ending(CloseReason.IDLE, None if exchange.has_answered else _NO_ANSWER)
                await self._wait(until)
        return exchange.ending

    def _end_exchange(self, reason: CloseReason | DenyReason) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            metrics = self._services.gateway.metrics
            metrics.bytes_up.inc(exchange.bytes_up)
            metrics.bytes_down.inc(exchange.bytes_down)
            self._log("close", reason, exchange.bytes_up, exchange.bytes_down)

    # -- waiting

    def _wake(self) -> None:
        """Something changed at one of the streams."""
        if self._waker is not None and not self._waker.done():
            self._waker.set_result(None)
        if self._client.ended and self._gone_timer is None and not self._closed:
            self._gone_timer = self._services.loop.call_later(HALF_CLOSED_S, self._check_half_closed)

    async def _wait(self, until: float) -> None:
        """Wait until something changes, or until `until` in the loop's time."""
        loop = self._services.loop
        waker = self._waker = loop.create_future()
        timer = loop.call_at(until, self._wake)
        try:
            await waker
        finally:
            timer.cancel()
            self._waker = None

    def _check_half_closed(self) -> None:
        if not self._is_serving:
            return
        loop = self._services.loop
        until = HALF_CLOSED_S + (self._client.active if self._exchange is None else self._exchange.active)
        if loop.time() >= until:
            self._stop(CloseReason.CLIENT_GONE)
        else:
            self._gone_timer = loop.call_at(until, self._check_half_closed)

    # -- ends

    def _refuse(self, deny: Deny, status: int | None = None) -> None:
        """Answer with a refusal; the connection ends after it."""
        self._is_serving = False
        self._services.count_refusal(self._asker, "http", deny)
        if self._asker is not None:
            self._log("refuse", deny.reason)
        self._held.drop()
        self._reply(deny, status)

    def _reply(self, deny: Deny, status: int | None = None) -> None:
        reply = refusal_of(deny, self._authority, status)
        # RFC 9110 §9.3.2: a response to HEAD has no body.
        self._client.write(reply[: reply.index(b"\r\n\r\n") + 4] if self._is_head else reply)

    @property
    def is_serving(self) -> bool:
        """Whether a request is being answered."""
        return self._is_serving

    def drain(self, *, keep: bool) -> None:
        """Take no request after the present one. With `keep` another process can, if nothing binds them to this one."""
        self._is_last = True
        self._is_kept = keep and self._tunnel is None
        if self._exchange is not None:
            self._exchange.is_last = not self._is_kept
        self._wake()

    async def _leave(self) -> None:
        """Let go of the connection so that the client can read what was sent last."""
        services, client = self._services, self._client
        self._held.drop()
        until = services.loop.time() + services.gateway.config.limits.egress_idle_ms / 1000
        client.wake_when_sent()
        while client.has_unsent and services.loop.time() < until:
            await self._wait(until)
        if client.is_open and not client.has_unsent:
            try:
                sock = client.detach()
            except OSError:
                # Without a descriptor to spare it is closed hard.
                return
            if self._goes_back and not services.is_ending:
                services.route_again(sock, self._caller, bytes(client.data))
            else:
                services.lingering.close_with(sock, b"")

    def _on_client_lost(self) -> None:
        self._stop(CloseReason.CLIENT_GONE)

    def _stop(self, reason: CloseReason) -> None:
        """Close at once, whatever is being done."""
        if not self._closed:
            self._close(reason)
            if self._task is not None:
                self._task.cancel()

    def _close(self, reason: CloseReason) -> None:
        """Give everything back. Once or more."""
        if self._closed:
            return
        self._closed = True
        self._services.relays.discard(self)
        if self._exchange is not None:
            self._end_exchange(reason)
        elif self._is_serving and self._asker is not None:
            self._log("refuse", reason)
        self._held.drop()
        if self._session is not None:
            self._session.remove_closer(self._stop)
        if self._gone_timer is not None:
            self._gone_timer.cancel()
        if self._client.is_connected:
            self._client.abort()

    def _log(self, event: str, reason: DenyReason | CloseReason | str, up: int = 0, down: int = 0) -> None:
        session, authority = self._asker, self._authority
        assert session is not None
        assert authority is not None
        self._services.gateway.audit.write(
            session.id, event, "http", authority.host, authority.port, self._address, reason,
            up, down, milliseconds_since(self._started),
        )  # fmt: skip
