"""A folder of the host that a session asks to see as /in leads to nothing else of the host."""

import os
import socket
from pathlib import Path

import pytest

from control.sessions import folders
from control.sessions.folders import InputError, check_in_dir


def checked(folder: Path, root: Path) -> str:
    return check_in_dir(str(folder), (str(root),))


def test_a_folder_below_a_root_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "project/deep").mkdir(parents=True)
    (tmp_path / "project/deep/file").write_text("x")
    (tmp_path / "project/link").symlink_to("/etc/shadow")
    assert checked(tmp_path / "project", tmp_path) == str(tmp_path / "project")


@pytest.mark.parametrize("link", ["project", "project/below"])
def test_a_link_on_the_way_is_refused(tmp_path: Path, link: str) -> None:
    (tmp_path / "root/project").parent.mkdir()
    (tmp_path / "elsewhere/below").mkdir(parents=True)
    if link == "project":
        (tmp_path / "root/project").symlink_to(tmp_path / "elsewhere")
    else:
        (tmp_path / "root/project").mkdir()
        (tmp_path / "root/project/below").symlink_to(tmp_path / "elsewhere/below")
    with pytest.raises(InputError, match="without following a link"):
        checked(tmp_path / "root/project/below", tmp_path / "root")


@pytest.mark.parametrize("kind", ["socket", "fifo"])
def test_a_way_to_a_process_of_the_host_is_refused_however_deep_it_lies(tmp_path: Path, kind: str) -> None:
    deep = tmp_path / "project"
    deep.mkdir()
    for _ in range(30):
        deep /= "d"
        deep.mkdir()
    if kind == "fifo":
        os.mkfifo(deep / "door")
    else:
        here = Path.cwd()
        os.chdir(deep)
        try:
            with socket.socket(socket.AF_UNIX) as listening:
                listening.bind("door")
        finally:
            os.chdir(here)
    with pytest.raises(InputError, match="socket, FIFO or device"):
        checked(tmp_path / "project", tmp_path)


def test_folders_without_end_are_refused_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "MAX_IN_ENTRIES", 50)
    deep = tmp_path / "project"
    for _ in range(60):
        deep.mkdir()
        deep /= "d"
    with pytest.raises(InputError, match="more than 50"):
        checked(tmp_path / "project", tmp_path)


def test_what_lies_deeper_than_a_path_is_long_is_not_taken_unseen(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    fd = os.open(tmp_path / "project", os.O_RDONLY)
    try:
        # Deeper than Python recurses, too.
        for _ in range(2_100):
            os.mkdir("d", dir_fd=fd)
            below = os.open("d", os.O_RDONLY, dir_fd=fd)
            os.close(fd)
            fd = below
    finally:
        os.close(fd)
    with pytest.raises(InputError, match="File name too long"):
        checked(tmp_path / "project", tmp_path)
    _flatten(tmp_path / "project")


def _flatten(folder: Path) -> None:
    """Take a deep folder apart from its top: nothing that recurses can remove it."""
    number = 0
    while (folder / "d").exists():
        number += 1
        (folder / "d").rename(folder.parent / f"out{number}")
        inner = folder.parent / f"out{number}/d"
        if inner.exists():
            inner.rename(folder / "d")
