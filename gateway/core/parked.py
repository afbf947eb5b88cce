"""The record that a gateway leaves to the one after it: what was open, and in what state.

It goes with the descriptors that it names by their place in the parcel. Both processes are ours, but they need not be of
one version, and a descriptor taken for another would join two strangers: so it is versioned, checked whole, and refused
whole. It holds no token, only SHA-256 of them; `early` and `held` are bytes that were read and not yet passed on, which may
be the start of a request. It knows nothing of sockets.
"""

import hashlib
import struct
from collections.abc import Iterator
from ipaddress import ip_address
from typing import Annotated, Final

import msgspec

from gateway.contract.policy import Count, Grant
from gateway.core.authority import AuthorityError, parse_authority

# To be raised with every change of the structs below, or of the messages in `gateway/channel.py`. A record of another
# version is refused: it says nothing that this one could rely on.
VERSION: Final = 4
# A snapshot of 10,000 sessions is about 10 MB, what 10,000 tunnels hold at most 640 MB; more is no record of ours.
MAX_BYTES: Final = 1 << 30

_MAGIC: Final = b"opificia-parked\n"
# Magic, version, length and SHA-256 of what follows.
_HEADER: Final = struct.Struct(">16sIQ32s")

# A place in the list of descriptors that come with the record.
Place = Annotated[int, msgspec.Meta(ge=0)]
SessionId = Annotated[str, msgspec.Meta(pattern="^[a-z0-9-]{1,64}$")]
Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class ParkedError(Exception):
    """Not a record that can be taken up; the message is one sentence."""


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all parts."""


class ParkedFlow(_Strict, frozen=True):
    """One direction of a spliced pair: what was counted, what is held, and what has ended.

    `pipe` are the ends of a pipe (read, write) that holds `in_pipe` bytes; `held` was read by recv.
    """

    count: Count
    held: bytes = b""
    in_pipe: Count = 0
    pipe: tuple[Place, Place] | None = None
    ended: bool = False
    shut: bool = False


class ParkedPair(_Strict, frozen=True):
    """Two joined sockets."""

    client: Place
    upstream: Place
    up: ParkedFlow
    down: ParkedFlow


class ParkedTunnel(_Strict, frozen=True):
    """An open CONNECT. `started` is of the machine's monotonic clock; `still` counts the sweeps that it was idle for."""

    session: SessionId
    authority: str
    address: str
    started: float
    still: Count
    pair: ParkedPair


class ParkedGreeting(_Strict, frozen=True):
    """A CONNECT that was answered and whose ClientHello is not whole; `early` is what has come of it."""

    session: SessionId
    authority: str
    address: str
    rule: str
    started: float
    left_s: float
    client: Place
    upstream: Place
    early: bytes


class ParkedAsking(_Strict, frozen=True):
    """A CONNECT that has no connection yet; it is judged and dialled again.

    `left_s` is what is left of its wait: for a slot where it is `admitted`, else for the sessions; None when it waits for neither.
    """

    session: SessionId
    token_sha256: Sha256
    caller: str | None
    authority: str
    started: float
    admitted: bool
    left_s: float | None
    client: Place
    early: bytes


class ParkedRunner(_Strict, frozen=True):
    """A runner's connection, joined to control's."""

    session: SessionId
    pair: ParkedPair


class ParkedHttp(_Strict, frozen=True):
    """An HTTP connection of a session, between two requests; `data` is what was read of the next one.

    `authority`: where the CONNECT leads that carries it, None for a connection to the gateway as a proxy or to the model proxy.
    """

    session: SessionId
    authority: str | None
    caller: str | None
    left_s: float
    client: Place
    data: bytes


class ParkedArrival(_Strict, frozen=True):
    """A connection whose request head is not whole, or is for the next process to answer."""

    client: Place
    caller: str | None
    proxied: bool
    started: float
    left_s: float
    data: bytes


class ParkedEnding(_Strict, frozen=True):
    """A connection that has got its last reply and is read until its client ends."""

    client: Place
    left_s: float
    discarded: Count


class ParkedModel(_Strict, frozen=True):
    """What a session has asked of models in this epoch. `starts` are times of the monotonic clock."""

    requests: Count = 0
    input_tokens: Count = 0
    output_tokens: Count = 0
    cache_read_tokens: Count = 0
    cache_write_tokens: Count = 0
    starts: tuple[float, ...] = ()
    # Set aside for requests that go on in the process before, while it lives.
    reserved_input: Count = 0
    reserved_output: Count = 0


class ParkedSession(_Strict, frozen=True):
    """A session's grant and what it has used in this epoch.

    `slots_elsewhere` are connection slots that stay held in the process before, and before that, while it lives.
    """

    grant: Grant
    bytes_up: Count = 0
    bytes_down: Count = 0
    egress_allowed: Count = 0
    egress_refused: Count = 0
    slots_elsewhere: Count = 0
    model: ParkedModel = ParkedModel()


class Parked(_Strict, frozen=True, kw_only=True):
    """All of it. `epoch` goes on, because the counts do.

    `listeners` are the listening sockets that the process made, by name; `passed` those that the service manager gave it.
    """

    epoch: str
    listeners: dict[str, Place] = {}
    passed: dict[str, Place] = {}
    sessions: tuple[ParkedSession, ...] = ()
    tunnels: tuple[ParkedTunnel, ...] = ()
    greetings: tuple[ParkedGreeting, ...] = ()
    asking: tuple[ParkedAsking, ...] = ()
    runners: tuple[ParkedRunner, ...] = ()
    http: tuple[ParkedHttp, ...] = ()
    arrivals: tuple[ParkedArrival, ...] = ()
    endings: tuple[ParkedEnding, ...] = ()

    @property
    def connections(self) -> int:
        """How many connections of sandboxes it holds."""
        parts = (self.tunnels, self.greetings, self.asking, self.runners, self.http, self.arrivals, self.endings)
        return sum(len(part) for part in parts)

    @property
    def pairs(self) -> Iterator[ParkedPair]:
        """All spliced pairs."""
        yield from (each.pair for each in self.tunnels)
        yield from (each.pair for each in self.runners)

    @property
    def flows(self) -> Iterator[ParkedFlow]:
        """All directions of spliced pairs."""
        for pair in self.pairs:
            yield from (pair.up, pair.down)

    @property
    def pipe_places(self) -> frozenset[int]:
        """The places of pipes; all others are of sockets."""
        return frozenset(place for flow in self.flows for place in flow.pipe or ())

    @property
    def bytes_held(self) -> tuple[int, int]:
        """How many bytes of tunnels are on their way in pipes, and how many in the record itself."""
        flows = tuple(self.flows)
        return sum(flow.in_pipe for flow in flows), sum(len(flow.held) for flow in flows)


_decoder: Final = msgspec.msgpack.Decoder(Parked)


def encode_parked(record: Parked) -> bytes:
    """Return the record as bytes. Raises ParkedError when nobody would read it."""
    body = msgspec.msgpack.encode(record)
    if (size := _HEADER.size + len(body)) > MAX_BYTES:
        raise ParkedError(f"what is open makes a record of {size} bytes, more than {MAX_BYTES}")
    return _HEADER.pack(_MAGIC, VERSION, len(body), hashlib.sha256(body).digest()) + body


def decode_parked(data: bytes, descriptors: int) -> Parked:
    """Read a record that came with this many descriptors. Raises ParkedError, on anything but exactly what was written."""
    if len(data) < _HEADER.size or not data.startswith(_MAGIC):
        raise ParkedError("it is not a record of a gateway")
    _, version, length, digest = _HEADER.unpack_from(data)
    if version != VERSION:
        raise ParkedError(f"it is of version {version}, and this gateway reads version {VERSION}")
    body = memoryview(data)[_HEADER.size :]
    if len(body) != length or hashlib.sha256(body).digest() != digest:
        raise ParkedError("it is not whole")
    try:
        record = _decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise ParkedError(f"it cannot be read: {error}") from error
    _check(record, descriptors)
    return record


def _check(record: Parked, descriptors: int) -> None:
    places = sorted(_places(record))
    # Each descriptor belongs to exactly one part: used twice it would join two connections, not used it would leak.
    if places != list(range(descriptors)):
        raise ParkedError(f"it does not name each of the {descriptors} descriptors once")
    try:
        for authority in _authorities(record):
            parse_authority(authority.encode())
        for caller in _callers(record):
            ip_address(caller or "::")
    except (ValueError, AuthorityError) as error:
        raise ParkedError(f"it names a place that is none: {error}") from error
    for flow in record.flows:
        if (flow.pipe is None) != (flow.in_pipe == 0):
            raise ParkedError("a pipe and what it holds do not fit")
        if flow.shut and (flow.held or flow.in_pipe):
            raise ParkedError("a direction has ended and holds bytes")


def _places(record: Parked) -> Iterator[int]:
    yield from record.listeners.values()
    yield from record.passed.values()
    for pair in record.pairs:
        yield from (pair.client, pair.upstream)
    for flow in record.flows:
        yield from flow.pipe or ()
    for greeting in record.greetings:
        yield from (greeting.client, greeting.upstream)
    yield from (each.client for each in record.asking)
    yield from (each.client for each in record.http)
    yield from (each.client for each in record.arrivals)
    yield from (each.client for each in record.endings)


def _authorities(record: Parked) -> Iterator[str]:
    yield from (each.authority for each in record.tunnels)
    yield from (each.authority for each in record.greetings)
    yield from (each.authority for each in record.asking)
    yield from (each.authority for each in record.http if each.authority is not None)


def _callers(record: Parked) -> Iterator[str | None]:
    yield from (each.caller for each in record.asking)
    yield from (each.caller for each in record.http)
    yield from (each.caller for each in record.arrivals)
