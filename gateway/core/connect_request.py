"""What a CONNECT asks for and in whose name, by its head alone. Whether it may is for others to say."""

from dataclasses import dataclass

from gateway.contract.ids import is_session_id
from gateway.core.authority import Authority, AuthorityError, parse_authority
from gateway.core.credentials import parse_basic
from gateway.core.head import Head, HeadError
from gateway.core.verdict import Deny, DenyReason

_MISSING = Deny(DenyReason.CREDENTIALS_MISSING, "proxy credentials are needed: session and token")
_NOT_BASIC = Deny(DenyReason.CREDENTIALS_WRONG, "the proxy credentials are not of the Basic scheme")

_NO_SESSION = Deny(DenyReason.CREDENTIALS_WRONG, "the proxy credentials name no session")


@dataclass(frozen=True, slots=True)
class ConnectRequest:
    """Where to, and the credentials as they were sent."""

    authority: Authority
    session_id: str
    token: str


@dataclass(frozen=True, slots=True)
class Unacceptable:
    """A head that asks for nothing that could be granted; `authority` as far as it could be read."""

    deny: Deny
    authority: Authority | None = None


def read_connect(head: Head) -> ConnectRequest | Unacceptable:
    """Understand the head of a CONNECT (RFC 9110 §9.3.6)."""
    authority = None
    try:
        authority = parse_authority(head.target)
        credentials = head.get(b"proxy-authorization")
        host = head.get(b"host")
        # RFC 9112 §3.2.3: the Host of a CONNECT is its target. Two different answers to "which host" are a bypass.
        if host and host != head.target and parse_authority(host, default_port=authority.port).host != authority.host:
            raise AuthorityError("the Host header names another host than the request")
    except AuthorityError as error:
        return Unacceptable(Deny(DenyReason.MALFORMED_AUTHORITY, str(error)), authority)
    except HeadError as error:
        return Unacceptable(Deny(error.reason, error.message), authority)
    if credentials is None:
        return Unacceptable(_MISSING, authority)
    parsed = parse_basic(credentials)
    if parsed is None:
        return Unacceptable(_NOT_BASIC, authority)
    if not is_session_id(parsed[0]):
        # It is nobody's, now or later, and must stand in no record of the gateway's.
        return Unacceptable(_NO_SESSION, authority)
    return ConnectRequest(authority, *parsed)
