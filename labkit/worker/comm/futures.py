"""Tracks torch's futures: which operations complete them, and when a rank is blocked in one."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Iterable
from types import CellType
from typing import Any, Final
from weakref import WeakKeyDictionary, ref

import torch

from labkit.recording.torch_internals import wrap
from labkit.worker.comm.operation import Operation

EXIT_LIMIT_S: Final = 0.5  # for the threads of RPC and of the program to finish the callbacks
BACKENDS_EXIT_LIMIT_S: Final = 1800.0  # for those of a process group: gloo's own time limit for an operation

KEEPER: Final = "labkit-group"  # the name of threads that keep a destroyed group


class _Ties:
    """The operations that complete a future, and the threads that wait for it."""

    __slots__ = ("fail", "known", "operations", "waiters")

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.fail = False  # whether an error of the future is one of the operations: they have failed
        self.known: bool | None = None  # see `Futures.known`; None: known if there are operations
        self.waiters = 0


class Futures:
    """The operations behind every future, including futures made by `then` and `collect_all`.

    All Python code waits for futures in one C++ method, which is wrapped here.

    What can go wrong, and the tests that show it; those without a file are in `tests/worker/comm/test_operation.py`:

    - A program waits for a future made from another. The wait belongs to the operations behind both, also where a
      callback completes the second future by hand (`test_waiting_for_a_derived_future`).
    - The operation is tied to the future while a thread is already waiting, or completes as the wait begins
      (`test_the_life_of_an_operation`).
    - C++ lets the waiting thread continue before it calls the callbacks. What must be recorded before the program goes
      on is recorded by whichever comes first, once (`test_rpc_calls.py`:
      `test_a_reply_is_written_down_once_and_before_its_caller_goes_on`); so is that an operation has failed
      (`test_a_wait_for_a_future_that_fails`).
    - C++ completes a future by work that is not recorded. Nobody may conclude that the wait will never end
      (`test_rpc_calls.py`: `test_futures_that_only_python_completes`).
    - The process ends while C++ holds callbacks, which it would release after the interpreter is gone
      (`test_process_group.py`: `test_the_end_of_a_process`).
    - A group is destroyed before its backend's thread has called a callback (`test_process_group.py`:
      `test_a_group_is_destroyed_before_its_last_callback`).
    """

    def __init__(self) -> None:
        self._ties: WeakKeyDictionary[Any, _Ties] = WeakKeyDictionary()
        self._callbacks: set[Any] = set()  # weak references to callbacks that C++ holds
        self._of_backends: dict[Any, str] = {}  # the same, of futures that the backend of a group completes; to its label
        self._over = False  # whether the interpreter exits, and this has waited for all callbacks

    def tell(self, future: Any, callback: Callable[[Any], None], *, group: str | None = None) -> None:
        """Call a function with the future when it has completed.

        `group`: the label of the process group whose backend completes the future, if one does. Until the callback has
        returned, `keep` keeps the group, and the process does not end.
        """
        if group is None:
            self._callbacks.add(ref(callback, self._callbacks.discard))
        else:
            self._of_backends[ref(callback, self._of_backends.pop)] = group
        future.add_done_callback(callback)

    def keep(self, group: Any, label: str) -> None:
        """Keep a process group that is destroyed until the callbacks of its futures have returned.

        It is for groups that C++ refers to, perhaps longer than Python: DistributedDataParallel's reducer keeps
        Python's global lock while it drops the last reference, which joins the backend's threads. A callback, which
        needs the lock, would wait for ever. Where Python drops the last reference, torch releases the lock first.
        """
        if self._over:
            return  # all callbacks have returned, and a new thread might not run any more
        pending = {callback for callback, of in list(self._of_backends.items()) if of == label}

        def wait(_group: Any) -> None:
            while not pending.isdisjoint(list(self._of_backends)):
                time.sleep(0.001)
            time.sleep(0.001)  # torch's own threads need the lock, too, to release tensors after the callbacks

        try:
            threading.Thread(target=wait, args=(group,), name=KEEPER, daemon=True).start()
        except RuntimeError:  # from Python 3.12 on, while functions of `atexit` run
            wait(group)

    def install(self) -> None:
        """Wrap the methods of torch's futures."""
        wrap(torch.Future, wait=self._wait, then=self._then)
        wrap(torch.futures, collect_all=self._collect_all, wait_all=_wait_all)
        atexit.register(self._let_go)
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """In a forked process, no thread of a backend runs that would call the callbacks."""
        self._callbacks, self._of_backends = set(), {}

    def _let_go(self) -> None:
        """Wait for pending callbacks, and for destroyed groups.

        A backend's thread that releases a callback while the interpreter exits would abort the process. Without labkit,
        too, a process with a collective under way ends only after it: torch waits for the backend's threads.
        """
        begin = time.monotonic()
        for callbacks, limit_s in ((self._of_backends, BACKENDS_EXIT_LIMIT_S), (self._callbacks, EXIT_LIMIT_S)):
            while callbacks and time.monotonic() - begin < limit_s:
                time.sleep(0.001)
        self._over = True
        for thread in threading.enumerate():
            if thread.name == KEEPER:
                thread.join(BACKENDS_EXIT_LIMIT_S)

    def tie(self, future: Any, operations: Iterable[Operation], *, fail: bool = False) -> None:
        """Note that the future completes with these operations.

        `fail`: whether they have failed if the future has an error, which may otherwise be that of a callback or of a
        function called remotely.
        """
        ties = self._ties.get(future)
        if ties is None:
            ties = self._ties[future] = _Ties()
        ties.fail = fail
        for operation in operations:
            ties.operations.append(operation)
            if ties.waiters:  # a thread is already waiting
                operation.wait_begins()

    def known(self, future: Any) -> bool:
        """Whether a future can only be completed by Python or by recorded operations, not by unrecorded work in C++."""
        ties = self._ties.get(future)
        if ties is None or isinstance(future, torch.futures.Future):
            return isinstance(future, torch.futures.Future)
        return bool(ties.operations) if ties.known is None else ties.known

    def _wait(self, wait: Callable[..., Any], future: Any) -> Any:
        ties = self._ties.get(future)
        if future.done():
            if ties is not None:
                for operation in ties.operations:
                    if operation.also is not None:
                        operation.completed()  # the callback that says so may come only after this thread has gone on
                    operation.waited_when_complete()  # which its callback may not have recorded yet
            return wait(future)
        if ties is None:
            ties = self._ties[future] = _Ties()
        ties.waiters += 1
        for operation in ties.operations:
            operation.wait_begins()
        try:
            return wait(future)
        except Exception as error:
            for operation in ties.operations:
                if ties.fail and operation.waited_for:
                    operation.failed(error)
            raise
        finally:
            ties.waiters -= 1
            for operation in ties.operations:
                if operation.waited_for:
                    operation.wait_ends()

    def _then(self, then: Callable[..., Any], future: Any, callback: Any) -> Any:
        ties = self._ties.get(future)
        if ties is None or not ties.operations:
            return self._made_of([future], then(future, callback))
        for cell in getattr(callback, "__closure__", None) or ():
            # A callback that refers to another future completes it: `RRef.rpc_async` returns the result of its second
            # call in this way.
            if cell != CellType() and isinstance(cell.cell_contents, torch.Future) and cell.cell_contents is not future:
                self.tie(cell.cell_contents, ties.operations)
        child = self._made_of([future], then(future, callback))
        self.tie(child, ties.operations)
        return child

    def _made_of(self, parts: Iterable[Any], future: Any) -> Any:
        """Note that a future completes when others have completed, and return it."""
        ties = self._ties[future] = _Ties()
        ties.known = all(self.known(part) for part in parts)
        return future

    def _collect_all(self, collect: Callable[..., Any], futures: Any) -> Any:
        futures = list(futures)
        future = self._made_of(futures, collect(futures))
        for part in futures:
            ties = self._ties.get(part)
            if ties is not None:
                self.tie(future, ties.operations)
        return future


def _wait_all(_: Callable[..., Any], futures: Any) -> list[Any]:
    """Replace torch's `wait_all`, which collects its futures in C++."""
    return [future.wait() for future in torch.futures.collect_all(futures).wait()]


def value_of(future: Any) -> Any:
    """Return the result of a completed future, or its error."""
    try:
        return future.value()
    except Exception as error:  # noqa: BLE001  # whatever the student's function raised
        return error
