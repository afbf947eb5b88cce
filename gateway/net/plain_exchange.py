"""One request and its response between two streams. Moves bytes, counts them, and says how it ended; waits for nothing.

Both directions are open at once: a server may answer before it has all of the request (100 Continue, 413).
"""

from dataclasses import dataclass
from typing import Final

from gateway.core.chunked import LAST_CHUNK, encode_chunk
from gateway.core.head import Chunked
from gateway.core.incomplete import Incomplete
from gateway.core.plain_body import BodyError, BodyReader, body_reader
from gateway.core.plain_head import (
    PlainRequest,
    ResponseError,
    ResponseHead,
    parse_response_head,
    response_bytes,
    response_framing,
)
from gateway.core.verdict import CloseReason, Deny, DenyReason
from gateway.net.plain_stream import Stream
from gateway.net.splice import Account

_EXHAUSTED: Final = Deny(DenyReason.BUDGET_EXHAUSTED, "the session's egress budget is used up")
_NO_ANSWER: Final = Deny(DenyReason.UPSTREAM_FAILED, "the host closed the connection without a whole answer")


@dataclass(frozen=True, slots=True)
class Ending:
    """How an exchange ended.

    `deny` is what the client is to be told; None once it has got the head of a response. `keep_client` and `keep_upstream`: the
    connection will carry another exchange. `is_cut`: the client has a response that it could take for whole, and is not.
    `is_stale`: a kept connection ended before it answered anything, so the request may be sent on a new one.
    """

    reason: CloseReason | DenyReason
    deny: Deny | None = None
    keep_client: bool = False
    keep_upstream: bool = False
    is_cut: bool = False
    is_stale: bool = False


class Exchange:
    """One exchange. `account` pays for every byte that is passed on, and none is passed on that is not paid for."""

    __slots__ = (
        "_account", "_client", "_download", "_in_chunks", "_keep_client", "_request", "_response", "_upload", "_upstream",
        "bytes_down", "bytes_up", "ending", "is_last",
    )  # fmt: skip

    def __init__(self, account: Account, request: PlainRequest, client: Stream, upstream: Stream) -> None:
        self._account = account
        self._request = request
        self._client = client
        self._upstream = upstream
        self._upload = body_reader(request.framing)
        self._response: ResponseHead | None = None
        self._download: BodyReader | None = None
        self._keep_client = False
        self._in_chunks = False
        self.bytes_up = 0
        self.bytes_down = 0
        self.ending: Ending | None = None
        # Whether the client is to be told that its connection takes no other request.
        self.is_last = False

    @property
    def has_answered(self) -> bool:
        """Whether the client has got the head of a response."""
        return self._response is not None

    @property
    def keeps_client(self) -> bool:
        """Whether the client has been told that its connection takes another request."""
        return self.has_answered and self._keep_client

    @property
    def active(self) -> float:
        """When a byte last moved, in the loop's time."""
        return max(self._client.active, self._upstream.active)

    def start(self) -> None:
        """Send the request's head."""
        # A head goes whole or not at all: half a head is of no use to anybody.
        if len(self._request.head) > self._account.bytes_left:
            self._exhaust()
        else:
            self._send_up(self._request.head)

    def step(self) -> bool:
        """Move what can be moved now; True if it was anything, so that another step may move more."""
        moved = False
        if self.ending is None:
            moved = self._step_up()
        if self.ending is None:
            moved = self._step_down() or moved
        return moved and self.ending is None

    # -- the request's body

    def _step_up(self) -> bool:
        client, upstream, upload = self._client, self._upstream, self._upload
        # A server that has ended reads no more; what it said before that decides.
        if upload.done or upstream.ended or upstream.is_full:
            return False
        held = len(client.data)
        try:
            piece = upload.read(client.data)
        except BodyError as error:
            self._end(DenyReason.MALFORMED_REQUEST, Deny(DenyReason.MALFORMED_REQUEST, str(error)))
            return False
        client.taken()
        if piece:
            self._send_up(piece)
        if held == len(client.data):
            if client.ended:
                # The rest of the body will never come, and what the server makes of a part is nobody's wish.
                self._end(
                    CloseReason.CLIENT_GONE, Deny(DenyReason.MALFORMED_REQUEST, "the request's body is not whole")
                )
            return False
        return True

    def _send_up(self, data: bytes) -> None:
        account = self._account
        data = data[: max(0, account.bytes_left)]
        self._upstream.write(data)
        account.bytes_up += len(data)
        account.bytes_left -= len(data)
        self.bytes_up += len(data)
        if account.bytes_left <= 0:
            self._exhaust()

    # -- the response

    def _step_down(self) -> bool:
        if self._client.is_full:
            return False
        moved = False
        if self._download is None:
            moved = self._read_head()
        # In the same step: of a short reply the client has all or nothing, whatever comes next.
        if self._download is not None and self.ending is None:
            moved = self._read_body(self._download) or moved
        return moved

    def _read_head(self) -> bool:
        upstream, request = self._upstream, self._request
        try:
            head = parse_response_head(upstream.data)
            if isinstance(head, Incomplete):
                if upstream.ended:
                    self._end(CloseReason.UPSTREAM_FAILED, _NO_ANSWER, is_stale=not upstream.data)
                return False
            framing = response_framing(head, request)
        except ResponseError as error:
            self._end(CloseReason.UPSTREAM_FAILED, Deny(DenyReason.UPSTREAM_FAILED, str(error)))
            return False
        del upstream.data[: head.size]
        upstream.taken()
        if head.is_interim:
            # RFC 9110 §15.2: "A server MUST NOT send a 1xx response to an HTTP/1.0 client."
            if not request.is_http_1_0:
                self._send_head(response_bytes(head, framing, close=False))
            return True
        download = self._download = body_reader(framing)
        # A body that ends with the connection looks whole wherever it was cut, so it goes on in chunks to whoever knows
        # them. (A reset would tell as well, but a unix socket has none, and the forwarder passes none on.)
        self._in_chunks = download.ends_with_connection and not request.is_http_1_0
        # If the request's body is not whole yet, it may never be, and then nothing can follow it.
        self._keep_client = request.keep_alive and self._upload.done and not self.is_last
        passed = Chunked() if self._in_chunks else framing
        if self._send_head(response_bytes(head, passed, close=not self._keep_client)):
            self._response = head
            self._settle(download)
        return True

    def _send_head(self, data: bytes) -> bool:
        if len(data) > self._account.bytes_left:
            self._exhaust()
            return False
        self._send_down(data)
        return True

    def _read_body(self, download: BodyReader) -> bool:
        upstream = self._upstream
        held = len(upstream.data)
        try:
            piece = download.read(upstream.data)
        except BodyError:
            self._end(CloseReason.UPSTREAM_FAILED, is_cut=True)
            return False
        upstream.taken()
        if piece and not self._send_body(encode_chunk(piece) if self._in_chunks else piece):
            return False
        self._settle(download)
        return held != len(upstream.data)

    def _send_body(self, data: bytes) -> bool:
        """Send as much of `data` as is paid for; False if that was not all."""
        room = max(0, self._account.bytes_left)
        self._send_down(data[:room])
        if room < len(data):
            self._exhaust()
        return room >= len(data)

    def _send_down(self, data: bytes) -> None:
        account = self._account
        self._client.write(data)
        account.bytes_down += len(data)
        account.bytes_left -= len(data)
        self.bytes_down += len(data)

    def _settle(self, download: BodyReader) -> None:
        """End if the response is whole, or will never be."""
        upstream, response = self._upstream, self._response
        assert response is not None
        if download.done:
            # Bytes behind a response were not asked for: they are never taken for an answer to the next request.
            reusable = response.keep_alive and self._upload.done and not upstream.data and not upstream.ended
            self._end(CloseReason.DONE, keep_client=self._keep_client, keep_upstream=reusable)
        elif self._account.bytes_left <= 0:
            self._exhaust()
        elif upstream.ended and not upstream.data:
            if not download.ends_with_connection or upstream.failed:
                self._end(CloseReason.UPSTREAM_FAILED, is_cut=True)
            elif not self._in_chunks or self._send_body(LAST_CHUNK):
                self._end(CloseReason.DONE, keep_client=self._keep_client)

    # -- ends

    def _exhaust(self) -> None:
        self._end(CloseReason.BUDGET_EXHAUSTED, _EXHAUSTED)

    def _end(
        self,
        reason: CloseReason | DenyReason,
        deny: Deny | None = None,
        *,
        keep_client: bool = False,
        keep_upstream: bool = False,
        is_cut: bool = False,
        is_stale: bool = False,
    ) -> None:
        if self.ending is None:
            told = None if self.has_answered else deny
            self.ending = Ending(reason, told, keep_client, keep_upstream, is_cut, is_stale)
