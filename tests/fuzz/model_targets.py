"""Targets on the way of a model request: its head and body, the reply's head, framing and usage; and a parked record."""

import contextlib
import json
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gateway.core.chunked import LAST_CHUNK, ChunkedError, ChunkedReader, encode_chunk
from gateway.core.incomplete import Incomplete
from gateway.core.model_body import BodyFacts, read_body
from gateway.core.model_refusal import ModelRefusal
from gateway.core.model_reply import Reply
from gateway.core.model_request import Opening, RequestReader, RequestRules, Unacceptable
from gateway.core.providers import SHAPES
from gateway.core.redact import redact
from gateway.core.usage import MAX_TOKENS, JsonUsage, Kept, StreamUsage, TokenUsage, UsageReader
from gateway.net.upstream import UpstreamConnection
from tests.fuzz.properties import check_message, pieces, settled

_RULES = RequestRules(
    names={"opificia-gateway"}, default=SHAPES["anthropic"], others={b"openai": SHAPES["openai"]}, max_head_bytes=2048
)
# With a beginning that comes again in it, as in what is held back.
KEY = b"sk-sk-ant-00"
_ROUTE = SHAPES["anthropic"].routes[b"/v1/messages"]
_BEFORE = b"POST /model/s1/v1/messages HTTP/1.1\r\nhost: opificia-gateway\r\nx-api-key: t\r\nContent-Length: 12\r\n\r\n"


def chunked(data: bytes) -> None:
    """`ChunkedReader`: the body does not depend on how it arrives, and is the same when it is framed anew."""

    def read(parts: list[bytes]) -> tuple[bytes, int, bool] | str:
        reader, body, taken = ChunkedReader(), b"", 0
        try:
            for part in parts:
                got, used = reader.feed(part)
                body += got
                taken += used
        except ChunkedError as error:
            check_message(str(error))
            return "refused"
        assert len(body) <= reader.announced
        assert reader.done or taken == len(data)
        return body, taken, reader.done

    whole = read([data])
    assert read(pieces(data)) == whole
    if isinstance(whole, tuple) and whole[2]:
        body, taken, _ = whole
        assert data[:taken].endswith(b"\r\n\r\n")
        again = (encode_chunk(body) if body else b"") + LAST_CHUNK
        assert ChunkedReader().feed(again) == (body, len(again))


def model_request(data: bytes) -> None:
    """`RequestReader`: what was read before on the same connection changes nothing."""

    def parse(raw: bytes) -> object:
        found = RequestReader(_RULES).read(raw)
        # Of several faults the first that is seen is told.
        return found.refusal.reason if isinstance(found, Unacceptable) else found

    result = RequestReader(_RULES).read(data)
    settled(parse, data, parse(data))
    second = RequestReader(_RULES)
    for earlier in (_BEFORE, data):
        second.read(earlier)
    assert second.read(data) == result
    match result:
        case Incomplete():
            assert b"\r\n\r\n" not in data[:2048]
        case Unacceptable(refusal=refusal):
            check_message(refusal.message)
        case Opening(request):
            assert request.destination.target.startswith(b"/v1/")
            for name in (b"x-api-key", b"authorization", b"content-length", b"transfer-encoding", b"connection"):
                assert not any(line.lower().startswith(name + b":") for line in request.passed.split(b"\r\n"))


def model_body(data: bytes) -> None:
    """`read_body`: what is taken from it is what any other reader takes from it."""
    for path, rule in (
        (path, route.body) for shape in SHAPES.values() for path, route in shape.routes.items() if route.body
    ):
        for limited in (False, True):
            found = read_body(data, rule, ["claude-*", "gpt-*"], limits_tokens=limited)
            if isinstance(found, ModelRefusal):
                check_message(found.message)
                continue
            assert isinstance(found, BodyFacts)
            # As a reader that is easy about bytes that are not UTF-8 takes it.
            theirs = json.loads(data.decode(errors="replace"))
            assert theirs["model"] == found.model, path
            if found.output_tokens is not None:
                assert found.output_tokens >= 0
                asked = [theirs[name] for name in rule.output_caps if theirs.get(name) is not None]
                assert found.output_tokens >= max(asked)


def usage(data: bytes) -> None:
    """`StreamUsage`, `JsonUsage`: counts within bounds, never a failure, the same however the reply arrives."""
    for kind in (StreamUsage, JsonUsage):

        def read(parts: list[bytes], kind: type[UsageReader] = kind) -> tuple[TokenUsage, str, bool]:
            reader = kind(Kept())
            for part in parts:
                reader.feed(part)
            reader.end()
            return reader.usage, reader.model, reader.final

        whole = read([data])
        assert read(pieces(data)) == whole
        counts, model, _ = whole
        for count in (counts.input_tokens, counts.output_tokens, counts.cache_read_tokens, counts.cache_write_tokens):
            assert 0 <= count <= MAX_TOKENS
        assert model.isascii()
        assert len(model) <= 1_000


class _Still:
    """Stands for poller and pool where nothing is to happen."""

    def __getattr__(self, _name: str) -> Any:
        return lambda *_: None


@dataclass
class _Reply:
    status: int = 0
    head: bytes = b""
    body: bytes = b""
    relayed: bytes = b""
    ended: str = ""
    interims: list[bytes] = field(default_factory=list)

    def interim_reply(self, head: bytes) -> None:
        self.interims.append(head)

    def reply_started(self, status: int, head: bytes) -> Callable[[bytes], object]:
        self.status, self.head = status, head
        return self.body_received

    def body_received(self, body: bytes) -> None:
        self.body += body

    def relay(self, data: bytes) -> None:
        self.relayed += data

    def reply_completed(self, *, reusable: bool) -> None:
        self.ended = f"whole, {reusable}"

    def upstream_lost(self, connection: UpstreamConnection, *, clean: bool) -> None:
        self.ended = "lost"


def model_reply(data: bytes) -> None:
    """`UpstreamConnection`: what a provider's reply says does not depend on how it arrives; nothing is invented."""

    def read(parts: list[bytes]) -> _Reply:
        still: Any = _Still()
        with socket.socket() as sock:
            connection = UpstreamConnection(still, still, sock, over_tls=False)
            reply = _Reply()
            owner: Any = reply
            connection.start(owner)
            for part in parts:
                if not reply.ended:
                    connection.received(part)
            return reply

    whole = read([data])
    cut = read(pieces(data))
    assert cut.ended or not whole.ended
    # A head with bare newlines is refused when it comes in pieces, and may pass at once: the provider's own fault.
    if whole.ended != "lost" and data.count(b"\n") == data.count(b"\r\n"):
        # In pieces it ends where it is whole; what follows is then nobody's, and in one piece a fault.
        assert (cut.status, cut.head, cut.body, cut.ended) == (whole.status, whole.head, whole.body, whole.ended)
    assert data.startswith(b"".join((*whole.interims, whole.head, whole.relayed)))
    assert whole.status == 0 or whole.status >= 200
    assert len(whole.body) <= len(whole.relayed) or whole.ended == "lost"


class _Client(_Reply):
    """Takes a reply as an exchange does: what `written` holds is what the sandbox gets."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self._passing: Reply | None = None

    def interim_reply(self, head: bytes) -> None:
        self.written += redact(head, KEY)

    def reply_started(self, status: int, head: bytes) -> Callable[[bytes], object]:
        self.status, self.head = status, head
        self._passing = Reply(_ROUTE, status, head, KEY, Kept(), close=False)
        return self._passing.body_reader

    def relay(self, data: bytes) -> None:
        assert self._passing is not None
        self.relayed += data
        self.written += data if self._passing.is_plain else self._passing.take(data)

    def reply_completed(self, *, reusable: bool) -> None:
        assert self._passing is not None
        self.written += self._passing.end()
        self.ended = "whole"


def redacted_reply(data: bytes) -> None:
    """`Reply`, `Redactor`: a key that an error or an interim reply repeats reaches nobody, however it is cut and framed."""
    # The corpus has two bytes for the key, so that mutation meets its pieces.
    data = data.replace(b"\xfe\xfe", KEY)

    def read(parts: list[bytes]) -> _Client:
        still: Any = _Still()
        with socket.socket() as sock:
            connection = UpstreamConnection(still, still, sock, over_tls=False)
            client = _Client()
            owner: Any = client
            connection.start(owner)
            for part in parts:
                if not client.ended:
                    connection.received(part)
            return client

    whole, cut = read([data]), read(pieces(data))
    for client in (whole, cut):
        head, _, body = client.written.partition(b"\r\n\r\n")
        if not 200 <= client.status < 300:
            assert KEY not in client.written
            assert KEY not in _body(head, body)
    if whole.ended == cut.ended == "whole" and data.count(b"\n") == data.count(b"\r\n"):
        assert _final(whole) == _final(cut)


def _final(client: _Client) -> tuple[bytes, bytes]:
    """Return the last head that a client got, and the body without its framing."""
    written = client.written
    while True:
        head, _, written = written.partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 1"):
            return head, _body(head, written)


def _body(head: bytes, framed: bytes) -> bytes:
    if b"\ntransfer-encoding:" not in head.lower():
        return framed
    with contextlib.suppress(ChunkedError):
        return ChunkedReader(max_chunks=None).feed(framed)[0]
    return framed


MODEL_TARGETS = {
    "redacted_reply": redacted_reply,
    "chunked": chunked,
    "model_request": model_request,
    "model_body": model_body,
    "model_reply": model_reply,
    "usage": usage,
}
