"""Verdicts and their reasons.

The spelling of a reason is a contract with audit logs, metrics and replies; it never changes once released.
"""

import enum
from dataclasses import dataclass


class DenyReason(enum.StrEnum):
    """Why a request from a sandbox is refused. Each is safe as a metric label and as an HTTP reason phrase."""

    # 400, 404, 405, 413, 414, 415, 431: what was said
    MALFORMED_REQUEST = "malformed_request"
    MALFORMED_AUTHORITY = "malformed_authority"
    HEAD_TOO_LARGE = "head_too_large"
    HEAD_TIMEOUT = "head_timeout"
    REQUEST_TIMEOUT = "request_timeout"
    NOT_FOUND = "not_found"
    REQUEST_TOO_LARGE = "request_too_large"
    UNSUPPORTED_ENCODING = "unsupported_encoding"
    # 401, 407, 503: who said it
    CREDENTIALS_MISSING = "credentials_missing"
    CREDENTIALS_WRONG = "credentials_wrong"
    WRONG_ADDRESS = "wrong_address"
    NOT_READY = "not_ready"
    # 403: policy
    NETWORK_DISABLED = "network_disabled"
    HOST_DENIED = "host_denied"
    HOST_NOT_LISTED = "host_not_listed"
    PORT_NOT_LISTED = "port_not_listed"
    MODEL_NOT_ALLOWED = "model_not_allowed"
    # 403, 429: budget
    BUDGET_EXHAUSTED = "budget_exhausted"
    NO_FREE_SLOT = "no_free_slot"
    RATE_LIMITED = "rate_limited"
    OVERLOADED = "overloaded"
    # 403: where it leads
    ADDRESS_NOT_PUBLIC = "address_not_public"
    ADDRESS_DENIED = "address_denied"
    # 502, 504: what answered
    NAME_NOT_FOUND = "name_not_found"
    RESOLVE_FAILED = "resolve_failed"
    RESOLVE_TIMEOUT = "resolve_timeout"
    CONNECT_REFUSED = "connect_refused"
    CONNECT_UNREACHABLE = "connect_unreachable"
    CONNECT_FAILED = "connect_failed"
    CONNECT_TIMEOUT = "connect_timeout"
    UPSTREAM_FAILED = "upstream_failed"
    UPSTREAM_TIMEOUT = "upstream_timeout"
    # inside a tunnel
    NOT_TLS = "not_tls"
    HELLO_MALFORMED = "hello_malformed"
    HELLO_TIMEOUT = "hello_timeout"
    SNI_MISSING = "sni_missing"
    SNI_MISMATCH = "sni_mismatch"
    ENCRYPTED_HELLO = "encrypted_hello"


class CloseReason(enum.StrEnum):
    """Why something that was allowed ended."""

    DONE = "done"
    IDLE = "idle"
    RESET = "reset"
    BUDGET_EXHAUSTED = "budget_exhausted"
    REVOKED = "revoked"
    SHUTDOWN = "shutdown"
    TIMEOUT = "timeout"
    UPSTREAM_FAILED = "upstream_failed"
    CLIENT_GONE = "client_gone"


@dataclass(frozen=True, slots=True)
class Allow:
    """Go on. `rule` names what allowed it (`open`, `registries:pypi`, `allow:*.example.com`)."""

    rule: str


@dataclass(frozen=True, slots=True)
class Deny:
    """Refuse. `message` is one sentence for a person; it holds no address, key or token."""

    reason: DenyReason
    message: str


Verdict = Allow | Deny
