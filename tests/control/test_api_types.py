"""How the API writes what it gives."""

import pytest

from control.api.types import rfc3339


@pytest.mark.parametrize(
    ("at_ms", "text"),
    [
        (0, "1970-01-01T00:00:00.000Z"),
        (1_700_000_000_007, "2023-11-14T22:13:20.007Z"),
        (1_709_208_000_999, "2024-02-29T12:00:00.999Z"),
    ],
)
def test_times_are_rfc_3339_in_utc_with_milliseconds(at_ms: int, text: str) -> None:
    assert rfc3339(at_ms) == text
