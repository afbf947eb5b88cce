"""Plain-HTTP bodies: their end is found whatever the segments, and nothing but the body is passed on."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.chunked import ChunkedReader
from gateway.core.head import Chunked, ContentLength, NoBody
from gateway.core.plain_body import CHUNKS_TURN_BYTES, BodyError, BodyReader, body_reader
from gateway.core.plain_head import UntilClose


def drain(reader: BodyReader, data: bytearray) -> bytes:
    """Read until nothing moves, as the relay does."""
    passed = b""
    while not reader.done and data:
        held = len(data)
        passed += reader.read(data)
        if len(data) == held:
            break
    return passed


def in_segments(reader: BodyReader, data: bytes, cuts: list[int]) -> tuple[bytes, bytes]:
    """Return what is passed on and what is left of `data` when it arrives cut at `cuts`."""
    held = bytearray()
    passed = b""
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for start, end in itertools.pairwise(edges):
        held += data[start:end]
        passed += drain(reader, held)
    return passed, bytes(held)


def unchunk(data: bytes) -> bytes:
    reader = ChunkedReader()
    body, size = reader.feed(data)
    assert reader.done
    assert size == len(data)
    return body


def test_a_message_without_body_takes_nothing() -> None:
    assert body_reader(NoBody()).done
    assert body_reader(ContentLength(0)).done


@given(st.binary(max_size=50), st.binary(max_size=50), st.lists(st.integers(0, 100), max_size=5))
def test_a_counted_body_takes_its_length_and_no_more(body: bytes, after: bytes, cuts: list[int]) -> None:
    reader = body_reader(ContentLength(len(body)))
    assert in_segments(reader, body + after, cuts) == (body, after)
    assert reader.done


@given(
    st.lists(st.binary(min_size=1, max_size=30), max_size=6),
    st.binary(max_size=20),
    st.lists(st.integers(0, 300), max_size=6),
)
def test_a_chunked_body_ends_at_the_same_byte_whatever_the_segments(
    chunks: list[bytes], after: bytes, cuts: list[int]
) -> None:
    reader = body_reader(Chunked())
    sent = b"".join(b"%X;ext=1\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"000\r\nTrailer: x\r\n\r\n"
    passed, left = in_segments(reader, sent + after, cuts)
    assert reader.done
    assert left == after
    assert unchunk(passed) == b"".join(chunks)


def test_extensions_and_trailers_go_no_further() -> None:
    passed = drain(body_reader(Chunked()), bytearray(b"3;a=b\r\nabc\r\n0;c\r\nContent-Length: 7\r\nHost: b\r\n\r\n"))
    assert passed == b"3\r\nabc\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n",
        b"g\r\n",
        b"-1\r\n",
        b"+1\r\n",
        b"0x1\r\n",
        b" 1\r\n",
        b"1\n\nx",
        b"1\nx\r\n",
        b"1;a\nx\r\n",
        b"1;a\rb\r\nx\r\n",
        b"ffffffffffffffff1\r\n",
        b"1\r\nxy\r\n",
        b"1\r\nx\n",
        b"3\r\nab\r\n0\r\n\r\n",
        b"0\r\nno colon\r\n\r\n",
        b"0\r\n folded: x\r\n\r\n",
        b"0\r\nA: b\n\r\n",
        b"1;" + b"x" * 300,
        b"0\r\n" + b"A: b\r\n" * 3000,
    ],
)
def test_chunks_that_two_readers_could_take_differently_are_refused(data: bytes) -> None:
    with pytest.raises(BodyError):
        drain(body_reader(Chunked()), bytearray(data))


@given(st.binary(max_size=100))
def test_random_bytes_raise_only_the_readers_own_error(noise: bytes) -> None:
    try:
        drain(body_reader(Chunked()), bytearray(noise))
    except BodyError:
        pass


def test_a_turn_reads_a_bounded_number_of_small_chunks_and_a_large_one_whole() -> None:
    reader = body_reader(Chunked())
    small = bytearray(b"1\r\nx\r\n" * 10_000)
    size = len(small)
    reader.read(small)
    assert size - len(small) == CHUNKS_TURN_BYTES
    large = bytearray(b"10000\r\n" + b"x" * 0x10000)
    reader = body_reader(Chunked())
    reader.read(large)
    reader.read(large)
    assert not large


def test_a_body_may_have_any_number_of_chunks() -> None:
    reader = body_reader(Chunked())
    for _ in range(600):
        drain(reader, bytearray(b"1\r\nx\r\n" * 1000))
    drain(reader, bytearray(b"0\r\n\r\n"))
    assert reader.done


def test_a_body_until_the_end_takes_everything_and_is_never_done_by_itself() -> None:
    reader = body_reader(UntilClose())
    data = bytearray(b"abc")
    assert reader.read(data) == b"abc"
    assert not data
    assert not reader.done
    assert reader.ends_with_connection
