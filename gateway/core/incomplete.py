"""The value that a parser returns while its input could still become whole.

"Not yet" is a value, never an exception; nothing is consumed until the input is whole.
"""

import enum
from typing import Final


class Incomplete(enum.Enum):
    """More bytes are needed before anything can be said."""

    INCOMPLETE = "incomplete"


INCOMPLETE: Final = Incomplete.INCOMPLETE
