"""The daemons' own logs: what a peer puts into a message makes neither a second line nor steers the terminal."""

import logging
import subprocess
import sys

import pytest

from gateway.runtime.log import LineFormatter, one_line
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
