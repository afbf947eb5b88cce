"""Writes docs/reference/ from the code: the API's OpenAPI document, the runner protocol's JSON Schema, metrics, states.

python -m scripts.reference          writes the files that differ, and says which
python -m scripts.reference --check  writes nothing; exit 1 if one differs
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
from prometheus_client.core import Metric

from control.api.openapi import document
from control.api.routes import OPERATIONS
from control.metrics import ControlCollector, Figures
from control.plan import session
from control.runner import messages
from gateway.core.verdict import CloseReason, DenyReason
from gateway.metrics import Metrics

FOLDER: Final = Path(__file__).resolve().parents[1] / "docs/reference"
_MADE: Final = "Made from the code by `python -m scripts.reference`; do not edit.\n"


def openapi() -> str:
    """Return the OpenAPI document of the control API."""
    return _json(document(OPERATIONS))


def runner_protocol() -> str:
    """Return the JSON Schema of the frames that a runner and control exchange."""
    kinds = (messages.FromRunner, messages.ToRunner)
    schemas, definitions = msgspec.json.schema_components(kinds, ref_template="#/$defs/{name}")
    return _json(
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": f"Opificia runner protocol, version {messages.PROTOCOL_VERSION}",
            "description": (messages.__doc__ or "").strip(),
            "$defs": {**definitions, "FromRunner": schemas[0], "ToRunner": schemas[1]},
            "anyOf": [{"$ref": "#/$defs/FromRunner"}, {"$ref": "#/$defs/ToRunner"}],
        }
    )


def metrics() -> str:
    """Return the table of all metrics of both daemons."""
    figures = Figures(dict.fromkeys(map(str, session.SessionState), 0), 0, 0, 0, False, 0)
    rows = [
        "# Metrics",
        "",
        _MADE,
        "The gateway serves them at `[listen] metrics`, control at `/metrics` of its API. Scrape configuration and alert rules are in",
        "[../prometheus/](../prometheus/).",
    ]
    families = {
        "Gateway": sorted(Metrics().collect(), key=_name),
        "Control": sorted(ControlCollector(lambda: figures).collect(), key=_name),
    }
    for title, found in families.items():
        rows += ["", f"## {title}", "", "| metric | type | labels | meaning |", "|---|---|---|---|"]
        rows += [f"| `{_exposed(each)}` | {each.type} | {_labels(each)} | {each.documentation} |" for each in found]
    rows += ["", "## Values of labels", ""]
    rows += [f"- `reason` of decisions: `allowed`, or why it is refused: {_spelled(DenyReason)}"]
    rows += [f"- `reason` of tunnels closed: {_spelled(CloseReason)}"]
    return "\n".join(rows) + "\n"


def states() -> str:
    """Return the table of what leads a session from state to state, and why one can have ended."""
    rows = ["# States of a session", "", _MADE, *session.transition_table(), "", "## Reasons", ""]
    rows += [f"Why a session has ended: {_spelled(session.Reason)}"]
    return "\n".join(rows) + "\n"


def _name(metric: Metric) -> str:
    return metric.name


def _exposed(metric: Metric) -> str:
    return f"{metric.name}_total" if metric.type == "counter" else metric.name


def _labels(metric: Metric) -> str:
    names = sorted({name for sample in metric.samples for name in sample.labels} - {"le"})
    return ", ".join(f"`{name}`" for name in names) or "–"


def _spelled(values: Any) -> str:
    return ", ".join(f"`{each.value}`" for each in values)


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


FILES: Final[dict[str, Callable[[], str]]] = {
    "openapi.json": openapi,
    "runner-protocol.json": runner_protocol,
    "metrics.md": metrics,
    "states.md": states,
}


def main() -> int:
    """Write or check the files."""
    check = "--check" in sys.argv[1:]
    different = []
    FOLDER.mkdir(exist_ok=True)
    for name, make in FILES.items():
        path, text = FOLDER / name, make()
        if not path.exists() or path.read_text() != text:
            different.append(name)
            if not check:
                path.write_text(text)
    for name in different:
        print(f"docs/reference/{name} {'differs' if check else 'written'}")
    return 1 if check and different else 0


if __name__ == "__main__":
    sys.exit(main())
