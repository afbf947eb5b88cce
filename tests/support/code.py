"""A copy of the daemons' code that every user can read, made once a run: the checkout may lie under /root."""

import atexit
import compileall
import functools
import shutil
import tempfile
from pathlib import Path

from tests.support.paths import CHECKOUT


@functools.cache
def readable_code() -> Path:
    """Return the folder to put on PYTHONPATH. It is compiled, because daemons start often and may not write there."""
    code = Path(tempfile.mkdtemp(prefix="opificia-code-"))
    atexit.register(shutil.rmtree, code, ignore_errors=True)
    for program in ("gateway", "control"):
        shutil.copytree(CHECKOUT / program, code / program, ignore=shutil.ignore_patterns("__pycache__"))
    code.chmod(0o755)
    compileall.compile_dir(code, quiet=1, optimize=0)
    return code
