"""The ends of tunnels that were parked, in case that no process takes them up.

A stop looks like the first half of a restart, so tunnels are parked at either, and after a stop the manager cuts them when
nobody is there to log it. What their last lines would say waits in a file beside the logs; the next process writes it,
unless it has the tunnels themselves.
"""

import contextlib
import logging
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from gateway.access import AuditLine, AuditLog
from gateway.contract.ids import is_session_id
from gateway.core.authority import parse_authority
from gateway.core.parked import Parked
from gateway.core.verdict import CloseReason

log = logging.getLogger("gateway.unfinished")

# No session's log: an id holds no dot.
_NAME: Final = ".unfinished"
# 10,000 tunnels are about 3 MB.
_MAX_BYTES: Final = 64 << 20
_decoder: Final = msgspec.json.Decoder(list[AuditLine])


def decode(data: bytes) -> list[AuditLine]:
    """Read what such a file holds. Raises ValueError when a line could not be one of the audit log's."""
    try:
        lines = _decoder.decode(data)
    except RecursionError as error:
        raise ValueError(str(error)) from error
    for line in lines:
        # It becomes the name of a file.
        if not is_session_id(line.session):
            raise ValueError("a line is of no session")
        # Of a time without its zone nobody knows when it was; and the years at either end are no numbers of seconds.
        if line.ts.tzinfo is None or not 1970 < line.ts.year < 9999:
            raise ValueError("a line is of no time")
    return lines


class Unfinished:
    """The file of one audit folder; with an empty `directory` there is none."""

    def __init__(self, directory: str) -> None:
        self._path = Path(directory) / _NAME if directory else None

    def write(self, record: Parked) -> None:
        """Say how every tunnel of the record ends if it is not taken up."""
        if self._path is None:
            return
        now, monotonic = datetime.now(UTC), time.monotonic()
        lines = []
        for tunnel in record.tunnels:
            authority = parse_authority(tunnel.authority.encode())
            lines.append(
                AuditLine(
                    *(now, tunnel.session, "close", "connect", authority.host, authority.port, tunnel.address),
                    *(CloseReason.SHUTDOWN, tunnel.pair.up.count, tunnel.pair.down.count),
                    int((monotonic - tunnel.started) * 1000),
                )
            )
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
            with os.fdopen(os.open(self._path, flags, 0o600), "wb") as file:
                file.write(msgspec.json.encode(lines))
        except OSError as error:
            log.error("the ends of parked tunnels cannot be kept: %s", error.strerror)

    def settle(self, audit: AuditLog, *, taken_up: bool) -> None:
        """Write the lines, unless the tunnels were taken up, and remove the file."""
        if self._path is None:
            return
        lines = []
        try:
            # Of those that go on nobody needs it: a full disk may have kept it from being whole.
            if not taken_up:
                with self._path.open("rb") as file:
                    lines = decode(file.read(_MAX_BYTES))
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            log.error("the ends of tunnels that were parked cannot be read: %s", error)
        with contextlib.suppress(OSError):
            self._path.unlink()
        if not lines:
            return
        log.warning("%d tunnels were parked and not taken up: cut at the stop", len(lines))
        for line in lines:
            audit.write(
                line.session, line.event, line.kind, line.host, line.port, line.address, line.reason,
                line.bytes_up, line.bytes_down, line.ms, at=line.ts.timestamp(),
            )  # fmt: skip
        # Their sessions may have ended meanwhile. Those that go on lose nothing by it.
        for session in {line.session for line in lines}:
            audit.forget(session)
