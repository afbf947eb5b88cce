"""Plain HTTP: where a body ends does not depend on how it arrives, and noise raises only each parser's own error."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.chunked import ChunkedReader
from gateway.core.head import Chunked, ContentLength
from gateway.core.plain_body import BodyError, BodyReader, body_reader
from gateway.core.plain_head import ResponseError, parse_response_head
from tests.unit.core.test_plain_body import drain


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


@given(st.binary(max_size=100))
def test_random_bytes_in_a_body_raise_only_its_own_error(noise: bytes) -> None:
    try:
        drain(body_reader(Chunked()), bytearray(noise))
    except BodyError:
        pass


@given(st.binary(max_size=200), st.booleans())
def test_random_bytes_in_a_response_head_raise_only_its_own_error(noise: bytes, led: bool) -> None:
    try:
        parse_response_head(b"HTTP/1.1 200 OK\r\n" + noise if led else noise)
    except ResponseError:
        pass
