"""A request whose sender is known, and what follows from that for every request of the same head."""

from gateway.core.model_request import Request
from gateway.net.model_proxy import Provider
from gateway.registry import Registry, Session


class Ask:
    """What is asked by `request`, of whom, in whose name. A connection keeps its last one while it `is_current`."""

    __slots__ = ("_fixed", "_grant", "_head", "key", "must_read", "provider", "request", "session")

    def __init__(self, session: Session, provider: Provider, request: Request) -> None:
        self.session = session
        self.provider = provider
        self.request = request
        self._grant = session.grant
        # The provider's own header lines that `_head` was made with.
        self._fixed = b""
        self._head = b""
        # The key in `_head`: the one that a reply may repeat, also when the provider has another by then.
        self.key = b""
        route = request.destination.route
        # Whether a rule of the session must read the body.
        self.must_read = route.body is not None and (
            bool(session.grant.models) or (route.metered and session.model.limits_tokens)
        )

    def is_current(self, registry: Registry) -> bool:
        """Tell whether the session still is what it was when its credentials were checked."""
        session = self.session
        return registry.get(session.id) is session and session.grant is self._grant

    def head(self) -> bytes:
        """Return the head for the provider but for the body's framing and the empty line. It holds the key."""
        fixed = self.provider.fixed_headers()
        if fixed is not self._fixed:
            request = self.request
            line = b"%b %b%b HTTP/1.1\r\n" % (
                request.method,
                self.provider.url.base_path,
                request.destination.target,
            )
            self._fixed = fixed
            self.key = self.provider.key()
            self._head = b"".join((line, fixed, request.passed))
        return self._head
