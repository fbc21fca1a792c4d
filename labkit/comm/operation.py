"""One communication of this rank, from issue to completion: what is recorded in the ring, and when."""

from __future__ import annotations

import _thread
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from labkit.recording.record import clock
from labkit.recording.ring_buffer import RingWriter
from labkit.recording.schema import CPU, CUDA, OPEN, SERVED, TIMED

if TYPE_CHECKING:
    from labkit.comm.emulated_link import Booking

__all__ = ["Batch", "Operation", "Ready"]


class Ready(Protocol):
    """The moment when a GPU had computed what is sent."""

    def time_ns(self) -> int | None:
        """That moment on `time.perf_counter_ns`; None while it has not come."""


class Operation:
    """A communication that was issued. Any thread may tell how it goes on; exactly one record is written, at its end.

    The thread that issues it, one that waits for it and one of the backend's that completes it may be three, at the
    same time. Attributes are set before the question is asked that depends on them, so that under the interpreter's
    lock no wait is lost.

    Args:
        ring: where it is written down.
        name: as the student knows it: "all_reduce".
        start_ns: when it was issued.
        nbytes, peer, group, match, line, signature: as in `recording.events.Span`.
        ready: where what is sent comes from a GPU: the rank neither communicates nor waits before that has computed it.
    """

    __slots__ = (
        "_once", "_ready", "_ring", "_served", "_slot", "booking", "end_ns", "future", "group", "line", "match", "name", "nbytes",
        "peer", "signature", "start_ns", "timed", "wait_end_ns", "wait_start_ns", "waited_for",
    )  # fmt: skip

    def __init__(
        self,
        ring: RingWriter,
        name: str,
        start_ns: int,
        nbytes: int = 0,
        peer: int = -1,
        group: str = "",
        match: int = 0,
        line: str = "",
        ready: Ready | None = None,
        signature: str = "",
    ) -> None:
        self._ring, self.name, self.start_ns, self.nbytes = ring, name, start_ns, nbytes
        self.peer, self.group, self.match, self.line, self.signature = peer, group, match, line, signature
        self.end_ns = self.wait_start_ns = self.wait_end_ns = 0
        self.future: Any = None  # until it completes, if somebody asked for it, and so may wait for it where we do not see it
        self.waited_for = False  # a thread of ours is blocked in it, and writes the record when it goes on
        self.booking: Booking | None = None  # over a slow link: when it ends
        self.timed = False  # who waits for it goes on after a time that the program has set
        self._ready = ready
        self._served = False  # it is waited for on a thread that does what another rank has called
        self._once = _thread.allocate_lock()
        self._slot = ring.pend(name, start_ns, nbytes=nbytes, peer=peer, group=group, match=match, line=line, signature=signature)

    @property
    def done(self) -> bool:
        """Whether it has completed or failed, so that waiting for it takes no time."""
        return self.end_ns != 0

    def wait_begins(self, thread: int = 0) -> None:
        """This thread is now blocked until it completes. Nothing changes where it has, or another thread waits already.

        Args:
            thread: `recording.ring_buffer.STREAM` where it is not this thread that is blocked, but a stream of its GPU;
                `TIMED` where it goes on at some time in any case.
        """
        if not self.wait_start_ns and not self.end_ns:
            self.wait_start_ns = now = clock()
            self.waited_for = True
            self._served = _thread.get_ident() in self._ring.serving_threads
            self._ring.waiting(self._slot, now, thread or TIMED * self.timed)

    def wait_ends(self) -> None:
        """This thread goes on, because it has completed."""
        self.wait_end_ns = now = clock()
        self.end_ns = self.end_ns or now
        self._write()

    def wait_begins_in_torch(self) -> None:
        """The rank is now blocked in C++ until it completes, as at the end of a backward pass of DDP."""
        if not self.wait_start_ns and not self.end_ns:
            self.wait_start_ns = now = clock()
            self._served = _thread.get_ident() in self._ring.serving_threads
            self._ring.waiting(self._slot, now, TIMED * self.timed)

    def wait_has_ended_in_torch(self) -> None:
        """The rank continues: its wait in C++ has ended, even if the thread that reports it has had no core yet."""
        future = self.future
        if future is not None and future.done():
            self.completed()

    def on_completion(self, future: Any) -> None:
        """For a future's `add_done_callback`: it has completed now, or failed."""
        try:
            future.value()
        except Exception:  # noqa: BLE001  # who waits for it gets to see what
            if not self.waited_for:
                self.failed()
                return
        if self.booking is not None:
            self.booking.then(self.completed)
        else:
            self.completed()

    @property
    def held(self) -> bool:
        """Whether a slow link holds it back at this moment, once the backend has completed it."""
        return self.booking is not None and not self.done and clock() < self.booking.due_ns

    def hold(self) -> None:
        """The backend has completed it; over a slow link, sleep until it ends there."""
        if self.booking is not None:
            self.booking.hold()

    def completed(self, _: object = None) -> None:
        """It has completed now."""
        self.end_ns = self.end_ns or clock()
        if not self.waited_for:
            if self.wait_start_ns:
                self.wait_end_ns = self.end_ns
            self._write()

    def failed(self) -> None:
        """It will never complete: it raised, or the wait for it did."""
        now = clock()
        self.end_ns = self.end_ns or now
        if self.wait_start_ns:
            self.wait_end_ns = now
        self._write(OPEN)

    def withdrawn(self) -> None:
        """It was refused when it was issued, so it never was."""
        if self.booking is not None:
            self.booking.cancel()
        if self._once.acquire(blocking=False):
            self._leave_slot()

    def _write(self, flags: int = 0, device: int = CPU) -> None:
        if not self._once.acquire(blocking=False):
            return
        start_ns, end_ns, wait_start_ns, wait_end_ns = self.start_ns, self.end_ns, self.wait_start_ns, self.wait_end_ns
        ready_ns = self._ready.time_ns() if self._ready is not None else None
        if ready_ns is not None:
            device = CUDA
            start_ns = min(max(start_ns, ready_ns), end_ns)
            wait_start_ns = max(wait_start_ns, ready_ns) if wait_start_ns else 0
        if wait_end_ns <= wait_start_ns:  # it had completed when somebody began to wait for it
            wait_start_ns = wait_end_ns = 0
        if self._served:
            flags |= SERVED
        self._ring.write_communication(
            self.name, start_ns, end_ns, wait_start_ns=wait_start_ns, wait_end_ns=wait_end_ns, nbytes=self.nbytes,
            peer=self.peer, group=self.group, match=self.match, line=self.line, signature=self.signature, device=device,
            flags=flags,
        )  # fmt: skip
        self._leave_slot()

    def _leave_slot(self) -> None:
        self.future = None  # it holds tensors
        slot, self._slot = self._slot, -1  # from now on the slot is another's
        self._ring.unpend(slot)


class Batch:
    """Operations that were launched as one, and end together.

    Args:
        operations: at least one.
    """

    def __init__(self, operations: Sequence[Operation]) -> None:
        self.operations = operations

    @property
    def done(self) -> bool:
        """Whether all have completed or failed."""
        return all(operation.done for operation in self.operations)

    @property
    def held(self) -> bool:
        """As for any of them."""
        return any(operation.held for operation in self.operations)

    def wait_begins(self, thread: int = 0) -> None:
        """As for one of them, and so are the others."""
        for operation in self.operations:
            operation.wait_begins(thread)

    def wait_ends(self) -> None:
        """This thread goes on."""
        for operation in self.operations:
            operation.wait_ends()

    def hold(self) -> None:
        """As for the last of them."""
        for operation in self.operations:
            operation.hold()

    def completed(self) -> None:
        """All have completed now."""
        for operation in self.operations:
            operation.completed()

    def failed(self) -> None:
        """None will ever complete."""
        for operation in self.operations:
            operation.failed()
