"""What the head of a CONNECT asks for."""

import base64

import pytest

from gateway.core.connect_request import ConnectRequest, Unacceptable, read_connect
from gateway.core.head import Head, parse_head
from gateway.core.verdict import DenyReason

GOOD = "Proxy-Authorization: Basic " + base64.b64encode(b"s1:token:with:colons").decode()


def read(target: str, *headers: str) -> ConnectRequest | Unacceptable:
    head = parse_head("\r\n".join([f"CONNECT {target} HTTP/1.1", *headers, "", ""]).encode())
    assert isinstance(head, Head)
    return read_connect(head)


@pytest.mark.parametrize("host", ["Host: a.example:443", "Host: A.Example", "Host: a.example:8443", "Accept: */*"])
def test_gives_authority_and_credentials(host: str) -> None:
    request = read("a.example:443", host, GOOD)
    assert isinstance(request, ConnectRequest)
    assert (str(request.authority), request.session_id, request.token) == ("a.example:443", "s1", "token:with:colons")


@pytest.mark.parametrize(
    ("target", "headers", "reason", "named"),
    [
        ("a.example:443", ["Host: a.example:443"], DenyReason.CREDENTIALS_MISSING, True),
        ("a.example:443", ["Proxy-Authorization: Bearer x"], DenyReason.CREDENTIALS_WRONG, True),
        ("a.example:443", [GOOD, "Proxy-Authorization: Basic eDp5"], DenyReason.MALFORMED_REQUEST, True),
        ("a.example:443", ["Host: b.example:443", GOOD], DenyReason.MALFORMED_AUTHORITY, True),
        ("a.example:443", ["Host: a.example:+443", GOOD], DenyReason.MALFORMED_AUTHORITY, True),
        ("a.example:443", ["Host: a.example", "Host: b.example", GOOD], DenyReason.MALFORMED_REQUEST, True),
        ("a.example", [GOOD], DenyReason.MALFORMED_AUTHORITY, False),
        ("a.example:0", [GOOD], DenyReason.MALFORMED_AUTHORITY, False),
    ],
)
def test_refuses_with_the_authority_as_far_as_it_is_known(
    target: str, headers: list[str], reason: DenyReason, named: bool
) -> None:
    found = read(target, *headers)
    assert isinstance(found, Unacceptable)
    assert found.deny.reason == reason
    assert (str(found.authority) if found.authority else None) == ("a.example:443" if named else None)
