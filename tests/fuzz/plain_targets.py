"""Targets on the way of a plain-HTTP exchange: what goes on of a request and of a response, and the exchange itself."""

from dataclasses import dataclass, field
from typing import Any

from gateway.core.authority import Authority, parse_authority
from gateway.core.chunked import ChunkedReader
from gateway.core.head import Chunked, ContentLength, Head, HeadError, body_framing, parse_head
from gateway.core.incomplete import Incomplete
from gateway.core.plain_head import (
    HTTP,
    PlainRequest,
    ResponseError,
    ResponseHead,
    UntilClose,
    host_header,
    parse_response_head,
    read_request,
    response_bytes,
    response_framing,
)
from gateway.net.plain_exchange import Ending, Exchange
from tests.fuzz.properties import check_message, pieces, settled

_TUNNEL = Authority("tunnel.example", 80)
_FOR_ONE_CONNECTION = {b"connection", b"http2-settings", b"keep-alive", b"te", b"trailer", b"upgrade"}
_FRAMING = {b"host", b"content-length", b"transfer-encoding"}
_BUDGET = 100_000


def _request(text: bytes) -> PlainRequest:
    head = parse_head(text + b"\r\nHost: a.example\r\n\r\n")
    assert isinstance(head, Head)
    return read_request(head, None)


_GET = _request(b"GET http://a.example/ HTTP/1.1")
_ASKED = (_GET, _request(b"HEAD http://a.example/ HTTP/1.1"), _request(b"GET http://a.example/ HTTP/1.0"))


def plain_request(data: bytes) -> None:
    """`read_request`: what goes upstream has one meaning, and it is the one that was judged."""
    try:
        head = parse_head(data)
    except HeadError:
        return
    if isinstance(head, Incomplete):
        return
    for tunnel in (None, _TUNNEL):
        try:
            request = read_request(head, tunnel)
        except HeadError as error:
            check_message(error.message)
            continue
        assert tunnel is None or request.authority == tunnel
        again = parse_head(request.head, len(request.head))
        assert isinstance(again, Head)
        assert again.size == len(request.head)
        assert again.method == head.method != b"CONNECT"
        assert again.target == b"*" or again.target.startswith(b"/")
        assert again.get_all(b"host") == [host_header(request.authority)]
        assert parse_authority(again.get_all(b"host")[0], HTTP) == request.authority
        assert body_framing(again) == request.framing
        assert again.get_all(b"connection") == ([b"close"] if request.is_http_1_0 else [])
        assert not (request.is_http_1_0 and request.keep_alive)
        passed = [each for each in again.headers if each[0] not in _FRAMING | {b"connection"}]
        assert not any(name in _FOR_ONE_CONNECTION or name.startswith(b"proxy-") for name, _ in passed)
        # Nothing is invented, and the order is the client's.
        theirs = iter(head.headers)
        assert all(each in theirs for each in passed)


def plain_response(data: bytes) -> None:
    """`parse_response_head`, `response_framing`, `response_bytes`: the client finds the same end of it as the gateway."""

    def parse(raw: bytes) -> object:
        try:
            return parse_response_head(raw, 2048)
        except ResponseError as error:
            check_message(str(error))
            return "refused"

    head = parse(data)
    settled(parse, data, head)
    if not isinstance(head, ResponseHead):
        return
    for request in _ASKED:
        try:
            framing = response_framing(head, request)
        except ResponseError as error:
            check_message(str(error))
            continue
        for close in (False, True):
            written = response_bytes(head, framing, close=close)
            again = parse_response_head(written)
            assert isinstance(again, ResponseHead)
            assert again.size == len(written)
            assert (again.status, again.phrase) == (head.status, head.phrase)
            assert response_framing(again, request) == framing
            assert again.keep_alive == (head.is_interim or not close)
            names = {name.lower() for name, _ in again.headers} - {b"connection"}
            assert not any(name in _FOR_ONE_CONNECTION or name.startswith(b"proxy-") for name in names)


@dataclass
class _End:
    """One end of an exchange; takes whatever is written."""

    data: bytearray = field(default_factory=bytearray)
    written: bytearray = field(default_factory=bytearray)
    ended: bool = False
    failed: bool = False
    is_full: bool = False
    active: float = 0.0

    def write(self, data: bytes) -> None:
        self.written += data

    def taken(self) -> None:
        pass


@dataclass
class _Account:
    bytes_left: int
    bytes_up: int = 0
    bytes_down: int = 0
    pipes: int = 0


def _exchange(request: PlainRequest, parts: list[bytes], budget: int) -> tuple[bytes, Ending]:
    client, host, account = _End(), _End(), _Account(budget)
    ends: tuple[Any, Any] = client, host
    exchange = Exchange(account, request, *ends)
    exchange.start()
    for part in parts:
        host.data += part
        while exchange.step():
            pass
    host.ended = True
    while exchange.step():
        pass
    assert exchange.ending is not None
    assert (exchange.bytes_up, exchange.bytes_down) == (len(host.written), len(client.written))
    assert account.bytes_left == budget - len(host.written) - len(client.written) >= 0
    return bytes(client.written), exchange.ending


def _as_client(request: PlainRequest, written: bytes, ending: Ending) -> tuple[list[tuple[int, bytes]], bytes]:
    """Read what a client got as it would: the heads and the body. Whole where the ending does not say that it is cut."""
    heads: list[tuple[int, bytes]] = []
    while written:
        head = parse_response_head(written)
        assert isinstance(head, ResponseHead)
        heads.append((head.status, head.phrase))
        written = written[head.size :]
        if not head.is_interim:
            framing = response_framing(head, request)
            body, size, done = written, len(written), True
            if isinstance(framing, Chunked):
                reader = ChunkedReader(max_chunks=None)
                body, size = reader.feed(written)
                done = reader.done
            elif isinstance(framing, ContentLength):
                done = len(body) == framing.length
            elif not isinstance(framing, UntilClose):
                done = not body
            # Not a byte follows that could be taken for the next response.
            assert size == len(written)
            assert done or ending.is_cut
            return heads, body
    return heads, b""


def plain_exchange(data: bytes) -> None:
    """`Exchange`: the client gets the same however the host's answer arrives, and no byte that is not paid for."""
    # Each piece has the head looked at anew, so much of it takes long.
    data = data[:600]
    for request in _ASKED:
        written, ending = _exchange(request, [data], _BUDGET)
        heads, body = _as_client(request, written, ending)
        written, again = _exchange(request, pieces(data), _BUDGET)
        heads_again, body_again = _as_client(request, written, again)
        assert heads_again == heads
        # Of several faults the first that is seen is told.
        assert (again.reason, again.deny is None, again.is_cut) == (ending.reason, ending.deny is None, ending.is_cut)
        # Of a body that turns out to be none, more may have gone on before it was seen.
        assert body_again.startswith(body) if ending.is_cut else body_again == body
        _exchange(request, [data], len(request.head) + len(data) // 2)


def plain_upload(data: bytes) -> None:
    """`Exchange`, upwards: one request with one body goes up, however it arrives, and what follows it stays behind."""
    data = data[:600]
    try:
        head = parse_head(data)
        if isinstance(head, Incomplete):
            return
        request = read_request(head, None)
    except HeadError:
        return
    body = data[head.size :]

    def upload(parts: list[bytes], budget: int = _BUDGET) -> tuple[bytes, bytes, Ending | None]:
        client, host, account = _End(), _End(), _Account(budget)
        ends: tuple[Any, Any] = client, host
        exchange = Exchange(account, request, *ends)
        exchange.start()
        for part in parts:
            client.data += part
            while exchange.step():
                pass
        client.ended = True
        while exchange.step():
            pass
        assert account.bytes_up == len(host.written) == budget - account.bytes_left <= budget
        if exchange.ending is not None and exchange.ending.deny is not None:
            check_message(exchange.ending.deny.message)
        return bytes(host.written), bytes(client.data), exchange.ending

    written, left, ending = upload([body])
    written_again, left_again, ending_again = upload(pieces(body))
    assert ending_again == ending
    assert (left_again, _unframed(request, written_again)) == (left, _unframed(request, written)) or ending is not None
    sent, whole = _unframed(request, written)
    assert whole == (ending is None)
    if isinstance(request.framing, ContentLength):
        assert body.startswith(sent)
        assert not whole or body == sent + left
    elif not isinstance(request.framing, Chunked):
        assert left == body
    elif whole:
        theirs = ChunkedReader(max_chunks=None).feed(body)
        assert (sent, left) == (theirs[0], body[theirs[1] :])
    upload([body], len(request.head) + len(body) // 2)


def _unframed(request: PlainRequest, written: bytes) -> tuple[bytes, bool]:
    """Read what went up as the host would: the body, and whether it is whole. Not a byte follows it."""
    assert written.startswith(request.head)
    body = written[len(request.head) :]
    if isinstance(request.framing, Chunked):
        reader = ChunkedReader(max_chunks=None)
        found, size = reader.feed(body)
        assert size == len(body)
        return found, reader.done
    length = request.framing.length if isinstance(request.framing, ContentLength) else 0
    assert len(body) <= length
    return body, len(body) == length


PLAIN_TARGETS = {
    "plain_upload": plain_upload,
    "plain_request": plain_request,
    "plain_response": plain_response,
    "plain_exchange": plain_exchange,
}
