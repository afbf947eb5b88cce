"""The operator's model key: from systemd's credential directory (systemd.exec(5) LoadCredential=) or a 0600 file.

It is read here, handed to the model proxy, and never logged, printed or sent anywhere but to the provider.
"""

import logging
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

log = logging.getLogger("gateway.credentials")

CREDENTIAL_NAME: Final = "model-api-key"
MAX_KEY_BYTES: Final = 4096


class ModelKeyError(Exception):
    """There is no usable key; the message is one sentence with the remedy, without the key."""


class ModelKey:
    """The present key; `reload` reads it anew (SIGHUP) and keeps the old one when that fails."""

    def __init__(self, file: str, environment: Mapping[str, str] = os.environ) -> None:
        directory = environment.get("CREDENTIALS_DIRECTORY")
        self._path: Path | None
        if file:
            self._path = Path(file)
        elif directory and (Path(directory) / CREDENTIAL_NAME).exists():
            self._path = Path(directory) / CREDENTIAL_NAME
        else:
            self._path = None
        # Modes of systemd's own directory are the manager's business; a file of the operator's is checked.
        self._check_mode = bool(file)
        self._key = b""
        self.reload()

    def __repr__(self) -> str:
        return f"ModelKey({self._path})"

    def __call__(self) -> bytes:
        """Return the key, empty if none is configured."""
        return self._key

    def reload(self) -> None:
        """Read the key. Raises ModelKeyError."""
        if self._path is None:
            return
        try:
            with self._path.open("rb") as file:
                mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
                raw = file.read(MAX_KEY_BYTES + 1)
        except OSError as error:
            raise ModelKeyError(
                f"the model key {self._path} cannot be read: {error.strerror}; put the key there, readable for the"
                " gateway's user alone"
            ) from error
        if self._check_mode and mode & 0o077:
            raise ModelKeyError(f"the model key {self._path} can be read by others: chmod 600 {self._path}")
        key = raw.strip()
        if not key or len(key) > MAX_KEY_BYTES or any(byte <= 0x20 or byte >= 0x7F for byte in key):
            raise ModelKeyError(f"the model key {self._path} is not one line of printable characters")
        self._key = key
