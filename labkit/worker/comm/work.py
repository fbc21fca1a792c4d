"""The `Work` objects of pending operations, with every wait for them recorded."""

from __future__ import annotations

import _thread
import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final
from weakref import WeakKeyDictionary

from torch.distributed import Work

from labkit.recording.schema import TIMED
from labkit.worker.comm.futures import Futures
from labkit.worker.comm.operation import Batch, Operation, blocked
from labkit.worker.comm.time_limits import ends_by_itself
from labkit.worker.comm.torch_internals import JOIN

NO_TIMEOUT: Final = timedelta(0)  # torch's default
SHORTEST: Final = timedelta(milliseconds=1)


class WatchedWork(Work):
    """A `Work` of torch's that informs its operation about waits. C++ calls these methods, too.

    Args:
        notified: whether the backend notifies the operation when it completes; otherwise `wait` does.
        own: whether the program's own code gets it, and must wait for it.
    """

    __slots__ = ("_future", "_futures", "_notified", "_operation", "_unwaited", "_work")

    def __init__(self, work: Any, operation: Operation | Batch, futures: Futures, notified: bool, own: bool = False) -> None:
        super().__init__()
        self._work, self._operation, self._futures, self._notified = work, operation, futures, notified
        self._unwaited = own
        self._future: Any = None  # on an emulated link, the delayed future, the same for all callers

    def __del__(self) -> None:
        if self._unwaited:
            for operation in self._operations:
                operation.dropped()

    @property
    def _operations(self) -> Sequence[Operation]:
        return self._operation.operations if isinstance(self._operation, Batch) else [self._operation]

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Block until it has completed; on a GPU, make the current stream wait for it."""
        self._unwaited = False
        operation = self._operation
        if operation.done:
            operation.wait_begins()
            operation.hold()  # raises its error again
            return self._work.wait(timeout)  # type: ignore[no-any-return]
        with blocked(operation, TIMED if ends_by_itself(timeout) else 0):
            result: bool = self._work.wait(timeout)
            operation.hold()
        return result

    def is_completed(self) -> bool:
        """Whether it has completed."""
        if not self._work.is_completed():
            return False
        self._operation.backend_completed()
        if self._operation.held:
            return False
        self._operation.completed()
        self._unwaited = False
        return True

    def get_future(self) -> Any:
        """Return a future that completes with it."""
        self._unwaited = False
        if self._future is not None:
            return self._future
        future = self._work.get_future()
        operations = self._operations
        self._futures.tie(future, operations)
        for operation in operations:
            if not self._notified:
                self._futures.tell(future, operation.on_completion, of_backend=True)
        self._notified = True
        booking = operations[-1].booking
        if booking is not None:
            future = self._future = booking.delayed(future, self._futures.tell)
            self._futures.tie(future, operations)
        for operation in operations:
            operation.has_future = True
            if not operation.done:
                operation.future = future
        return future


class SilentWork(WatchedWork):
    """A `Work` whose backend reports the completion only to the thread that waits for it."""

    __slots__ = ()

    def __del__(self) -> None:
        super().__del__()
        if self._operation.done:
            return
        if self._work.is_completed():
            self._operation.completed()  # at an unknown earlier time
        else:
            self._operation.failed()  # its completion will never be known


class WatchedMessage(WatchedWork):
    """A message. Only one thread may wait for it in C++: the student's or labkit's; the other waits for that thread.

    `arrived` is called with the backend's `Work` when it has completed.
    """

    __slots__ = ("_arrived", "_error", "_taken", "_under_way", "_waited")
    _operation: Operation

    def __init__(
        self, work: Any, operation: Operation, futures: Futures, arrived: Callable[[Any, Operation], None] | None,
        own: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(work, operation, futures, True, own)
        self._arrived = arrived
        self._taken = _thread.allocate_lock()  # held by the thread that waits for it in C++
        self._under_way = _thread.allocate_lock()  # held until that wait has ended
        self._under_way.acquire()
        self._error: BaseException | None = None
        self._waited = False

    @property
    def start_ns(self) -> int:
        """When it was issued."""
        return self._operation.start_ns

    def claim(self) -> bool:
        """Whether the caller must wait for it: True for the first caller."""
        return self._taken.acquire(blocking=False)

    def attend(self) -> None:
        """Block until it has completed or failed, and record which."""
        self._finish(NO_TIMEOUT)

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
                self._finish(timeout)
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

    def _finish(self, timeout: timedelta) -> None:
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


def keep_for_reducers() -> None:
    """Keep each `Work` that DistributedDataParallel hands to its reducer, as it does inside `Join`.

    The reducer keeps the C++ part only. Without its Python part, that has no `wait` but the one of torch's base class,
    which never ends.
    """
    kept: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def hand_over(set_handle: Callable[..., None], reducer: Any, work: Any, *how: bool) -> None:
        kept[reducer] = work
        set_handle(reducer, work, *how)

    if JOIN.found:
        JOIN.replace("_set_forward_pass_work_handle", hand_over)


def _delegate(name: str) -> None:
    def method(self: WatchedWork, *args: Any, **kwargs: Any) -> Any:
        self._unwaited = False
        return getattr(self._work, name)(*args, **kwargs)

    method.__name__ = name
    setattr(WatchedWork, name, method)


for _name in dir(Work):
    if not _name.startswith(("__", "_pybind11")) and _name not in vars(WatchedWork) and _name != "unbox":
        _delegate(_name)  # `result`, `exception`, `_source_rank`, ...
for _class in (WatchedWork, SilentWork, WatchedMessage):
    # Their `repr` is the same as without labkit.
    _class.__name__ = _class.__qualname__ = Work.__name__
    _class.__module__ = Work.__module__
