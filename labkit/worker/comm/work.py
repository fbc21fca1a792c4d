"""The `Work` objects of pending operations, with every wait for them recorded, and the ends of messages.

gloo reports the completion of a send or receive only to a thread that waits for it, and only to one thread. After a
grace period, a thread of labkit's waits for the message; the student's `wait` then waits for that thread.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch.distributed import Work

from labkit.recording.record import clock
from labkit.recording.schema import TIMED
from labkit.recording.torch_internals import JOIN
from labkit.worker.comm.futures import Futures
from labkit.worker.comm.operation import Operation, blocked, ends_by_itself

NO_TIMEOUT: Final = timedelta(0)  # torch's default
SHORTEST: Final = timedelta(milliseconds=1)
# No cost for programs that wait at once, as `send` and `recv` do; completions are noticed late by up to this time.
GRACE_NS: Final = 500_000
EXIT_LIMIT_S: Final = 0.5  # for threads to notice that their messages have failed


class RecordedWork(Work):
    """A `Work` of torch's that informs its operations about waits. C++ calls these methods, too.

    Args:
        operations: more than one if they were launched together, and end together.
        notified: whether the backend notifies the operations when they complete; otherwise `wait` does.
        own: whether the program's own code gets it, and must wait for it.
        silent: whether the backend reports the completion only to the thread that waits for it.
    """

    __slots__ = ("_future", "_futures", "_notified", "_operations", "_silent", "_unwaited", "_work")

    def __init__(
        self, work: Any, operations: Sequence[Operation], futures: Futures, *, notified: bool = False, own: bool = False,
        silent: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self._work, self._operations, self._futures, self._notified = work, operations, futures, notified
        self._unwaited, self._silent = own, silent
        self._future: Any = None  # on an emulated link, the delayed future, the same for all callers

    def __del__(self) -> None:
        for operation in self._operations:
            if self._unwaited:
                operation.dropped()
            if self._silent and not operation.done:
                if self._work.is_completed():
                    operation.completed()  # at an unknown earlier time
                else:
                    operation.failed()  # its completion will never be known

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Block until it has completed; on a GPU, make the current stream wait for it."""
        self._unwaited = False
        if all(operation.done for operation in self._operations):
            for operation in self._operations:
                operation.wait_begins()
                operation.hold()  # raises its error again
            return self._work.wait(timeout)  # type: ignore[no-any-return]
        with blocked(*self._operations, limit=timeout):
            result: bool = self._work.wait(timeout)
        return result

    def is_completed(self) -> bool:
        """Whether it has completed."""
        if not self._work.is_completed():
            return False
        for operation in self._operations:
            operation.backend_completed()
        if any(operation.held for operation in self._operations):
            return False
        for operation in self._operations:
            operation.completed()
        self._unwaited = False
        return True

    def get_future(self) -> Any:
        """Return a future that completes with it."""
        self._unwaited = False
        if self._future is not None:
            return self._future
        future = self._work.get_future()
        self._futures.tie(future, self._operations, fail=True)
        for operation in self._operations:
            if not self._notified:
                self._futures.tell(future, operation.on_completion, group=operation.group)
        self._notified = True
        booking = self._operations[-1].booking
        if booking is not None:
            future = self._future = booking.delayed(future, partial(self._futures.tell, group=self._operations[-1].group))
            self._futures.tie(future, self._operations, fail=True)
        for operation in self._operations:
            operation.has_future = True
            if not operation.done:
                operation.future = future
        return future


class RecordedMessage(RecordedWork):
    """A message. Only one thread may wait for it in C++: the student's or labkit's; the other waits for that thread.

    `arrived` is called with the backend's `Work` when it has completed.
    """

    __slots__ = ("_arrived", "_error", "_operation", "_taken", "_under_way", "_waited", "start_ns")

    def __init__(
        self, work: Any, operation: Operation, futures: Futures, arrived: Callable[[Any, Operation], None] | None,
        *, own: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(work, [operation], futures, notified=True, own=own)
        self._operation, self._arrived, self.start_ns = operation, arrived, operation.start_ns
        self._taken = _thread.allocate_lock()  # held by the thread that waits for it in C++
        self._under_way = _thread.allocate_lock()  # held until that wait has ended
        self._under_way.acquire()
        self._error: BaseException | None = None
        self._waited = False

    def claim(self) -> bool:
        """Whether the caller must wait for it: True for the first caller."""
        return self._taken.acquire(blocking=False)

    def attend(self, timeout: timedelta = NO_TIMEOUT) -> None:
        """Block until it has completed or failed, and record which."""
        operation = self._operation
        try:
            self._work.wait(timeout)
            if self._arrived is not None:
                self._arrived(self._work, operation)
            operation.hold()
            operation.completed()
        except BaseException as error:  # noqa: BLE001  # the student's thread raises it
            self._error = error
            if not operation.waited_for:
                operation.failed()
        finally:
            self._under_way.release()

    def give_up(self) -> None:
        """Make it fail for the thread that waits for it: gloo closes the connection when a time limit expires."""
        with contextlib.suppress(RuntimeError):
            self._work.wait(SHORTEST)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Block until it has completed."""
        self._unwaited = False
        operation = self._operation
        was_done = operation.done
        operation.wait_begins(TIMED if ends_by_itself(timeout) else 0)
        if not was_done:
            if self.claim():
                self.attend(timeout)
            elif self._under_way.acquire(timeout=timeout.total_seconds() or -1):
                self._under_way.release()
            else:
                self._time_is_up(timeout)
        if self._error is not None:
            operation.failed(self._error)
            raise self._error
        operation.wait_ends()
        self._waited = True
        return True

    def _time_is_up(self, timeout: timedelta) -> None:
        """Make gloo fail, and keep its error, with the program's time limit in the message."""
        try:
            self._work.wait(SHORTEST)
            with self._under_way:  # it has arrived, and another thread copies it to the GPU
                pass
        except RuntimeError as error:
            limit_ms = round(timeout / SHORTEST)
            error.args = (str(error).replace("waiting 1ms", f"waiting {limit_ms}ms"),)
            self._error = error

    def is_completed(self) -> bool:
        """Whether it was waited for: with gloo, a message never completes before that."""
        return self._waited


class Attendant:
    """Threads that wait for messages: one for each pending message that no other thread waits for."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[RecordedMessage] = queue.SimpleQueue()
        self._attended: set[RecordedMessage] = set()  # each holds a thread
        self._free = 0  # threads that are not blocked in a message
        self._closed = False
        self._lock = threading.Lock()
        atexit.register(self._let_go)

    def watch(self, message: RecordedMessage) -> None:
        """Make sure that a thread waits for the message."""
        self._messages.put(message)
        if not self._free:
            self._more()

    def _more(self) -> None:
        with self._lock:
            if not self._free:
                # Where no thread can be started, as at the end of a script in Python 3.12, a message is only noted as
                # complete when the program waits for it, or when a thread is free.
                with contextlib.suppress(RuntimeError):
                    threading.Thread(target=self._serve, name="labkit-messages", daemon=True).start()
                    self._free += 1

    def _serve(self) -> None:
        while True:
            message = self._messages.get()
            early_ns = message.start_ns + GRACE_NS - clock()
            if early_ns > 0:
                time.sleep(early_ns / 1e9)
            if not self._closed and message.claim():
                with self._lock:
                    self._free -= 1
                    self._attended.add(message)
                self._more()  # later messages may complete before this one
                message.attend()
                with self._lock:
                    self._attended.discard(message)
                    self._free += 1
            del message  # releases its tensors

    def _let_go(self) -> None:
        """Let all threads return from C++: one that returns while the interpreter exits would abort the process."""
        self._closed = True
        with self._lock:
            messages = list(self._attended)
        for message in messages:
            message.give_up()
        until = time.monotonic() + EXIT_LIMIT_S
        while self._attended and time.monotonic() < until:
            time.sleep(0.001)


class HostCopy:
    """The copy of a GPU tensor in the host's memory, `host`, through which gloo sends and receives a message.

    gloo copies the GPU tensors of collectives by itself, those of messages not: it passes a GPU's address to the
    operating system, which answers "Bad address"; a small message even ends the process.

    The student's thread issues a message, and any thread may complete it. So the copies are on a stream of their own,
    which begins where the student's stream is when the message is issued. Both block the calling thread.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.host = torch.empty_strided(  # of the same layout, so that gloo still rejects one that is not contiguous
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu", pin_memory=True
        )
        self._tensor = tensor
        self._stream = torch.cuda.Stream(tensor.device)
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))

    def copy(self, *, to_gpu: bool) -> None:
        """Fill the copy once the GPU has computed the tensor, or the tensor once earlier work no longer reads it."""
        source, target = (self.host, self._tensor) if to_gpu else (self._tensor, self.host)
        # Like gloo on a CPU, unseen by autograd: the tensor may be a leaf that requires a gradient.
        # `device`: a thread that works on GPU 0 otherwise, and returns to it, would open a context there.
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream), torch.inference_mode():
            target.data.copy_(source)


def keep_for_reducers() -> None:
    """Keep each `Work` that DistributedDataParallel hands to its reducer, as it does inside `Join`.

    The reducer keeps the C++ part only. Without its Python part, that has no `wait` but the one of torch's base class,
    which never ends.
    """
    kept: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def hand_over(set_handle: Callable[..., None], reducer: Any, work: Any, *how: bool) -> None:
        kept[reducer] = work
        set_handle(reducer, work, *how)

    JOIN.apply(_set_forward_pass_work_handle=hand_over)


def _delegate(name: str) -> None:
    def method(self: RecordedWork, *args: Any, **kwargs: Any) -> Any:
        self._unwaited = False
        return getattr(self._work, name)(*args, **kwargs)

    method.__name__ = name
    setattr(RecordedWork, name, method)


for _name in dir(Work):
    if not _name.startswith(("__", "_pybind11")) and _name not in vars(RecordedWork) and _name != "unbox":
        _delegate(_name)  # `result`, `exception`, `_source_rank`, ...
for _class in (RecordedWork, RecordedMessage):
    # Their `repr` is the same as without labkit.
    _class.__name__ = _class.__qualname__ = Work.__name__
    _class.__module__ = Work.__module__
