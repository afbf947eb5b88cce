"""A runner that does what the reference runner does not, as the entrypoint of an image of its own, with the reference runner beside it.

What it does is told by its session's name: `silent…` never says hello; `lost…` goes away for good when control has its
command's output; `reports…` tells of itself and of a tool, and when control has that goes away until there is `/in/back`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from control.runner import client

# The numbers of what it sends: the two lines of the command's output, or the three reports.
_OUTPUT = 2
_REPORTS = 3


class Odd(client.Runner):
    """Goes away."""

    def __init__(self, life: str) -> None:
        super().__init__(os.environ["OPIFICIA_RUNNER_URL"], os.environ["OPIFICIA_RUNNER_TOKEN"])
        self._life = life
        self._told = life != "reports"
        self._away = False

    def _connection(self) -> int:
        while self._away and (self._life == "lost" or not Path("/in/back").exists()):
            time.sleep(0.05)
        return super()._connection()

    def _handle(self, connection: client.WebSocket, message: dict[str, Any]) -> int | None:
        if message["type"] == "run" and not self._told:
            self._told = True
            self._outbox.put("status", status="busy", detail="reads")
            self._outbox.put("tool_call", call="c1", name="read", arguments={"path": "README.md"})
            self._outbox.put("tool_result", call="c1", ok=True, content="text")
        code = super()._handle(connection, message)
        last = _REPORTS if self._life == "reports" else _OUTPUT
        if message["type"] == "ack" and message["seq"] >= last and not self._away:
            self._away = True
            raise client.ConnectionLostError("goes away")
        return code


def main() -> None:
    """Run until control or a signal says stop."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, client._terminate)
    life = os.environ["OPIFICIA_SESSION_ID"].removeprefix("again--").split("--")[0]
    if life == "silent":
        try:
            while True:
                signal.pause()
        except client.Terminated:
            sys.exit(1)
    os._exit(Odd(life).serve())


if __name__ == "__main__":
    main()
