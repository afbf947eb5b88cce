"""Hypothesis settings for this folder."""

import os
from typing import Final

from hypothesis import HealthCheck, settings

# How many examples each property is tried with; a night's run sets it to a million.
_EXAMPLES: Final = int(os.environ.get("OPIFICIA_EXAMPLES", "100"))

# No deadline: how long an example takes says more about the machine's other work than about the code. No database: a
# failure prints its example, which belongs into a unit test.
settings.register_profile(
    "opificia",
    max_examples=_EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile("opificia")
