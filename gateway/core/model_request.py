"""What a request head at `/model/…` asks for, and on what terms. Whether it may is for others to say."""

import re
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Final

from gateway.contract.ids import is_session_id
from gateway.core.authority import AuthorityError, parse_absolute_http
from gateway.core.credentials import MAX_CREDENTIALS_BYTES, parse_bearer
from gateway.core.head import BodyFraming, Head, HeadError, NoBody, body_framing
from gateway.core.model_refusal import ModelRefusal
from gateway.core.providers import Route, Shape
from gateway.core.verdict import DenyReason

# RFC 3986 §3.4, and brackets, which clients leave unescaped.
_match_query: Final = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=:@/?%\[\]-]*").fullmatch
_NOT_FOUND: Final = ModelRefusal(DenyReason.NOT_FOUND, "There is nothing of this name and method at the model proxy")
_READ: Final = frozenset(
    {b"x-api-key", b"authorization", b"host", b"connection", b"expect", b"content-encoding", b"content-length"}
)


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a request is to go. `provider` is a configured name, empty for the default one; `target` begins with `/v1/`."""

    session_id: str
    provider: bytes
    shape: Shape
    route: Route
    target: bytes


@dataclass(frozen=True, slots=True)
class Terms:
    """Who says to ask, how the body is framed, and what is to happen to the connection."""

    token: str
    framing: BodyFraming
    close: bool
    expects_continue: bool
    encoded: bool


def read_destination(
    method: bytes, target: bytes, names: Set[str], default: Shape, others: Mapping[bytes, Shape]
) -> Destination | ModelRefusal:
    """Match the raw target against the routes there are. Nothing is decoded or normalized: what is not there is a 404.

    An absolute target is taken as if addressed directly when its host is one of `names`: so ask clients that have a proxy
    configured and no exception for the gateway itself.
    """
    if target[:7].lower() == b"http://":
        try:
            authority, target = parse_absolute_http(target)
        except AuthorityError:
            return _NOT_FOUND
        if authority.host not in names:
            return _NOT_FOUND
    path, mark, query = target.partition(b"?")
    parts = path.split(b"/", 3)
    if len(parts) != 4 or parts[0] or parts[1] != b"model" or _match_query(query) is None:
        return _NOT_FOUND
    session_id = parts[2].decode("latin-1")
    if not is_session_id(session_id):
        return _NOT_FOUND
    provider, shape, path = b"", default, b"/" + parts[3]
    route = shape.routes.get(path)
    if route is None:
        provider, _, rest = parts[3].partition(b"/")
        named = others.get(provider)
        if named is None:
            return _NOT_FOUND
        shape, path = named, b"/" + rest
        route = shape.routes.get(path)
    if route is None or route.method != method:
        return _NOT_FOUND
    return Destination(session_id, provider, shape, route, path + mark + query)


def read_terms(head: Head, route: Route) -> Terms | ModelRefusal:
    """Read everything else that the proxy itself must know of a head."""
    found: dict[bytes, list[bytes]] = {}
    for name, value in head.headers:
        if name in _READ:
            found.setdefault(name, []).append(value)
    # RFC 9112 §3.2: a server must answer 400 to a request without exactly one Host.
    if len(found.get(b"host", ())) != 1:
        return _malformed("A request has exactly one Host header")
    if head.minor_version == 0:
        return _malformed("The model proxy speaks HTTP/1.1: replies are streamed in chunks")
    try:
        framing = body_framing(head)
    except HeadError as error:
        return ModelRefusal(error.reason, error.message)
    if route.method == b"GET" and not isinstance(framing, NoBody):
        return _malformed("This request has no body")
    expectations = [value.lower() for value in found.get(b"expect", ())]
    if expectations not in ([], [b"100-continue"]):
        return _malformed("The only expectation that can be met is 100-continue")
    token = _read_token(found.get(b"x-api-key", []), found.get(b"authorization", []))
    if isinstance(token, ModelRefusal):
        return token
    close = any(b"close" in value.lower() for value in found.get(b"connection", ()))
    encoded = any(value.lower() not in (b"", b"identity") for value in found.get(b"content-encoding", ()))
    return Terms(token, framing, close, bool(expectations), encoded)


def _read_token(keys: list[bytes], authorizations: list[bytes]) -> str | ModelRefusal:
    """Return the one token that all credentials of a request agree on."""
    tokens = {key.decode("latin-1") for key in keys if key and len(key) <= MAX_CREDENTIALS_BYTES}
    for authorization in authorizations:
        token = parse_bearer(authorization)
        if token is None:
            return ModelRefusal(DenyReason.CREDENTIALS_WRONG, "The Authorization header is not `Bearer` and a token")
        tokens.add(token)
    if not tokens:
        return ModelRefusal(
            DenyReason.CREDENTIALS_MISSING, "Give the session's token as x-api-key or as Authorization: Bearer"
        )
    # Whoever sends two wants two readers to see different ones.
    if len(tokens) > 1:
        return ModelRefusal(DenyReason.CREDENTIALS_WRONG, "The request carries two different credentials")
    return tokens.pop()


def _malformed(message: str) -> ModelRefusal:
    return ModelRefusal(DenyReason.MALFORMED_REQUEST, message)
