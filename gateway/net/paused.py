"""HTTP connections between two requests in a gateway that leaves: nobody reads them until a process goes on with them.

What their clients send meanwhile waits in the socket. They were authenticated once, so they count to their session, which
closes them when it ends, and not to those of their source that were not.
"""

import socket

from gateway.core.authority import Authority
from gateway.core.verdict import CloseReason
from gateway.net.services import Services
from gateway.registry import IPAddress, Session


class Paused:
    """One such connection. `data` was read of its next request, `left_s` is what that has left of its time."""

    __slots__ = ("_services", "_until", "authority", "caller", "data", "session", "sock")

    def __init__(
        self,
        services: Services,
        session: Session,
        caller: IPAddress | None,
        authority: Authority | None,
        sock: socket.socket,
        data: bytes,
        left_s: float,
    ) -> None:
        """`authority`: where the CONNECT leads that carries it, None for a connection to the gateway as a proxy."""
        self._services = services
        self.session = session
        self.caller = caller
        self.authority = authority
        self.sock = sock
        self.data = data
        self._until = services.loop.time() + left_s
        services.paused.add(self)
        # Nothing that a stop must wait for.
        session.add_closer(self.close, resumes=True)

    @property
    def left_s(self) -> float:
        """What is left of the time for the next request."""
        return max(0.0, self._until - self._services.loop.time())

    def forget(self) -> socket.socket:
        """Return the connection, which is another's from here on."""
        self._services.paused.discard(self)
        self.session.remove_closer(self.close)
        return self.sock

    def close(self, _reason: CloseReason = CloseReason.SHUTDOWN) -> None:
        """End it."""
        self.forget().close()
