"""Nothing that a sandbox prints can steer the terminal it is shown on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control.cli.text import Escaper, escape, escape_line


@pytest.mark.parametrize(
    ("hostile", "shown"),
    [
        ("\x1b[2J", "\\x1b[2J"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\x9b31m", "\\x9b31m"),
        ("a\x08b", "a\\x08b"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("\x7f", "\\x7f"),
        ("plain ü 漢\ttab\n", "plain ü 漢\ttab\n"),
    ],
)
def test_control_characters_are_made_visible(hostile: str, shown: str) -> None:
    assert escape(hostile) == shown


def test_a_cell_is_one_line() -> None:
    assert escape_line("a\nb\tc") == "a\\nb c"


def test_a_carriage_return_cannot_overwrite_a_line() -> None:
    assert Escaper().feed(b"refused\rallowed\r\nnext\r", final=True) == "refused\nallowed\nnext\n"


def test_bytes_that_are_no_text_are_shown() -> None:
    assert Escaper().feed(b"\xff\xfe", final=True) == "\\xff\\xfe"


@given(st.binary(max_size=60), st.lists(st.integers(0, 60)))
def test_the_pieces_do_not_matter(data: bytes, cuts: list[int]) -> None:
    whole = Escaper().feed(data, final=True)
    escaper, at, pieces = Escaper(), 0, ""
    for cut in sorted(cuts):
        pieces += escaper.feed(data[at:cut])
        at = max(at, cut)
    pieces += escaper.feed(data[at:], final=True)
    assert pieces == whole
    assert not any(ord(character) < 0x20 and character not in "\n\t" for character in whole)
