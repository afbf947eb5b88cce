"""Refusals: complete, readable in every client, and impossible to break out of."""

import io
import json
import ssl
from http.client import HTTPResponse
from typing import Any

import pytest

from gateway.core.replies import ALERT_UNRECOGNIZED_NAME, ESTABLISHED, MAX_MESSAGE_CHARACTERS, refusal
from gateway.core.verdict import DenyReason


class _Wire(io.BytesIO):
    def makefile(self, _mode: str) -> io.BytesIO:
        return self


def read(reply: bytes) -> tuple[HTTPResponse, dict[str, Any]]:
    """Read a reply as Python's own client does, and check that nothing is left over."""
    wire = _Wire(reply)
    response = HTTPResponse(wire)  # type: ignore[arg-type]
    response.begin()
    length = int(response.headers["Content-Length"])
    head, _, body = reply.partition(b"\r\n\r\n")
    assert len(body) == length
    assert b"\n" not in head.replace(b"\r\n", b"")
    return response, json.loads(body)["error"]


def test_a_refusal_says_why_three_times() -> None:
    reply = refusal(403, DenyReason.HOST_NOT_LISTED, "this host is not on the list", host="example.com", port=443)
    response, error = read(reply)
    assert response.status == 403
    assert response.reason == "host_not_listed: this host is not on the list"
    assert response.headers["X-Opificia-Reason"] == "host_not_listed"
    assert error == {
        "reason": "host_not_listed",
        "message": "this host is not on the list",
        "host": "example.com",
        "port": 443,
    }
    assert response.headers["Content-Type"] == "application/json"
    assert response.headers["Connection"] == "close"
    assert "Proxy-Authenticate" not in response.headers
    assert "Retry-After" not in response.headers


def test_only_a_407_carries_a_challenge() -> None:
    response, error = read(refusal(407, DenyReason.CREDENTIALS_MISSING, "no credentials"))
    assert response.headers["Proxy-Authenticate"] == 'Basic realm="opificia"'
    assert "host" not in error
    assert "port" not in error


def test_says_when_to_come_back() -> None:
    response, _ = read(refusal(429, DenyReason.NO_FREE_SLOT, "busy", retry_after_s=5))
    assert response.headers["Retry-After"] == "5"


@pytest.mark.parametrize(
    "hostile",
    [
        "a\r\nX-Evil: 1",
        "a\nb",
        "a\r\n\r\n<script>",
        'a"}}\\',
        "\x00\x1b[31m\x7f",
        "bücher 例え \ud800 \u2028",
        "%s%d%b{}",
        "x" * 100_000,
    ],
)
@pytest.mark.parametrize("status", [400, 407, 502])
def test_no_string_breaks_out_of_a_refusal(hostile: str, status: int) -> None:
    reply = refusal(status, DenyReason.MALFORMED_AUTHORITY, hostile, host=hostile, port=1)
    response, error = read(reply)
    assert len(reply) < 1500
    assert response.status == status
    assert "X-Evil" not in response.headers
    assert len(error["message"]) <= MAX_MESSAGE_CHARACTERS
    for text in (response.reason, error["message"], error["host"]):
        assert text.isascii()
        assert text.isprintable()


@pytest.mark.parametrize("reason", list(DenyReason))
def test_every_reason_fits_everywhere(reason: DenyReason) -> None:
    response, error = read(refusal(403, reason, "m"))
    assert response.headers["X-Opificia-Reason"] == error["reason"] == reason.value


def test_a_granted_connect_has_no_body_and_no_length() -> None:
    assert ESTABLISHED == b"HTTP/1.1 200 Connection established\r\n\r\n"


def test_a_tls_client_reads_the_alert_as_unrecognized_name() -> None:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="example.com")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    incoming.write(ALERT_UNRECOGNIZED_NAME)
    with pytest.raises(ssl.SSLError, match=r"(?i)unrecognized.name"):
        client.do_handshake()
