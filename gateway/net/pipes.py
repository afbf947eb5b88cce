"""Kernel pipes for splice(2), pooled. A pipe is held only while bytes are in flight in it."""

import fcntl
import os
from typing import Final, Protocol

Pipe = tuple[int, int]

PIPE_BYTES: Final = 1 << 20
# fcntl(2) F_SETPIPE_SZ; the fcntl module names it only from Python 3.10 on some systems.
_F_SETPIPE_SZ: Final = 1031
# An unprivileged user may hold 16,384 pages in pipes (fs.pipe-user-pages-soft), 64 pipes of 1 MiB; beyond that the
# kernel makes 8 KiB ones, which are slower than a copy.
MAX_PIPES: Final = 64


class PipeHolder(Protocol):
    """Who takes pipes: a session, or the runner connections together."""

    pipes: int


class PipePool:
    """Gives out 1 MiB pipes, at most `MAX_PIPES`, and no holder more than half of them."""

    def __init__(self, limit: int = MAX_PIPES) -> None:
        self._free: list[Pipe] = []
        self._made = 0
        self._limit = limit
        # One sandbox with many stalled readers must not take every pipe from the others.
        self._share = max(1, limit // 2)

    def take(self, holder: PipeHolder) -> Pipe | None:
        """Return an empty non-blocking pipe, or None when there is none to have (copy instead)."""
        if holder.pipes >= self._share:
            return None
        pipe = self._free.pop() if self._free else self._make()
        if pipe is not None:
            holder.pipes += 1
        return pipe

    def adopt(self, pipe: Pipe, holder: PipeHolder) -> None:
        """Count in a pipe that an earlier process left with bytes in it, whatever the limit and the holder's share."""
        self._made += 1
        holder.pipes += 1

    def give_back(self, pipe: Pipe, holder: PipeHolder) -> None:
        """Take back an empty pipe."""
        holder.pipes -= 1
        self._free.append(pipe)

    def discard(self, pipe: Pipe, holder: PipeHolder) -> None:
        """Close a pipe that still holds bytes: they must never reach another tunnel."""
        holder.pipes -= 1
        self._close(pipe)

    def close(self) -> None:
        """Close the pipes that are free."""
        while self._free:
            self._close(self._free.pop())

    def _close(self, pipe: Pipe) -> None:
        self._made -= 1
        os.close(pipe[0])
        os.close(pipe[1])

    def _make(self) -> Pipe | None:
        if self._made >= self._limit:
            return None
        try:
            pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return None
        self._made += 1
        try:
            fcntl.fcntl(pipe[1], _F_SETPIPE_SZ, PIPE_BYTES)
        except OSError:
            # The user's share of pipe pages is used up (by other processes of the user too): ask for no more.
            self._close(pipe)
            self._limit = max(self._made, 1)
            return None
        return pipe
