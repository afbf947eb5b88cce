"""What a request head at `/model/…` asks for, and on what terms. Whether it may is for others to say."""

import re
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Final

import msgspec

from gateway.contract.ids import is_session_id
from gateway.core.authority import AuthorityError, parse_absolute_http
from gateway.core.credentials import MAX_CREDENTIALS_BYTES, parse_bearer
from gateway.core.head import BodyFraming, ContentLength, Head, HeadError, NoBody, body_framing, parse_head
from gateway.core.headers import passed_headers
from gateway.core.incomplete import INCOMPLETE, Incomplete
from gateway.core.model_refusal import ModelRefusal
from gateway.core.providers import Route, Shape
from gateway.core.verdict import DenyReason

# RFC 3986 §3.4, and brackets, which clients leave unescaped.
_match_query: Final = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=:@/?%\[\]-]*").fullmatch
_MAX_LENGTH_DIGITS: Final = 18
_find_length: Final = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: ([1-9][0-9]{0,17})\r\n").search
_NOT_FOUND: Final = ModelRefusal(DenyReason.NOT_FOUND, "There is nothing of this name and method at the model proxy")
_READ: Final = frozenset(
    {b"x-api-key", b"authorization", b"host", b"connection", b"expect", b"content-encoding", b"content-type"}
)
# Where a request line has its target, also in a line that is otherwise none.
_find_target: Final = re.compile(rb"[\x21-\x7e]{1,64} +([\x21-\x7e\x80-\xff]+)").match
# RFC 9110 §8.3: JSON (RFC 6839 §3.1 with its suffix), and no parameter but a charset that gives its bytes the one reading they
# have here: UTF-8. What is called a form is read as one, and `{"model":"a","x":"&model=b"}` is a form as well.
_match_json_type: Final = re.compile(
    rb"""application/(?:json|%b+\+json)(?:[ \t]*;[ \t]*charset=(?P<quote>"?)(?:utf-?8|us-ascii)(?P=quote))?"""
    % rb"[!#$%&'*+\-.^_`|~0-9a-z]",
    re.IGNORECASE,
).fullmatch


@dataclass(frozen=True, slots=True)
class RequestRules:
    """What heads are read by: the gateway's own names, the providers' shapes, the largest head."""

    names: Set[str]
    default: Shape
    others: Mapping[bytes, Shape]
    max_head_bytes: int


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
    """Who says to ask, what is to happen to the connection, and whether the body is said to be anything but JSON in UTF-8.

    `is_foreign`: it has a content coding, another media type or charset, or nobody can tell. Two readers could take it
    differently. A body that is not said to be of any type is no foreign one: nobody takes such a body for a form.
    """

    token: str
    close: bool
    expects_continue: bool
    is_foreign: bool


class Request(msgspec.Struct, frozen=True):
    """What a head asks for, but for its body's length. `passed` are the header lines that go on."""

    method: bytes
    destination: Destination
    terms: Terms
    passed: bytes


class Opening(msgspec.Struct, frozen=True):
    """A request whose head, of `size` bytes, has come; its body is framed as it says."""

    request: Request
    framing: BodyFraming
    size: int


@dataclass(frozen=True, slots=True)
class Unacceptable:
    """A head that is no request to the model proxy, and the shape in which to say so."""

    shape: Shape
    refusal: ModelRefusal


class Elsewhere:
    """A request for another host, which a client of a proxy may send on any of its connections."""


ELSEWHERE: Final = Elsewhere()


class RequestReader:
    """Reads the heads of one connection.

    A client's heads differ in little but their Content-Length. What one head means, the next one means as well when all
    its other bytes are the same: it is then not parsed again, and gives the very same `Request`. Nothing is remembered
    from one connection to another.
    """

    __slots__ = ("_after", "_before", "_rules", "last", "length")

    def __init__(self, rules: RequestRules) -> None:
        self._rules = rules
        # The last head that had a length: what stands before its digits, and after them.
        self._before = b""
        self._after = b""
        self.last: Request | None = None
        # What the repeated head said of its body.
        self.length = 0

    def read(self, data: bytes) -> Opening | Unacceptable | Elsewhere | Incomplete:
        """Read the head at the start of `data`."""
        last = self.last
        if last is not None and (size := self.size_of_repeated(data)):
            return Opening(last, ContentLength(self.length), size)
        opening = self._parse(data)
        if isinstance(opening, Opening):
            length = _find_length(data, 0, opening.size)
            if length is not None:
                self._before, self._after = data[: length.start(1)], data[length.end(1) : opening.size]
                self.last = opening.request
        return opening

    def size_of_repeated(self, data: bytes) -> int:
        """Return the size of the head at the start of `data` if it is the last one again but for its `length`, else 0."""
        before = self._before
        if not before or not data.startswith(before):
            return 0
        # Neither part holds an empty line but at the end, so a head that consists of both ends where they do.
        start, after = len(before), self._after
        end = data.find(b"\r", start, start + _MAX_LENGTH_DIGITS + 1)
        digits, size = data[start:end], end + len(after)
        if not (data.startswith(after, end) and digits.isdigit() and size <= self._rules.max_head_bytes):
            return 0
        if digits.startswith(b"0"):
            return 0
        self.length = int(digits)
        return size

    def _parse(self, data: bytes) -> Opening | Unacceptable | Elsewhere | Incomplete:
        rules = self._rules
        try:
            head = parse_head(data, rules.max_head_bytes)
        except HeadError as error:
            return Unacceptable(rules.default, ModelRefusal(error.reason, error.message))
        if isinstance(head, Incomplete):
            return INCOMPLETE
        destination = read_destination(head.method, head.target, rules)
        if isinstance(destination, Elsewhere):
            return destination
        if isinstance(destination, ModelRefusal):
            return Unacceptable(rules.default, destination)
        try:
            framing = body_framing(head)
            terms = _read_terms(head, destination.route, framing)
        except HeadError as error:
            return Unacceptable(destination.shape, ModelRefusal(error.reason, error.message))
        request = Request(head.method, destination, terms, passed_headers(head.headers))
        return Opening(request, framing, head.size)


def is_for_model(data: bytes, names: Set[str]) -> bool:
    """Tell whether what begins so, and need be no request at all, is meant for the model proxy.

    Its client has a provider's SDK, which understands a refusal in the provider's shape only.
    """
    match = _find_target(data)
    if match is None:
        return False
    target = match[1]
    if target[:7].lower() == b"http://":
        try:
            authority, target = parse_absolute_http(target)
        except AuthorityError:
            return False
        if authority.host not in names:
            return False
    return target.startswith(b"/model/")


def read_destination(method: bytes, target: bytes, rules: RequestRules) -> Destination | ModelRefusal | Elsewhere:
    """Match the raw target against the routes there are. Nothing is decoded or normalized: what is not there is a 404.

    An absolute target is taken as if addressed directly when its host is one of the gateway's names: so ask clients that
    have a proxy configured and no exception for the gateway itself.
    """
    if target[:7].lower() == b"http://":
        try:
            authority, target = parse_absolute_http(target)
        except AuthorityError:
            return _NOT_FOUND
        if authority.host not in rules.names:
            return ELSEWHERE
    path, mark, query = target.partition(b"?")
    parts = path.split(b"/", 3)
    if len(parts) != 4 or parts[0] or parts[1] != b"model" or _match_query(query) is None:
        return _NOT_FOUND
    session_id = parts[2].decode("latin-1")
    if not is_session_id(session_id):
        return _NOT_FOUND
    provider, shape, path = b"", rules.default, b"/" + parts[3]
    route = shape.routes.get(path)
    if route is None:
        provider, _, rest = parts[3].partition(b"/")
        named = rules.others.get(provider)
        if named is None:
            return _NOT_FOUND
        shape, path = named, b"/" + rest
        route = shape.routes.get(path)
    if route is None or route.method != method:
        return _NOT_FOUND
    return Destination(session_id, provider, shape, route, path + mark + query)


def _read_terms(head: Head, route: Route, framing: BodyFraming) -> Terms:
    """Read everything else that the proxy itself must know of a head. Raises HeadError."""
    found: dict[bytes, list[bytes]] = {}
    for name, value in head.headers:
        if name in _READ:
            found.setdefault(name, []).append(value)
    # RFC 9112 §3.2: a server must answer 400 to a request without exactly one Host.
    if len(found.get(b"host", ())) != 1:
        raise _malformed("A request has exactly one Host header")
    if head.minor_version == 0:
        raise _malformed("The model proxy speaks HTTP/1.1: replies are streamed in chunks")
    if route.method == b"GET" and not isinstance(framing, NoBody):
        raise _malformed("This request has no body")
    expectations = [value.lower() for value in found.get(b"expect", ())]
    if expectations not in ([], [b"100-continue"]):
        raise _malformed("The only expectation that can be met is 100-continue")
    token = _read_token(found.get(b"x-api-key", []), found.get(b"authorization", []))
    close = any(b"close" in value.lower() for value in found.get(b"connection", ()))
    return Terms(token, close, bool(expectations), _is_foreign(found))


def _is_foreign(found: Mapping[bytes, list[bytes]]) -> bool:
    if any(value.lower() not in (b"", b"identity") for value in found.get(b"content-encoding", ())):
        return True
    # In UTF-7 `+ACI-` is a quotation mark: a server that believes the charset finds keys where JSON has a string.
    kinds = found.get(b"content-type", ())
    return len(kinds) > 1 or any(_match_json_type(kind) is None for kind in kinds)


def _read_token(keys: list[bytes], authorizations: list[bytes]) -> str:
    """Return the one token that all credentials of a request agree on. Raises HeadError."""
    tokens = {key.decode("latin-1") for key in keys if key and len(key) <= MAX_CREDENTIALS_BYTES}
    for authorization in authorizations:
        token = parse_bearer(authorization)
        if token is None:
            raise _wrong("The Authorization header is not `Bearer` and a token")
        tokens.add(token)
    if not tokens:
        message = "Give the session's token as x-api-key or as Authorization: Bearer"
        raise HeadError(401, DenyReason.CREDENTIALS_MISSING, message)
    # Whoever sends two wants two readers to see different ones.
    if len(tokens) > 1:
        raise _wrong("The request carries two different credentials")
    return tokens.pop()


def _malformed(message: str) -> HeadError:
    return HeadError(400, DenyReason.MALFORMED_REQUEST, message)


def _wrong(message: str) -> HeadError:
    return HeadError(401, DenyReason.CREDENTIALS_WRONG, message)
