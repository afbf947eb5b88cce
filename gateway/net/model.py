"""A client's connection to the model proxy: request heads are judged one after the other, each becomes an exchange.

Requests may be pipelined; they are answered in order. What is refused is refused in the shape of the provider, and the
connection is closed after it when the request's body did not come whole, or when nobody is known to be behind it.
"""

import asyncio
import select
import socket
import time
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address
from typing import Final

from gateway.context import Gateway
from gateway.core.head import BodyFraming, ContentLength, NoBody
from gateway.core.incomplete import Incomplete
from gateway.core.model_refusal import ModelRefusal, encode_refusal
from gateway.core.model_request import Elsewhere, Opening, RequestReader, Unacceptable
from gateway.core.providers import Shape
from gateway.core.verdict import CloseReason, Deny, DenyReason
from gateway.net.model_ask import Ask
from gateway.net.model_exchange import Exchange
from gateway.net.poller import Poller
from gateway.net.wire import Wire
from gateway.registry import Session

IPAddress = IPv4Address | IPv6Address

# How long a connection may stand open between two requests. Clients' pools let theirs go earlier (httpx 5 s, Node 5 s).
KEEP_ALIVE_S: Final = 120.0
# What a client sends ahead of the reply it waits for; beyond it, it is not read until the reply is whole.
MAX_AHEAD_BYTES: Final = 64 * 1024
# After the last reply the rest of a request is read and thrown away: the reset that close(2) sends while bytes are unread
# would take the reply with it. nginx does so for 5 s (lingering_timeout).
LINGER_S: Final = 5.0
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"

_NOT_READY: Final = ModelRefusal(DenyReason.NOT_READY, "The gateway does not know its sessions yet; try again", 1)


class ModelClient(Wire):
    """Serves one client connection. `caller` is the sandbox's own address, None on a port without PROXY headers.

    `route_again` takes the connection when the next request on it is for another host.
    """

    __slots__ = ("_ask", "_buffer", "_caller", "_deadline", "_discarded", "_exchange", "_gateway", "_has_left", "_in_head", "_is_shut",
                 "_last", "_lingers", "_proxy", "_reader", "_route_again", "_seen_unsent", "_session", "_waiting")  # fmt: skip

    def __init__(
        self,
        gateway: Gateway,
        poller: Poller,
        sock: socket.socket,
        caller: IPAddress | None,
        route_again: Callable[[socket.socket, IPAddress | None, bytes, Session | None], None],
    ) -> None:
        super().__init__(poller, sock)
        self._route_again = route_again
        self._gateway = gateway
        self._proxy = gateway.model
        self._caller = caller
        self._reader = RequestReader(gateway.model.rules)
        # Whose connection this is, since the last request that said so.
        self._session: Session | None = None
        self._ask: Ask | None = None
        # What was read beyond the request that is being served.
        self._buffer = b""
        self._exchange: Exchange | None = None
        # A request that waits until the registry knows its sessions.
        self._waiting: Opening | None = None
        self._in_head = True
        self._deadline = time.monotonic() + self._proxy.limits.head_timeout_ms / 1000
        # The last reply is written; what still comes is thrown away.
        self._last = False
        self._lingers = False
        self._is_shut = False
        # The client will send no more.
        self._has_left = False
        self._seen_unsent = 0
        self._discarded = 0
        self._proxy.add(self)

    # --- Wire

    def received(self, data: bytes) -> None:
        if self._last:
            self._discarded += len(data)
            if self._discarded > self._proxy.limits.max_request_bytes:
                self.close()
            return
        exchange, ask = self._exchange, self._ask
        if exchange is not None:
            if exchange.receiving:
                data = exchange.receive(data)
        elif not (self._buffer or self._waiting or self.is_full or ask is None) and ask.is_current(
            self._gateway.registry
        ):
            # The usual case: one more request like the one before. Credentials and all they were checked against are the
            # very ones of then.
            reader = self._reader
            if ask.request is reader.last and (size := reader.size_of_repeated(data)):
                self._begin(ask, ContentLength(reader.length), data[size:])
                if self._buffer:
                    self._serve()
                return
        if data and not self._last:
            self._buffer = self._buffer + data if self._buffer else data
            self._serve()

    def lost(self, *, clean: bool) -> None:
        """The client left: whoever half-closes after a request is taken for gone, as by nginx."""
        cut = self._exchange is not None
        self._leave(CloseReason.CLIENT_GONE)
        if clean and self.unsent_bytes and not cut:
            # It may still read the last reply.
            self._has_left = True
            self.pause()
            self._end()
        else:
            self.close()

    def filled(self) -> None:
        if self._exchange is not None:
            self._exchange.pause()

    def drained(self) -> None:
        if self._exchange is not None:
            self._exchange.resume()
        elif not self._last:
            self._deadline = time.monotonic() + KEEP_ALIVE_S
            self.resume()
            self._serve()

    def emptied(self) -> None:
        if self._last:
            self._half_close()
        else:
            self._serve()

    def close(self) -> None:
        if not self.is_closed:
            super().close()
            self._leave(CloseReason.CLIENT_GONE)
            self._proxy.discard(self)
            if self._lingers:
                self._lingers = False
                self._proxy.end_linger()

    # --- for the exchange

    def turn_to_next(self, *, close: bool) -> None:
        """The reply is written whole: turn to the next request; with `close` there is none."""
        was_asked, self._exchange = self._exchange is not None, None
        self.resume()
        if not (close or self._proxy.draining):
            self._deadline = time.monotonic() + KEEP_ALIVE_S
            if was_asked and self._buffer:
                # Not from within the provider's callback: a row of requests would nest.
                asyncio.get_running_loop().call_soon(self._serve_rest)
            return
        self._disown()
        self._lingers = self._proxy.begin_linger()
        self._end()

    def refuse(self, shape: Shape, refusal: ModelRefusal, *, close: bool) -> None:
        """Answer with a refusal; with `close` it is the last reply."""
        close = close or self._proxy.draining
        self._gateway.metrics.refused["model", refusal.reason].inc()
        if not self.is_closed:
            self.write(encode_refusal(shape, refusal, close=close))
            self.turn_to_next(close=close)

    def abort(self, reason: CloseReason = CloseReason.CLIENT_GONE) -> None:
        """Cut the connection, whatever is still to be written."""
        self._leave(reason)
        self.close()

    # --- for the clock

    def tick(self, now: float) -> None:
        """End what has taken too long."""
        if self._exchange is not None:
            self._exchange.tick(now)
            if self.is_paused and not self.is_closed and self._hung_up():
                self.close()
        elif self._last or self.is_full:
            self._tick_unsent(now)
        elif now < self._deadline:
            pass
        elif self._waiting is not None:
            self._stop_waiting()
            self.refuse(self._proxy.default.shape, _NOT_READY, close=True)
        elif self._buffer:
            refusal = ModelRefusal(DenyReason.HEAD_TIMEOUT, "The request head did not arrive in time")
            self.refuse(self._proxy.default.shape, refusal, close=True)
        else:
            self._end()

    def drain(self) -> None:
        """End after the present request, at once if there is none."""
        if self._exchange is None and self._waiting is None and not self._last:
            self.turn_to_next(close=True)

    def hand_back(self) -> None:
        """Give the connection back to the router if it is between two requests: it can then go on in another process."""
        is_quiet = self._exchange is None and self._waiting is None
        if is_quiet and not (self.is_closed or self._last or self.unsent_bytes):
            self._go_elsewhere()

    # --- within

    def _serve(self) -> None:
        """Serve what is in the buffer, until something must be waited for.

        One thing is a client that takes its replies more slowly than they come: a row of requests would fill the memory.
        """
        while self._buffer and self._exchange is None and self._waiting is None and not (self._last or self.is_full):
            opening = self._reader.read(self._buffer)
            if isinstance(opening, Unacceptable):
                self.refuse(opening.shape, opening.refusal, close=True)
                return
            if isinstance(opening, Elsewhere):
                # Once the reply before is sent.
                if not self.unsent_bytes:
                    self._go_elsewhere()
                return
            if isinstance(opening, Incomplete):
                if not self._in_head:
                    self._in_head = True
                    self._deadline = time.monotonic() + self._proxy.limits.head_timeout_ms / 1000
                return
            self._in_head = False
            self._buffer = self._buffer[opening.size :]
            self._judge(opening)
        if len(self._buffer) > MAX_AHEAD_BYTES and not self._last:
            self.pause()

    def _serve_rest(self) -> None:
        """Serve what came ahead of a reply, unless the client is gone by now."""
        try:
            self._serve()
        except BaseException:
            self.close()
            raise

    def _go_elsewhere(self) -> None:
        data, session = self._buffer, self._session
        self._leave(CloseReason.DONE)
        self._proxy.discard(self)
        self._route_again(self.detach(), self._caller, data, session)

    def _judge(self, opening: Opening) -> None:
        """Find out who sent a request, and begin to serve it."""
        registry, ask = self._gateway.registry, self._ask
        if ask is not None and ask.request is opening.request and ask.is_current(registry):
            # Credentials and all they were checked against are the very ones of the request before.
            self._begin(ask, opening.framing, self._buffer)
            return
        destination = opening.request.destination
        session = registry.authenticate(destination.session_id, opening.request.terms.token, self._caller)
        if not isinstance(session, Deny):
            self._ask = Ask(session, self._proxy.provider(destination.provider), opening.request)
            self._begin(self._ask, opening.framing, self._buffer)
        elif registry.ready or registry.get(destination.session_id) is not None:
            self.refuse(destination.shape, ModelRefusal(session.reason, session.message), close=True)
        elif not self._proxy.begin_wait():
            self.refuse(destination.shape, _NOT_READY, close=True)
        else:
            # After a restart the sessions come with control's first message: the request waits for it.
            self._waiting = opening
            self._deadline = time.monotonic() + self._proxy.limits.resync_wait_ms / 1000
            registry.when_ready(self._on_ready)

    def _begin(self, ask: Ask, framing: BodyFraming, data: bytes) -> None:
        """Serve a request whose sender is known; `data` is what was read beyond its head."""
        self._buffer = data
        proxy, account = self._proxy, ask.session.model
        now, limits = time.monotonic(), proxy.limits
        concurrent = limits.model_requests_per_session
        if ask.session is not self._session and not self._adopt(ask.session, concurrent):
            refusal = ModelRefusal(DenyReason.NO_FREE_SLOT, "The session has too many connections open", 1)
            # It belongs to no session: neither its limit nor a revocation would ever end it.
            self._turn_away(ask, framing, refusal, close=True)
            return
        if isinstance(framing, ContentLength) and framing.length > limits.max_request_bytes:
            self._turn_away(ask, framing, proxy.too_large())
            return
        started = account.start(now, concurrent, metered=ask.request.destination.route.metered)
        if started is not None:
            self._turn_away(ask, framing, started)
            return
        if ask.request.terms.expects_continue and not data:
            self.write(CONTINUE)
        self._buffer = b""
        # One who waited for the registry may have sent much meanwhile.
        self.resume()
        exchange = self._exchange = Exchange(self, proxy, ask, now)
        self._buffer = exchange.begin(framing, data)

    def _turn_away(self, ask: Ask, framing: BodyFraming, refusal: ModelRefusal, *, close: bool = False) -> None:
        """Refuse a request whose sender is known and whose body was not looked at."""
        self._proxy.report_refused(ask, refusal.reason)
        close = close or ask.request.terms.close or not isinstance(framing, NoBody)
        self.refuse(ask.request.destination.shape, refusal, close=close)

    def _adopt(self, session: Session, concurrent: int) -> bool:
        """Serve in the name of this session from now on, unless it has too many connections."""
        self._disown()
        # Each request in flight has a connection, and a client's pool keeps about as many for the next ones.
        if session.model.connections >= 2 * concurrent:
            return False
        session.model.connections += 1
        session.add_closer(self.abort)
        self._session = session
        return True

    def _disown(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.model.connections -= 1
            session.remove_closer(self.abort)

    def _on_ready(self) -> None:
        opening = self._waiting
        # Of those that are told in a row, one may have ended by what another did; it has been counted out then.
        if opening is not None:
            self._stop_waiting()
            try:
                self._judge(opening)
                self._serve()
            except Exception as error:
                # It must not keep those behind it in the row from being told.
                context = {"message": "a request that waited for the sessions failed", "exception": error}
                asyncio.get_running_loop().call_exception_handler(context)
                self.close()

    def _stop_waiting(self) -> None:
        self._waiting = None
        self._proxy.end_wait()
        self._gateway.registry.stop_waiting(self._on_ready)

    def _end(self) -> None:
        """Nothing more is written: close once all is sent, kindly if there is room for it."""
        self._buffer = b""
        self._last = True
        self._deadline = time.monotonic() + self._proxy.limits.model_idle_timeout_ms / 1000
        self._half_close()

    def _half_close(self) -> None:
        """Tell the client that nothing follows, once all is sent."""
        if self.unsent_bytes or self._is_shut or self.is_closed:
            return
        if self._has_left or not self._lingers:
            self.close()
            return
        self._is_shut = True
        self._seen_unsent = 0
        self._deadline = time.monotonic() + LINGER_S
        try:
            self.sock.shutdown(socket.SHUT_WR)
        except OSError:
            # The client is gone: nobody to be kind to.
            self.close()

    def _tick_unsent(self, now: float) -> None:
        """Cut a client that takes nothing of what is held for it."""
        if self.unsent_bytes != self._seen_unsent:
            self._seen_unsent = self.unsent_bytes
            self._deadline = now + self._proxy.limits.model_idle_timeout_ms / 1000
        elif now >= self._deadline:
            self.close()

    def _hung_up(self) -> bool:
        """Tell whether a client that is not read from has left; its transport would not notice."""
        poller = select.poll()
        poller.register(self.sock.fileno(), select.POLLRDHUP)
        return bool(poller.poll(0))

    def _leave(self, reason: CloseReason) -> None:
        """Let go of everything that is done for this client."""
        exchange, self._exchange = self._exchange, None
        self._buffer = b""
        if exchange is not None:
            exchange.client_gone(reason)
        if self._waiting is not None:
            self._stop_waiting()
        self._disown()
