"""Names of sessions and runs, and tokens. Only the SHA-256 of a token is ever kept (DESIGN: credentials)."""

import hashlib
import re
import secrets
from typing import Final

SESSION_ID: Final = re.compile(r"[a-z0-9-]{1,64}", re.ASCII)
_SHA256: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)
# 256 bits, as RFC 6750 asks of bearer tokens (§5.2: hard to guess); URL-safe, so it fits in a proxy URL as it is.
TOKEN_BYTES: Final = 32


def is_session_id(text: str) -> bool:
    """Tell whether `text` is a session id: 1 to 64 of `a-z`, `0-9`, `-`."""
    return SESSION_ID.fullmatch(text) is not None


def is_sha256(text: str) -> bool:
    """Tell whether `text` is a SHA-256 as 64 lower-case hex digits."""
    return _SHA256.fullmatch(text) is not None


def new_session_id() -> str:
    """Make a session id that no other session has (80 random bits)."""
    return secrets.token_hex(10)


def new_token() -> str:
    """Make a session token; it is shown once, to the sandbox, and kept only as `token_sha256`."""
    return secrets.token_urlsafe(TOKEN_BYTES)


def token_sha256(token: str) -> str:
    """Return the SHA-256 of a token as 64 lower-case hex digits."""
    return hashlib.sha256(token.encode()).hexdigest()
