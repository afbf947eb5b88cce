"""Which HTTP status says which reason, for CONNECT and plain requests. (On `/model` the provider's shape decides.)"""

from typing import Final

from gateway.core.verdict import DenyReason

_STATUS: Final = {
    DenyReason.MALFORMED_REQUEST: 400,
    DenyReason.MALFORMED_AUTHORITY: 400,
    DenyReason.HEAD_TOO_LARGE: 431,
    DenyReason.HEAD_TIMEOUT: 408,
    DenyReason.CREDENTIALS_MISSING: 407,
    DenyReason.CREDENTIALS_WRONG: 407,
    DenyReason.WRONG_ADDRESS: 407,
    DenyReason.NOT_READY: 503,
    DenyReason.OVERLOADED: 503,
    DenyReason.NO_FREE_SLOT: 429,
    DenyReason.NAME_NOT_FOUND: 502,
    DenyReason.RESOLVE_FAILED: 502,
    DenyReason.RESOLVE_TIMEOUT: 504,
    DenyReason.CONNECT_REFUSED: 502,
    DenyReason.CONNECT_UNREACHABLE: 502,
    DenyReason.CONNECT_FAILED: 502,
    DenyReason.CONNECT_TIMEOUT: 504,
    DenyReason.UPSTREAM_FAILED: 502,
    DenyReason.UPSTREAM_TIMEOUT: 504,
}
RETRY_AFTER_S: Final = 5


def status_of(reason: DenyReason) -> int:
    """Return the HTTP status of a refused CONNECT or plain request; policy is 403."""
    return _STATUS.get(reason, 403)
