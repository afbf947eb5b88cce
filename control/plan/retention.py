"""Which sessions that have ended are forgotten: by age, by number, and by what they take of the disk. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

# Whoever asked for a session has this long to fetch its results, however many others end meanwhile.
FETCH_MS: Final = 10 * 60_000
# More than a clock is led to the right time in a minute (adjtimex(2): 500 ppm), less than anybody sets it by.
_SLEWED_MS: Final = 1_000


class Calendar:
    """The clock by which ages are told: one that is set forward is followed only when FETCH_MS have passed.

    What has ended just now would be old otherwise, before anybody could fetch it. Set back, it is followed at once: then some
    is kept longer.
    """

    def __init__(self) -> None:
        # How much the clock was ahead of the monotonic one, and since when it is more ahead than that.
        self._ahead_ms: int | None = None
        self._set_at: int | None = None

    def now_ms(self, clock_ms: int, monotonic_ms: int) -> int:
        """Return the time by which to tell ages."""
        ahead = clock_ms - monotonic_ms
        if self._ahead_ms is None or ahead <= self._ahead_ms + _SLEWED_MS:
            self._ahead_ms, self._set_at = ahead, None
        elif self._set_at is None:
            self._set_at = monotonic_ms
        elif monotonic_ms - self._set_at > FETCH_MS:
            self._ahead_ms, self._set_at = ahead, None
        return monotonic_ms + self._ahead_ms


@dataclass(frozen=True, slots=True)
class Kept:
    """An ended session that is still kept. `bytes`: what its folder takes, None until it was measured."""

    id: str
    ended_at: int
    bytes: int | None


@dataclass(frozen=True, slots=True)
class Keep:
    """What may be kept: each for `ms` after its end, all together `sessions` and `bytes`; 0 means no limit."""

    ms: int
    sessions: int
    bytes: int


def to_forget(oldest: Sequence[Kept], count: int, size: int, keep: Keep, now_ms: int) -> list[str]:
    """Return which of the sessions that ended first are to be forgotten.

    `oldest` is the head of all that are kept, in the order of their ends; `count` and `size` are those of all.
    """
    forgotten = []
    for each in oldest:
        age_ms = now_ms - each.ended_at
        too_old = keep.ms and age_ms > keep.ms
        too_many = (keep.sessions and count > keep.sessions) or (keep.bytes and size > keep.bytes)
        if not too_old and not (too_many and age_ms > FETCH_MS):
            break
        forgotten.append(each.id)
        count -= 1
        size -= each.bytes or 0
    return forgotten
