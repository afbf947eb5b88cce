"""Frames of the contract socket that end early."""

import asyncio

import pytest

from gateway.contract.framing import FrameReader, FramingError, encode
from gateway.contract.messages import FromControl, RevokeGrant

FRAME = encode(RevokeGrant(1, "s1"))


async def read(data: bytes) -> list[object]:
    stream, found = asyncio.StreamReader(), []
    stream.feed_data(data)
    stream.feed_eof()
    reader = FrameReader[object](stream, FromControl)
    while (message := await reader.read()) is not None:
        found.append(message)
    return found


@pytest.mark.parametrize("size", range(1, len(FRAME)))
async def test_a_frame_that_is_cut_is_no_end_also_right_behind_its_length(size: int) -> None:
    with pytest.raises(FramingError, match="inside a frame"):
        await read(FRAME + FRAME[:size])


async def test_an_end_between_two_frames_is_one() -> None:
    assert await read(FRAME + FRAME) == [RevokeGrant(1, "s1")] * 2
