"""Plain-HTTP bodies: their end is found whatever the segments, and nothing but the body is passed on."""

import pytest

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


def test_a_message_without_body_takes_nothing() -> None:
    assert body_reader(NoBody()).done
    assert body_reader(ContentLength(0)).done


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
