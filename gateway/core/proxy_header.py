"""PROXY protocol version 2: which sandbox is calling, as the forwarder saw it (haproxy's proxy-protocol.txt
§2.2).

Only the forwarder can reach the port that this is read on; nothing a sandbox sends can come before it.
"""

from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from typing import Final

from gateway.core.incomplete import INCOMPLETE, Incomplete

SIGNATURE: Final = b"\r\n\r\n\x00\r\nQUIT\n"
# §2.2: addresses and extensions together fit in 520 bytes after the fixed 16, so that one segment of any path
# carries it.
MAX_PROXY_HEADER_BYTES: Final = 536

_FIXED: Final = 16
_LOCAL: Final = 0x20  # version 2, command LOCAL
_PROXY: Final = 0x21  # version 2, command PROXY
_TCP4: Final = 0x11
_TCP6: Final = 0x21
_TCP4_BYTES: Final = 12
_TCP6_BYTES: Final = 36


class ProxyHeaderError(Exception):
    """What arrived is no PROXY v2 header of a TCP connection."""


@dataclass(frozen=True, slots=True)
class ProxyHeader:
    """Where a connection came from; `source` is None for the forwarder's own (LOCAL, a health check).

    `size` is the number of bytes the header takes in the buffer.
    """

    source: IPv4Address | IPv6Address | None
    size: int


def parse_proxy_header(data: bytes | bytearray) -> ProxyHeader | Incomplete:
    """Read the PROXY v2 header at the start of `data`; extensions (TLVs) are skipped.

    Returns INCOMPLETE until the header has arrived whole. Raises ProxyHeaderError if no continuation of
    `data` could be one: another signature or version, a family other than TCP over IPv4 or IPv6, more than
    MAX_PROXY_HEADER_BYTES. A source in IPv4-mapped form is returned as the IPv4 address it is (RFC 4291
    §2.5.5.2).
    """
    size = len(data)
    if size < _FIXED:
        if data[:12] != SIGNATURE[:size]:
            raise ProxyHeaderError("no PROXY v2 signature")
        if size > 12 and data[12] not in (_LOCAL, _PROXY):
            raise ProxyHeaderError("unknown PROXY version or command")
        return INCOMPLETE
    if data[:12] != SIGNATURE:
        raise ProxyHeaderError("no PROXY v2 signature")
    command, family = data[12], data[13]
    length = data[14] << 8 | data[15]
    if command not in (_LOCAL, _PROXY):
        raise ProxyHeaderError("unknown PROXY version or command")
    if length > MAX_PROXY_HEADER_BYTES - _FIXED:
        raise ProxyHeaderError("PROXY header too large")
    source: IPv4Address | IPv6Address | None
    if command == _LOCAL:
        needed = 0  # §2.2: "the receiver must [...] discard the protocol block including the family"
    elif family == _TCP4:
        needed = _TCP4_BYTES
    elif family == _TCP6:
        needed = _TCP6_BYTES
    else:
        raise ProxyHeaderError("PROXY header of something else than TCP over IPv4 or IPv6")
    if length < needed:
        raise ProxyHeaderError("PROXY header too short for its address family")
    whole = _FIXED + length
    if size < whole:
        return INCOMPLETE
    if needed == 0:
        source = None
    elif needed == _TCP4_BYTES:
        source = IPv4Address(int.from_bytes(data[16:20], "big"))
    else:
        address = IPv6Address(bytes(data[16:32]))
        source = address.ipv4_mapped or address
    return ProxyHeader(source, whole)
