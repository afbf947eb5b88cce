"""Authorities, `host:port`: read once into one normal form, used everywhere (rules, DNS, SNI, log).

A name that two parts of a system read differently is a way around the rules between them. So a host has
exactly one spelling here, and spellings that only some readers understand (`0x7f.1`, `127.1`, zone ids,
userinfo) are refused.
"""

import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from typing import Final

import idna

# A name has at most 253 characters (RFC 1035 §2.3.4); up to four UTF-8 bytes each.
MAX_AUTHORITY_BYTES: Final = 1024
MAX_NAME_CHARACTERS: Final = 253
MAX_LABEL_CHARACTERS: Final = 63

# Letters, digits, inner hyphens (RFC 1123 §2.1), and underscores: host names should have none, but names in
# use do.
_LABEL: Final = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_PORT: Final = r"[1-9][0-9]{0,4}"

_match_plain: Final = re.compile(rf"({_LABEL}(?:\.{_LABEL})*)(\.?)(?::({_PORT}))?".encode()).fullmatch
_match_bracketed: Final = re.compile(rf"\[([0-9A-Fa-f:.]{{2,45}})\](?::({_PORT}))?".encode()).fullmatch
_match_port: Final = re.compile(_PORT.encode()).fullmatch
_match_label: Final = re.compile(_LABEL).fullmatch
# A last label that readers of IPv4 addresses take for a number (WHATWG URL, "ends in a number checker").
_match_number: Final = re.compile(r"[0-9]+|0[xX][0-9A-Fa-f]*").fullmatch
_match_http: Final = re.compile(rb"http://([^/?#]*)([^#]*)", re.IGNORECASE).fullmatch
_DIGITS: Final = frozenset("0123456789")


class AuthorityError(Exception):
    """A host or port that has no one plain reading. The message is one sentence for a person."""

    @property
    def message(self) -> str:
        """What is wrong."""
        return str(self)


@dataclass(frozen=True, slots=True)
class Authority:
    """A host and a port (1 to 65535).

    `host` is in normal form: lower-case A-labels without trailing dot; for an IP literal, which `address`
    then holds, its compressed form without brackets.
    """

    host: str
    port: int
    address: IPv4Address | IPv6Address | None = None

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_authority(raw: bytes, default_port: int | None = None) -> Authority:
    """Read `host:port`; the port may be left out only if there is a `default_port`.

    Names are mapped by UTS #46 and turned into A-labels (RFC 5891), so full-width letters, digits and dots
    are what they look like before anything is checked; one trailing dot is dropped. Raises AuthorityError for
    anything else than one name, one dotted-quad IPv4 address or one bracketed IPv6 address, and one port
    without sign or leading zero.
    """
    if len(raw) > MAX_AUTHORITY_BYTES:
        raise AuthorityError("the host is too long")
    match = _match_plain(raw)
    if match is None:
        return _parse_rare(raw, default_port)
    name, dot, digits = match.groups()
    host = name.decode("ascii").lower()
    port = _read_port(digits, default_port)
    if host[host.rfind(".") + 1] in _DIGITS or "xn--" in host or len(host) > MAX_NAME_CHARACTERS:
        return _read_host(host + dot.decode("ascii"), port)
    return Authority(host, port)


def parse_absolute_http(target: bytes) -> tuple[Authority, bytes]:
    """Split the target of a proxy request, `http://host[:port]/path?query`, into authority and origin form
    (RFC 9112 §3.2).

    Raises AuthorityError for any other scheme, for userinfo and for fragments.
    """
    match = _match_http(target)
    if match is None:
        if target[:8].lower() == b"https://":
            raise AuthorityError("https goes through CONNECT, not through a plain request")
        raise AuthorityError("the target is not an absolute http:// address")
    host, path = match.groups()
    if not path.startswith(b"/"):
        path = b"/" + path
    return parse_authority(host, 80), path


def _parse_rare(raw: bytes, default_port: int | None) -> Authority:
    """Read an IPv6 literal or an international name; anything else is not allowed."""
    # Refused by itself because `good.example@evil.example` is the oldest way to show one host and reach
    # another.
    if b"@" in raw:
        raise AuthorityError("credentials before the host are not allowed")
    if raw.startswith(b"["):
        return _parse_bracketed(raw, default_port)
    name, colon, digits = raw.partition(b":")
    if colon and _match_port(digits) is None:
        raise AuthorityError("the port is not a plain number from 1 to 65535")
    port = _read_port(digits if colon else None, default_port)
    try:
        # Without STD3 rules, which would refuse underscores: each label's characters are checked below.
        mapped = idna.uts46_remap(name.decode("utf-8"), std3_rules=False)
    except UnicodeError:  # idna's own error is one as well
        raise AuthorityError("the host is not a valid international name (UTS #46)") from None
    return _read_host(mapped, port)


def _parse_bracketed(raw: bytes, default_port: int | None) -> Authority:
    match = _match_bracketed(raw)
    if match is None:
        raise AuthorityError("brackets hold one IPv6 address without zone, followed by a port from 1 to 65535")
    literal, digits = match.groups()
    port = _read_port(digits, default_port)
    try:
        address = IPv6Address(literal.decode("ascii"))
    except ValueError:
        raise AuthorityError("the brackets do not hold an IPv6 address") from None
    return Authority(str(address), port, address)


def _read_port(digits: bytes | None, default_port: int | None) -> int:
    if digits is None:
        if default_port is None:
            raise AuthorityError("the port is missing")
        return default_port
    port = int(digits)
    if port > 65535:
        raise AuthorityError("the port is not a plain number from 1 to 65535")
    return port


def _read_host(text: str, port: int) -> Authority:
    """Bring a mapped, lower-case host into normal form."""
    host = text.removesuffix(".")
    labels = host.split(".")
    if _match_number(labels[-1]):
        # `127.1`, `2130706433`, `0x7f.1` and `0177.0.0.1` are 127.0.0.1 to inet_aton(3), and names to a
        # resolver.
        try:
            address = IPv4Address(text)
        except ValueError:
            raise AuthorityError("the host is an unusual spelling of an IPv4 address") from None
        return Authority(str(address), port, address)
    host = ".".join([_normal_label(label) for label in labels])
    if len(host) > MAX_NAME_CHARACTERS:
        raise AuthorityError(f"the host is longer than {MAX_NAME_CHARACTERS} characters")
    return Authority(host, port)


def _normal_label(label: str) -> str:
    """Return the A-label of one label, or the label itself where it is plain ASCII."""
    if not label:
        raise AuthorityError("the host has an empty label")
    if len(label) > MAX_LABEL_CHARACTERS:
        raise AuthorityError(f"a label of the host is longer than {MAX_LABEL_CHARACTERS} characters")
    try:
        if not label.isascii():
            return idna.alabel(label).decode("ascii")
        # An A-label is only accepted in the one form that its name encodes to.
        if label.startswith("xn--") and idna.alabel(idna.ulabel(label)).decode("ascii") != label:
            raise AuthorityError("a label of the host is not in its normal form (RFC 5891)")
    except UnicodeError:
        raise AuthorityError("a label of the host is not a valid international name (RFC 5891)") from None
    if _match_label(label) is None:
        raise AuthorityError("the host holds a character that no host name has")
    return label
