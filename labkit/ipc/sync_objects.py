"""Sends locks, events, queues and executors as new ones, if they are not in use; otherwise an error says why not.

They serve the threads of one process, so each rank gets a new one, as each process of a script creates its own. The
usual case is a module's global lock, which no thread holds while a run is being sent.
"""

from __future__ import annotations

import _thread
import functools
import multiprocessing.process
import pickle
import queue
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, Final

Reduced = tuple[Callable[..., Any], tuple[Any, ...]]


class CannotSendError(pickle.PicklingError):
    """An object of a kind that cannot be sent, or not in its current state.

    Args:
        culprit: the object.
        reason: the predicate of the sentence that says why: "is locked".
        remedy: a sentence on what to do.
    """

    def __init__(self, culprit: Any, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.culprit, self.reason, self.remedy = culprit, reason, remedy


_OWN: Final = "each rank gets a new one, since processes share no locks."


def reduce_sync_object(obj: Any) -> Reduced | None:
    """Return how to create a new one in the receiver; None for other kinds of object.

    Raises:
        CannotSendError: threads of this process hold the object or wait for it.
    """
    reduce = _REDUCERS.get(type(obj))
    if reduce is None and isinstance(obj, _BOUND):
        reduce = _process_or_thread
    return None if reduce is None else reduce(obj)


def _refuse_if_locked(obj: Any, locked: bool) -> None:
    if locked:
        raise CannotSendError(obj, "is locked at this moment", f"Release it before the run. If it is unlocked, {_OWN}")


def _refuse_if_awaited(obj: Any, *conditions: Any) -> None:
    if any(condition._waiters for condition in conditions):
        raise CannotSendError(
            obj,
            "is in use: a thread of the notebook waits for it",
            f"End that thread before the run. If no thread waits, {_OWN}",
        )


def _lock(lock: Any) -> Reduced:
    _refuse_if_locked(lock, lock.locked())
    return threading.Lock, ()


def _rlock(lock: Any) -> Reduced:
    mine = lock._is_owned()
    free = not mine and lock.acquire(blocking=False)
    if free:
        lock.release()
    _refuse_if_locked(lock, not free)
    return threading.RLock, ()


def _condition(condition: Any) -> Reduced:
    _refuse_if_awaited(condition, condition)
    return threading.Condition, (condition._lock,)


def _event(event: Any) -> Reduced:
    _refuse_if_awaited(event, event._cond)
    return _make_event, (event.is_set(),)


def _make_event(is_set: bool) -> threading.Event:
    event = threading.Event()
    if is_set:
        event.set()
    return event


def _semaphore(semaphore: Any) -> Reduced:
    _refuse_if_awaited(semaphore, semaphore._cond)
    if isinstance(semaphore, threading.BoundedSemaphore):
        initial: int = vars(semaphore)["_initial_value"]
        _refuse_if_locked(semaphore, semaphore._value < initial)
    return type(semaphore), (semaphore._value,)


def _barrier(barrier: Any) -> Reduced:
    _refuse_if_awaited(barrier, barrier._cond)
    if barrier.broken:
        raise CannotSendError(barrier, "is broken", "Call its reset() before the run, or make a new one.")
    return threading.Barrier, (barrier._parties, barrier._action, barrier._timeout)


def _queue(given: Any) -> Reduced:
    _refuse_if_awaited(given, given.not_empty, given.not_full, given.all_tasks_done)
    with given.mutex:
        return _make_queue, (type(given), given.maxsize, list(given.queue), given.unfinished_tasks)


def _make_queue(kind: Callable[[int], Any], maxsize: int, items: Sequence[Any], unfinished: int) -> Any:
    made = kind(maxsize)
    made.queue.extend(items)
    made.unfinished_tasks = unfinished
    return made


def _simple_queue(given: Any) -> Reduced:
    if not given.empty():
        raise CannotSendError(
            given, "holds items, which cannot be read without removing them", "Send a list of the items, or a queue.Queue."
        )
    return queue.SimpleQueue, ()


def _local(local: Any) -> Reduced:
    return _make_local, (dict(vars(local)),)


def _make_local(values: dict[str, Any]) -> threading.local:
    local = threading.local()
    vars(local).update(values)
    return local


def _executor(executor: Any) -> Reduced:
    """Reduce an idle executor to a new one with the same settings."""
    if executor._shutdown or executor._broken:
        raise CannotSendError(executor, "has been shut down", "Make it inside the function that the ranks run.")
    if not executor._work_queue.empty():
        raise CannotSendError(executor, "has unfinished work", "Wait for its futures before the run. If it is idle, " + _OWN)
    make = functools.partial(
        ThreadPoolExecutor, executor._max_workers, executor._thread_name_prefix, executor._initializer, executor._initargs
    )
    return make, ()


def _future(future: Any) -> Reduced:
    if not future.done():
        raise CannotSendError(future, "has no result yet", "Send the result itself: future.result() waits for it.")
    if future.cancelled():
        raise CannotSendError(future, "was cancelled", "Leave it out.")
    return _make_future, (future._result, future._exception)


def _make_future(result: Any, error: BaseException | None) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result) if error is None else future.set_exception(error)
    return future


def _process_or_thread(obj: Any) -> Reduced:
    raise CannotSendError(obj, "belongs to the process that made it", "Start it inside the function that the ranks run.")


_REDUCERS: Final[dict[type, Callable[[Any], Reduced]]] = {
    _thread.LockType: _lock,
    type(threading.RLock()): _rlock,
    threading.Condition: _condition,
    threading.Event: _event,
    threading.Semaphore: _semaphore,
    threading.BoundedSemaphore: _semaphore,
    threading.Barrier: _barrier,
    queue.Queue: _queue,
    queue.LifoQueue: _queue,
    queue.PriorityQueue: _queue,
    queue.SimpleQueue: _simple_queue,
    threading.local: _local,
    ThreadPoolExecutor: _executor,
    Future: _future,
}
# Also for subclasses by the student. Their locks and events could be sent, but the result would be no working thread.
_BOUND: Final = (threading.Thread, subprocess.Popen, multiprocessing.process.BaseProcess, Executor)
