"""How the daemons write their logs: a message is one line, whatever a peer has put into what it quotes."""

import codecs
import logging
import sys

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


def begin(level: int | str) -> None:
    """Log to stderr from now on. The service manager's journal adds the time."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
