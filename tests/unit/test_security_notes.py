"""What docs/SECURITY.md says is shown by a test is shown by one, and what it says is fuzzed is fuzzed."""

import ast
import re
from pathlib import Path

import pytest

from tests.fuzz.targets import TARGETS
from tests.support.paths import CHECKOUT

NOTES = (CHECKOUT / "docs/SECURITY.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w./]+\.py)(?:::(\w+))?`", NOTES)))


def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize(("file", "test"), NAMED, ids=lambda value: value)
def test_the_test_that_is_named_exists(file: str, test: str) -> None:
    assert (CHECKOUT / file).is_file()
    assert not test or test in functions_of(CHECKOUT / file)


def test_every_line_of_a_table_of_ways_names_a_test() -> None:
    ways = [line for line in NOTES.splitlines() if line.count("|") == 4 and "---" not in line]
    heads = ("| way ", "| enemy ", "| **a ")
    assert [line for line in ways if "`tests/" not in line and not line.startswith(heads)] == []


def test_every_target_is_listed_where_its_bytes_cross() -> None:
    section = NOTES.partition("## Every byte")[2]
    rows = [line.split("|") for line in section.splitlines() if line.count("|") == 5]
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row[4])}
    assert listed == set(TARGETS)
