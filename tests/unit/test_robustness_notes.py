"""The crash points are all steps that are stored, and the table of them in the documentation has no more and no fewer."""

import ast
import inspect
import re
from typing import get_args

from control.db.database import Database
from control.db.store import Store
from control.plan.session import Event
from tests.host.crash_points import KEEPING, LAUNCH_CUT, POINTS, life_of
from tests.support.paths import CHECKOUT

STEPS = {point.split("--", 1)[1] for point in POINTS} | {*LAUNCH_CUT, *KEEPING}
# Brings the tables to this version's form, in one transaction, before anything else; its own tests kill nothing.
NO_STEPS = {"migrate"}


def test_every_event_has_a_crash_point_at_each_of_its_writes() -> None:
    names = [str(event.__struct_config__.tag).replace("_", "-") for event in get_args(Event)]
    places = [(f"journal-{name}", when) for name in names for when in ("before", "torn", "after")]
    places += [(f"stored-{name}", when) for name in names for when in ("before", "after")]
    missing = [f"{step}--{when}" for step, when in places if f"{step}--{when}" not in STEPS]
    assert not missing, f"no crash point at {', '.join(missing)}"


def test_every_other_write_to_the_database_has_a_crash_point() -> None:
    """`append` has those of the events that it is called for."""
    calls = {name.replace("_", "-") for name in _writing(Store, Database) - NO_STEPS - {"append"}}
    places = [f"store-{name}--{when}" for name in calls for when in ("before", "after")]
    assert len(places) >= 12
    missing = [place for place in places if place not in STEPS]
    assert not missing, f"no crash point at {', '.join(missing)}"


def _writing(*classes: type) -> set[str]:
    """Return the public methods that write: that call `self.write`, or one that does."""
    calls: dict[str, set[str]] = {}
    for each in classes:
        (tree,) = ast.parse(inspect.getsource(each)).body
        assert isinstance(tree, ast.ClassDef)
        for method in tree.body:
            if isinstance(method, ast.AsyncFunctionDef):
                calls[method.name] = {node.attr for node in ast.walk(method) if isinstance(node, ast.Attribute)}
    found = {"write"}
    while more := {name for name, called in calls.items() if called & found} - found:
        found |= more
    return {name for name in found - {"write"} if not name.startswith("_")}


def test_the_table_has_every_crash_point_and_the_end_that_is_due() -> None:
    text = (CHECKOUT / "docs/crash-points.md").read_text()
    found, alone = {}, []
    for section in text.split("\n## ")[1:]:
        (life,) = re.findall(r"\(`(\w+)`\)", section.partition("\n")[0])
        for line in section.splitlines():
            cells = [cell.strip() for cell in line.split("|")]
            if len(cells) == 6 and cells[1] not in ("step", "---"):
                found[f"{life}--{cells[1]}--{cells[2]}"] = cells[4]
            if len(cells) == 4 and cells[1] not in ("step", "---"):
                alone.append(f"{cells[1]}--{cells[2]}")
    assert found == {point: f"{life_of(point).state} ({life_of(point).reason})" for point in POINTS}
    assert alone == [*LAUNCH_CUT, *KEEPING]
