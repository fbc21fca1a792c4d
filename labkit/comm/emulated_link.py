"""A slow link: what went through the backend is held back until the model of the link says that it has ended.

Nothing spins meanwhile: whoever waits sleeps, and what nobody waits for is told by one thread when its time has come.
"""

from __future__ import annotations

import atexit
import ctypes
import heapq
import itertools
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final

import torch

from labkit.costs.link import Link
from labkit.costs.shared_link import Cost, SharedLink
from labkit.recording.record import clock

__all__ = ["Booking", "SlowLink", "hold_until"]

PR_SET_TIMERSLACK: Final = 29
EXIT_LIMIT_S: Final = 0.5  # for the thread that tells of ends to come to an end itself


class Booking:
    """One operation of this rank in the book.

    Args:
        slow: the rank's link.
        group, match: which operation, as in `recording.events.Span`.
    """

    __slots__ = ("_group", "_match", "_slow")

    def __init__(self, slow: SlowLink, group: str, match: int) -> None:
        self._slow, self._group, self._match = slow, group, match

    @property
    def due_ns(self) -> int:
        """When it ends by the model, on `recording.record.clock`; to be asked once the backend has ended it."""
        return self._slow.shared_link.due_ns(self._group, self._match)

    def hold(self) -> None:
        """Sleep until it ends."""
        hold_until(self.due_ns)

    def then(self, action: Callable[[], None]) -> None:
        """Do something when it ends, on a thread for such actions."""
        self._slow.at(self.due_ns, action)

    def cancel(self) -> None:
        """It was refused, so it never was."""
        self._slow.shared_link.withdraw(self._group, self._match)

    def delayed(self, future: Any, tell: Callable[[Any, Callable[[Any], None]], None]) -> Any:
        """A future that completes as the given one does, but not before the operation ends.

        Args:
            future: the backend's.
            tell: has a function called with a future when that completes.
        """
        held: Any = torch.futures.Future()
        tell(future, lambda done: self.then(lambda: pass_on(done, held)))
        return held


class SlowLink:
    """What a rank sends and receives, as over a link.

    Args:
        link: the link.
        rank: this rank's number.
        shared_link: the group's book.
    """

    def __init__(self, link: Link, rank: int, shared_link: SharedLink) -> None:
        self.link, self.rank, self.shared_link = link, rank, shared_link
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()  # of actions that are due at the same time
        self._change = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        atexit.register(self._close)

    nothing: ClassVar[Cost] = Cost(0, 0, (), (), 1)  # of something that is only known to be there

    def collective(self, name: str, nbytes: int, ranks: Sequence[int], group: str, match: int, at_ns: int) -> Booking:
        """This rank has entered a collective. A rank's collectives use its link in sequence, as on one NCCL stream."""
        cost_ns = round(self.link.seconds(name, nbytes, len(ranks)) * 1e9)
        self.shared_link.arrive(group, match, at_ns, Cost(cost_ns, cost_ns, ranks, ranks, len(ranks)))
        return Booking(self, group, match)

    def message(
        self, source: int, destination: int, nbytes: int, group: str, match: int, at_ns: int, *, ends: int = 2
    ) -> Booking:
        """A message whose sender or receiver this rank is. The next one may follow it at once: latencies overlap.

        Args:
            source: the rank that sends it.
            destination: the rank that receives it.
            nbytes: its size.
            group: what both call the pair of them.
            match: its number there.
            at_ns: when this rank issued it.
            ends: 2 where it begins when both ends have come; 1 where its sender alone books it.
        """
        busy_ns = round(nbytes / self.link.bytes_per_s * 1e9)
        cost_ns = round(self.link.latency_s * 1e9) + busy_ns
        self.shared_link.arrive(group, match, at_ns, Cost(cost_ns, busy_ns, [source], [destination], ends))
        return Booking(self, group, match)

    def at(self, due_ns: int, action: Callable[[], None]) -> None:
        """Do something at a moment; at once, if that has passed and nothing is to be done before."""
        with self._change:
            heapq.heappush(self._due, (due_ns, next(self._order), action))
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="labkit-link", daemon=True)
                self._thread.start()
            self._change.notify()

    def _serve(self) -> None:
        while True:
            with self._change:
                while not self._closed and (not self._due or self._due[0][0] > clock()):
                    self._change.wait((self._due[0][0] - clock()) / 1e9 if self._due else None)
                if self._closed:
                    return
                _, _, action = heapq.heappop(self._due)
            action()
            del action  # and with it the tensors

    def _close(self) -> None:
        """A thread that calls into torch while the interpreter ends aborts the process."""
        with self._change:
            self._closed = True
            self._change.notify()
        if self._thread is not None:
            self._thread.join(EXIT_LIMIT_S)


def hold_until(due_ns: int) -> None:
    """Sleep until a moment of `recording.record.clock`."""
    left_ns = due_ns - clock()
    while left_ns > 0:
        time.sleep(left_ns / 1e9)
        left_ns = due_ns - clock()


def wake_in_time() -> None:
    """Let this thread, and those that it starts from now on, sleep to within some microseconds. Linux adds 50.

    Source: prctl(2), the Linux man-pages.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)


def pass_on(done: Any, held: Any) -> None:
    """Complete a future as another one has."""
    try:
        value = done.value()
    except Exception as error:  # noqa: BLE001  # who waits for it gets to see what
        held.set_exception(error)
    else:
        held.set_result(value)
