"""Robustness is tried as the documentation says: crash points at all steps that are stored, every fault on every wire."""

import ast
import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any, TypeVar, get_args

import tests.host.test_faults as on_the_host
import tests.model.test_faults as to_the_provider
import tests.net.test_faults as at_the_gateway
from control.db.database import Database
from control.db.store import Store
from control.link import GatewayLink
from control.plan.session import Event
from control.sessions.engine import Engine
from tests.host.crash_points import KEEPING, LAUNCH_CUT, POINTS, life_of
from tests.support.faults import Fault, Kind
from tests.support.paths import CHECKOUT

T = TypeVar("T")
STEPS = {point.split("--", 1)[1] for point in POINTS} | {*LAUNCH_CUT, *KEEPING}
# Brings the tables to this version's form, in one transaction, before anything else; its own tests kill nothing.
NO_STEPS = {"migrate"}
# Calls that change nothing; `kill` only shortens a stop that is under way, and has that one's points.
ONLY_LOOK = {"ping", "image", "follow_logs", "wait", "owned", "out_volumes", "kill"}
ONLY_ASK = {"run", "opinions"}


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


def test_every_call_that_changes_engine_or_gateway_has_a_crash_point() -> None:
    calls = {f"engine-{name}" for name in _coroutines(Engine) - ONLY_LOOK}
    calls |= {f"link-{name}" for name in _coroutines(GatewayLink) - ONLY_ASK}
    assert len(calls) >= 11
    places = [f"{call.replace('_', '-')}--{when}" for call in calls for when in ("before", "after")]
    missing = [place for place in places if place not in STEPS]
    assert not missing, f"no crash point at {', '.join(missing)}"


def _coroutines(each: type) -> set[str]:
    return {name for name, call in vars(each).items() if inspect.iscoroutinefunction(call) and not name.startswith("_")}


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


WIRES = {
    "sandbox – gateway": ("tunnels", "plain HTTP"),
    "gateway – upstream": ("tunnels", "plain HTTP", "the model provider"),
    "gateway – control (contract)": ("",),
    "runner – control": ("",),
    "control – Docker": ("",),
    "control – PostgreSQL": ("",),
}
# As the tests call them.
NAMES = {
    "sandbox-gateway": "sandbox – gateway",
    "gateway-upstream": "gateway – upstream",
    "contract": "gateway – control (contract)",
    "runner": "runner – control",
    "engine": "control – Docker",
    "database": "control – PostgreSQL",
}


def test_every_kind_of_fault_is_tried_on_every_wire() -> None:
    tried: defaultdict[tuple[str, str], set[Kind]] = defaultdict(set)
    for module in (at_the_gateway, to_the_provider, on_the_host):
        for test in _tests(module):
            for wire in _values(test, str) & NAMES.keys() or {"gateway-upstream"}:
                tried[NAMES[wire], _protocol(module, test)] |= _kinds(module, test)
    missing = [
        f"{kind} on {wire} {protocol}".strip()
        for wire, protocols in WIRES.items()
        for protocol in protocols
        for kind in sorted(set(Kind) - tried[wire, protocol])
    ]
    assert not missing, f"not tried: {', '.join(missing)}"


def test_the_table_of_wires_has_all_of_them() -> None:
    text = (CHECKOUT / "docs/robustness.md").read_text()
    section = text.partition("## A bad wire between any two parts")[2].partition("\n## ")[0]
    rows = [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("| ")]
    assert {name for row in rows[1:] for name in row.split(", ")} == WIRES.keys()


def _tests(module: ModuleType) -> Iterator[Callable[..., Any]]:
    return (each for name, each in vars(module).items() if name.startswith("test_"))


def _protocol(module: ModuleType, test: Callable[..., Any]) -> str:
    if module is on_the_host:
        return ""
    if module is to_the_provider:
        return "the model provider"
    return "plain HTTP" if "bad_wire_for_http" in test.__code__.co_names else "tunnels"


def _kinds(module: ModuleType, test: Callable[..., Any]) -> set[Kind]:
    """Return the kinds of fault that a test has by its parameters, or names in its body."""
    used = test.__code__.co_names
    faults = _values(test, Fault) | set(module.FAULTS if "FAULTS" in used else ())
    return (
        {fault.kind for fault in faults}
        | _values(test, Kind)
        | {Kind[name] for name in used if name in Kind.__members__}
    )


def _values(test: Callable[..., Any], kind: type[T]) -> set[T]:
    """Return the values of a type among a test's parameters."""
    marks = [mark for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"]
    return {value for mark in marks for case in mark.args[1] for value in _parts(case) if isinstance(value, kind)}


def _parts(case: object) -> Iterable[object]:
    return case if isinstance(case, tuple) else (case,)
