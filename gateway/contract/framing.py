"""Frames on the contract socket: a 4-byte big-endian length, then one msgpack message.

Both ends are ours, but each is bounded and strict: a frame too long or not understood ends the connection.
"""

import asyncio
import struct
from typing import Final, Generic, TypeVar

import msgspec

# A snapshot of 10,000 sessions with 20 rules each is about 10 MB.
MAX_FRAME_BYTES: Final = 64 * 1024 * 1024
_LENGTH: Final = struct.Struct(">I")

Message = TypeVar("Message")


class FramingError(Exception):
    """The peer broke the framing or sent a message that is not of the contract."""


def encode(message: object) -> bytes:
    """Return `message` as one frame."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


class FrameReader(Generic[Message]):
    """Reads messages of one union type from a stream."""

    def __init__(self, reader: asyncio.StreamReader, messages: object) -> None:
        self._reader = reader
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(messages)

    async def read(self) -> Message | None:
        """Return the next message, or None when the peer closed between two frames.

        Raises FramingError on a frame that is cut, too long or not of the contract.
        """
        head = b""
        try:
            head = await self._reader.readexactly(_LENGTH.size)
            (length,) = _LENGTH.unpack(head)
            if length > MAX_FRAME_BYTES:
                raise FramingError(f"a frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
            body = await self._reader.readexactly(length)
        except asyncio.IncompleteReadError as error:
            if not head and not error.partial:
                return None
            raise FramingError("the connection ended inside a frame") from error
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise FramingError(f"not a message of contract version 1: {error}") from error
