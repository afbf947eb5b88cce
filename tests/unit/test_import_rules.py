"""The direction of imports, and that the check can fail."""

from pathlib import Path

import pytest

from tests.support.import_rules import violations
from tests.support.paths import CHECKOUT


def test_every_module_imports_only_what_its_layer_may() -> None:
    assert violations(CHECKOUT) == []


@pytest.mark.parametrize(
    ("module", "source", "problem"),
    [
        ("control/app.py", "from gateway.net import dial", "imports gateway.net.dial"),
        ("control/app.py", "from gateway import registry", "imports gateway.registry"),
        ("control/app.py", "import gateway", "imports gateway;"),
        ("control/app.py", "def f():\n    import gateway.core.decide", "imports gateway.core.decide"),
        ("control/app.py", "import importlib\nimportlib.import_module('gateway.core')", "computed name"),
        ("gateway/app.py", "from control.spec import Spec", "imports control.spec.Spec"),
        ("gateway/net/link.py", "from ..  import control", None),
        ("gateway/net/link.py", "import control.plan as plan", "imports control.plan"),
        ("gateway/app.py", "from tests.support import paths", "imports tests.support.paths"),
        ("gateway/core/decide.py", "import socket", "imports socket"),
        ("gateway/core/decide.py", "from asyncio import sleep", "imports asyncio.sleep"),
        ("gateway/core/decide.py", "import os.path", "imports os.path"),
        ("gateway/core/decide.py", "import time", "imports time"),
        ("gateway/core/decide.py", "import random", "imports random"),
        ("gateway/core/decide.py", "import logging", "imports logging"),
        ("gateway/core/decide.py", "from pathlib import Path", "imports pathlib.Path"),
        ("gateway/core/decide.py", "import urllib.request", "imports urllib.request"),
        ("gateway/core/decide.py", "from ..net import dial", "imports gateway.net.dial"),
        (
            "gateway/core/decide.py",
            "from gateway.contract import framing",
            "imports gateway.contract.framing",
        ),
        ("gateway/core/decide.py", "text = open('/etc/hosts').read()", "calls open()"),
        (
            "gateway/core/decide.py",
            "import datetime\nt = datetime.datetime.now()",
            "reads the clock by now()",
        ),
        ("gateway/contract/ids.py", "from gateway.core import head", "imports gateway.core.head"),
        ("control/plan/session.py", "import docker", "imports docker"),
        ("control/spec.py", "from gateway.core import decide", "imports gateway.core.decide"),
        ("control/app.py", "from gateway.core.rules import HostRule", "imports gateway.core.rules"),
    ],
)
def test_the_check_finds_what_is_forbidden(tmp_path: Path, module: str, source: str, problem: str | None) -> None:
    path = tmp_path / module
    path.parent.mkdir(parents=True)
    path.write_text(source)
    found = violations(tmp_path)
    if problem is None:
        assert found == []
    else:
        assert len(found) == 1
        assert found[0].startswith(f"{module}:")
        assert problem in found[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("control/app.py", "from gateway.contract.messages import Ack\nfrom gateway.runtime import settings"),
        ("control/app.py", "import asyncio, docker, gatewayish"),
        ("gateway/net/dial.py", "import socket\nfrom gateway.core.decide import decide_host"),
        (
            "gateway/core/decide.py",
            "from urllib.parse import urlsplit\nfrom gateway.contract.policy import Grant",
        ),
        ("control/spec.py", "from gateway.core.rules import HostRule\nfrom pathlib import PurePosixPath"),
        ("gateway/core/__init__.py", "from .decide import decide_host"),
    ],
)
def test_the_check_leaves_alone_what_is_allowed(tmp_path: Path, module: str, source: str) -> None:
    path = tmp_path / module
    path.parent.mkdir(parents=True)
    path.write_text(source)
    assert violations(tmp_path) == []
