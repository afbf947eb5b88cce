"""Who sends a plain-HTTP request, and whether it may: as a CONNECT is judged, up to the slot."""

from typing import Final

from gateway.core.authority import Authority
from gateway.core.credentials import parse_basic
from gateway.core.decide import decide_host
from gateway.core.head import Head
from gateway.core.verdict import Deny, DenyReason, Verdict
from gateway.net.services import Services
from gateway.registry import IPAddress, Session

_MISSING: Final = Deny(DenyReason.CREDENTIALS_MISSING, "proxy credentials are needed: session and token")
_NOT_BASIC: Final = Deny(DenyReason.CREDENTIALS_WRONG, "the proxy credentials are not of the Basic scheme")
_NOT_READY: Final = Deny(DenyReason.NOT_READY, "the gateway does not know its sessions yet; try again")
_EXHAUSTED: Final = Deny(DenyReason.BUDGET_EXHAUSTED, "the session's egress budget is used up")


async def authenticate(services: Services, head: Head, caller: IPAddress | None) -> Session | Deny:
    """Return the session whose credentials the request carries. Raises HeadError if it carries two."""
    gateway = services.gateway
    value = head.get(b"proxy-authorization")
    credentials = None if value is None else parse_basic(value)
    if credentials is None:
        return _MISSING if value is None else _NOT_BASIC
    if not await gateway.registry.wait_ready(credentials[0], gateway.config.limits.resync_wait_ms / 1000):
        return _NOT_READY
    return gateway.registry.authenticate(*credentials, caller)


def judge(session: Session, authority: Authority) -> Verdict:
    """Decide whether a session may ask this host for something, as far as that can be said before its name is known."""
    verdict = decide_host(session.policy, authority)
    if not isinstance(verdict, Deny) and session.bytes_left <= 0:
        return _EXHAUSTED
    return verdict
