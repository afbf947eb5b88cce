"""Plain HTTP: `GET http://host/…` at the sandbox port, and what a CONNECT to port 80 carries.

One coroutine a client connection; it is not the hot path. Every request is judged as a CONNECT is: credentials, level and
rules, budget, slot, name, addresses. Requests may be pipelined and are answered in order, one at a time. A connection to
a host may serve the next request to the same host, never one to another. A request to the gateway itself on the same
connection takes the connection back to the router. In a gateway that leaves a connection pauses before its next request.
"""

import asyncio
import logging
import socket
import time
from typing import Final

from gateway.core.authority import Authority
from gateway.core.head import Head, HeadError, parse_head
from gateway.core.incomplete import Incomplete
from gateway.core.plain_head import PlainRequest, names_one_of, read_request
from gateway.core.replies import refusal_of
from gateway.core.verdict import CloseReason, Deny, DenyReason
from gateway.net.paused import Paused
from gateway.net.plain_exchange import Ending, Exchange
from gateway.net.plain_judge import authenticate, judge
from gateway.net.plain_stream import Stream
from gateway.net.plain_upstream import HeldUpstream, Unreached, Upstream, reach
from gateway.net.services import Services, milliseconds_since
from gateway.registry import IPAddress, Session

log = logging.getLogger("gateway.plain")

# A client that half-closed may still read its response; one that left looks the same. When nothing has moved for this
# long it counts as gone. (nginx and Go take it for gone at once.)
HALF_CLOSED_S: Final = 5.0

_CROWDED: Final = Deny(DenyReason.NO_FREE_SLOT, "too many connections of the session are open")
_NO_ANSWER: Final = Deny(DenyReason.UPSTREAM_TIMEOUT, "the host did not answer in time")


class PlainRelay:
    """Serves one client connection. `caller` is the sandbox's own address, None on a port without PROXY headers.

    `session`: whose connection it is, where that is known; `tunnel`: where the CONNECT to port 80 leads that carries it.
    """

    def __init__(
        self,
        services: Services,
        caller: IPAddress | None,
        session: Session | None = None,
        tunnel: Authority | None = None,
    ) -> None:
        self._services = services
        self._caller = caller
        self._client = Stream(services.loop, self._wake, self._on_client_lost)
        self._held = HeldUpstream(services)
        self._task: asyncio.Task[None] | None = None
        self._waker: asyncio.Future[None] | None = None
        self._gone_timer: asyncio.TimerHandle | None = None
        self._closed = False
        # The connection as it came, until this has begun.
        self._sock: socket.socket | None = None
        # Until when the head that has begun must be whole.
        self._head_until: float | None = None
        # The next request is another's to serve: the router's, because it is for the gateway itself, or the next process'.
        self._goes_back = False
        self._goes_on = False
        # Whose connections and slots are in use here: the session of the tunnel, or of the latest request.
        self._session: Session | None = None
        self._is_crowded = False
        self._tunnel = tunnel
        # The request being served. `_asker` is None until its own credentials are known to be good.
        self._is_serving = False
        self._is_head = False
        self._asker: Session | None = None
        self._authority: Authority | None = None
        self._address = ""
        self._started = 0.0
        self._exchange: Exchange | None = None
        if session is not None:
            self._adopt(session)

    # -- the connection

    def start(self, sock: socket.socket, data: bytes, left_s: float | None = None) -> None:
        """Serve a connection that nobody else watches; `data` was read from it already.

        `left_s`: its session had it before, and this is what was left of the time for its next request.
        """
        services, client, limits = self._services, self._client, self._services.gateway.config.limits
        client.data += data
        if left_s is not None:
            # It was let in once.
            self._is_crowded = False
            if data:
                self._head_until = services.loop.time() + min(left_s, limits.head_timeout_ms / 1000)
            else:
                client.active += min(0.0, left_s - limits.egress_idle_ms / 1000)
        if self._pauses:
            self._pause(sock)
            return
        self._sock = sock
        services.relays.add(self)
        self._task = services.loop.create_task(self._run(sock))
        services.tasks.keep(self._task)

    async def _run(self, sock: socket.socket) -> None:
        self._sock = None
        try:
            # Reading begins when this returns.
            await self._services.loop.connect_accepted_socket(lambda: self._client, sock)
            while await self._serve():
                pass
            await self._leave()
        except asyncio.CancelledError:
            # Session revoked, client gone, or the gateway stops. Nothing is awaited any more; `_close` gives all back.
            pass
        except OSError as error:
            log.debug("a connection cannot be served: %s", error)
        finally:
            if not self._client.is_connected:
                sock.close()
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
            self._head_until = None
            self._started = time.monotonic()
            self._is_head = head.method == b"HEAD"
            request = read_request(head, self._tunnel)
            self._authority = request.authority
            found = self._asker or await authenticate(self._services, head, self._caller)
        except HeadError as error:
            self._refuse_head(error)
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
        services, client = self._services, self._client
        loop, limits = services.loop, services.gateway.config.limits
        while True:
            if self._pauses:
                self._goes_on = True
                return None
            if client.data:
                head = parse_head(client.data, limits.head_bytes)
                if not isinstance(head, Incomplete):
                    if self._is_for_gateway(head):
                        self._goes_back = True
                        return None
                    del client.data[: head.size]
                    client.taken()
                    return head
                if self._head_until is None:
                    self._head_until = loop.time() + limits.head_timeout_ms / 1000
            if client.ended or services.is_ending:
                return None
            until = self._until
            if loop.time() >= until:
                if self._head_until is None:
                    return None
                raise HeadError(408, DenyReason.HEAD_TIMEOUT, "the request head did not arrive in time")
            await self._wait(min(until, self._held.tend(until)))

    @property
    def _pauses(self) -> bool:
        """Whether the next request is the next process'. Only who is known may wait for it."""
        return self._services.is_leaving and self._session is not None

    @property
    def _until(self) -> float:
        """Until when the next request must begin, or its head be whole, in the loop's time."""
        idle_s = self._services.gateway.config.limits.egress_idle_ms / 1000
        return self._client.active + idle_s if self._head_until is None else self._head_until

    def _is_for_gateway(self, head: Head) -> bool:
        """Whether a request is for the gateway itself, addressed directly or as by a client that has it for a proxy."""
        is_direct = head.target.startswith(b"/") and head.method != b"CONNECT"
        return self._tunnel is None and (is_direct or names_one_of(self._services.gateway.names, head))

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

    # -- the exchange

    async def _carry(self, session: Session, request: PlainRequest) -> Ending | Deny:
        """Judge a request and carry it out."""
        self._asker = session
        if session is not self._session:
            self._adopt(session)
        verdict = judge(session, request.authority)
        if isinstance(verdict, Deny):
            return verdict
        if self._is_crowded:
            return _CROWDED
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
        exchange.is_last = self._services.is_ending
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

    def _refuse_head(self, error: HeadError) -> None:
        """Answer what is no request; who means the model proxy is answered as by its provider."""
        reply = None
        if self._tunnel is None and not self._is_serving:
            reply = self._services.model_refusal(bytes(self._client.data), error.reason, error.message)
        if reply is None:
            self._refuse(Deny(error.reason, error.message), error.status)
        else:
            self._client.write(reply)

    def _reply(self, deny: Deny, status: int | None = None) -> None:
        reply = refusal_of(deny, self._authority, status)
        # RFC 9110 §9.3.2: a response to HEAD has no body.
        self._client.write(reply[: reply.index(b"\r\n\r\n") + 4] if self._is_head else reply)

    @property
    def will_pause(self) -> bool:
        """Whether it pauses when its last reply is sent: no request is being answered."""
        return self._pauses and not self._is_serving

    @property
    def has_promised(self) -> bool:
        """Whether it pauses when the present reply is whole, whose client was told that it may ask again."""
        return self._pauses and self._exchange is not None and self._exchange.keeps_client

    @property
    def is_sent(self) -> bool:
        """Whether the client has taken all of the last reply."""
        return not (self._client.is_connected and self._client.has_unsent)

    def drain(self) -> None:
        """Notice that the gateway leaves or ends: no request is taken after the present one."""
        if self._exchange is not None:
            self._exchange.is_last = self._services.is_ending
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
            if not (self._goes_back or self._goes_on) or services.is_ending:
                services.lingering.close_with(sock, b"")
            elif self._pauses:
                self._pause(sock)
            elif self._goes_back:
                services.route_again(sock, self._caller, bytes(client.data), self._session)
            else:
                # The process that it was to wait for did not come.
                relay = PlainRelay(services, self._caller, self._session, self._tunnel)
                relay.start(sock, bytes(client.data), self._until - services.loop.time())

    def _pause(self, sock: socket.socket) -> None:
        """Leave the connection to the next process."""
        services, session = self._services, self._session
        assert session is not None
        session.remove_closer(self._stop)
        left_s = self._until - services.loop.time()
        Paused(services, session, self._caller, self._tunnel, sock, bytes(self._client.data), left_s)

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
        elif self._sock is not None:
            self._sock.close()

    def _log(self, event: str, reason: DenyReason | CloseReason | str, up: int = 0, down: int = 0) -> None:
        session, authority = self._asker, self._authority
        assert session is not None
        assert authority is not None
        self._services.gateway.audit.write(
            session.id, event, "http", authority.host, authority.port, self._address, reason,
            up, down, milliseconds_since(self._started),
        )  # fmt: skip
