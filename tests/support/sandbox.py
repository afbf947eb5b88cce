"""One sandbox of a private host, driven through the control API, as a program of the operator's would drive it."""

import asyncio
import contextlib
import hashlib
import io
import tarfile
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any, Final, TypeVar

from control.api.types import Health, RunBroken, RunCompleted, RunOutput, RunRequest, SessionView
from control.client import ControlClient
from control.runner.messages import Output, Stream
from control.spec import SandboxSpec
from tests.support.engine import PrivateEngine
from tests.support.processes import wait_until
from tests.support.programs import CONNECT, GREETING, RESOLVE, SEARCH

T = TypeVar("T")

IMAGE: Final = "opificia-sandbox:latest"
START_TIMEOUT_S: Final = 60.0
_DECISIONS: Final = ("allow", "refuse")


class SandboxError(AssertionError):
    """The session did not do what was asked; the message says what it did."""


@dataclass(frozen=True, slots=True)
class Ran:
    """How a command in a sandbox ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        """Both outputs, for messages."""
        return f"{self.stdout}{self.stderr}".strip()


class Sandbox:
    """A session that waits for commands. Make it with `launch`; calls block."""

    def __init__(self, api: str, engine: PrivateEngine, session: str) -> None:
        self._api = api
        self._engine = engine
        self.session: Final = session

    @classmethod
    def launch(cls, api: str, engine: PrivateEngine, spec: SandboxSpec) -> "Sandbox":
        """Create and launch a session, and wait until its runner is connected. Raises SandboxError."""

        async def work(client: ControlClient) -> str:
            view = await client.create(spec)
            await client.launch(view.id)
            async with asyncio.timeout(START_TIMEOUT_S):
                async for _ in client.events(view.id):
                    view = await client.get(view.id)
                    if view.state.final:
                        break
                    if view.runner_connected:
                        return view.id
            raise SandboxError(f"session {view.id} {view.state}, {view.reason}: {view.message}")

        return cls(api, engine, _call(api, work))

    def wait_connected(self) -> None:
        """Wait until the runner is connected, as after a restart of a daemon."""
        wait_until(lambda: self.view().runner_connected, f"runner of session {self.session}", timeout_s=START_TIMEOUT_S)

    def run(self, *argv: str, stdin: str = "", timeout_s: float = 60.0) -> Ran:
        """Run a command to its end; one that takes longer than `timeout_s` has the exit code 124."""

        async def work(client: ControlClient) -> Ran:
            outputs = {Stream.STDOUT: bytearray(), Stream.STDERR: bytearray()}
            request = RunRequest(argv=argv, stdin=stdin, timeout_ms=int(timeout_s * 1000))
            async for line in client.run(self.session, request):
                match line:
                    case RunOutput(stream, data, encoding):
                        outputs[stream] += Output(1, "run", stream, data, encoding).content()
                    case RunCompleted():
                        stdout, stderr = (outputs[each].decode(errors="replace") for each in Stream)
                        return Ran(124 if line.timed_out else line.exit_code, stdout, stderr + line.error)
                    case RunBroken():
                        break
            raise SandboxError(f"the end of {argv[0]} in session {self.session} is not known")

        return _call(self._api, work)

    @contextlib.contextmanager
    def background(self, *argv: str, ready: str) -> Iterator[None]:
        """Run a command for the length of the context, from when its output holds `ready`."""
        heard = threading.Event()
        loop = asyncio.new_event_loop()

        async def listen() -> None:
            async with ControlClient(self._api) as client:
                output = b""
                async for line in client.run(self.session, RunRequest(argv=argv)):
                    if isinstance(line, RunOutput):
                        output += Output(1, "run", line.stream, line.data, line.encoding).content()
                        if ready.encode() in output:
                            heard.set()

        task = loop.create_task(listen())
        thread = threading.Thread(target=lambda: loop.run_until_complete(asyncio.wait([task])))
        thread.start()
        try:
            if not heard.wait(START_TIMEOUT_S):
                raise SandboxError(f"{argv[0]} in session {self.session} did not say {ready!r}")
            yield
        finally:
            # The API cancels a command when whoever asked for it goes away.
            loop.call_soon_threadsafe(task.cancel)
            thread.join()
            loop.close()

    def python(self, source: str, *argv: str, stdin: str = "", timeout_s: float = 60.0) -> Ran:
        """Run a Python program in the sandbox."""
        return self.run("python3", "-c", source, *argv, stdin=stdin, timeout_s=timeout_s)

    def reaches(self, address: str, timeout_s: float = 2.0) -> float | None:
        """Return in how many seconds somebody answers at PORT of an address; None if nobody does in time."""
        seconds, _, answer = self.python(CONNECT, address, str(timeout_s)).stdout.partition(" ")
        return float(seconds) if GREETING in answer else None

    def resolves(self, name: str) -> bool:
        """Tell whether a name has an address here."""
        return self.python(RESOLVE, name).stdout.startswith("resolved")

    def search(self, *secrets: str) -> tuple[int, list[list[str]]]:
        """Look for secrets of one length and prefix in all files, environments and command lines.

        Returns how many were read, and where each secret is.
        """
        digests = [hashlib.sha256(secret.encode()).hexdigest() for secret in secrets]
        done = self.python(SEARCH, secrets[0][:4], str(len(secrets[0])), *digests, timeout_s=120)
        if done.code:
            raise SandboxError(f"the search failed: {done.output}")
        count, *found = done.stdout.splitlines()
        places: list[list[str]] = [[] for _ in secrets]
        for line in found:
            index, _, name = line.partition(" ")
            places[int(index)].append(name)
        return int(count), places

    def decision(self, host: str, event: str = "") -> dict[str, Any]:
        """Return the gateway's last decision about a host, or its last line of this `event`; waits for one."""
        found: list[dict[str, Any]] = []

        def arrived() -> bool:
            # The gateway's log is written by a thread of its own, some milliseconds after the reply.
            found[:] = [
                line for line in self.egress() if line["host"] == host and line["event"] in (event or _DECISIONS)
            ]
            return bool(found)

        wait_until(arrived, f"a decision about {host} in the egress log of session {self.session}")
        return found[-1]

    def view(self) -> SessionView:
        """Return the session as the API shows it."""
        return _call(self._api, lambda client: client.get(self.session))

    def egress(self) -> list[dict[str, Any]]:
        """Return the gateway's decisions so far."""

        async def work(client: ControlClient) -> list[dict[str, Any]]:
            return [line async for line in client.egress(self.session)]

        return _call(self._api, work)

    def stop(self) -> SessionView:
        """Stop the session and wait for its end."""

        async def work(client: ControlClient) -> SessionView:
            await client.stop(self.session, 1_000)
            return await client.ended(self.session)

        return _call(self._api, work)

    def out(self) -> dict[str, bytes]:
        """Return the files that an ended session left in /out, by name."""

        async def work(client: ControlClient) -> dict[str, bytes]:
            with tempfile.TemporaryDirectory() as folder:
                archive = Path(folder) / "out.tar"
                await client.out(self.session, archive)
                with tarfile.open(fileobj=io.BytesIO(archive.read_bytes())) as tar:
                    return {
                        member.name.removeprefix("./"): reader.read()
                        for member in tar
                        if member.isreg() and (reader := tar.extractfile(member)) is not None
                    }

        return _call(self._api, work)

    @property
    def address(self) -> IPv4Address:
        """The sandbox's own address on the internal network."""
        with contextlib.closing(self._engine.client()) as client:
            (found,) = client.api.containers(filters={"label": f"opificia.session={self.session}"})
            (network,) = found["NetworkSettings"]["Networks"].values()
            return IPv4Address(network["IPAddress"])


def health(api: str) -> Health:
    """Ask a control daemon how its host is."""
    return _call(api, lambda client: client.health())


def _call(api: str, work: Callable[[ControlClient], Awaitable[T]]) -> T:
    async def whole() -> T:
        async with ControlClient(api) as client:
            return await work(client)

    return asyncio.run(whole())
