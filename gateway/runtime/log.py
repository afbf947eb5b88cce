"""How the daemons write their logs: a message is one line, whatever a peer has put into what it quotes."""

import codecs
import logging
import sys
import time
from collections.abc import Callable
from typing import Final

# How long a message that a sandbox can bring about again and again is not said again.
SELDOM_S: Final = 10.0

# Now: the module that it is in cannot be read by a process without a descriptor to spare, whose messages are wanted most.
codecs.lookup("unicode_escape")


def one_line(text: str) -> str:
    """Return `text` with every character that is not printable made visible, line ends among them."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


class LineFormatter(logging.Formatter):
    """Keeps a message from looking like several, or steering the terminal on which it is read. A traceback has lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """Return the line of a record."""
        return one_line(super().formatMessage(record))


class Seldom(logging.Filter):
    """Lets each message of a logger pass once in a while, whatever is filled in, so that no sandbox drowns all others in it.

    It is for loggers whose messages are few and constant; how often one was left out is told when it is next said.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        # By message: when it may be said again, and how often it was left out.
        self._said: dict[str, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Tell whether the record is to be said."""
        message = str(record.msg)
        now = self._clock()
        again, left_out = self._said.get(message, (now, 0))
        if now < again:
            self._said[message] = (again, left_out + 1)
            return False
        self._said[message] = (now + SELDOM_S, 0)
        if left_out:
            record.msg = f"{message} ({left_out} such messages were left out)"
        return True


def begin(level: int | str) -> None:
    """Log to stderr from now on. The service manager's journal adds the time."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
