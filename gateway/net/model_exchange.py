"""One model request and its reply: the body goes up as it comes, the reply comes down as it is framed, at once.

It holds nothing back but a body that a rule must read first. Whatever ends it, the upstream connection is given back or
closed, usage is booked, and the client can tell a whole reply from a cut one.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from gateway.access import ModelCost
from gateway.core.chunked import ChunkedError
from gateway.core.head import BodyFraming, ContentLength, NoBody
from gateway.core.model_body import read_body
from gateway.core.model_budget import Outcome, Reservation
from gateway.core.model_phase import Phase, patience_ms
from gateway.core.model_refusal import ModelRefusal
from gateway.core.model_reply import Reply
from gateway.core.model_upload import Upload, framing_line
from gateway.core.redact import redact
from gateway.core.usage import NO_USAGE
from gateway.core.verdict import CloseReason, DenyReason
from gateway.net.model_ask import Ask
from gateway.net.model_proxy import ModelProxy
from gateway.net.upstream import UpstreamConnection

if TYPE_CHECKING:
    from gateway.net.model import ModelClient

# Body bytes kept while the upstream connection is made; then the client waits.
MAX_PENDING_BYTES: Final = 256 * 1024
# A request larger than this is not sent again on a new connection: it is not kept for it.
MAX_REPLAY_BYTES: Final = 1024 * 1024


class Exchange:
    """Serves one `Ask` of the client connection `client`."""

    __slots__ = (
        "_ask", "_bytes_down", "_bytes_up", "_client", "_first_byte_at", "_held", "_held_bytes", "_moved", "_opened", "_pending",
        "_pending_bytes", "_phase", "_proxy", "_quiet_since", "_replay", "_replay_bytes", "_reply", "_reservation", "_sent_any",
        "_started", "_upload", "_upstream", "receiving",
    )  # fmt: skip

    def __init__(self, client: "ModelClient", proxy: ModelProxy, ask: Ask, now: float) -> None:
        self._client = client
        self._proxy = proxy
        self._ask = ask
        self._started = self._quiet_since = now
        self._phase = Phase.HOLDING
        self._upstream: UpstreamConnection | None = None
        # The request's body while it comes in pieces. Whether bytes of it are still to come.
        self._upload: Upload | None = None
        self.receiving = False
        # A body that a rule must read. Its bytes stay counted until the provider's connection has taken them.
        self._held: bytearray | None = None
        self._held_bytes = 0
        # What waits for a connection.
        self._pending: list[bytes] | None = None
        self._pending_bytes = 0
        # What was sent on a reused connection, until a reply byte or an acknowledgement shows that it arrived.
        self._replay: list[bytes] | None = None
        self._replay_bytes = 0
        # Whether the decision was to pass the request on, and whether the provider may have begun to work on it.
        self._opened = False
        self._sent_any = False
        self._reservation: Reservation | None = None
        self._reply: Reply | None = None
        self._first_byte_at = 0.0
        self._bytes_up = self._bytes_down = self._moved = 0
        proxy.running += 1

    def begin(self, framing: BodyFraming, data: bytes) -> bytes:
        """Start, with what has come of the body already; return what follows it.

        The provider is asked at once, unless the body must be read first.
        """
        if self._ask.must_read:
            if self._ask.request.terms.is_foreign:
                self.refuse(
                    ModelRefusal(
                        DenyReason.UNSUPPORTED_ENCODING,
                        "This session's request bodies must be application/json in UTF-8, not compressed",
                    )
                )
                return b""
            if isinstance(framing, ContentLength) and len(data) >= framing.length:
                # The usual case: the body came with the head.
                size = self._bytes_up = framing.length
                body, rest = (data, b"") if len(data) == size else (data[:size], data[size:])
                if self._count_held(size):
                    self._judge(body)
                return rest
            self._held = bytearray()
        elif isinstance(framing, NoBody):
            self._open(b"" if self._ask.request.method == b"GET" else framing_line(0))
            return data
        upload = self._upload = Upload(framing)
        self.receiving = not upload.done
        if self._held is not None:
            if not self.receiving:
                self._judge(b"")
            return self.receive(data) if data and self.receiving else data
        body = b""
        if data and self.receiving:
            fed = self._feed(upload, data)
            if fed is None:
                return b""
            body, data = fed
        self._open(upload.framing, upload.encode(body))
        return data

    # --- from the client

    def receive(self, data: bytes) -> bytes:
        """Take bytes of the request's body, of which some are to come; return what follows it."""
        upload = self._upload
        assert upload is not None
        fed = self._feed(upload, data)
        if fed is None:
            return b""
        body, rest = fed
        if self._held is None:
            self._send(upload.encode(body))
        elif self._count_held(len(body)):
            self._held += body
            if not self.receiving:
                whole, self._held = bytes(self._held), None
                self._judge(whole)
        return rest

    def client_gone(self, reason: CloseReason) -> None:
        """The client left, or must: the provider is told by closing, so that it stops working."""
        self._end(reason, Outcome.CUT)

    def pause(self) -> None:
        """The client does not take more now."""
        if self._upstream is not None:
            self._upstream.pause()

    def resume(self) -> None:
        """The client takes more again."""
        if self._upstream is not None:
            self._upstream.resume()

    # --- from the clock

    def tick(self, now: float) -> None:
        """End the exchange if one of its times is over."""
        if self._phase is Phase.ENDED:
            return
        limits = self._proxy.limits
        if now - self._started >= limits.model_total_timeout_ms / 1000:
            self._time_out("The request took longer than the gateway allows")
            return
        # What the provider takes of a body that was held is movement too.
        unsent = 0 if self._upstream is None else self._upstream.unsent_bytes
        moved = self._bytes_up + self._bytes_down - unsent
        if moved != self._moved and self._phase is not Phase.HOLDING:
            self._moved = moved
            self._quiet_since = now
            return
        if self._replay is not None and self._upstream is not None and not self._upstream.took_nothing():
            self._replay = None
        if now - self._quiet_since < patience_ms(self._phase, limits) / 1000:
            return
        match self._phase:
            case Phase.HOLDING:
                self._time_out_client()
            case Phase.CONNECTING:
                dialing = self._ask.provider.pool.is_dialing_for(self)
                self.refuse(
                    ModelRefusal(DenyReason.CONNECT_TIMEOUT, "The model provider did not answer in time")
                    if dialing
                    else ModelRefusal(DenyReason.OVERLOADED, "All connections to the model provider are in use", 1)
                )
            case Phase.SENDING if self._client.is_paused:
                self._time_out("The model provider stopped reading the request")
            case Phase.SENDING:
                self._time_out_client()
            case Phase.WAITING:
                self._time_out("The model provider did not answer in time")
            case Phase.REPLYING:
                self._time_out("The model provider fell silent")

    # --- from the upstream connection (UpstreamOwner)

    def upstream_ready(self, connection: UpstreamConnection) -> None:
        pending, self._pending, self._pending_bytes = self._pending, None, 0
        self._attach(connection)
        if pending:
            self._send(b"".join(pending))
        if not connection.is_full:
            self._client.resume()

    def upstream_unavailable(self, reason: DenyReason, message: str) -> None:
        self.refuse(ModelRefusal(reason, message))

    def interim_reply(self, head: bytes) -> None:
        self._client.write(redact(head, self._ask.key))

    def reply_started(self, status: int, head: bytes) -> Callable[[bytes], object]:
        ask = self._ask
        self._first_byte_at = time.monotonic()
        self._phase = Phase.REPLYING
        self._replay = None
        close = ask.request.terms.close or self.receiving or self._proxy.draining
        reply = self._reply = Reply(
            ask.request.destination.route, status, head, ask.key, ask.session.model.kept, close=close
        )
        return reply.body_reader

    def relay(self, data: bytes) -> None:
        reply = self._reply
        assert reply is not None
        self._bytes_down += len(data)
        if not reply.is_plain:
            data = reply.take(data)
        if data:
            self._client.write(data)

    def reply_completed(self, *, reusable: bool) -> None:
        reply = self._reply
        assert reply is not None
        if last := reply.end():
            self._client.write(last)
        receiving = self.receiving
        self._end(CloseReason.DONE, reply.outcome, reusable=reusable and not receiving)
        self._client.turn_to_next(close=receiving or self._ask.request.terms.close)

    def upstream_lost(self, connection: UpstreamConnection, *, clean: bool) -> None:
        if self._reply is not None:
            if clean and self._reply.is_whole_at_close():
                self.reply_completed(reusable=False)
                return
            self._upstream = None
            self._fail(CloseReason.UPSTREAM_FAILED)
        elif self._replay is not None and connection.took_nothing():
            # The provider closed an idle connection while the request was on its way.
            self._upstream = None
            self._pending, self._replay = self._replay, None
            self._pending_bytes = self._replay_bytes
            self._phase = Phase.CONNECTING
            self._sent_any = False
            self._quiet_since = time.monotonic()
            self._ask.provider.pool.acquire(self, fresh=True)
        else:
            self._upstream = None
            self.refuse(
                ModelRefusal(DenyReason.UPSTREAM_FAILED, "The model provider closed the connection without a reply")
            )

    def upstream_full(self) -> None:
        self._client.pause()

    def upstream_drained(self) -> None:
        self._drop_held()
        self._client.resume()

    # --- ends

    def refuse(self, refusal: ModelRefusal) -> None:
        """End with a refusal, or with a cut when the reply has begun."""
        if self._reply is not None:
            self._fail(CloseReason.UPSTREAM_FAILED)
            return
        receiving = self.receiving
        request = self._ask.request
        self._end(refusal.reason, Outcome.CUT)
        self._client.refuse(request.destination.shape, refusal, close=receiving or request.terms.close)

    def _time_out(self, message: str) -> None:
        if self._reply is not None:
            self._fail(CloseReason.TIMEOUT)
        else:
            self.refuse(ModelRefusal(DenyReason.UPSTREAM_TIMEOUT, message))

    def _time_out_client(self) -> None:
        self.refuse(ModelRefusal(DenyReason.REQUEST_TIMEOUT, "The request body did not arrive in time"))

    def _fail(self, reason: CloseReason) -> None:
        """The reply cannot be completed: the client's connection is cut in mid-reply, so that it can tell."""
        self._end(reason, Outcome.CUT)
        self._client.close()

    def _end(self, reason: CloseReason | DenyReason, outcome: Outcome, *, reusable: bool = False) -> None:
        """Give back and book everything, once."""
        if self._phase is Phase.ENDED:
            return
        self._phase = Phase.ENDED
        self.receiving = False
        ask, upstream, proxy, account = self._ask, self._upstream, self._proxy, self._ask.session.model
        proxy.running -= 1
        if upstream is not None:
            self._upstream = None
            upstream.release(reusable=reusable)
        else:
            ask.provider.pool.cancel(self)
        if self._held_bytes:
            self._drop_held()
        self._held = self._pending = self._replay = None
        reply = self._reply
        usage = NO_USAGE if reply is None else reply.usage
        tokens = usage.usage
        if outcome is Outcome.CUT:
            usage.drop()
            if usage.final:
                outcome = Outcome.CUT_LATE
        seconds = time.monotonic() - self._started
        refused = reply is not None and not 200 <= reply.status < 300
        if not ask.request.destination.route.metered or not self._sent_any or refused:
            # Nothing was spent, however it ended.
            outcome = Outcome.KNOWN
        account.settle(self._reservation, tokens, outcome, relayed_bytes=self._bytes_down, seconds=seconds)
        account.finish()
        if self._opened:
            first = self._first_byte_at
            first_byte_s = first - self._started if first else None
            cost = ModelCost(
                usage.model,
                0 if reply is None else reply.status,
                tokens.input_tokens,
                tokens.output_tokens,
                tokens.cache_read_tokens,
                tokens.cache_write_tokens,
                int((first_byte_s or 0) * 1000),
            )
            proxy.report_closed(ask, reason, cost, self._bytes_up, self._bytes_down, seconds, first_byte_s)
        elif isinstance(reason, DenyReason):
            proxy.report_refused(ask, reason)

    # --- within

    def _feed(self, upload: Upload, data: bytes) -> tuple[bytes, bytes] | None:
        """Return body bytes and what follows the body; None when it is refused for them."""
        try:
            fed = upload.feed(data)
        except ChunkedError as error:
            self.refuse(ModelRefusal(DenyReason.MALFORMED_REQUEST, f"The request body is malformed: {error}"))
            return None
        if upload.announced > self._proxy.limits.max_request_bytes:
            self.refuse(self._proxy.too_large())
            return None
        self.receiving = not upload.done
        self._bytes_up += len(fed[0])
        return fed

    def _count_held(self, count: int) -> bool:
        """Count body bytes as held; without room for them the exchange has ended."""
        if not self._proxy.hold(count):
            self.refuse(ModelRefusal(DenyReason.OVERLOADED, "The gateway holds too many request bodies; try again", 1))
            return False
        self._held_bytes += count
        return True

    def _judge(self, body: bytes) -> None:
        """Hold the whole body against the session's rules, then send it."""
        ask = self._ask
        session, route = ask.session, ask.request.destination.route
        assert route.body is not None
        limits_tokens = route.metered and session.model.limits_tokens
        facts = read_body(body, route.body, session.grant.models, limits_tokens=limits_tokens)
        if isinstance(facts, ModelRefusal):
            self.refuse(facts)
            return
        if limits_tokens:
            # A token is at least one byte, so the size is the most input the body itself can be. What it only names (an
            # earlier response, a file, a URL) is counted when the provider says it.
            reservation = session.model.reserve(len(body), facts.output_tokens)
            if isinstance(reservation, ModelRefusal):
                self.refuse(reservation)
                return
            self._reservation = reservation
        self._open(framing_line(len(body)), body)

    def _open(self, framing: bytes, body: bytes = b"") -> None:
        """The request is passed on: begin with its head, and the `body` if it is whole."""
        ask = self._ask
        self._opened = True
        self._proxy.report_allowed(ask)
        self._quiet_since = self._started
        connection = ask.provider.pool.acquire(self)
        if connection is not None:
            self._attach(connection)
        else:
            self._phase = Phase.CONNECTING
        self._send(b"".join((ask.head(), framing, b"\r\n", body)))

    def _attach(self, connection: UpstreamConnection) -> None:
        self._upstream = connection
        connection.start(self)
        if self._client.is_full:
            # It was told when it filled, to whoever was served then.
            connection.pause()
        self._phase = Phase.SENDING
        self._replay = [] if connection.reused else None
        self._replay_bytes = 0

    def _send(self, data: bytes) -> None:
        """Write to the provider, in one call what is there: on loopback a write costs more than all the rest of a request."""
        upstream = self._upstream
        if upstream is None:
            if self._pending is None:
                self._pending = []
            self._pending.append(data)
            self._pending_bytes += len(data)
            if self._pending_bytes > MAX_PENDING_BYTES and self.receiving:
                self._client.pause()
            return
        self._sent_any = True
        if self._replay is not None:
            self._replay_bytes += len(data)
            if self._replay_bytes <= MAX_REPLAY_BYTES:
                self._replay.append(data)
            else:
                self._replay = None
        upstream.write(data)
        if self._held_bytes and not upstream.is_full:
            self._drop_held()
        if not self.receiving and self._phase is Phase.SENDING:
            self._phase = Phase.WAITING

    def _drop_held(self) -> None:
        self._proxy.unhold(self._held_bytes)
        self._held_bytes = 0
