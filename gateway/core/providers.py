"""Model providers as data: which paths they have, where the key goes, how their errors look, what their bodies say.

A further provider is a further table here, never a branch elsewhere. Paths are matched on the raw bytes: `..`, `%2e`, `//`
and their like are simply other paths, and no other path exists.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal
from urllib.parse import urlsplit

import msgspec

from gateway.core.verdict import DenyReason

_match_name: Final = re.compile(r"[a-z0-9-]{1,32}").fullmatch
_match_host: Final = re.compile(r"[A-Za-z0-9_.:-]+").fullmatch
_match_base_path: Final = re.compile(r"(?:/[A-Za-z0-9._~-]+)*/?").fullmatch


@dataclass(frozen=True, slots=True)
class BodyRule:
    """Which top-level fields of a JSON request a rule may have to read.

    `output_caps`: fields that cap the output tokens, the first that is there counts. `choices`: a field that multiplies
    them. `usage_option`: a stream says what it used only when `stream_options.include_usage` is set. `refused`: fields
    that would let the work go on where it cannot be counted.
    """

    output_caps: tuple[str, ...] = ()
    choices: str = ""
    usage_option: bool = False
    refused: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Route:
    """One path of a provider. `metered` routes spend tokens. `end_markers` name the last event of a whole stream."""

    method: bytes
    metered: bool = False
    body: BodyRule | None = None
    end_markers: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Shape:
    """A provider's API as the gateway needs to know it. Routes are by path, `/v1/…`."""

    routes: Mapping[bytes, Route]
    key_header: bytes
    key_prefix: bytes
    error_body: Callable[[str, DenyReason, str], object]
    error_types: Mapping[int, str]
    default_error_type: str


def _anthropic_error(kind: str, _reason: DenyReason, message: str) -> object:
    return {"type": "error", "error": {"type": kind, "message": message}}


def _openai_error(kind: str, reason: DenyReason, message: str) -> object:
    return {"error": {"message": message, "type": kind, "param": None, "code": reason.value}}


_MESSAGES = BodyRule(output_caps=("max_tokens",))
_CHAT = BodyRule(output_caps=("max_completion_tokens", "max_tokens"), choices="n", usage_option=True)
# A background response goes on after its request has ended, where nobody counts.
_RESPONSES = BodyRule(output_caps=("max_output_tokens",), refused=("background",))

ANTHROPIC: Final = Shape(
    routes=MappingProxyType(
        {
            b"/v1/messages": Route(b"POST", metered=True, body=_MESSAGES, end_markers=(b"message_stop",)),
            b"/v1/messages/count_tokens": Route(b"POST", body=BodyRule()),
            b"/v1/models": Route(b"GET"),
        }
    ),
    key_header=b"x-api-key",
    key_prefix=b"",
    error_body=_anthropic_error,
    # https://docs.anthropic.com/en/api/errors
    error_types=MappingProxyType(
        {
            401: "authentication_error",
            403: "permission_error",
            404: "not_found_error",
            413: "request_too_large",
            429: "rate_limit_error",
            500: "api_error",
            502: "api_error",
            503: "overloaded_error",
            504: "timeout_error",
        }
    ),
    default_error_type="invalid_request_error",
)

OPENAI: Final = Shape(
    routes=MappingProxyType(
        {
            b"/v1/chat/completions": Route(b"POST", metered=True, body=_CHAT, end_markers=(b"[DONE]",)),
            b"/v1/responses": Route(
                b"POST",
                metered=True,
                body=_RESPONSES,
                end_markers=(b"response.completed", b"response.incomplete", b"response.failed"),
            ),
            b"/v1/models": Route(b"GET"),
        }
    ),
    key_header=b"authorization",
    key_prefix=b"Bearer ",
    error_body=_openai_error,
    error_types=MappingProxyType(
        {
            401: "authentication_error",
            403: "permission_error",
            404: "not_found_error",
            429: "rate_limit_error",
            500: "server_error",
            502: "server_error",
            503: "server_error",
            504: "server_error",
        }
    ),
    default_error_type="invalid_request_error",
)

# The provider of a configuration that names none.
ANTHROPIC_URL: Final = "https://api.anthropic.com"
ShapeName = Literal["anthropic", "openai"]
SHAPES: Final[Mapping[ShapeName, Shape]] = MappingProxyType({"anthropic": ANTHROPIC, "openai": OPENAI})
# Whatever provider a request is for, a credential of any of them stays here.
KEY_HEADERS: Final = frozenset(shape.key_header for shape in SHAPES.values())


@dataclass(frozen=True, slots=True)
class UpstreamUrl:
    """Where a provider is. `base_path` goes before every route's path and has no slash at its end."""

    tls: bool
    host: str
    port: int
    base_path: bytes

    @property
    def host_header(self) -> bytes:
        """The `Host` of requests to it (RFC 9110 §7.2: the port only if it is not the scheme's)."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return (host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}").encode()


def parse_upstream(url: str) -> UpstreamUrl:
    """Read `https://host[:port][/base]` or the same with `http`. Raises ValueError with one sentence."""
    # urlsplit drops newlines and tabs without a word.
    if not url.isascii() or not url.isprintable():
        raise ValueError(f"{url!r} is not a URL")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"{url!r} is not a URL: {error}") from error
    if parts.scheme not in ("http", "https"):
        raise ValueError(f"{url!r} is not an http:// or https:// URL")
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise ValueError("an upstream URL has no user, password, query or fragment; the key is given by api_key_file")
    if not parts.hostname or _match_host(parts.hostname) is None:
        raise ValueError(f"{url!r} names no host")
    if _match_base_path(parts.path) is None:
        raise ValueError(f"{url!r} has a path with characters other than letters, digits and ._~-")
    base = parts.path.rstrip("/")
    if base.endswith("/v1"):
        raise ValueError(f"{url!r} ends in /v1, which requests bring along; leave it out")
    tls = parts.scheme == "https"
    return UpstreamUrl(tls, parts.hostname, port or (443 if tls else 80), base.encode())


class ProviderSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One `[[model.provider]]`: a provider other than the default one, reached as `/model/<session>/<name>/v1/…`."""

    name: str
    upstream: str
    shape: ShapeName = "openai"
    api_key_file: str = ""
    ca_file: str = ""

    def __post_init__(self) -> None:
        problems = []
        # `v1` is where the default provider's paths begin.
        if _match_name(self.name) is None or self.name == "v1":
            problems.append(f"name: {self.name[:80]!r} is not 1 to 32 of a-z, 0-9 and -, or it is v1")
        try:
            parse_upstream(self.upstream)
        except ValueError as error:
            problems.append(f"upstream: {error}")
        if problems:
            raise ValueError("\n".join(problems))
