"""Credentials as clients send them (RFC 7617 Basic, RFC 6750 Bearer). Parsing only; the registry knows whose they are."""

import base64
import binascii
from typing import Final

# A session id has at most 64 characters, a token of ours 43; a longer header is an attack on the decoder.
MAX_CREDENTIALS_BYTES: Final = 1024


def parse_basic(value: bytes) -> tuple[str, str] | None:
    """Return user and password of `Basic base64(user:password)`, or None when `value` is nothing of the kind."""
    scheme, _, encoded = value.partition(b" ")
    if scheme.lower() != b"basic" or len(encoded) > MAX_CREDENTIALS_BYTES:
        return None
    try:
        decoded = base64.b64decode(encoded.strip(b" "), validate=True).decode("ascii")
    except (binascii.Error, UnicodeDecodeError):
        return None
    user, separator, password = decoded.partition(":")
    return (user, password) if separator else None


def parse_bearer(value: bytes) -> str | None:
    """Return the token of `Bearer token`, or None when `value` is nothing of the kind."""
    scheme, _, token = value.partition(b" ")
    token = token.strip(b" ")
    if scheme.lower() != b"bearer" or not token or len(token) > MAX_CREDENTIALS_BYTES or b" " in token:
        return None
    try:
        return token.decode("ascii")
    except UnicodeDecodeError:
        return None
