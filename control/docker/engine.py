"""The engine's API for an event loop: docker-py in a bounded pool of threads, every failure turned into an EngineError.

The loop never waits in docker-py. A hanging engine fills the pool; calls beyond it then end at their deadline, unserved.
Streams have threads of their own, so that sessions that wait do not take threads from calls.
"""

import asyncio
import concurrent.futures
import contextlib
import json
import math
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import docker.errors
import requests.exceptions
from docker import APIClient
from docker.constants import DEFAULT_DOCKER_API_VERSION

from control.docker.stream import Stream, arrived_cut, unreachable
from control.docker.transport import EngineAdapter
from control.docker.types import EngineError, EngineUnavailableError, NotFoundError

T = TypeVar("T")

_MAX_VERSION_BYTES: Final = 1024 * 1024

# What the engine says in these cases explains little; each is followed by what an operator can do.
_REMEDIES: Final = (
    ("no such image", "Build it with `opificia images build`, or load it with `opificia images load`."),
    ("pool overlaps", "Choose another [network] subnet."),
    ("address already in use", "Another container has that address; remove it, or run `opificia host prepare`."),
    ("rlimit", "Lower [sandbox] open_files, or raise LimitNOFILE of the engine's unit."),
    ("runtime name", "Register the runtime in the engine's daemon.json, or choose another."),
    ("unknown runtime", "Register the runtime in the engine's daemon.json, or choose another."),
    ("bind source path does not exist", "Make the folder, or correct its path in the configuration."),
    ("no space left", "Free space on the engine's disk."),
)


class Engine:
    """Calls to one engine. All methods but `close` raise EngineError, EngineUnavailableError or NotFoundError."""

    def __init__(self, socket_path: str, *, timeout_s: float, threads: int) -> None:
        self._socket_path = socket_path
        self._timeout_s = timeout_s
        self._pool = concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix="engine")
        # A client is a requests session, which is not made for use by several threads at once.
        self._local = threading.local()
        self._clients: list[APIClient] = []
        self._version = ""

    def close(self) -> None:
        """Give up what waits, and the connections."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for client in self._clients:
            client.close()

    async def call(self, function: Callable[[Any], T], *, extra_s: float = 0) -> T:
        """Run `function` with a docker.APIClient in the pool. `extra_s`: how long it may take beyond the usual."""
        deadline_s = self._timeout_s + extra_s
        try:
            async with asyncio.timeout(deadline_s):
                return await asyncio.get_running_loop().run_in_executor(self._pool, self._call, function)
        except TimeoutError as error:
            raise EngineUnavailableError(
                f"The Docker engine did not answer within {deadline_s:g} s.", "Look at its log; it may hang."
            ) from error

    async def in_thread(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        consume: Callable[[Stream], T],
        *,
        body: tuple[Any, int] | None = None,
        head_timeout_s: float | None = None,
    ) -> T:
        """Open a stream and run `consume` on it in a thread of its own; cancelling aborts the stream.

        Returns when the thread has ended, also when cancelled, so that nothing is written behind the caller's back.
        """
        if not self._version:
            await self.call(lambda api: api.api_version)
        timeout_s = self._timeout_s if head_timeout_s is None else head_timeout_s
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        opened: list[Stream] = []
        cancelled = threading.Event()

        def settle(result: T | None, error: BaseException | None) -> None:
            if error is None:
                done.set_result(result)  # type: ignore[arg-type]
            else:
                done.set_exception(error)

        def run() -> None:
            result, failure = None, None
            try:
                target = f"/v{self._version}{path}"
                with Stream(self._socket_path, method, target, query, head_timeout_s=timeout_s, body=body) as stream:
                    opened.append(stream)
                    if not cancelled.is_set():
                        result = consume(stream)
            except BaseException as error:  # it belongs to the coroutine that waits, whatever it is
                failure = error
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(settle, result, failure)

        threading.Thread(target=run, name=f"stream {path}", daemon=True).start()
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            cancelled.set()
            for stream in opened:
                stream.abort()
            await asyncio.wait([done])
            if not done.cancelled():
                done.exception()
            raise

    def _call(self, function: Callable[[Any], T]) -> T:
        try:
            return function(self._client())
        except docker.errors.NotFound as error:
            raise NotFoundError(*_explain(error)) from error
        except docker.errors.APIError as error:
            answer = error.response
            if answer is not None and arrived_cut(answer.status_code, answer.headers.get("Content-Type")):
                raise EngineUnavailableError("The connection to the engine was cut.") from error
            raise EngineError(*_explain(error)) from error
        except (requests.exceptions.RequestException, docker.errors.DockerException, OSError) as error:
            raise unreachable(self._socket_path, error) from error

    def _client(self) -> APIClient:
        client: APIClient | None = getattr(self._local, "client", None)
        if client is None:
            # Left to itself docker-py would ask for the version here, and leak its socket when that fails.
            self._version = self._version or self._negotiate()
            seconds = math.ceil(self._timeout_s)
            client = APIClient(f"unix://{self._socket_path}", version=self._version, timeout=seconds)
            client.mount("http+docker://", EngineAdapter(self._socket_path, seconds))
            self._local.client = client
            self._clients.append(client)
        return client

    def _negotiate(self) -> str:
        """Return the newest API version that engine and docker-py both speak. Runs in a thread."""
        with Stream(self._socket_path, "GET", "/version", {}, head_timeout_s=self._timeout_s) as stream:
            answer = bytearray()
            while (data := stream.read()) and len(answer) < _MAX_VERSION_BYTES:
                answer += data
        try:
            theirs = str(json.loads(answer)["ApiVersion"])
            return min(theirs, DEFAULT_DOCKER_API_VERSION, key=lambda text: tuple(map(int, text.split("."))))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise EngineUnavailableError(
                f"What answers at {self._socket_path} is no Docker engine.", "Correct [docker] socket."
            ) from error


def _explain(error: docker.errors.APIError) -> tuple[str, str]:
    said = str(error.explanation or error).strip().rstrip(".")
    lowered = said.lower()
    return f"The engine refused: {said}.", next((remedy for sign, remedy in _REMEDIES if sign in lowered), "")
