"""Refusals of the model proxy, in the shape of the provider that the client believes it talks to."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import msgspec

from gateway.core.providers import Shape
from gateway.core.verdict import DenyReason

_STATUS: Final[Mapping[DenyReason, int]] = MappingProxyType(
    {
        DenyReason.MALFORMED_REQUEST: 400,
        DenyReason.CREDENTIALS_MISSING: 401,
        DenyReason.CREDENTIALS_WRONG: 401,
        DenyReason.WRONG_ADDRESS: 401,
        DenyReason.BUDGET_EXHAUSTED: 403,
        DenyReason.MODEL_NOT_ALLOWED: 403,
        DenyReason.NOT_FOUND: 404,
        DenyReason.HEAD_TIMEOUT: 408,
        DenyReason.REQUEST_TIMEOUT: 408,
        DenyReason.REQUEST_TOO_LARGE: 413,
        DenyReason.UNSUPPORTED_ENCODING: 415,
        DenyReason.NO_FREE_SLOT: 429,
        DenyReason.RATE_LIMITED: 429,
        DenyReason.HEAD_TOO_LARGE: 431,
        DenyReason.CONNECT_FAILED: 502,
        DenyReason.UPSTREAM_FAILED: 502,
        DenyReason.NOT_READY: 503,
        DenyReason.OVERLOADED: 503,
        DenyReason.CONNECT_TIMEOUT: 504,
        DenyReason.UPSTREAM_TIMEOUT: 504,
    }
)
# The provider's SDKs retry these by themselves; every other refusal would only be refused again.
_WORTH_A_RETRY: Final = frozenset({408, 429, 502, 503, 504})


@dataclass(frozen=True, slots=True)
class ModelRefusal:
    """Why a model request is not served. `message` is one sentence for a person, without address, key or token."""

    reason: DenyReason
    message: str
    retry_after_s: int | None = None

    @property
    def status(self) -> int:
        """The HTTP status that says it."""
        return _STATUS.get(self.reason, 400)


def encode_refusal(shape: Shape, refusal: ModelRefusal, *, close: bool) -> bytes:
    """Return the whole response. `close` announces that the connection ends with it.

    `x-should-retry` is what Anthropic's and OpenAI's SDKs and Claude Code look at before the status.
    """
    status = refusal.status
    kind = shape.error_types.get(status, shape.default_error_type)
    body = msgspec.json.encode(shape.error_body(kind, refusal.reason, refusal.message))
    reason = refusal.reason.value.encode()
    lines = [
        b"HTTP/1.1 %d %b" % (status, reason),
        b"content-type: application/json",
        b"content-length: %d" % len(body),
        b"x-opificia-reason: %b" % reason,
    ]
    if status not in _WORTH_A_RETRY:
        lines.append(b"x-should-retry: false")
    if refusal.retry_after_s is not None:
        lines.append(b"retry-after: %d" % refusal.retry_after_s)
    if close:
        lines.append(b"connection: close")
    return b"\r\n".join(lines) + b"\r\n\r\n" + body
