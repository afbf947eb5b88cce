"""The table of crash points in the documentation has the points that are tried, no more and no fewer."""

import re

from tests.host.crash_points import POINTS, life_of
from tests.support.paths import CHECKOUT


def test_the_table_has_every_crash_point_and_the_end_that_is_due() -> None:
    text = (CHECKOUT / "docs/crash-points.md").read_text()
    found = {}
    for section in text.split("\n## ")[1:]:
        (life,) = re.findall(r"\(`(\w+)`\)", section.partition("\n")[0])
        for line in section.splitlines():
            cells = [cell.strip() for cell in line.split("|")]
            if len(cells) == 6 and cells[1] not in ("step", "---"):
                found[f"{life}--{cells[1]}--{cells[2]}"] = cells[4]
    assert found == {point: f"{life_of(point).state} ({life_of(point).reason})" for point in POINTS}
