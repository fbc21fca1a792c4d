"""Emulated links: delays operations that the backend has completed until they end according to the link's model.

Waiting threads sleep. Another thread completes the operations that no thread waits for, and runs their callbacks. As a
callback may wait for a further operation, a second thread takes over meanwhile.
"""

from __future__ import annotations

import atexit
import ctypes
import heapq
import itertools
import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, ClassVar, Final

import torch

from labkit.costs.link import Link
from labkit.costs.network import Network, as_network
from labkit.costs.shared_link import LinkCost, SharedLink, collective_cost, message_cost
from labkit.recording.record import clock

PR_SET_TIMERSLACK: Final = 29
EXIT_LIMIT_S: Final = 0.5  # for the threads that complete operations to end


class Booking:
    """A scheduled operation of this rank on an emulated link, which takes `cost_ns` according to the model.

    `limit_s` is the program's time limit for its transfer; inf for none.
    """

    __slots__ = ("_early_ns", "_group", "_match", "_slow", "error")

    def __init__(self, slow: SlowLink, group: str, match: int, cost_ns: int, limit_s: float) -> None:
        self._slow, self._group, self._match = slow, group, match
        over = cost_ns > limit_s * 1e9
        self._early_ns = cost_ns - round(limit_s * 1e9) if over else 0  # how much sooner it ends, since it fails
        self.error: RuntimeError | None = None  # that it ends with, as gloo does when a time limit expires
        if over:
            self.error = RuntimeError(
                f"Timed out waiting {limit_s * 1e3:.0f}ms: this takes {cost_ns / 1e6:.0f}ms over {slow.link}"
            )

    @property
    def due_ns(self) -> int:
        """When it ends according to the model, on `recording.record.clock`; valid once the backend has completed it."""
        return self._slow.shared_link.due_ns(self._group, self._match) - self._early_ns

    def hold(self) -> None:
        """Sleep until it ends; raise its error if it has one."""
        hold_until(self.due_ns)
        if self.error is not None:
            raise self.error

    def then(self, action: Callable[[], None]) -> None:
        """Run an action when it ends, on a thread of the link's."""
        self._slow.at(self.due_ns, action)

    def cancel(self) -> None:
        """Remove it, because the backend has rejected it."""
        self._slow.shared_link.withdraw(self._group, self._match)

    def delayed(self, future: Any, tell: Callable[[Any, Callable[[Any], None]], None]) -> Any:
        """Return a future that completes with the result of the given one, but not before the operation ends.

        `tell` registers a function that is called with a future when it completes.
        """
        held: Any = torch.futures.Future()

        def end(done: Any) -> None:
            if self.error is None:
                pass_on(done, held)
            else:
                held.set_exception(self.error)

        tell(future, lambda done: self.then(lambda: end(done)))
        return held


class SlowLink:
    """The emulated link of one rank, or its links in a network; all ranks of the group share the schedule.

    `fd` is the shared memory with that schedule, which passes to the link.
    """

    def __init__(self, link: Link | Network, rank: int, ranks: int, fd: int) -> None:
        wake_in_time()
        self.link, self.rank, self.shared_link = link, rank, SharedLink(fd)
        self.shared_link.keep_from_forks()
        self._network = as_network(link, ranks)
        self._cost = lru_cache(maxsize=1 << 10)(partial(collective_cost, self._network))  # programs repeat their collectives
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()  # orders actions that are due at the same time
        self._change = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._idle = 0  # threads that wait for the next action
        self._closed = False
        atexit.register(self._close)

    nothing: ClassVar[LinkCost] = LinkCost(0, 0, (), (), 1)  # of a value that is only announced

    def collective(
        self, name: str, nbytes: int, ranks: Sequence[int], group: str, match: int, at_ns: int, limit_s: float
    ) -> Booking:
        """Schedule a collective that this rank issues at a time."""
        cost = self._cost(name, nbytes, tuple(ranks))
        self.shared_link.arrive(group, match, at_ns, cost)
        return Booking(self, group, match, cost.cost_ns, limit_s)

    def message(
        self, source: int, destination: int, nbytes: int, group: str, match: int, at_ns: int, *, ends: int = 2,
        limit_s: float = math.inf,
    ) -> Booking:  # fmt: skip
        """Schedule a message that this rank sends or receives.

        It starts when both ranks have arrived, or, with `ends=1`, when its sender has, which alone schedules it.
        """
        cost = message_cost(self._network, source, destination, nbytes, ends)
        self.shared_link.arrive(group, match, at_ns, cost)
        return Booking(self, group, match, cost.cost_ns, limit_s)

    def to(self, peer: int) -> Link:
        """Return the link between this rank and another."""
        return self._network.link(self.rank, peer)

    def at(self, due_ns: int, action: Callable[[], None]) -> None:
        """Run an action at a given time, or as soon as possible after it."""
        with self._change:
            heapq.heappush(self._due, (due_ns, next(self._order), action))
            if not self._threads:
                self._start()
            self._change.notify_all()

    def _start(self) -> None:
        thread = threading.Thread(target=self._serve, name="labkit-link", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _serve(self) -> None:
        while True:
            with self._change:
                self._idle += 1
                while not self._closed and (not self._due or self._due[0][0] > clock()):
                    self._change.wait((self._due[0][0] - clock()) / 1e9 if self._due else None)
                self._idle -= 1
                if self._closed:
                    return
                _, _, action = heapq.heappop(self._due)
                if not self._idle:
                    self._start()
            action()
            del action  # it holds tensors

    def _close(self) -> None:
        """End the threads: one that calls into torch while the interpreter shuts down aborts the process."""
        with self._change:
            self._closed = True
            self._change.notify_all()
        until_s = time.monotonic() + EXIT_LIMIT_S
        for thread in self._threads:
            thread.join(max(until_s - time.monotonic(), 0))


def hold_until(due_ns: int) -> None:
    """Sleep until a time on `recording.record.clock`."""
    left_ns = due_ns - clock()
    while left_ns > 0:
        time.sleep(left_ns / 1e9)
        left_ns = due_ns - clock()


def wake_in_time() -> None:
    """Make sleeps accurate to a few microseconds in this thread and those that it starts; by default Linux adds 50.

    Source: prctl(2), the Linux man-pages.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)


def pass_on(done: Any, held: Any) -> None:
    """Complete a future with the result or the error of another."""
    try:
        value = done.value()
    except Exception as error:  # noqa: BLE001  # raised where the future is waited for
        held.set_exception(error)
    else:
        held.set_result(value)
