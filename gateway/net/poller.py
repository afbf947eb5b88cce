"""Watches raw sockets with an epoll of its own, which the event loop watches as one descriptor.

The loop's `add_reader` and `add_writer` cost a connection more than all the checks of the gateway: a handle for each
socket, two system calls to prove that it can be polled, two to make it non-blocking again, one to remove it, and a switch
of context a callback. Here a change costs one system call, and closing a watched socket none.
"""

import asyncio
import contextlib
import select
import time
from collections.abc import Callable, Iterable
from typing import Final

# Sockets served before the loop's other work (timers, model streams, name look-ups) gets its turn.
EVENTS_PER_TURN: Final = 64
# How long the poller looks again and again before it lets the loop sleep, once QUICK batches in a row came within this time
# of the one before. To sleep and be woken costs a message more than it waits here, in time and in CPU (Linux does the same for
# idle virtual machines: Documentation/virt/guest-halt-polling.rst). It is longer than a message there and back takes on
# loopback where cores fall asleep (60 to 100 us): with less, it would wait in vain again and again. After it has waited in vain
# it wants AFTER_VAIN more of them first: bursts with pauses between them, as of many model streams, would have it wait in vain
# after each.
SPIN_S: Final = 120e-6
QUICK: Final = 8
AFTER_VAIN: Final = 24
# Deferred work begins no other piece after this time before sockets are looked at again: a small message waits for one
# piece of bulk, not for all tunnels'.
TURN_S: Final = 0.001
# How long what comes often and in small pieces is left alone before it is read again.
REST_S: Final = 0.001

_IN: Final = select.EPOLLIN
_OUT: Final = select.EPOLLOUT
# A hang-up or an error is for both: each finds out by trying.
_FOR_READER: Final = ~_OUT
_FOR_WRITER: Final = ~_IN
Callback = Callable[[], object]


class _Watch:
    __slots__ = ("events", "reader", "turn", "writer")

    def __init__(self, turn: int) -> None:
        self.reader: Callback | None = None
        self.writer: Callback | None = None
        # What the kernel was asked for; 0: nothing, the socket is not in the epoll.
        self.events = 0
        self.turn = turn


class Poller:
    """Calls back for sockets that are ready, level-triggered. A callback that raises is reported and not called again.

    A socket is closed only after `forget`. One whose descriptor lives on elsewhere (duplicated, given to a transport) is
    removed by `remove_reader` and `remove_writer` instead: the kernel drops a descriptor from an epoll only with its last
    copy.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._epoll = select.epoll()
        self._watches: dict[int, _Watch] = {}
        # Counts batches of events. A watch that began in a batch has no event in it: such an event is about a socket that
        # had the same number before and was closed by an earlier callback of the batch.
        self._turn = 0
        # What a callback wants to hear no more of; told to the kernel when it returns, because often the socket is closed by
        # then, or wanted for something else.
        self._less: list[int] = []
        self._calling = False
        # Whether the callbacks of several sockets are called one after the other, and what is wanted after the last of them.
        self.is_serving_many = False
        self._after: list[Callback] = []
        # What is called when a rest is over.
        self._resting: dict[Callback, None] = {}
        self._waking: asyncio.TimerHandle | None = None
        # Work that waits until all events of a batch are served, in the order it came.
        self._deferred: dict[Callback, None] = {}
        # When the last batch was served, how many came quickly (from below 0 after waiting in vain), and until when to look
        # again without a sleep.
        self._served = 0.0
        self._quick = 0
        self._spin_end = 0.0
        self._spinning: asyncio.Handle | None = None
        loop.add_reader(self._epoll.fileno(), self._on_ready)

    def __len__(self) -> int:
        return len(self._watches)

    @property
    def spinning(self) -> bool:
        """Whether it looks again at once instead of letting the loop sleep."""
        return self._spinning is not None

    def add_reader(self, fd: int, callback: Callback, /) -> None:
        """Call `callback` whenever there is something to read on a socket, an end or an error included."""
        watch = self._watches.get(fd)
        if watch is None:
            watch = self._watches[fd] = _Watch(self._turn)
        watch.reader = callback
        if not watch.events & _IN:
            self._apply(fd, watch)

    def remove_reader(self, fd: int, /) -> None:
        """Stop it."""
        watch = self._watches.get(fd)
        if watch is not None:
            watch.reader = None
            if self._calling:
                self._less.append(fd)
            else:
                self._apply(fd, watch)

    def add_writer(self, fd: int, callback: Callback, /) -> None:
        """Call `callback` whenever a socket would take something, an error included."""
        watch = self._watches.get(fd)
        if watch is None:
            watch = self._watches[fd] = _Watch(self._turn)
        watch.writer = callback
        if not watch.events & _OUT:
            self._apply(fd, watch)

    def remove_writer(self, fd: int, /) -> None:
        """Stop it."""
        watch = self._watches.get(fd)
        if watch is not None:
            watch.writer = None
            if self._calling:
                self._less.append(fd)
            else:
                self._apply(fd, watch)

    def forget(self, fd: int, /) -> None:
        """Stop both for a socket that is closed next."""
        watch = self._watches.pop(fd, None)
        if watch is not None:
            watch.reader = watch.writer = None

    def after_batch(self, work: Callback, /) -> None:
        """Call `work` when the callbacks of all sockets that are ready now have been called; only if `is_serving_many`.

        It is for what is cheaper in a row. If it raises, that is reported.
        """
        self._after.append(work)

    def rest(self, work: Callback, /) -> None:
        """Call `work` once in REST_S or a little later, in a row with other such work. If it raises, that is reported."""
        self._resting[work] = None
        if self._waking is None:
            self._waking = self._loop.call_later(REST_S, self._wake)

    def defer(self, work: Callback, /) -> None:
        """Call `work` after the callbacks of all sockets that are ready now, in turn with other such work.

        It is for a reader that has much to read: small messages go first, and after TURN_S what is ready then. Work that is
        not reached waits for the next turn, which comes at once because its socket is still ready.
        """
        self._deferred[work] = None

    def cancel(self, work: Callback, /) -> None:
        """Take deferred work back."""
        self._deferred.pop(work, None)

    def close(self) -> None:
        """Watch nothing any more."""
        self._deferred.clear()
        if self._spinning is not None:
            self._spinning.cancel()
        if self._waking is not None:
            self._waking.cancel()
        self._loop.remove_reader(self._epoll.fileno())
        self._watches.clear()
        self._epoll.close()

    def _apply(self, fd: int, watch: _Watch) -> None:
        """Tell the kernel what is wanted of a socket, if it does not know."""
        wanted = (_IN if watch.reader is not None else 0) | (_OUT if watch.writer is not None else 0)
        if wanted == watch.events:
            return
        if not watch.events:
            self._epoll.register(fd, wanted)
        elif wanted:
            self._epoll.modify(fd, wanted)
        else:
            # Not kept with an empty mask: the kernel reports a hang-up all the same, again and again.
            self._epoll.unregister(fd)
            del self._watches[fd]
        watch.events = wanted

    def _on_ready(self) -> None:
        batch = self._epoll.poll(0, EVENTS_PER_TURN)
        if not batch:
            return
        if time.monotonic() - self._served < SPIN_S:
            self._quick += 1
        else:
            self._quick = min(self._quick, 0)
        self._serve(batch)
        if self._deferred:
            self._run_deferred()
            # Bulk is so much work a batch that sleeping costs little beside it.
            self._quick = min(self._quick, 0)
        self._served = time.monotonic()
        if self._quick >= QUICK:
            self._spin_end = self._served + SPIN_S
            if self._spinning is None:
                self._spinning = self._loop.call_soon(self._spin)

    def _spin(self) -> None:
        """Look again, with a turn of the loop in between: its sockets and timers wait for none of this."""
        self._spinning = None
        self._on_ready()
        if self._spinning is None:
            if time.monotonic() < self._spin_end:
                self._spinning = self._loop.call_soon(self._spin)
            else:
                self._quick = -AFTER_VAIN

    def _serve(self, batch: list[tuple[int, int]]) -> None:
        turn = self._turn = self._turn + 1
        watches = self._watches
        self.is_serving_many = len(batch) > 1
        for fd, events in batch:
            watch = watches.get(fd)
            if watch is None or watch.turn == turn:
                continue
            self._calling = True
            try:
                if events & _FOR_READER and watch.reader is not None:
                    watch.reader()
                if events & _FOR_WRITER and watch.writer is not None:
                    watch.writer()
            except Exception as error:
                self._give_up(fd, watch, error)
            finally:
                self._calling = False
                if self._less:
                    self._tell_less()
        self._finish_batch()

    def _tell_less(self) -> None:
        """Tell the kernel what a callback wants to hear no more of."""
        less, self._less = self._less, []
        for fd in less:
            watch = self._watches.get(fd)
            if watch is None:
                continue
            try:
                self._apply(fd, watch)
            except OSError as error:
                # Closed without `forget`. The number is the next socket's: it must not find what was this one's.
                self._give_up(fd, watch, error)

    def _finish_batch(self) -> None:
        self.is_serving_many = False
        if self._after:
            after, self._after = self._after, []
            self._run_all(after)

    def _wake(self) -> None:
        self._waking = None
        rested, self._resting = self._resting, {}
        self.is_serving_many = len(rested) > 1
        self._run_all(rested)
        self._finish_batch()

    def _run_all(self, works: Iterable[Callback]) -> None:
        for work in works:
            try:
                work()
            except Exception as error:
                self._loop.call_exception_handler({"message": "the poller's work failed", "exception": error})

    def _give_up(self, fd: int, watch: _Watch, error: Exception) -> None:
        """Report a callback that failed, and call it no more.

        Its socket is still ready, so it would fail again at once, and those behind it in the batch would never have their turn.
        """
        self._loop.call_exception_handler(
            {"message": "a socket's callback failed; the socket is not watched any more", "exception": error}
        )
        if self._watches.get(fd) is watch:
            watch.reader = watch.writer = None
            # It may have closed the socket without a word, which took it from the epoll.
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)
            del self._watches[fd]

    def _run_deferred(self) -> None:
        deferred = self._deferred
        end = time.monotonic() + TURN_S
        while deferred:
            work = next(iter(deferred))
            del deferred[work]
            work()
            if time.monotonic() >= end:
                break
