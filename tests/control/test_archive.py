"""Archives that untrusted code has written stay inside the folder they are unpacked into."""

import gzip
import io
import os
import stat
import tarfile
from pathlib import Path

import pytest

from control.archive import ArchiveError, Unpacked, unpack

Entry = tarfile.TarInfo | tuple[tarfile.TarInfo, bytes]


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, link, mode
    return info


def file(name: str, data: bytes = b"data", mode: int = 0o644) -> Entry:
    info = entry(name, mode=mode)
    info.size = len(data)
    return info, data


def made(tmp_path: Path, *entries: Entry, strict: bool = False, max_entries: int = 100) -> Unpacked:
    archive = tmp_path / "a.tar"
    with tarfile.open(archive, "w") as tar:
        for each in entries:
            if isinstance(each, tuple):
                tar.addfile(each[0], io.BytesIO(each[1]))
            else:
                tar.addfile(each)
    (tmp_path / "target").mkdir(exist_ok=True)
    return unpack(archive, tmp_path / "target", max_bytes=1_000_000, max_entries=max_entries, strict=strict)


def test_files_folders_and_inner_links_are_made(tmp_path: Path) -> None:
    done = made(
        tmp_path,
        entry("d", tarfile.DIRTYPE),
        file("d/tool", b"#!", mode=0o4777),
        file("deep/er/x"),
        entry("d/link", tarfile.SYMTYPE, "../deep/er/x"),
        entry("hard", tarfile.LNKTYPE, "deep/er/x"),
    )
    target = tmp_path / "target"
    assert (done.entries, done.refused) == (5, [])
    assert (target / "d/link").read_bytes() == b"data"
    assert (target / "hard").read_bytes() == b"data"
    # No set-id bits, whatever the archive says; whether it can be executed stays.
    assert stat.S_IMODE((target / "d/tool").stat().st_mode) == 0o755
    assert stat.S_IMODE((target / "deep/er/x").stat().st_mode) == 0o644


def test_modes_do_not_depend_on_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        made(tmp_path, file("d/x"))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "target/d").stat().st_mode) == 0o755
    assert stat.S_IMODE((tmp_path / "target/d/x").stat().st_mode) == 0o644


@pytest.mark.parametrize(
    "bad",
    [
        file("../out"),
        file("a/../../out"),
        entry("l", tarfile.SYMTYPE, "/etc/shadow"),
        entry("l", tarfile.SYMTYPE, "../outside"),
        entry("a/l", tarfile.SYMTYPE, "b/../../../outside"),
        entry("h", tarfile.LNKTYPE, "../outside"),
        entry("h", tarfile.LNKTYPE, "nowhere"),
        entry("f", tarfile.FIFOTYPE),
        entry("c", tarfile.CHRTYPE),
        entry("b", tarfile.BLKTYPE),
        file("/".join("d" * 300)),
    ],
    ids=lambda each: (each[0] if isinstance(each, tuple) else each).name[:20],
)
def test_an_entry_that_leads_out_is_left_out_and_told(tmp_path: Path, bad: Entry) -> None:
    (tmp_path / "outside").write_text("secret")
    done = made(tmp_path, bad, file("good"))
    assert len(done.refused) == 1
    assert (tmp_path / "target/good").read_bytes() == b"data"
    assert (tmp_path / "outside").read_text() == "secret"
    assert not (tmp_path / "out").exists()
    with pytest.raises(ArchiveError):
        made(tmp_path, bad, strict=True)


def test_an_absolute_name_is_made_inside(tmp_path: Path) -> None:
    made(tmp_path, file("/etc/passwd"))
    assert (tmp_path / "target/etc/passwd").read_bytes() == b"data"


def test_nothing_is_written_through_a_link_that_was_there_before(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "target").mkdir()
    (tmp_path / "target/d").symlink_to(outside)
    (tmp_path / "target/f").symlink_to(outside / "f")
    done = made(tmp_path, file("d/x"), file("f", b"new"))
    assert len(done.refused) == 1
    assert list(outside.iterdir()) == []
    # A file takes the link's place.
    assert (tmp_path / "target/f").read_bytes() == b"new"


def test_nothing_is_written_through_a_link_of_the_archive_itself(tmp_path: Path) -> None:
    done = made(tmp_path, entry("a", tarfile.SYMTYPE, "."), file("a/x"))
    assert len(done.refused) == 1


def test_odd_names_are_kept(tmp_path: Path) -> None:
    name = os.fsdecode(b"new\nline\xff")
    made(tmp_path, file(name))
    assert [path.name for path in (tmp_path / "target").iterdir()] == [name]


def test_bounds_end_it(tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match="more than"):
        made(tmp_path, file("a", bytes(2_000_000)))
    with pytest.raises(ArchiveError, match="more than"):
        made(tmp_path, *(file(f"f{number}") for number in range(5)), max_entries=4)


def _long_name(size: int) -> bytes:
    """An archive whose one entry has a name of `size` bytes, which a reader takes into memory before it knows it."""
    info = entry("x", tarfile.GNUTYPE_LONGNAME)
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT)


def test_a_header_that_would_fill_the_memory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    with (tmp_path / "a.tar").open("wb") as archive:
        archive.write(_long_name(8 << 30))
        archive.truncate(16 << 30)  # sparse: the disk has none of it
    with pytest.raises(ArchiveError, match="longer than"):
        unpack(tmp_path / "a.tar", tmp_path / "target", max_bytes=1000, max_entries=9, strict=False)


def test_a_compressed_archive_is_refused_whatever_it_would_unfold_to(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "a.tar").write_bytes(gzip.compress(_long_name(1 << 20) + bytes(1 << 20)))
    with pytest.raises(ArchiveError):
        unpack(tmp_path / "a.tar", tmp_path / "target", max_bytes=1000, max_entries=9, strict=False)


def test_very_many_entries_each_with_a_long_name_are_unpacked(tmp_path: Path) -> None:
    names = ["/".join(("d" * 200, "e" * 200, f"{number}")) for number in range(90)]
    assert made(tmp_path, *(file(name) for name in names)).entries == 90


def test_names_may_begin_with_the_folder_itself(tmp_path: Path) -> None:
    made(tmp_path, entry(".", tarfile.DIRTYPE), file("./a/x"), entry("./h", tarfile.LNKTYPE, "./a/x"))
    assert (tmp_path / "target/h").read_bytes() == b"data"


@pytest.mark.parametrize("content", [b"", b"not a tar", b"\0" * 100, b"\x1f\x8b" + b"x" * 50])
def test_what_is_no_archive_is_one_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.tar").write_bytes(content)
    (tmp_path / "target").mkdir()
    with pytest.raises(ArchiveError):
        unpack(tmp_path / "a.tar", tmp_path / "target", max_bytes=1, max_entries=1, strict=True)


def test_a_cut_archive_is_one_error(tmp_path: Path) -> None:
    made(tmp_path, file("a", bytes(100_000)))
    archive = tmp_path / "a.tar"
    archive.write_bytes(archive.read_bytes()[:50_000])
    with pytest.raises(ArchiveError):
        unpack(archive, tmp_path / "target", max_bytes=1_000_000, max_entries=10, strict=False)
