"""The command line against a real daemon over a real unix socket, as a process of its own."""

import asyncio
import json
import os
import re
import signal
import sys
from pathlib import Path

from control.plan.session import SessionState
from tests.control.conftest import Host, until


async def start(host: Host, *arguments: str) -> asyncio.subprocess.Process:
    environment = {**os.environ, "OPIFICIA_CONTROL": f"unix:{host.api}"}
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "control.cli",
        *arguments,
        env=environment,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def opificia(host: Host, *arguments: str, stdin: bytes = b"") -> tuple[int, str, str]:
    process = await start(host, *arguments)
    async with asyncio.timeout(30):
        out, err = await process.communicate(stdin)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_run_keeps_outputs_apart_and_returns_the_commands_exit_code(host: Host) -> None:
    found = await opificia(host, "run", "sandbox", "--cwd", "/tmp", "--", "sh", "-c", "echo out; echo err >&2; exit 7")
    assert found == (7, "out\n", "err\n")
