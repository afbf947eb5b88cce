"""docker-py's connections, mended: one kept connection a thread, and none left open when the engine is away.

docker-py's own adapter keeps a pool for every different URL, so that no connection is ever used again for another
container, and leaves the socket of a refused connection to the garbage collector.
"""

import socket
from collections.abc import Mapping

from docker.transport.unixconn import UnixHTTPAdapter, UnixHTTPConnection, UnixHTTPConnectionPool


class _Connection(UnixHTTPConnection):
    def connect(self) -> None:
        """Connect to the engine's socket. Raises OSError."""
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connected.settimeout(self.timeout)
            connected.connect(self.unix_socket)
        except BaseException:
            connected.close()
            raise
        self.sock = connected


class _Pool(UnixHTTPConnectionPool):
    def __init__(self, socket_path: str, timeout_s: int) -> None:
        super().__init__("http+docker://localhost", socket_path, timeout_s, maxsize=1)
        self._timeout_s = timeout_s

    def _new_conn(self) -> _Connection:  # type: ignore[override]
        return _Connection(self.base_url, self.socket_path, self._timeout_s)


class EngineAdapter(UnixHTTPAdapter):
    """Serves all requests of one client from one pool."""

    def __init__(self, socket_path: str, timeout_s: int) -> None:
        super().__init__(socket_path, timeout_s)
        self._pool = _Pool(socket_path, timeout_s)

    def get_connection(self, url: str | bytes, proxies: Mapping[str, str] | None = None) -> _Pool:
        """Return the pool, whatever the URL."""
        return self._pool

    def close(self) -> None:
        """Close the kept connection."""
        self._pool.close()
        super().close()
