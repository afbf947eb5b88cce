"""The connections to one model provider: kept alive, bounded in number, TLS verified."""

import asyncio
import logging
import socket
import ssl
import time
from collections import OrderedDict, deque
from functools import partial
from ipaddress import ip_address
from typing import Final

from gateway.core.providers import UpstreamUrl
from gateway.core.verdict import DenyReason
from gateway.net.dial import Dialer, DialError
from gateway.net.poller import Poller
from gateway.net.upstream import UpstreamConnection, UpstreamOwner
from gateway.runtime.log import Seldom

log = logging.getLogger("gateway.upstream")
# A sandbox can ask thousands of times for a model whose provider is away.
log.addFilter(Seldom())

# Below the idle limits of load balancers in common use (60 s and more), so that it is rarely they who close.
KEEP_IDLE_S: Final = 55.0


class UpstreamPool:
    """The connections to one provider, at most `limit`, idle ones reused last in, first out."""

    def __init__(self, url: UpstreamUrl, tls: ssl.SSLContext | None, *, limit: int, connect_timeout_s: float) -> None:
        self._poller: Poller
        self._dialer: Dialer
        self._url = url
        self._limit = limit
        self._timeout_s = connect_timeout_s
        self._tls = tls
        self._idle: OrderedDict[UpstreamConnection, float] = OrderedDict()
        self._open: set[UpstreamConnection] = set()
        self._waiting: deque[UpstreamOwner] = deque()
        self._dialing: dict[asyncio.Task[None], UpstreamOwner | None] = {}
        self._closed = True

    def start(self, poller: Poller) -> None:
        """Make connections that `poller` watches from now on."""
        self._poller = poller
        self._dialer = Dialer(asyncio.get_running_loop(), self._timeout_s, poller=poller)
        self._closed = False

    def __len__(self) -> int:
        return len(self._open) + len(self._dialing)

    @property
    def idle_count(self) -> int:
        """Connections that serve nobody now."""
        return len(self._idle)

    def acquire(self, owner: UpstreamOwner, *, fresh: bool = False) -> UpstreamConnection | None:
        """Return a connection that is idle, or None: then `owner` is told later. `fresh` takes no idle one."""
        while self._idle and not fresh:
            connection, _ = self._idle.popitem()
            if not connection.is_closed:
                return connection
        self._waiting.append(owner)
        self._dial()
        return None

    def cancel(self, owner: UpstreamOwner) -> None:
        """Forget an owner that waits. A dial begun for it goes on and serves the next one."""
        if owner in self._waiting:
            self._waiting.remove(owner)
        for task, waiter in self._dialing.items():
            if waiter is owner:
                self._dialing[task] = None

    def is_dialing_for(self, owner: UpstreamOwner) -> bool:
        """Tell whether a connection is being made for `owner`, rather than it waiting for room."""
        return owner in self._dialing.values()

    def put_back(self, connection: UpstreamConnection) -> None:
        """Take a connection that an exchange has left in good order."""
        if self._closed:
            connection.close()
        elif self._waiting:
            self._waiting.popleft().upstream_ready(connection)
        else:
            self._idle[connection] = time.monotonic()

    def forget(self, connection: UpstreamConnection) -> None:
        """A connection is gone."""
        self._open.discard(connection)
        self._idle.pop(connection, None)
        self._dial()

    def expire(self, now: float) -> None:
        """Close connections that were idle too long."""
        while self._idle and next(iter(self._idle.values())) < now - KEEP_IDLE_S:
            connection, _ = self._idle.popitem(last=False)
            connection.close()

    async def close(self) -> None:
        """Close what is idle and stop dialing. Connections in use are their exchanges' to close."""
        if self._closed:
            return
        self._closed = True
        self._waiting.clear()
        for connection in list(self._idle):
            connection.close()
        tasks = list(self._dialing)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._dialer.close()

    def _dial(self) -> None:
        """Begin as many connections as are waited for and there is room for."""
        while self._waiting and len(self) < self._limit and not self._closed:
            task = asyncio.get_running_loop().create_task(self._connect())
            self._dialing[task] = self._waiting.popleft()
            task.add_done_callback(self._dialed)

    def _dialed(self, task: "asyncio.Task[None]") -> None:
        owner = self._dialing.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("connecting to the model provider failed: %s", type(error).__name__)
            if owner is not None:
                owner.upstream_unavailable(DenyReason.CONNECT_FAILED, "The model provider cannot be reached")
        self._dial()

    async def _connect(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = await self._open_connection()
        except TimeoutError:
            self._fail(task, DenyReason.CONNECT_TIMEOUT, "The model provider did not answer in time", "timed out")
        except ssl.SSLError as error:
            self._fail(task, DenyReason.CONNECT_FAILED, "The model provider's TLS certificate or handshake was not accepted",
                       f"TLS: {error.reason or 'failed'}")  # fmt: skip
        except OSError as error:
            self._fail(
                task, DenyReason.CONNECT_FAILED, "The model provider cannot be reached", error.strerror or "failed"
            )
        else:
            if self._closed or connection.is_closed:
                connection.close()
                self._fail(
                    task, DenyReason.CONNECT_FAILED, "The model provider closed the connection", "closed at once"
                )
                return
            owner = self._dialing.pop(task, None)
            self._open.add(connection)
            if owner is not None:
                owner.upstream_ready(connection)
            else:
                self.put_back(connection)

    def _fail(self, task: "asyncio.Task[None]", reason: DenyReason, message: str, detail: str) -> None:
        log.warning("connection to the model provider failed: %s", detail)
        owner = self._dialing.pop(task, None)
        if owner is not None:
            owner.upstream_unavailable(reason, message)

    async def _open_connection(self) -> UpstreamConnection:
        url = self._url
        found = await asyncio.get_running_loop().getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM)
        connected = await self._dialer.connect([ip_address(entry[4][0]) for entry in found], url.port)
        if isinstance(connected, DialError):
            if connected.reason is DenyReason.CONNECT_TIMEOUT:
                raise TimeoutError
            raise ConnectionError(0, connected.message)
        sock = connected.sock
        if self._tls is not None:
            sock = await self._shake_hands(sock, self._tls)
        return UpstreamConnection(self, self._poller, sock, over_tls=self._tls is not None)

    async def _shake_hands(self, plain: socket.socket, context: ssl.SSLContext) -> ssl.SSLSocket:
        """Begin TLS on a connected socket, and close it if that fails."""
        # An end without close_notify is an error, not an end: a reply that ends with its connection could be cut.
        sock = context.wrap_socket(
            plain, do_handshake_on_connect=False, suppress_ragged_eofs=False, server_hostname=self._url.host
        )
        poller, loop = self._poller, asyncio.get_running_loop()
        try:
            while True:
                ready: asyncio.Future[None] = loop.create_future()
                try:
                    sock.do_handshake()
                except ssl.SSLWantReadError:
                    poller.add_reader(sock.fileno(), partial(_set, ready))
                    await ready
                    poller.remove_reader(sock.fileno())
                except ssl.SSLWantWriteError:
                    poller.add_writer(sock.fileno(), partial(_set, ready))
                    await ready
                    poller.remove_writer(sock.fileno())
                else:
                    return sock
        except BaseException:
            poller.forget(sock.fileno())
            sock.close()
            raise


def _set(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


def client_context(ca_file: str) -> ssl.SSLContext:
    """Verify the provider by `ca_file`, or by the system's authorities when it is empty. Raises OSError (so ssl.SSLError)."""
    context = ssl.create_default_context(cafile=ca_file or None)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context
