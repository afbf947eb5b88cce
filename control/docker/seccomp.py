"""Our own seccomp profile; it stands in the repository so that it does not depend on the engine."""

import json
from importlib import resources


def default_seccomp_profile() -> str:
    """Return the profile as compact JSON."""
    text = (resources.files("control.docker") / "seccomp.json").read_text(encoding="utf-8")
    return json.dumps(json.loads(text), separators=(",", ":"))
