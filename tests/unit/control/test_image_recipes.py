"""The recipes shipped with the program."""

import re

import pytest

from control.docker.images import _is_python, _last_word
from control.docker.types import EngineError
from control.images.recipes import IMAGES, recipe


@pytest.mark.parametrize("name", IMAGES)
def test_every_recipe_reads_and_its_files_are_there(name: str) -> None:
    found = recipe(name)
    assert found.packages
    assert all(found.source(file).is_file() for file in found.files)


@pytest.mark.parametrize("name", IMAGES)
def test_dockerfile_installs_the_recipes_packages(name: str) -> None:
    text = recipe(name).source("Dockerfile").read_text()
    # What a base image brings along, an unpacked root must name.
    words = set(re.findall(r"[a-z0-9.+-]+", text)) | {"coreutils", "dash"}
    assert set(recipe(name).packages) <= words


@pytest.mark.parametrize("name", IMAGES)
def test_dockerfile_configures_the_image_like_the_recipe(name: str) -> None:
    text = recipe(name).source("Dockerfile").read_text().replace("\\\n    ", "")
    for line in recipe(name).changes():
        if not line.startswith("LABEL"):
            assert line.replace(",", ", ") in text or line in text


def test_digest_depends_on_the_mirrors_only_when_they_differ() -> None:
    one = recipe("helper")
    assert one.digest() == recipe("helper").digest()
    assert one.digest() != one.digest(("http://mirror.corp.example/debian",))
    assert len({recipe(name).digest() for name in IMAGES}) == len(IMAGES)


def test_downloads_are_named_by_their_hash() -> None:
    for name in IMAGES:
        for download in recipe(name).downloads:
            assert re.fullmatch(r"[0-9a-f]{128}", download.sha512)
            assert download.url.startswith("https://")


@pytest.mark.parametrize(
    ("stat", "expected"),
    [
        (None, False),
        ({"linkTarget": "python3.11"}, True),
        ({"linkTarget": "/usr/bin/python3.8"}, True),
        ({"linkTarget": "python3.7"}, False),
        ({"linkTarget": ""}, True),
    ],
)
def test_python_is_told_by_where_its_link_points(stat: dict[str, str] | None, expected: bool) -> None:
    assert _is_python(stat) is expected


def test_an_error_among_the_engines_lines_is_raised() -> None:
    with pytest.raises(EngineError, match="no space"):
        _last_word(b'{"status":"Loading"}\n{"error":"no space left on device"}\n')


def test_the_last_word_of_the_engine_is_told() -> None:
    assert _last_word(b'{"status":"one"}\nnot json\n{"stream":"Loaded image: x\\n"}\n') == "Loaded image: x"


@pytest.mark.parametrize("line", [b"3", b"null", b"[1]", b'"error"', b"\xff"])
def test_a_word_of_the_engine_that_is_no_object_is_passed_over(line: bytes) -> None:
    assert _last_word(b'{"status":"Loaded"}\n' + line) == "Loaded"
