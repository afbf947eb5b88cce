"""Every setting of control.toml is documented with its default, and the policy file that the documents show is one."""

import re
from pathlib import Path

import msgspec
import pytest

from control.cli.policy import load_policy
from control.config import ControlConfig
from tests.support.paths import CHECKOUT

TEXT = (CHECKOUT / "docs/configuration.md").read_text()
SETTINGS = [
    (table.name, field.name, field.default)
    for table in msgspec.structs.fields(ControlConfig)
    for field in msgspec.structs.fields(table.type)
]


@pytest.mark.parametrize(("table", "name", "default"), SETTINGS)
def test_a_setting_is_documented_with_its_default(table: str, name: str, default: object) -> None:
    row = re.search(rf"^\| `\[{table}\] {name}` \| (.+?) \|", TEXT, re.MULTILINE)
    assert row, f"[{table}] {name}"
    match default:
        case "" | ():
            assert "`" not in row[1]
        case bool():
            assert row[1] == f"`{str(default).lower()}`"
        case int() | float():
            assert float(row[1].strip("`")) == default
        case _:
            assert row[1] == f"`{default}`"


def test_the_policy_file_shown_can_be_used(tmp_path: Path) -> None:
    example = TEXT.split("## Policy files")[1].split("```toml\n")[1].split("```")[0]
    (tmp_path / "policy.toml").write_text(example)
    assert load_policy(tmp_path / "policy.toml").allow == ("*.example.com", "git.example.org:22")
