"""The record of what one process leaves to the next: it comes back as it was, and anything else is refused."""

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.contract.policy import EgressBudget, Grant, ModelBudget, NetworkLevel, Usage
from gateway.core.parked import (
    VERSION,
    Parked,
    ParkedArrival,
    ParkedAsking,
    ParkedEnding,
    ParkedError,
    ParkedFlow,
    ParkedGreeting,
    ParkedHttp,
    ParkedModel,
    ParkedPair,
    ParkedRunner,
    ParkedSession,
    ParkedTunnel,
    decode_parked,
    encode_parked,
)

IDS = st.from_regex(r"\A[a-z0-9-]{1,64}\Z")
HASHES = st.binary(min_size=32, max_size=32).map(bytes.hex)
COUNTS = st.integers(0, 1 << 50)
TIMES = st.floats(0, 1e9)
BYTES = st.binary(max_size=200)
AUTHORITIES = st.sampled_from(["example.com:443", "127.0.0.1:80", "[2001:db8::1]:22"])
CALLERS = st.sampled_from([None, "10.0.0.1", "2001:db8::2"])


class _Places:
    """Gives out places one after the other, as the packing does."""

    def __init__(self) -> None:
        self.count = 0

    def next(self) -> int:
        self.count += 1
        return self.count - 1


@st.composite
def records(draw: st.DrawFn) -> tuple[Parked, int]:
    places = _Places()

    def flow() -> ParkedFlow:
        in_pipe = draw(st.integers(0, 1 << 20))
        pipe = (places.next(), places.next()) if in_pipe else None
        held = b"" if pipe else draw(BYTES)
        shut = not pipe and not held and draw(st.booleans())
        return ParkedFlow(draw(COUNTS), held, in_pipe, pipe, shut or draw(st.booleans()), shut)

    def pair() -> ParkedPair:
        return ParkedPair(places.next(), places.next(), flow(), flow())

    def many(make):  # type: ignore[no-untyped-def]
        return tuple(make() for _ in range(draw(st.integers(0, 3))))

    grants = st.builds(
        Grant,
        session=IDS,
        token_sha256=HASHES,
        network=st.sampled_from(NetworkLevel),
        egress_budget=st.builds(EgressBudget, COUNTS, COUNTS),
        model_budget=st.builds(ModelBudget, COUNTS, COUNTS, COUNTS),
        used=st.builds(Usage, COUNTS, COUNTS),
    )
    models = st.builds(ParkedModel, COUNTS, COUNTS, COUNTS, COUNTS, COUNTS, st.lists(TIMES, max_size=5).map(tuple))
    record = Parked(
        epoch=draw(st.text(max_size=20)),
        listeners={name: places.next() for name in draw(st.sets(st.sampled_from(["sandbox", "metrics", "contract"])))},
        passed={name: places.next() for name in draw(st.sets(st.sampled_from(["sandbox", "contract"])))},
        sessions=tuple(draw(st.lists(st.builds(ParkedSession, grants, *[COUNTS] * 5, models), max_size=3))),
        tunnels=many(
            lambda: ParkedTunnel(draw(IDS), draw(AUTHORITIES), "::1", draw(TIMES), draw(st.integers(0, 8)), pair())
        ),
        greetings=many(
            lambda: ParkedGreeting(
                *(draw(IDS), draw(AUTHORITIES), "::1", "open", draw(TIMES), draw(TIMES)),
                *(places.next(), places.next(), draw(BYTES)),
            )
        ),
        asking=many(
            lambda: ParkedAsking(
                *(draw(IDS), draw(HASHES), draw(CALLERS), draw(AUTHORITIES), draw(TIMES)),
                *(draw(st.booleans()), draw(st.none() | TIMES), places.next(), draw(BYTES)),
            )
        ),
        runners=many(lambda: ParkedRunner(draw(IDS), pair())),
        http=many(
            lambda: ParkedHttp(
                *(draw(IDS), draw(st.none() | AUTHORITIES), draw(CALLERS), draw(TIMES), places.next(), draw(BYTES))
            )
        ),
        arrivals=many(
            lambda: ParkedArrival(
                places.next(), draw(CALLERS), draw(st.booleans()), draw(TIMES), draw(TIMES), draw(BYTES)
            )
        ),
        endings=many(lambda: ParkedEnding(places.next(), draw(TIMES), draw(COUNTS))),
    )
    return record, places.count


@given(records())
def test_a_record_comes_back_as_it_was(drawn: tuple[Parked, int]) -> None:
    record, descriptors = drawn
    assert decode_parked(encode_parked(record), descriptors) == record


@given(records(), st.data())
def test_every_record_that_was_cut_is_refused(drawn: tuple[Parked, int], data: st.DataObject) -> None:
    record, descriptors = drawn
    whole = encode_parked(record)
    with pytest.raises(ParkedError):
        decode_parked(whole[: data.draw(st.integers(0, len(whole) - 1))], descriptors)


def test_every_prefix_of_a_record_is_refused() -> None:
    whole = encode_parked(Parked(epoch="e", endings=(ParkedEnding(0, 1.0, 0),)))
    for size in range(len(whole)):
        with pytest.raises(ParkedError):
            decode_parked(whole[:size], 1)
    assert decode_parked(whole, 1).connections == 1


@given(records(), st.data())
def test_a_record_with_a_changed_byte_is_refused(drawn: tuple[Parked, int], data: st.DataObject) -> None:
    record, descriptors = drawn
    whole = bytearray(encode_parked(record))
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ParkedError):
        decode_parked(bytes(whole), descriptors)


@given(records(), st.integers(-3, 3).filter(bool))
def test_a_record_with_other_descriptors_than_it_names_is_refused(drawn: tuple[Parked, int], more: int) -> None:
    record, descriptors = drawn
    with pytest.raises(ParkedError):
        decode_parked(encode_parked(record), descriptors + more)


@given(st.binary(max_size=300))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ParkedError):
        decode_parked(data, 0)


@given(st.binary(max_size=300), st.integers(0, 3))
def test_random_bytes_in_a_whole_frame_are_refused_or_read(body: bytes, descriptors: int) -> None:
    header = struct.pack(">16sIQ32s", b"opificia-parked\n", VERSION, len(body), hashlib.sha256(body).digest())
    try:
        record = decode_parked(header + body, descriptors)
    except ParkedError:
        return
    assert encode_parked(record)


@given(st.integers(0, (1 << 32) - 1).filter(lambda version: version != VERSION))
def test_another_version_is_refused_by_its_number(version: int) -> None:
    whole = encode_parked(Parked(epoch="e"))
    with pytest.raises(ParkedError, match=f"of version {version}"):
        decode_parked(whole[:16] + version.to_bytes(4, "big") + whole[20:], 0)


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (Parked(epoch="e", endings=(ParkedEnding(0, 1.0, 0), ParkedEnding(0, 1.0, 0))), "once"),
        (Parked(epoch="e", endings=(ParkedEnding(0, 1.0, 0), ParkedEnding(2, 1.0, 0))), "once"),
        (
            Parked(epoch="e", runners=(ParkedRunner("s", ParkedPair(0, 1, ParkedFlow(0, in_pipe=5), ParkedFlow(0))),)),
            "pipe",
        ),
        (
            Parked(
                epoch="e",
                runners=(ParkedRunner("s", ParkedPair(0, 1, ParkedFlow(0, b"x", shut=True), ParkedFlow(0))),),
            ),
            "ended",
        ),
        (Parked(epoch="e", arrivals=(*[ParkedArrival(n, "nowhere", True, 0, 0, b"") for n in range(2)],)), "place"),
        (
            Parked(
                epoch="e", asking=(*[ParkedAsking("s", "0" * 64, None, "x", 0, False, 0, n, b"") for n in range(2)],)
            ),
            "place",
        ),
        (
            Parked(epoch="e", asking=(*[ParkedAsking("s", "0", None, "x:1", 0, False, 0, n, b"") for n in range(2)],)),
            "read",
        ),
        (Parked(epoch="e", runners=(ParkedRunner("../s", ParkedPair(0, 1, ParkedFlow(0), ParkedFlow(0))),)), "read"),
    ],
)
def test_a_record_that_contradicts_itself_is_refused(record: Parked, why: str) -> None:
    with pytest.raises(ParkedError, match=why):
        decode_parked(encode_parked(record), 2)
