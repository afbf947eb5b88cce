"""What is kept of an output, and the engine's record of it, which is never quite the same."""

import random
from functools import partial

import pytest

from control.docker.alignment import ENTRY_BYTES, Alignment, _recorded


def record(output: bytes) -> list[bytes]:
    """Return the entries that the engine makes of an output (daemon/logger/copier.go of Docker 20.10)."""
    entries = []
    while output:
        line = output[: (output.find(b"\n", 0, ENTRY_BYTES) + 1) or ENTRY_BYTES]
        entries.append(_recorded(line))
        output = output[len(line) :]
    return entries


def read(kept: bytes, offset: int, length: int) -> bytes:
    return kept[offset : offset + length]


def rest(kept: bytes, entries: list[bytes], later: list[bytes] | None = None) -> tuple[bytes, bool]:
    """Return what of the record is not kept yet, and whether something may be missing before it.

    `later`: entries that come after the place was looked for.
    """
    alignment = Alignment(partial(read, kept), len(kept))
    for entry in entries:
        alignment.feed(entry)
    fresh = b"".join(alignment.fresh(entry) for entry in later or [])
    return b"".join(entries)[alignment.position :] + fresh, alignment.broken


def lines(first: int, last: int) -> bytes:
    return b"".join(b"line %d\n" % n for n in range(first, last + 1))


def test_the_record_goes_on_wherever_what_is_kept_was_cut() -> None:
    output = "eins\nzwei \u00fcml\u00e4ut\n\n".encode() + b"no newline at the end"
    for cut in range(len(output) + 1):
        assert rest(output[:cut], record(output)) == (output[cut:], False)


def test_bytes_that_are_not_utf_8_are_found_in_a_record_that_has_replaced_them() -> None:
    output = b"\xff\xfe raw\n" * 3 + b"\xc3(\n" + random.Random(1).randbytes(50_000) + b"\nend\n"
    entries = record(output)
    for cut in (0, 3, 7, 20, 30, 20_000, 40_000, len(output) - 4):
        # As far as the cut is not within what was replaced.
        if _recorded(output[:cut]) + _recorded(output[cut:]) == b"".join(entries):
            assert rest(output[:cut], entries) == (_recorded(output[cut:]), False), cut
    assert rest(output, entries) == (b"", False)


def test_a_line_longer_than_an_entry_is_found_also_when_a_character_was_cut_by_it() -> None:
    output = b"x" + "\u00fc".encode() * 20_000 + b"\nend\n"
    assert rest(output[:-4], record(output)) == (b"end\n", False)


@pytest.mark.parametrize("unrecorded", [b"half a li", b"half a line\nand another\n", lines(900, 20_000)])
def test_what_an_engine_passed_on_and_did_not_record_hides_nothing_of_what_comes_after(unrecorded: bytes) -> None:
    before, after = lines(1, 800), lines(20_001, 20_500)
    kept, entries = before + unrecorded, record(before) + record(after)
    assert rest(kept, entries) == (after, False)
    # Nor is any of that doubled when it is taken up once more, as soon as there is enough to tell by.
    for taken in (5_000, 5_003, len(after)):
        assert rest(kept + after[:taken], entries) == (after[taken:], False)


def test_a_few_lines_are_enough_to_go_on_behind_what_was_not_recorded() -> None:
    kept, entries = lines(1, 800) + b"unrecorded\n", record(lines(1, 800) + lines(801, 900))
    assert rest(kept + lines(801, 803), entries) == (lines(804, 900), False)
    assert rest(kept + lines(801, 803) + b"line", entries) == (lines(804, 900).removeprefix(b"line"), False)


def test_what_is_kept_of_a_line_that_is_not_recorded_yet_is_not_doubled_when_it_is() -> None:
    kept = lines(1, 5) + b"half a "
    assert rest(kept, record(lines(1, 5)), [b"half a line\n", b"next\n"]) == (b"line\nnext\n", False)
    assert rest(kept, record(lines(1, 3)), record(lines(4, 5) + b"half a line\n")) == (b"line\n", False)
    # An engine that was killed never records it.
    assert rest(kept, record(lines(1, 5)), [b"another\n", b"next\n"]) == (b"another\nnext\n", False)
    assert rest(b"half a ", [], [b"half a line\n"]) == (b"line\n", False)


def test_an_engine_that_closed_a_line_in_its_middle_does_not_part_the_two() -> None:
    entries = [b"one\n", b"half a ", b"line\n", b"two\n"]
    assert rest(b"one\nhalf a line\n", entries) == (b"two\n", False)


def test_the_place_is_found_in_a_record_whose_beginning_was_thrown_away() -> None:
    whole = lines(1, 5_000)
    assert rest(lines(1, 3_000), record(whole)[2_000:]) == (lines(3_001, 5_000), False)


def test_a_record_that_has_nothing_more_of_what_is_kept_is_broken() -> None:
    assert rest(lines(1, 1_000), record(lines(2_000, 3_000))) == (lines(2_000, 3_000), True)


def test_a_place_that_is_there_twice_is_said_to_be_one_of_several() -> None:
    block = lines(1, 1_000)
    left, broken = rest(b"begin\n" + block, record(block + block))
    assert broken
    # Rather twice than not at all.
    assert left == block


def test_a_record_in_which_nothing_is_new_leaves_nothing() -> None:
    assert rest(lines(1, 10), record(lines(1, 10))) == (b"", False)
    assert rest(b"", []) == (b"", False)
    # What the engine has lost is kept.
    assert rest(lines(1, 10), record(lines(1, 7))) == (b"", False)


# From encoding/json of Go 1.19, which writes the engine's record.
@pytest.mark.parametrize(
    ("data", "length"), [(b"\xff", 3), (b"\xe2\x82", 6), (b"a\xe2\x82b", 8), ("\u20ac".encode(), 3), (b"\xc3\x28", 4)]
)
def test_each_byte_that_is_not_utf_8_is_replaced_by_itself(data: bytes, length: int) -> None:
    assert len(_recorded(data)) == length
