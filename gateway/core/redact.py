"""Takes a secret out of bytes, whole or passing by in pieces, without changing their length."""

from typing import Final

_STAR: Final = b"*"


def redact(data: bytes, secret: bytes) -> bytes:
    """Return `data`, which is whole, with every occurrence of `secret` overwritten with stars."""
    return data.replace(secret, _STAR * len(secret)) if secret else data


class Redactor:
    """Overwrites every occurrence of `secret` with stars, also when it is cut between two pieces.

    The end of a piece that could be the secret's beginning is held back until the next one, or `flush`.
    """

    __slots__ = ("_held", "_secret", "_stars")

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._stars = _STAR * len(secret)
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """Return what may be passed on."""
        data = (self._held + data).replace(self._secret, self._stars) if self._secret else data
        size = self._overlap(data)
        self._held = data[len(data) - size :]
        return data[: len(data) - size]

    def flush(self) -> bytes:
        """Return what was held back: nothing follows that could complete it."""
        held, self._held = self._held, b""
        return held

    def _overlap(self, data: bytes) -> int:
        for size in range(min(len(self._secret) - 1, len(data)), 0, -1):
            if data.endswith(self._secret[:size]):
                return size
        return 0
