"""A reply of the engine read as it comes: logs, events, archives.

docker-py's own streams lose which output a piece belongs to, cannot be ended from another thread, and have no deadline
for the reply's head. This is the same request on http.client, which needs no more than a socket.
"""

import contextlib
import http.client
import json
import socket
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import urlencode

from control.docker.types import EngineError, EngineUnavailableError, NotFoundError

# Most the engine sends in one piece is 32 KiB.
_READ_BYTES: Final = 256 * 1024
_MAX_ERROR_BYTES: Final = 64 * 1024


class Stream:
    """One open reply. `read` in one thread; `abort` from any other ends it. Use as a context manager."""

    def __init__(
        self,
        socket_path: str,
        method: str,
        path: str,
        query: Mapping[str, str],
        *,
        head_timeout_s: float,
        body: tuple[Any, int] | None = None,
    ) -> None:
        """Send the request and wait for the reply's head. `body`: a file to send, and its length in bytes.

        Raises NotFoundError, EngineUnavailableError, EngineError.
        """
        self._aborted = False
        try:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            # A daemon without a descriptor left is no fault of a session's: it is worth another try.
            raise unreachable(socket_path, error) from error
        try:
            self._socket.settimeout(head_timeout_s)
            self._socket.connect(socket_path)
            self._response = self._request(method, f"{path}?{urlencode(query)}", body)
            self._socket.settimeout(None)
        except (OSError, http.client.HTTPException) as error:
            self._socket.close()
            raise unreachable(socket_path, error) from error
        except BaseException:
            self._socket.close()
            raise

    def _request(self, method: str, target: str, body: tuple[Any, int] | None) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("docker")
        connection.sock = self._socket
        file, length = body or (None, 0)
        headers = {"Content-Type": "application/x-tar", "Content-Length": str(length)} if body else {}
        connection.request(method, target, body=file, headers=headers)
        response = connection.getresponse()
        if response.status >= 400:
            raw = response.read(_MAX_ERROR_BYTES)
            response.close()
            try:
                message = str(json.loads(raw)["message"])
            except (ValueError, KeyError, TypeError, RecursionError):
                message = raw.decode(errors="replace")
            if arrived_cut(response.status, response.getheader("Content-Type")):
                raise EngineUnavailableError("The connection to the engine was cut.")
            raise (NotFoundError if response.status == 404 else EngineError)(f"The engine refused: {message}.")
        return response

    def read(self) -> bytes:
        """Return the next bytes; empty at the end, and when aborted. Raises EngineUnavailableError."""
        try:
            return self._response.read1(_READ_BYTES)
        except (OSError, ValueError, http.client.HTTPException) as error:
            if self._aborted:
                return b""
            raise EngineUnavailableError(f"The engine broke off a stream: {error}.") from error

    def write(self, data: bytes) -> None:
        """Send bytes the other way, where the engine has made a plain connection of it (attach).

        Raises EngineUnavailableError.
        """
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise EngineUnavailableError(f"The engine broke off a stream: {error}.") from error

    def abort(self) -> None:
        """End the reading at once, from any thread."""
        self._aborted = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._response.close()
        self._socket.close()


def arrived_cut(status: int, content_type: str | None) -> bool:
    """Tell whether this is Go's HTTP server and not the engine, which answers in JSON: a request did not arrive whole."""
    return status == 400 and (content_type or "").partition(";")[0] != "application/json"


def unreachable(socket_path: str, error: BaseException) -> EngineUnavailableError:
    """Say why the engine could not be reached, and what to do about it."""
    text = str(error)
    if "Permission denied" in text:
        return EngineUnavailableError(
            f"No permission to use the Docker engine at {socket_path}.",
            "Run as a member of the socket's group (membership is as good as root).",
        )
    if "No such file" in text:
        return EngineUnavailableError(
            f"There is no Docker engine at {socket_path}.",
            "Install and start one (apt-get install docker.io), or correct [docker] socket.",
        )
    if "Too many open files" in text:
        return EngineUnavailableError(
            f"No descriptor is left to reach the Docker engine at {socket_path}.", "Raise LimitNOFILE of the unit."
        )
    if "timed out" in text:
        return EngineUnavailableError(
            f"The Docker engine at {socket_path} did not answer in time.", "Look at its log; it may hang."
        )
    return EngineUnavailableError(
        f"The Docker engine at {socket_path} does not answer.", "Start it: systemctl start docker."
    )
