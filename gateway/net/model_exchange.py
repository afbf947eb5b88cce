"""One model request and its reply: the body goes up as it comes, the reply comes down as it is framed, at once.

It holds nothing back but what a rule must read first, and a key that a provider's error repeats. Whatever ends it, the
upstream connection is given back or closed, usage is booked, and the client can tell a whole reply from a cut one.
"""

import enum
import time
from typing import TYPE_CHECKING, Final

import msgspec

from gateway.core.chunked import LAST_CHUNK, ChunkedError, ChunkedReader, encode_chunk
from gateway.core.head import Chunked, ContentLength
from gateway.core.headers import ReplyHead
from gateway.core.model_body import read_body
from gateway.core.model_budget import Outcome, Reservation
from gateway.core.model_refusal import ModelRefusal
from gateway.core.model_request import Request
from gateway.core.redact import Redactor
from gateway.core.usage import NO_USAGE, JsonUsage, StreamUsage, UsageReader
from gateway.core.verdict import CloseReason, DenyReason
from gateway.net.model_proxy import ModelProxy, Provider, Spent
from gateway.net.upstream import UpstreamConnection
from gateway.registry import Session

if TYPE_CHECKING:
    from gateway.net.model import ModelClient

# Body bytes kept while the upstream connection is made; then the client waits.
MAX_PENDING_BYTES: Final = 256 * 1024
# A request larger than this is not sent again on a new connection: it is not kept for it.
MAX_REPLAY_BYTES: Final = 1024 * 1024


class Phase(enum.Enum):
    """What an exchange waits for."""

    HOLDING = "holding"  # the whole body, because a rule must read it
    CONNECTING = "connecting"
    SENDING = "sending"  # more of the request's body
    WAITING = "waiting"  # the reply's first byte
    REPLYING = "replying"
    ENDED = "ended"


class Ask(msgspec.Struct, frozen=True):
    """A request whose sender is known: whose it is, of whom, and what."""

    session: Session
    provider: Provider
    request: Request


class Exchange:
    """Serves one `Ask` of the client connection `client`."""

    __slots__ = (
        "_ask", "_bytes_down", "_bytes_up", "_chunks", "_client", "_first_byte_at", "_held", "_held_bytes", "_left", "_moved",
        "_opened", "_pending", "_pending_bytes", "_phase", "_plain", "_proxy", "_quiet_since", "_rechunk", "_redactor", "_replay",
        "_replay_bytes", "_reply_head", "_reply_status", "_reservation", "_route", "_sent_any", "_started", "_upstream", "_usage", "receiving",
    )  # fmt: skip

    def __init__(self, client: "ModelClient", proxy: ModelProxy, ask: Ask, now: float) -> None:
        self._client = client
        self._proxy = proxy
        self._ask = ask
        self._route = ask.request.destination.route
        self._started = self._quiet_since = now
        self._phase = Phase.CONNECTING
        self._upstream: UpstreamConnection | None = None
        self._chunks = ChunkedReader() if isinstance(ask.request.framing, Chunked) else None
        self._left = ask.request.framing.length if isinstance(ask.request.framing, ContentLength) else 0
        # Whether request body bytes are still to come.
        self.receiving = self._chunks is not None or self._left > 0
        # A body that a rule must read. Its bytes stay counted until the provider's connection has taken them.
        self._held = bytearray()
        self._held_bytes = 0
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        # What was sent on a reused connection, until a reply byte or an acknowledgement shows that it arrived.
        self._replay: list[bytes] | None = None
        self._replay_bytes = 0
        # Whether the decision was to pass the request on, and whether the provider may have begun to work on it.
        self._opened = False
        self._sent_any = False
        self._reservation: Reservation | None = None
        self._usage: UsageReader = NO_USAGE
        self._redactor: Redactor | None = None
        # Whether body bytes pass as they are; `_reply_head` goes out with the first of them.
        self._plain = True
        self._reply_head = b""
        self._rechunk = False
        self._reply_status = 0
        self._first_byte_at = 0.0
        self._bytes_up = self._bytes_down = self._moved = 0

    def begin(self, data: bytes) -> bytes:
        """Start, with what has come of the body already; return what follows it.

        The provider is asked at once, unless the body must be read first.
        """
        framing = self._ask.request.framing
        if self._must_read():
            if self._ask.request.terms.encoded:
                self.refuse(
                    ModelRefusal(DenyReason.UNSUPPORTED_ENCODING, "This session's requests must not be compressed")
                )
                return b""
            self._phase = Phase.HOLDING
            if not self.receiving:
                self._judge()
        elif isinstance(framing, ContentLength):
            self._open(b"content-length: %d\r\n" % framing.length)
        elif isinstance(framing, Chunked):
            self._open(b"transfer-encoding: chunked\r\n")
        else:
            self._open(b"" if self._ask.request.method == b"GET" else b"content-length: 0\r\n")
        if data and self.receiving:
            return self.receive(data)
        self._flush()
        return data

    # --- from the client

    def receive(self, data: bytes) -> bytes:
        """Take bytes of the request's body; return what follows it."""
        if self._chunks is None:
            body = data[: self._left] if len(data) > self._left else data
            self._left -= len(body)
            self.receiving = self._left > 0
            rest = data[len(body) :]
        else:
            try:
                body, used = self._chunks.feed(data)
            except ChunkedError as error:
                self.refuse(ModelRefusal(DenyReason.MALFORMED_REQUEST, f"The request body is malformed: {error}"))
                return b""
            if self._chunks.announced > self._proxy.limits.max_request_bytes:
                self.refuse(self._proxy.too_large())
                return b""
            self.receiving = not self._chunks.done
            rest = data[used:]
        self._bytes_up += len(body)
        if self._phase is Phase.HOLDING:
            self._hold(body)
        elif self._chunks is None:
            self._send(body)
        else:
            self._send((encode_chunk(body) if body else b"") + (b"" if self.receiving else LAST_CHUNK))
        self._flush()
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
        moved = self._bytes_up + self._bytes_down
        if moved != self._moved and self._phase is not Phase.HOLDING:
            self._moved = moved
            self._quiet_since = now
            return
        quiet = now - self._quiet_since
        if self._replay is not None and self._upstream is not None and not self._upstream.took_nothing():
            self._replay = None
        match self._phase:
            case Phase.HOLDING:
                if quiet >= limits.model_first_byte_timeout_ms / 1000:
                    self._time_out_client()
            case Phase.CONNECTING:
                if quiet >= limits.model_connect_timeout_ms / 1000:
                    dialing = self._ask.provider.pool.is_dialing_for(self)
                    self.refuse(
                        ModelRefusal(DenyReason.CONNECT_TIMEOUT, "The model provider did not answer in time")
                        if dialing
                        else ModelRefusal(DenyReason.OVERLOADED, "All connections to the model provider are in use", 1)
                    )
            case Phase.SENDING:
                if quiet >= limits.model_idle_timeout_ms / 1000:
                    if self._client.is_paused:
                        self._time_out("The model provider stopped reading the request")
                    else:
                        self._time_out_client()
            case Phase.WAITING:
                if quiet >= limits.model_first_byte_timeout_ms / 1000:
                    self._time_out("The model provider did not answer in time")
            case Phase.REPLYING:
                if quiet >= limits.model_idle_timeout_ms / 1000:
                    self._time_out("The model provider fell silent")

    # --- from the upstream connection (UpstreamOwner)

    def upstream_ready(self, connection: UpstreamConnection) -> None:
        self._attach(connection)
        self._flush()
        self._client.set_reading(True)

    def upstream_unavailable(self, reason: DenyReason, message: str) -> None:
        self.refuse(ModelRefusal(reason, message))

    def interim_reply(self, head: bytes) -> None:
        self._client.write(head)

    def reply_started(self, status: int, head: bytes) -> None:
        self._reply_status = status
        self._first_byte_at = time.monotonic()
        self._phase = Phase.REPLYING
        self._replay = None
        reply = ReplyHead(status, head)
        self._rechunk = not reply.is_delimited
        if 200 <= status < 300:
            if self._route.metered and not reply.is_encoded:
                self._usage = StreamUsage() if reply.is_event_stream else JsonUsage()
        elif key := self._ask.provider.key():
            # Some providers repeat the key in the error about it.
            self._redactor = Redactor(key)
            reply = ReplyHead(status, Redactor(key).feed(head))
        close = self._ask.request.terms.close or self.receiving or self._proxy.draining
        self._reply_head = reply.for_client(close=close, chunked=self._rechunk)
        self._plain = False

    def body_received(self, body: bytes) -> None:
        self._usage.feed(body)

    def relay(self, data: bytes) -> None:
        self._bytes_down += len(data)
        if self._plain:
            self._client.write(data)
        else:
            self._relay_specially(data)

    def reply_completed(self, *, reusable: bool) -> None:
        if self._redactor is not None and (held := self._redactor.flush()):
            self._client.write(encode_chunk(held) if self._rechunk else held)
        if self._rechunk:
            self._client.write(LAST_CHUNK)
        self._usage.end()
        close = self._ask.request.terms.close or self.receiving
        self._end(CloseReason.DONE, self._outcome(), reusable=reusable and not self.receiving)
        self._client.exchange_done(close=close)

    def upstream_lost(self, connection: UpstreamConnection, *, clean: bool) -> None:
        if self._phase is Phase.REPLYING:
            if self._rechunk and clean and self._usage.ends_with(self._route.end_markers):
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
            self._quiet_since = time.monotonic()
            self._ask.provider.pool.acquire(self, fresh=True)
        else:
            self._upstream = None
            self.refuse(
                ModelRefusal(DenyReason.UPSTREAM_FAILED, "The model provider closed the connection without a reply")
            )

    def upstream_full(self) -> None:
        self._client.set_reading(False)

    def upstream_drained(self) -> None:
        self._drop_held()
        self._client.set_reading(True)

    # --- ends

    def refuse(self, refusal: ModelRefusal) -> None:
        """End with a refusal, or with a cut when the reply has begun."""
        if self._phase is Phase.REPLYING:
            self._fail(CloseReason.UPSTREAM_FAILED)
            return
        receiving = self.receiving
        self._end(refusal.reason, Outcome.CUT if self._sent_any else Outcome.KNOWN)
        self._client.refuse(
            self._ask.request.destination.shape, refusal, close=receiving or self._ask.request.terms.close
        )

    def _time_out(self, message: str) -> None:
        if self._phase is Phase.REPLYING:
            self._fail(CloseReason.TIMEOUT)
        else:
            self.refuse(ModelRefusal(DenyReason.UPSTREAM_TIMEOUT, message))

    def _time_out_client(self) -> None:
        self.refuse(ModelRefusal(DenyReason.REQUEST_TIMEOUT, "The request body did not arrive in time"))

    def _fail(self, reason: CloseReason) -> None:
        """The reply cannot be completed: the client's connection is cut in mid-reply, so that it can tell."""
        self._end(reason, Outcome.CUT)
        self._client.abort()

    def _outcome(self) -> Outcome:
        if self._route.metered and 200 <= self._reply_status < 300 and not self._usage.final:
            return Outcome.UNREADABLE
        return Outcome.KNOWN

    def _end(self, reason: CloseReason | DenyReason, outcome: Outcome, *, reusable: bool = False) -> None:
        """Give back and book everything, once."""
        if self._phase is Phase.ENDED:
            return
        self._phase = Phase.ENDED
        ask, upstream = self._ask, self._upstream
        self._upstream = None
        if upstream is not None:
            upstream.release(reusable=reusable)
        else:
            ask.provider.pool.cancel(self)
        self._drop_held()
        self._pending.clear()
        self._replay = None
        usage = self._usage
        if not self._route.metered:
            outcome = Outcome.KNOWN
        ask.session.model.settle(self._reservation, usage.usage, outcome, self._bytes_down)
        ask.session.model.finish()
        if not self._opened and isinstance(reason, DenyReason):
            self._proxy.report_refused(ask, reason)
        elif self._opened:
            now = time.monotonic()
            self._proxy.report_closed(
                ask,
                reason,
                Spent(
                    status=self._reply_status,
                    model=usage.model,
                    tokens=usage.usage,
                    bytes_up=self._bytes_up,
                    bytes_down=self._bytes_down,
                    seconds=now - self._started,
                    first_byte_s=self._first_byte_at - self._started if self._first_byte_at else None,
                ),
            )

    # --- within

    def _must_read(self) -> bool:
        rule, session = self._route.body, self._ask.session
        if rule is None:
            return False
        return bool(session.grant.models) or (self._route.metered and session.model.limits_tokens)

    def _hold(self, body: bytes) -> None:
        if not self._proxy.hold(len(body)):
            self.refuse(ModelRefusal(DenyReason.OVERLOADED, "The gateway holds too many request bodies; try again", 1))
            return
        self._held += body
        self._held_bytes += len(body)
        if not self.receiving:
            self._judge()

    def _judge(self) -> None:
        """Hold the whole body against the session's rules, then send it."""
        ask = self._ask
        assert self._route.body is not None
        account = ask.session.model
        limits_tokens = self._route.metered and account.limits_tokens
        body = bytes(self._held)
        self._held = bytearray()
        facts = read_body(body, self._route.body, ask.session.grant.models, limits_tokens=limits_tokens)
        if isinstance(facts, ModelRefusal):
            self.refuse(facts)
            return
        if limits_tokens:
            # A token is at least one byte of the request, so its size is the most input it can be.
            reservation = account.reserve(len(body), facts.output_tokens)
            if isinstance(reservation, ModelRefusal):
                self.refuse(reservation)
                return
            self._reservation = reservation
        self._open(b"content-length: %d\r\n" % len(body))
        self._send(body)
        self._flush()

    def _open(self, framing: bytes) -> None:
        ask = self._ask
        self._opened = True
        self._proxy.report_allowed(ask)
        self._phase = Phase.CONNECTING
        self._quiet_since = self._started
        request, provider = ask.request, ask.provider
        line = b"%b %b%b HTTP/1.1\r\n" % (request.method, provider.url.base_path, request.destination.target)
        self._send(b"".join((line, provider.fixed_headers(), request.passed, framing, b"\r\n")))
        connection = ask.provider.pool.acquire(self)
        if connection is not None:
            self._attach(connection)

    def _attach(self, connection: UpstreamConnection) -> None:
        self._upstream = connection
        connection.start(self)
        self._phase = Phase.SENDING
        self._replay = [] if connection.reused else None

    def _send(self, data: bytes) -> None:
        self._pending.append(data)
        self._pending_bytes += len(data)

    def _flush(self) -> None:
        """Write what is to be sent, in one call: on loopback a write costs more than all the rest of a request."""
        if self._upstream is None:
            if self._pending_bytes > MAX_PENDING_BYTES and self.receiving:
                self._client.set_reading(False)
            return
        pending = self._pending
        if pending:
            self._sent_any = True
            if self._replay is not None:
                self._replay_bytes += self._pending_bytes
                self._replay = self._replay + pending if self._replay_bytes <= MAX_REPLAY_BYTES else None
            self._pending, self._pending_bytes = [], 0
            self._upstream.write(b"".join(pending))
            if self._held_bytes and not self._upstream.is_full:
                self._drop_held()
        if not self.receiving and self._phase is Phase.SENDING:
            self._phase = Phase.WAITING

    def _relay_specially(self, data: bytes) -> None:
        """Relay the first bytes of a body with the reply's head, and bodies that are not passed as they are."""
        if self._redactor is not None:
            data = self._redactor.feed(data)
        if self._rechunk and data:
            data = encode_chunk(data)
        head, self._reply_head = self._reply_head, b""
        if head:
            self._client.write(head + data)
        elif data:
            self._client.write(data)
        self._plain = self._redactor is None and not self._rechunk

    def _drop_held(self) -> None:
        self._proxy.unhold(self._held_bytes)
        self._held_bytes = 0
        self._held = bytearray()
