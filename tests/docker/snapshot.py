"""One live sandbox looked at from inside and from the engine, once for a module: a test for each finding costs nothing more."""

import asyncio
import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from control.plan.network import NetworkSettings
from tests.docker.conftest import LIMITS, open_service
from tests.docker.sandboxes import Sandboxes
from tests.support.engine import PrivateEngine


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What was found: by `probe` inside, by the engine's inspection of container, processes and itself."""

    inside: dict[str, Any]
    container: dict[str, Any]
    processes: list[str]
    engine: dict[str, Any]


def look(engine: PrivateEngine, folder: Path, probe: str) -> Snapshot:
    """Run `probe`, a Python program that prints one line of JSON, in a sandbox of the prepared host."""

    async def work() -> Snapshot:
        service = open_service(engine)
        sandboxes = Sandboxes(service, NetworkSettings(), LIMITS, folder)
        try:
            sandbox = await sandboxes.launch(
                f"cat > /tmp/probe.py <<'PROBE'\n{probe}\nPROBE\npython3 /tmp/probe.py && echo done && sleep 60"
            )
            await sandbox.said("\ndone\n")
            with contextlib.closing(engine.client()) as client:
                top = client.api.top(sandbox.container)
                return Snapshot(
                    inside=json.loads(sandbox.output.stdout.decode().rsplit("\ndone\n", 1)[0]),
                    container=client.api.inspect_container(sandbox.container),
                    processes=[process[top["Titles"].index("CMD")] for process in top["Processes"]],
                    engine=client.api.info(),
                )
        finally:
            await sandboxes.close()
            await service.close()

    return asyncio.run(work())
