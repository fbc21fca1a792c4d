"""One communication operation of this rank, from issue to completion, and its record in the ring.

What happens to an operation, and who reports it; any thread may, and exactly one record is written, at the end:

    issued        `Operation(...)`: whoever calls torch's function (`process_group`, `rpc_calls`, `backward`, ...)
      → withdrawn `withdrawn`: the same, if torch rejects the call; no record
      → waited for
                  `wait_begins`: a thread in `blocked`, `RecordedWork.wait` or `Futures`; with `in_torch`, `Backwards`,
                  which only knows that a thread of torch's waits
      → done by the backend
                  `on_completion`: the backend's thread, through `Futures.tell`
                  `hold`: the thread that waited for the backend; on an emulated link, it sleeps until the end there
                  `backend_completed` alone, without sleeping: `is_completed`
      → complete  `completed`: as above, if there is no link, or when `Booking` says that it ends there; for messages,
                  the thread of `Attendant`; for RPC, `Futures`; for a wait in torch, `Backwards` if it is quicker than
                  the backend's thread. If a Python thread waits, `completed` leaves the record to it:
      → complete  `wait_ends`: this thread continues
      → failed    `failed`: whoever gets the error, or gives up; the record has the flag `OPEN`

Two notes come beside: `waited_when_complete` (a wait that need not wait), and `dropped` (nobody will wait). Operations
of the GPU (`cuda_timing.DeviceOperation`) are complete when the GPU has reached an event: `settled`.
"""

from __future__ import annotations

import _thread
import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from labkit.ipc.tracebacks import OWN_LIMIT
from labkit.recording.record import clock
from labkit.recording.ring_buffer import RingWriter
from labkit.recording.schema import CPU, CUDA, OPEN, OWN_THREAD, SERVED, THROUGH_HOST, TIMED, UNWAITED

if TYPE_CHECKING:
    from labkit.worker.comm.emulated_link import Booking

# NCCL's default; gloo's is three times as long. Torch's defaults do not delay the report of a deadlock, but a program
# that expects a wait to fail, and handles that, sets a shorter limit.
RESPECTED: Final = timedelta(minutes=10)


def ends_by_itself(limit: timedelta | float | None) -> bool:
    """Whether a time limit (in seconds if it is a number) is so short that the program expects the wait to fail."""
    seconds = limit.total_seconds() if isinstance(limit, timedelta) else limit or 0
    return 0 < seconds < RESPECTED.total_seconds()


class OwnLimit(NamedTuple):
    """A time limit that the program has set for a group's operations, and the student's line that set it, or ""."""

    seconds: float
    line: str

    def note(self, error: BaseException, start_ns: int) -> None:
        """Note in the error of an operation that this limit ended it, if it had lasted so long."""
        if clock() - start_ns >= self.seconds * 1e9:
            where = f" ({self.line})" if self.line else ""
            setattr(error, OWN_LIMIT, f"{self.seconds:g} s is the program's own time limit{where}.")


class Operation:
    """An issued operation; its name and details are as in `recording.schema.Span`.

    The thread that issues it, a thread that waits for it and the backend's thread that completes it may run
    concurrently. Attributes are set before the checks that depend on them, so that with the GIL, no wait is lost.

    Args:
        ready: for data on a GPU that gloo moves through the host, when the GPU has computed it (a `GpuMark` of
            `cuda_timing`): the rank neither communicates nor waits before that.
        limit: the time limit that the program has set for it, if it is that of a process group.
    """

    __slots__ = (
        "_delay_ns", "_flags", "_issue_delay_ns", "_limit", "_once", "_ready", "_ring", "_slot", "_wait_delay_ns", "also",
        "backend_ns", "blocking", "booking", "end_ns", "future", "group", "has_future", "line", "match", "name", "nbytes",
        "peer", "root", "signature", "start_ns", "timed", "wait_end_ns", "wait_start_ns", "waited_for",
    )  # fmt: skip

    def __init__(
        self, ring: RingWriter, name: str, start_ns: int, nbytes: int = 0, peer: int = -1, group: str = "", match: int = 0,
        line: str = "", ready: Any = None, signature: str = "", root: int = -1, limit: OwnLimit | None = None,
    ) -> None:  # fmt: skip
        self._ring, self.name, self.start_ns, self.nbytes = ring, name, start_ns, nbytes
        self.peer, self.root, self.group, self.match, self.line, self.signature = peer, root, group, match, line, signature
        self.end_ns = self.backend_ns = self.wait_start_ns = self.wait_end_ns = 0
        self.has_future = False  # whether a future was requested: C++ may wait for it
        self.future: Any = None  # this future, until it completes
        self._delay_ns = ring.thread_delay()  # of the thread that waits for it
        self._issue_delay_ns, self._wait_delay_ns = self._delay_ns(), 0
        self.waited_for = False  # a Python thread is blocked in it, and writes the record when it continues
        self.booking: Booking | None = None  # on an emulated link
        self.also: Callable[[], None] | None = None  # is called as its record is written, before a waiting thread continues
        self.blocking = False  # whether one call issues it and waits for it, so that nothing is computed in between
        self._limit = limit
        self.timed = limit is not None  # whether waits for it end after a time limit that the program has set
        self._ready = ready
        # Also whether the waiting thread serves a remote call, once one waits.
        self._flags = (ring.thread_flags() & OWN_THREAD) | (THROUGH_HOST if ready is not None else 0)
        self._once = _thread.allocate_lock()
        self._slot = ring.pend(
            name, start_ns, nbytes=nbytes, peer=peer, root=root, group=group, match=match, line=line, signature=signature
        )

    @property
    def done(self) -> bool:
        """Whether it has completed or failed."""
        return self.end_ns != 0

    def wait_begins(self, thread: int = 0, *, in_torch: bool = False) -> None:
        """Note that this thread is blocked until it completes, unless it has, or another thread is already waiting.

        If it has completed, the wait is recorded as one for an operation that was complete already.

        Args:
            thread: `STREAM` (see `recording.schema`) if a stream of the GPU is blocked rather than this thread; `TIMED`
                if the wait has a time limit.
            in_torch: whether the wait is in C++, as at the end of a backward pass of DDP: nobody calls `wait_ends`.
        """
        if self.end_ns:
            self.waited_when_complete()
        elif not self.wait_start_ns:
            self.wait_start_ns = now = clock()
            self._delay_ns = self._ring.thread_delay()
            self.waited_for = not in_torch
            self._flags |= self._ring.thread_flags() & SERVED
            self._ring.waiting(self._slot, now, thread or TIMED * self.timed)

    def wait_ends(self) -> None:
        """Note that this thread continues, because it has completed."""
        self.wait_end_ns = now = clock()
        self._wait_delay_ns = self._delay_ns()
        self.end_ns = self.end_ns or now
        self._write()

    def waited_when_complete(self) -> None:
        """Note that this thread waits for it, and need not, because the backend has completed it."""
        if self.group:  # otherwise nobody could tell for which operation
            self._ring.write_wait(self.group, self.match, clock())

    def dropped(self) -> None:
        """Note that the program no longer has what it would wait for, and has not waited."""
        self._flags |= UNWAITED
        if self.end_ns and self.group:  # it may be recorded already, without this flag
            self._ring.write_wait(self.group, self.match, clock(), UNWAITED)

    def on_completion(self, future: Any) -> None:
        """Note that it has completed or failed; for a future's `add_done_callback`."""
        try:
            future.value()
        except Exception:  # noqa: BLE001  # raised where the future is waited for
            self.failed()
            return
        self.backend_completed()
        if self.booking is not None:
            self.booking.then(self.completed if self.booking.error is None else self.failed)
        else:
            self.completed()

    def backend_completed(self) -> None:
        """Note that the backend has completed it, and that only an emulated link, if there is one, delays it now."""
        if self.booking is not None:
            self.backend_ns = self.backend_ns or clock()

    @property
    def held(self) -> bool:
        """Whether an emulated link still delays it, once the backend has completed it."""
        return self.booking is not None and not self.done and clock() < self.booking.due_ns

    def hold(self) -> None:
        """Sleep until it ends on the emulated link, if there is one; to be called once the backend has completed it.

        Raises:
            RuntimeError: the link takes longer for it than the program's time limit.
        """
        if self.booking is not None:
            self.backend_completed()
            self.booking.hold()

    def completed(self, _: object = None) -> None:
        """Note that it has completed now."""
        self.end_ns = self.end_ns or clock()
        if not self.waited_for:
            if self.wait_start_ns:
                self.wait_end_ns, self._wait_delay_ns = self.end_ns, self._delay_ns()
            self._write()

    def failed(self, error: BaseException | None = None) -> None:
        """Note that it will never complete, because it or the wait for it has raised an error."""
        now = clock()
        if error is not None and self._limit is not None:
            self._limit.note(error, self.start_ns)
        self.end_ns = self.end_ns or now
        if self.wait_start_ns:
            self.wait_end_ns = now
        self._write(OPEN)

    def withdrawn(self) -> None:
        """Drop it, because the backend has rejected it."""
        if self.booking is not None:
            self.booking.cancel()
        if self._once.acquire(blocking=False):
            self._leave_slot()

    def _write(self, flags: int = 0, device: int = CPU) -> None:
        if not self._once.acquire(blocking=False):
            return
        start_ns, end_ns, wait_start_ns, wait_end_ns = self.start_ns, self.end_ns, self.wait_start_ns, self.wait_end_ns
        if self.blocking and wait_start_ns:
            wait_start_ns = start_ns
        ready_ns = self._ready.time_ns() if self._ready is not None else None
        if ready_ns is not None:
            device = CUDA
            start_ns = min(max(start_ns, ready_ns), end_ns)
            wait_start_ns = max(wait_start_ns, ready_ns) if wait_start_ns else 0
        if wait_end_ns <= wait_start_ns:  # it had completed before the wait
            wait_start_ns = wait_end_ns = self._wait_delay_ns = 0
        self._ring.write_communication(
            self.name, start_ns, end_ns, wait_start_ns=wait_start_ns, wait_end_ns=wait_end_ns, nbytes=self.nbytes,
            peer=self.peer, root=self.root, group=self.group, match=self.match, line=self.line, signature=self.signature,
            device=device, flags=flags | self._flags, backend_ns=min(self.backend_ns, end_ns),
            issue_delay_ns=self._issue_delay_ns, wait_delay_ns=self._wait_delay_ns,
        )  # fmt: skip
        if self.also is not None:
            self.also()
        self._leave_slot()

    def _leave_slot(self) -> None:
        self.future = self.also = None  # they hold tensors
        slot, self._slot = self._slot, -1  # the slot may be reused from now on
        self._ring.unpend(slot)


@contextlib.contextmanager
def blocked(*operations: Operation, limit: timedelta | float | None = None) -> Iterator[None]:
    """Note that this thread waits for operations inside this context, and sleep until they end on an emulated link.

    An error means that they have failed. `limit` is the time limit of the wait.
    """
    for operation in operations:
        operation.wait_begins(TIMED if ends_by_itself(limit) else 0)
    try:
        yield
        for operation in operations:
            operation.backend_completed()  # before the first of them sleeps
        for operation in operations:
            operation.hold()
    except BaseException as error:
        for operation in operations:
            operation.failed(error)
        raise
    for operation in operations:
        operation.wait_ends()
