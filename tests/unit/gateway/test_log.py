"""The daemons' own logs: what a peer puts into a message makes neither a second line nor steers the terminal."""

import logging

import pytest

from gateway.runtime.log import LineFormatter, one_line


@pytest.mark.parametrize(
    ("hostile", "shown"),
    [
        ("a\nERROR gateway: forged", "a\\nERROR gateway: forged"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\u2028\u202egpj.exe", "\\u2028\\u202egpj.exe"),
        ("\udcff", "\\udcff"),
        ("plain ü 漢", "plain ü 漢"),
    ],
)
def test_a_message_is_one_line(hostile: str, shown: str) -> None:
    assert one_line(hostile) == shown
    record = logging.LogRecord("gateway", logging.WARNING, "", 0, "it said: %s", (hostile,), None)
    assert LineFormatter("%(levelname)s %(name)s: %(message)s").format(record) == f"WARNING gateway: it said: {shown}"
