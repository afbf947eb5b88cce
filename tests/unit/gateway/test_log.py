"""The daemons' own logs: what a peer puts into a message makes neither a second line nor steers the terminal."""

import logging
import subprocess
import sys

import pytest

from gateway.runtime.log import SELDOM_S, LineFormatter, Seldom, one_line
from tests.support.paths import CHECKOUT


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


def test_both_daemons_log_so() -> None:
    program = "import logging\nfrom gateway.runtime.log import begin\nbegin('INFO')\nlogging.info('a%sb', chr(10))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=CHECKOUT)
    assert done.stderr == "INFO root: a\\nb\n"
    for main in ("gateway/__main__.py", "control/__main__.py"):
        assert "basicConfig" not in (CHECKOUT / main).read_text()


def test_a_message_that_comes_again_and_again_is_said_once_in_a_while_with_how_often_it_was_not() -> None:
    now = 0.0
    seldom = Seldom(lambda: now)

    def said(message: str, *values: object) -> str | None:
        record = logging.LogRecord("gateway", logging.WARNING, "", 0, message, values, None)
        return record.getMessage() if seldom.filter(record) else None

    assert said("runner of %s", "a") == "runner of a"
    assert [said("runner of %s", each) for each in "abc"] == [None] * 3
    assert said("another") == "another"
    now = SELDOM_S
    assert said("runner of %s", "b") == "runner of b (3 such messages were left out)"
    assert said("runner of %s", "b") is None
    now = 2 * SELDOM_S
    assert said("another") == "another"
