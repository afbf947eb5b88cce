"""What is installed is what is in the checkout: commands, data files, dependencies."""

import importlib
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.import_rules import third_party_imports
from tests.support.paths import CHECKOUT


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    return project


def test_each_command_names_a_function_that_exists(project: dict[str, Any]) -> None:
    assert set(project["scripts"]) == {"opificia", "opificia-gateway", "opificia-control"}
    for target in project["scripts"].values():
        module, _, function = target.partition(":")
        assert callable(getattr(importlib.import_module(module), function))


def test_every_third_party_import_is_a_declared_dependency(project: dict[str, Any]) -> None:
    declared = {_normal(re.split(r"[\[<>=!~; ]", line, maxsplit=1)[0]) for line in project["dependencies"]}
    providers = importlib.metadata.packages_distributions()
    undeclared = {
        name: user
        for name, user in third_party_imports(CHECKOUT).items()
        if not declared.intersection(_normal(provider) for provider in providers.get(name, []))
    }
    assert undeclared == {}


def test_the_wheel_holds_every_file_of_both_programs(tmp_path: Path) -> None:
    # From a copy: building writes into the tree it builds.
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(CHECKOUT / name, source / name)
    for program in ("gateway", "control"):
        shutil.copytree(CHECKOUT / program, source / program, ignore=shutil.ignore_patterns("__pycache__"))
    expected = {
        str(path.relative_to(source))
        for program in ("gateway", "control")
        for path in (source / program).rglob("*")
        if path.is_file()
    }
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            tmp_path,
            source,
        ],
        check=True,
        stdin=subprocess.DEVNULL,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert expected - set(archive.namelist()) == set()


def _normal(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()
