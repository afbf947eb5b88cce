"""Policy files: network level, rules and budgets in TOML, for `run --policy` and `egress check --policy`.

The keys are those of the API's sessions, so that a program can send the same as JSON.
"""

from pathlib import Path

import msgspec

from control.spec import SessionPolicy, policy_problems
from gateway.runtime.settings import load


class PolicyFile(SessionPolicy, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A policy that checks itself: one ValueError, a line for each problem."""

    def __post_init__(self) -> None:
        if problems := policy_problems(self):
            raise ValueError("\n".join(problems))


def load_policy(path: Path) -> SessionPolicy:
    """Read a policy file. Raises SettingsError with every problem, each with its line."""
    found = load(path, PolicyFile)
    return SessionPolicy(**msgspec.structs.asdict(found))
