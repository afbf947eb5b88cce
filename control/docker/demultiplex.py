"""The engine's framing of two outputs in one stream. Pure: bytes in, pieces out.

Each frame is one byte for the output, three of zero, a 32-bit big-endian length, then the bytes
(Docker Engine API, "Attach to a container", stream format).
"""

import struct
from collections.abc import Iterator
from typing import Final

from control.docker.types import EngineError, LogStream

_HEADER: Final = struct.Struct(">BxxxI")
_STREAMS: Final = {1: LogStream.STDOUT, 2: LogStream.STDERR}


class Demultiplexer:
    """Takes the stream in pieces of any size. A frame's bytes are passed on as they come, never collected."""

    def __init__(self) -> None:
        self._header = bytearray()
        self._stream: LogStream | None = None
        self._left = 0

    @property
    def at_end(self) -> bool:
        """Tell whether the piece that was yielded last was the last one of its frame."""
        return self._left == 0

    def feed(self, data: bytes) -> Iterator[tuple[LogStream, bytes]]:
        """Yield what the next bytes hold of each output, in order. Raises EngineError when it is no such stream."""
        position = 0
        while position < len(data):
            if self._left == 0:
                wanted = _HEADER.size - len(self._header)
                self._header += data[position : position + wanted]
                position += wanted
                if len(self._header) == _HEADER.size:
                    self._open_frame()
                continue
            piece = data[position : position + self._left]
            position += len(piece)
            self._left -= len(piece)
            assert self._stream is not None
            yield self._stream, piece

    def _open_frame(self) -> None:
        kind, self._left = _HEADER.unpack(self._header)
        self._header.clear()
        self._stream = _STREAMS.get(kind)
        if self._stream is None:
            # 3 is the engine's own complaint about the stream; anything else is no frame at all.
            raise EngineError(f"The engine's log stream holds a frame of unknown kind {kind}.")
