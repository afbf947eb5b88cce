"""ClientHello messages, built by hand so that each field can be wrong, or by OpenSSL as a client sends them."""

import ssl
from collections.abc import Iterable, Sequence


def vector(content: bytes, prefix: int) -> bytes:
    """Return `content` behind its length in `prefix` bytes (RFC 8446 §3.4)."""
    return len(content).to_bytes(prefix, "big") + content


def extension(kind: int, content: bytes) -> bytes:
    """Return one extension."""
    return kind.to_bytes(2, "big") + vector(content, 2)


def server_name(name: bytes, kind: int = 0) -> bytes:
    """Return a server_name extension with one entry."""
    return extension(0, vector(bytes([kind]) + vector(name, 2), 2))


def alpn(*protocols: bytes) -> bytes:
    """Return an ALPN extension."""
    return extension(16, vector(b"".join(vector(protocol, 1) for protocol in protocols), 2))


def encrypted(kind: int = 0xFE0D) -> bytes:
    """Return an outer encrypted_client_hello extension with nothing real in it, as GREASE has it."""
    return extension(kind, b"\x00" + bytes(40))


def message(
    extensions: Iterable[bytes] | None = (),
    *,
    version: bytes = b"\x03\x03",
    session_id: bytes = bytes(32),
    suites: bytes = b"\x13\x01\x13\x02",
    compression: bytes = b"\x00",
    after: bytes = b"",
) -> bytes:
    """Return a whole ClientHello handshake message; `extensions` None leaves even their length out."""
    body = version + bytes(32) + vector(session_id, 1) + vector(suites, 2) + vector(compression, 1)
    if extensions is not None:
        body += vector(b"".join(extensions), 2)
    body += after
    return b"\x01" + vector(body, 3)


def records(content: bytes, sizes: Sequence[int] = (), version: bytes = b"\x03\x01") -> bytes:
    """Return handshake records that carry `content`; `sizes` are those of all records but the last."""
    pieces = []
    for size in sizes:
        pieces.append(content[:size])
        content = content[size:]
    pieces.append(content)
    return b"".join(b"\x16" + version + vector(piece, 2) for piece in pieces if piece)


def hello(name: bytes | None = b"example.com", *extensions: bytes) -> bytes:
    """Return a ClientHello in one record, with a server name unless `name` is None."""
    first = [] if name is None else [server_name(name)]
    return records(message([*first, *extensions]))


def openssl_hello(name: str | None, protocols: Sequence[str] = ()) -> bytes:
    """Return what OpenSSL sends first when it connects to `name`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if protocols:
        context.set_alpn_protocols(list(protocols))
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(incoming, outgoing, server_hostname=name)
    try:
        client.do_handshake()
    except ssl.SSLWantReadError:
        return outgoing.read()
    raise AssertionError("a handshake with nobody ended")
