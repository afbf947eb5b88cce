"""What a refused client is told, and how: as whole responses, ready to send.

A refusal says why three times, because clients show different parts: urllib and Go print the reason phrase,
npm the phrase and the body's `error`, apt the whole head. None of the parts can be broken out of, whatever
the strings hold.
"""

import re
from http import HTTPStatus
from typing import Final

import orjson

from gateway.core.authority import Authority
from gateway.core.status import RETRY_AFTER_S, status_of
from gateway.core.verdict import Deny, DenyReason

# RFC 9110 §9.3.6: a 2xx to CONNECT has no body and neither Content-Length nor Transfer-Encoding.
ESTABLISHED: Final = b"HTTP/1.1 200 Connection established\r\n\r\n"

# Once a tunnel is granted there is no HTTP left to refuse with: a fatal alert in a TLS record (RFC 8446 §6,
# RFC 6066 §3), which clients show as "unrecognized name". The record version is the one all versions from 1.2
# on send.
ALERT_UNRECOGNIZED_NAME: Final = b"\x15\x03\x03\x00\x02\x02\x70"

MAX_MESSAGE_CHARACTERS: Final = 200
_MAX_HOST_CHARACTERS: Final = 253
_CHALLENGE: Final = b'Proxy-Authenticate: Basic realm="opificia"\r\n'
_odd_characters: Final = re.compile(r"[^\x20-\x7e]")


def refusal(
    status: int,
    reason: DenyReason,
    message: str,
    *,
    host: str | None = None,
    port: int | None = None,
    retry_after_s: int | None = None,
) -> bytes:
    """Return a whole HTTP/1.1 response that refuses a request and closes the connection.

    `message` is one sentence for a person; `host` and `port` are what the client asked for. Anything but
    printable ASCII in them is replaced. A 407 carries the challenge (RFC 9110 §11.7.1).
    """
    text = _printable(message, MAX_MESSAGE_CHARACTERS)
    error: dict[str, str | int] = {"reason": reason.value, "message": text}
    if host is not None:
        error["host"] = _printable(host, _MAX_HOST_CHARACTERS)
    if port is not None:
        error["port"] = port
    body = orjson.dumps({"error": error}) + b"\n"
    challenge = _CHALLENGE if status == HTTPStatus.PROXY_AUTHENTICATION_REQUIRED else b""
    retry = b"" if retry_after_s is None else b"Retry-After: %d\r\n" % retry_after_s
    name = reason.value.encode("ascii")
    return (
        b"HTTP/1.1 %d %b: %b\r\nX-Opificia-Reason: %b\r\n%b%b"
        b"Content-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b"
        % (status, name, text.encode("ascii"), name, challenge, retry, len(body), body)
    )


def refusal_of(deny: Deny, authority: Authority | None, status: int | None = None) -> bytes:
    """Return the response that refuses a CONNECT or plain request for `authority`, None where it named none.

    `status` is given only where the reason alone does not say it.
    """
    status = status or status_of(deny.reason)
    return refusal(
        status,
        deny.reason,
        deny.message,
        host=authority.host if authority else None,
        port=authority.port if authority else None,
        retry_after_s=RETRY_AFTER_S if status in (429, 503) else None,
    )


def _printable(text: str, limit: int) -> str:
    return _odd_characters.sub("?", text[:limit])
