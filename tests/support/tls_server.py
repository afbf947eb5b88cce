"""TLS servers with certificates of a throw-away authority."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trustme

from tests.support.listener import Handler
from tests.support.sockets import Server, echo


class Authority:
    """A certificate authority made for one test run."""

    def __init__(self) -> None:
        self._authority = trustme.CA()

    def server_context(self, *names: str) -> ssl.SSLContext:
        """Return a server's context with one certificate for `names` (hosts or addresses)."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._authority.issue_cert(*names).configure_cert(context)
        return context

    def client_context(self) -> ssl.SSLContext:
        """Return a client's context that trusts this authority and nothing else."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._authority.configure_trust(context)
        return context

    def pem(self) -> bytes:
        """Return the authority's certificate."""
        return self._authority.cert_pem.bytes()


@asynccontextmanager
async def tls_server(
    authority: Authority, *names: str, handler: Handler = echo, port: int = 0
) -> AsyncIterator[Server]:
    """Run a TLS server on 127.0.0.1 with a certificate for `names`; it echoes unless told otherwise."""
    server = Server(handler)
    await server.start(tls=authority.server_context(*names), port=port)
    try:
        yield server
    finally:
        await server.stop()


def client_hello(server_name: str | None, *, alpn: tuple[str, ...] = ()) -> bytes:
    """Return the first flight of a real TLS client: the records of its ClientHello."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if alpn:
        context.set_alpn_protocols(list(alpn))
    outgoing = ssl.MemoryBIO()
    client = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=server_name)
    try:
        client.do_handshake()
    except ssl.SSLWantReadError:
        pass
    return outgoing.read()
