"""Bytes of the engine's streams: two outputs in one, what was taken of a record, an archive cut to its bounds."""

import io
import os
import resource
import socket
import struct
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control.docker.archive import TarCut
from control.docker.demultiplex import Demultiplexer
from control.docker.stream import Stream
from control.docker.types import EngineError, EngineUnavailableError, LogStream, OutLimits, OutSummary

UNLIMITED = OutLimits(bytes=1 << 40, entries=1 << 20)


def frame(kind: int, data: bytes) -> bytes:
    return struct.pack(">BxxxI", kind, len(data)) + data


def pieces(data: bytes, size: int) -> Iterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


@given(st.lists(st.tuples(st.sampled_from([1, 2]), st.binary(max_size=40))), st.integers(1, 50))
def test_outputs_come_apart_however_the_stream_is_cut(frames: list[tuple[int, bytes]], size: int) -> None:
    stream = b"".join(frame(kind, data) for kind, data in frames)
    demultiplexer = Demultiplexer()
    found = dict.fromkeys(LogStream, b"")
    for piece in pieces(stream, size):
        for kind, data in demultiplexer.feed(piece):
            found[kind] += data
    assert found[LogStream.STDOUT] == b"".join(data for kind, data in frames if kind == 1)
    assert found[LogStream.STDERR] == b"".join(data for kind, data in frames if kind == 2)


def test_a_frame_is_passed_on_before_it_is_whole() -> None:
    head = struct.pack(">BxxxI", 1, 1 << 31)
    assert list(Demultiplexer().feed(head + b"first")) == [(LogStream.STDOUT, b"first")]


@given(st.binary(min_size=8, max_size=200))
def test_bytes_that_are_no_log_stream_raise_only_the_engines_error(data: bytes) -> None:
    try:
        list(Demultiplexer().feed(data))
    except EngineError:
        return


def test_a_frame_of_unknown_kind_is_refused() -> None:
    with pytest.raises(EngineError, match="unknown kind 3"):
        list(Demultiplexer().feed(frame(3, b"error from daemon")))


def archive(*members: tuple[tarfile.TarInfo, bytes], format_: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format_) as tar:
        for member, content in members:
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def regular(name: str, size: int) -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.size = size
    return member, b"x" * size


def special(name: str, kind: bytes, link: str = "") -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.type = kind
    member.linkname = link
    return member, b""


ENTRIES = (
    special("out", tarfile.DIRTYPE),
    regular("out/a", 0),
    regular("out/b", 700),
    special("out/link", tarfile.SYMTYPE, "/etc/shadow"),
    special("out/fifo", tarfile.FIFOTYPE),
    regular("out/" + "n" * 300 + "\n\udcff", 512),
    special("out/" + "l" * 200, tarfile.SYMTYPE, "t" * 3000),
    regular("out/last", 1),
)


def cut(data: bytes, limits: OutLimits, size: int = 1000) -> tuple[bytes, OutSummary]:
    tar_cut = TarCut(limits)
    written = b"".join(tar_cut.feed(piece) for piece in pieces(data, size))
    end, summary = tar_cut.end()
    assert summary.bytes == len(written) + len(end)
    return written + end, summary


def names(data: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return tar.getnames()


@pytest.mark.parametrize("format_", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
@pytest.mark.parametrize("size", [1, 511, 512, 513, 100_000])
def test_an_archive_within_its_bounds_is_unchanged(format_: int, size: int) -> None:
    data = archive(*ENTRIES, format_=format_)
    written, summary = cut(data, UNLIMITED, size)
    assert data.startswith(written)
    assert names(written) == names(data)
    assert summary == OutSummary(len(written), len(ENTRIES), False)


@pytest.mark.parametrize("entries", range(len(ENTRIES)))
def test_an_archive_is_cut_between_entries_at_their_bound(entries: int) -> None:
    data = archive(*ENTRIES)
    written, summary = cut(data, OutLimits(1 << 30, entries))
    assert names(written) == names(data)[:entries]
    assert (summary.entries, summary.truncated) == (entries, True)


@pytest.mark.parametrize("limit", range(1024, 14_000, 512))
def test_an_archive_never_exceeds_its_bytes_and_stays_an_archive(limit: int) -> None:
    data = archive(*ENTRIES)
    written, summary = cut(data, OutLimits(limit, 1000))
    assert len(written) <= limit
    assert names(written) == names(data)[: summary.entries]
    assert summary.truncated == (summary.entries < len(ENTRIES))


@pytest.mark.parametrize("format_", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_a_sparse_file_of_a_tebibyte_is_left_out_without_reading_it(format_: int) -> None:
    member = tarfile.TarInfo("out/huge")
    member.size = 1 << 40
    header = member.tobuf(format_)
    tar_cut = TarCut(OutLimits(1 << 30, 1000))
    first = archive(regular("out/small", 1))[:1024]
    assert tar_cut.feed(first + header) == first
    assert tar_cut.done
    assert tar_cut.end()[1].truncated


def test_a_broken_stream_is_an_error_not_a_short_archive() -> None:
    tar_cut = TarCut(UNLIMITED)
    tar_cut.feed(archive(regular("out/a", 2000))[:1500])
    with pytest.raises(EngineError, match="middle"):
        tar_cut.end()


def test_an_extension_header_of_a_gigabyte_is_refused() -> None:
    member = tarfile.TarInfo("pax")
    member.type = tarfile.XHDTYPE
    member.size = 1 << 30
    with pytest.raises(EngineError, match="longer"):
        TarCut(UNLIMITED).feed(member.tobuf())


@pytest.mark.parametrize("records", [b"xx size=1\n", b"99 size=1\n", b"10 size=-1\n", b"0 size=1\n", b"9 size=z\n"])
def test_broken_pax_records_raise_only_the_engines_error(records: bytes) -> None:
    member = tarfile.TarInfo("pax")
    member.type = tarfile.XHDTYPE
    member.size = len(records)
    with pytest.raises(EngineError, match="pax"):
        TarCut(UNLIMITED).feed(member.tobuf() + records.ljust(512, b"\0"))


@given(st.binary(max_size=3000))
def test_random_bytes_raise_only_the_engines_error(data: bytes) -> None:
    tar_cut = TarCut(UNLIMITED)
    try:
        tar_cut.feed(data)
        tar_cut.end()
    except EngineError:
        return


@given(st.integers(0, 4000), st.integers(0, 255))
def test_a_changed_byte_raises_only_the_engines_error(position: int, value: int) -> None:
    data = bytearray(archive(*ENTRIES))
    data[position] = value
    try:
        cut(bytes(data), UNLIMITED)
    except EngineError:
        return


def test_a_process_without_a_descriptor_left_finds_the_engine_unavailable_and_no_more(tmp_path: Path) -> None:
    path = str(tmp_path / "docker.sock")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket(socket.AF_UNIX) as engine:
        engine.bind(path)
        engine.listen()
        # The lowest descriptor that is free is the next one to be given.
        free = os.dup(engine.fileno())
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            with pytest.raises(EngineUnavailableError, match="No descriptor is left"):
                Stream(path, "GET", "/version", {}, head_timeout_s=1)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("size", [b"-0000001000\0", b"0o000000777\0", b"000000_1000\0", b"+0000001000\0"])
def test_a_tar_header_whose_size_is_no_octal_number_is_refused(size: bytes) -> None:
    # int() takes all of them, and of a negative size the content would never end.
    with pytest.raises(EngineError, match="no tar"):
        TarCut(UNLIMITED).feed(tar_header(size, b"0"))


@pytest.mark.parametrize("kind", [b"\0", b"7", b"S", b"Z"])
def test_a_tar_entry_of_a_kind_that_readers_take_for_different_things_is_refused(kind: bytes) -> None:
    with pytest.raises(EngineError, match="unknown kind"):
        TarCut(UNLIMITED).feed(tar_header(b"00000001000\0", kind))


@pytest.mark.parametrize("record", [b"11 size=+5\n", b"12 size=1_0\n", b"+11 size=5\n", b"1_1 size=5\n"])
def test_a_pax_record_with_an_odd_number_is_refused(record: bytes) -> None:
    header = tar_header(b"%011o\0" % len(record), b"x")
    with pytest.raises(EngineError, match="pax"):
        TarCut(UNLIMITED).feed(header + record.ljust(512, b"\0"))


def tar_header(size: bytes, kind: bytes) -> bytes:
    header = bytearray(tarfile.TarInfo("name").tobuf(tarfile.USTAR_FORMAT))
    header[124:136], header[156:157] = size, kind
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


@pytest.mark.parametrize("body", [b"[" * 60_000, b'{"message":' + b"[" * 60_000, b"3", b"[]", b"\xff"])
def test_a_refusal_of_the_engine_that_cannot_be_read_is_a_refusal(tmp_path: Path, body: bytes) -> None:
    path = str(tmp_path / "docker.sock")
    head = b"HTTP/1.1 500 No\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    with socket.socket(socket.AF_UNIX) as engine, ThreadPoolExecutor(1) as pool:
        engine.bind(path)
        engine.listen()

        def answer() -> None:
            with engine.accept()[0] as connection:
                connection.recv(4096)
                connection.sendall(head + body)

        answering = pool.submit(answer)
        with pytest.raises(EngineError, match="The engine refused"):
            Stream(path, "GET", "/version", {}, head_timeout_s=60)
        answering.result()
