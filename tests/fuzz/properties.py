"""What targets have in common: what must hold of a parser whatever the bytes are."""

from collections.abc import Callable
from typing import Any

from gateway.core.incomplete import Incomplete
from gateway.runtime.log import one_line


def settled(parse: Callable[[bytes], Any], data: bytes, result: object) -> None:
    """Check that no prefix says something else than the whole, and that nothing after the whole changes it."""
    for size in {0, 1, len(data) // 2, len(data) - 1}:
        if 0 <= size < len(data):
            earlier = parse(data[:size])
            assert isinstance(earlier, Incomplete) or earlier == result, (size, earlier, result)
    if not isinstance(result, Incomplete):
        assert parse(data + b"\r\n\r\n\x16\x03\x01") == result


def check_message(message: str) -> None:
    """Check that a refusal has a message for a person, and nothing of the input that a log could trip over."""
    assert message
    assert message.replace("§", "").isascii()
    assert message.isprintable()


def pieces(data: bytes, most: int = 7) -> list[bytes]:
    """Cut `data` into pieces of odd sizes, up to `most`, that depend on it alone."""
    cut, position = [], 0
    while position < len(data):
        size = 1 + data[position] % most
        cut.append(data[position : position + size])
        position += size
    return cut


def check_bounded(message: str, data: bytes) -> None:
    """Check that an error has a message that steers no terminal, and that is not much longer than what it is about."""
    assert message
    # As the daemons log it.
    shown = one_line(message)
    assert shown.isprintable(), message
    # Of one byte an escape makes up to six characters.
    assert len(shown) <= 500 + 6 * len(data)
