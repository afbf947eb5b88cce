"""A session's logs on disk, also on one that is full."""

import contextlib
import os
import resource
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from control.docker.types import LogStream
from control.sessions.logs import BYTES_AT_ONCE, PIECES_AT_ONCE, LogFiles, PieceReader


def opened(folder: Path, limit: int = 10_000) -> LogFiles:
    return LogFiles(folder, limit, lambda: 7, lambda: None)


@contextlib.contextmanager
def room_for(size: int) -> Iterator[None]:
    """Let no file grow beyond `size` bytes: write(2) takes what fits and then fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_lack_of_descriptors_keeps_none_of_those_that_there_were(tmp_path: Path) -> None:
    def numbers() -> set[str]:
        # Without the one that lists them.
        return {path.name for path in list(Path("/proc/self/fd").iterdir()) if os.path.lexists(path)}

    before = numbers()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for room in range(3):
        # The lowest free numbers are what is given next.
        free = [number for number in range(soft) if str(number) not in before]
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[room], hard))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                opened(tmp_path)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert numbers() - before == set()
    opened(tmp_path).close()


def test_what_a_full_disk_takes_half_of_is_not_kept_and_comes_again_whole(tmp_path: Path) -> None:
    logs = opened(tmp_path)
    logs.write(LogStream.STDOUT, b"a" * 700)
    with room_for(1_000), pytest.raises(OSError, match="too large"):
        logs.write(LogStream.STDOUT, b"b" * 700)
    assert logs.position(LogStream.STDOUT) == 700
    assert (tmp_path / "stdout.log").read_bytes() == b"a" * 700
    logs.write(LogStream.STDOUT, b"b" * 700)
    logs.close()
    assert (tmp_path / "stdout.log").read_bytes() == b"a" * 700 + b"b" * 700
    assert [(piece.offset, piece.length) for piece in PieceReader(tmp_path).next()] == [(0, 700), (700, 700)]


def test_an_index_that_does_not_fit_keeps_nothing_of_the_piece(tmp_path: Path) -> None:
    logs = opened(tmp_path)
    for _ in range(3):
        logs.write(LogStream.STDERR, b"x")
    # The fourth entry would end at 52 bytes.
    with room_for(45), pytest.raises(OSError, match="too large"):
        logs.write(LogStream.STDERR, b"y")
    logs.write(LogStream.STDERR, b"y")
    logs.close()
    assert (tmp_path / "stderr.log").read_bytes() == b"xxxy"
    assert len(PieceReader(tmp_path).next()) == 4


def test_an_entry_of_the_index_that_a_crash_tore_does_not_shift_the_next(tmp_path: Path) -> None:
    logs = opened(tmp_path)
    logs.write(LogStream.STDOUT, b"one")
    logs.close()
    with (tmp_path / "logs.index").open("ab") as index:
        index.write(b"torn")
    logs = opened(tmp_path)
    logs.write(LogStream.STDOUT, b"two")
    logs.close()
    assert [piece.length for piece in PieceReader(tmp_path).next()] == [3, 3]


def test_a_program_that_writes_byte_by_byte_is_read_a_bounded_number_of_pieces_at_once(tmp_path: Path) -> None:
    logs = opened(tmp_path)
    for _ in range(2 * PIECES_AT_ONCE + 1):
        logs.write(LogStream.STDOUT, b"x")
    logs.close()
    reader = PieceReader(tmp_path)
    found = [reader.next() for _ in range(4)]
    assert [len(pieces) for pieces in found] == [PIECES_AT_ONCE, PIECES_AT_ONCE, 1, 0]
    assert [piece.offset for pieces in found for piece in pieces] == list(range(2 * PIECES_AT_ONCE + 1))


def test_large_pieces_are_read_a_bounded_number_of_bytes_at_once(tmp_path: Path) -> None:
    logs = opened(tmp_path, 10 * BYTES_AT_ONCE)
    for size in (2 * BYTES_AT_ONCE, BYTES_AT_ONCE, BYTES_AT_ONCE):
        logs.write(LogStream.STDOUT, bytes(size))
    logs.close()
    reader = PieceReader(tmp_path)
    assert [[piece.length for piece in reader.next()] for _ in range(4)] == [
        *([2 * BYTES_AT_ONCE], [BYTES_AT_ONCE], [BYTES_AT_ONCE], [])
    ]


def test_output_beyond_the_limit_is_said_once(tmp_path: Path) -> None:
    logs = opened(tmp_path, limit=5)
    for _ in range(3):
        logs.write(LogStream.STDOUT, b"abc")
    logs.close()
    kept = (tmp_path / "stdout.log").read_bytes()
    assert kept == b"abcab\n[opificia: output beyond 5 bytes is not kept]\n"


@pytest.mark.parametrize(
    "torn", [struct.pack(">QBI", 7, 2, 1), struct.pack(">QBI", 1 << 60, 0, 1), struct.pack(">QBI", 7, 0, 1 << 31)]
)
def test_an_index_that_a_power_cut_spoilt_ends_before_the_spoilt_entry(tmp_path: Path, torn: bytes) -> None:
    logs = opened(tmp_path)
    logs.write(LogStream.STDOUT, b"kept")
    logs.close()
    with (tmp_path / "logs.index").open("ab") as index:
        index.write(torn + struct.pack(">QBI", 7, 0, 4))
    reader = PieceReader(tmp_path)
    assert [(piece.offset, piece.length) for piece in reader.next()] == [(0, 4)]
    assert reader.next() == []
    reader = PieceReader(tmp_path)
    reader.skip(5)
    assert reader.next() == []
