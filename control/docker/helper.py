"""Commands for a helper container, over its input and output (control/images/helper/serve.sh says how).

Every command that control sends is one that may be sent twice, so whatever breaks between question and answer is mended
by asking again.
"""

import asyncio
import base64
import binascii
import secrets
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from control.docker.demultiplex import Demultiplexer
from control.docker.engine import Engine
from control.docker.stream import Stream
from control.docker.types import EngineError, EngineUnavailableError, NotFoundError
from control.plan.container import LABEL_HOST, LABEL_ROLE

# A helper that the engine restarts is back within a second.
_PATIENCE_S: Final = 10.0
_RETRY_S: Final = 0.2
# It serves one at a time; a second one waits in its input, so that it is never idle between two.
_AT_ONCE: Final = 2
# A firewall's listing on a host with thousands of rules.
_MAX_ANSWER_BYTES: Final = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Executed:
    """How a command ended."""

    status: int
    stdout: str
    stderr: str


class Helper:
    """One of an installation's helper containers, found by its role."""

    def __init__(self, engine: Engine, host_id: str, role: str) -> None:
        self._engine = engine
        self._filters = {"label": [f"{LABEL_HOST}={host_id}", f"{LABEL_ROLE}={role}"]}
        self._role = role
        self._container = ""
        self._turns = asyncio.Semaphore(_AT_ONCE)

    async def run(self, argv: Sequence[str]) -> str:
        """Run a command that may be repeated and return its output.

        Raises EngineError when it fails, NotFoundError when there is no such helper.
        """
        ended = await self.execute(argv)
        if ended.status != 0:
            said = " ".join((ended.stderr or ended.stdout).strip().splitlines()[-3:])
            raise EngineError(f"{argv[0]} failed in the {self._role} helper: {said}.")
        return ended.stdout

    async def execute(self, argv: Sequence[str]) -> Executed:
        """Run a command that may be repeated and return how it ended. Raises NotFoundError without a helper."""
        command = shlex.join(argv)
        if "\n" in command:
            raise ValueError("a command for a helper is one line")
        # Patience begins with one's turn: a burst of launches is no helper that hangs.
        async with self._turns:
            return await self._execute(command)

    async def _execute(self, command: str) -> Executed:
        loop = asyncio.get_running_loop()
        give_up = loop.time() + _PATIENCE_S
        while True:
            try:
                self._container = self._container or await self._find()
                async with asyncio.timeout_at(give_up):
                    return await self._ask(self._container, command)
            except NotFoundError:
                if not self._container:
                    raise
                # It was made anew since.
                self._container = ""
            except (EngineError, TimeoutError) as error:
                if loop.time() >= give_up:
                    raise EngineUnavailableError(
                        f"The {self._role} helper does not answer.", "Run `opificia host prepare`."
                    ) from error
                await asyncio.sleep(_RETRY_S)

    async def _find(self) -> str:
        found = await self._engine.call(lambda api: api.containers(filters=self._filters))
        if not found:
            raise NotFoundError(f"The {self._role} helper does not run.", "Run `opificia host prepare`.")
        return str(found[0]["Id"])

    async def _ask(self, container: str, command: str) -> Executed:
        question = secrets.token_hex(8)

        def consume(stream: Stream) -> Executed:
            stream.write(f"{question} {command}\n".encode())
            demultiplexer = Demultiplexer()
            pending = b""
            while data := stream.read():
                for _, piece in demultiplexer.feed(data):
                    *lines, pending = (pending + piece).split(b"\n")
                    for line in lines:
                        # Others may be asking at the same time; everyone hears every answer.
                        if line.startswith(question.encode()):
                            return _answer(line)
                    if len(pending) > _MAX_ANSWER_BYTES:
                        raise EngineError(f"The {self._role} helper says too much.")
            raise EngineUnavailableError(f"The {self._role} helper ended before it answered.")

        query = {"stream": "1", "stdin": "1", "stdout": "1"}
        return await self._engine.in_thread("POST", f"/containers/{container}/attach", query, consume)


def _answer(line: bytes) -> Executed:
    try:
        _, status, stdout, stderr = line.decode("ascii").split(" ")
        return Executed(int(status), _decoded(stdout), _decoded(stderr))
    except (ValueError, binascii.Error) as error:
        raise EngineError("A helper's answer cannot be read.") from error


def _decoded(field: str) -> str:
    return "" if field == "-" else base64.b64decode(field, validate=True).decode(errors="replace")
