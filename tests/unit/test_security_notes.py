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
    heads = ("| way ", "| enemy ", "| **")
    assert [line for line in ways if "`tests/" not in line and not line.startswith(heads)] == []


def test_every_target_is_listed_where_its_bytes_cross() -> None:
    section = NOTES.partition("## Every byte")[2]
    rows = [line.split("|") for line in section.splitlines() if line.count("|") == 5]
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row[4])}
    assert listed == set(TARGETS)


# What takes bytes from outside of the process, or makes values of them.
_READING = {"recv", "recv_into", "recvmsg", "recvfrom", "sock_recv", "loads", "Decoder", "read_text", "read_bytes"}
# What looks so and is not: click's own hook, a protocol's method, a mount that is read-only, a pair of the gateway's own.
_NOT_FROM_OUTSIDE = {
    "control/cli/groups.py",
    "control/docker/types.py",
    "control/plan/container.py",
    "gateway/net/progress.py",
}
_READER = re.compile(r"_?(parse|decode|read|load|receive)(_|$)")


def readers_of(path: Path) -> bool:
    """Tell whether a module reads: it has a function that is named so, or calls what does."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _READER.match(node.name):
            return True
        if isinstance(node, ast.Call):
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if name in _READING:
                return True
    return False


def test_every_module_that_reads_is_listed_where_its_bytes_cross() -> None:
    named = set(re.findall(r"`((?:gateway|control)/[\w/]+\.py)`", NOTES.partition("## Every byte")[2]))
    reading = {
        str(path.relative_to(CHECKOUT))
        for program in ("gateway", "control")
        for path in (CHECKOUT / program).rglob("*.py")
        if readers_of(path)
    }
    assert reading - named == _NOT_FROM_OUTSIDE
