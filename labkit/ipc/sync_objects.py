"""Locks, events, queues and executors: unused ones travel as fresh ones, those in use are refused with a reason.

They belong to the threads of one process, so each rank gets one of its own, as a script's every process makes its own. A module's
global lock is the usual case: it is there for threads, and nobody holds it while a run is being sent.
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

__all__ = ["CannotTravelError", "reduce_sync_object"]

Reduced = tuple[Callable[..., Any], tuple[Any, ...]]


class CannotTravelError(pickle.PicklingError):
    """An object that is known not to travel, or not now.

    Args:
        culprit: the object.
        reason: what is the matter with it, as the rest of a sentence: "is locked".
        remedy: what to do, a sentence.
    """

    def __init__(self, culprit: Any, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.culprit, self.reason, self.remedy = culprit, reason, remedy


_OWN: Final = "each rank gets one of its own, since threads of different processes share nothing."


def reduce_sync_object(obj: Any) -> Reduced | None:
    """How to make a fresh one elsewhere; None where it is nothing of the kind.

    Raises:
        CannotTravelError: threads of this process hold it, or wait for it.
    """
    reduce = _REDUCERS.get(type(obj))
    if reduce is None and isinstance(obj, _BOUND):
        reduce = _process_or_thread
    return None if reduce is None else reduce(obj)


def _refuse_if_locked(obj: Any, locked: bool) -> None:
    if locked:
        raise CannotTravelError(obj, "is locked at this moment", f"Release it before the run; unlocked it travels, and {_OWN}")


def _refuse_if_awaited(obj: Any, *conditions: Any) -> None:
    if any(condition._waiters for condition in conditions):
        raise CannotTravelError(
            obj,
            "has a thread of the notebook that waits for it",
            f"Let that thread end before the run; then it travels, and {_OWN}",
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
        raise CannotTravelError(barrier, "is broken", "Call its reset() before the run, or make a new one.")
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
        raise CannotTravelError(
            given, "holds items, which nobody can read without taking them", "Send a list of the items, or a queue.Queue."
        )
    return queue.SimpleQueue, ()


def _local(local: Any) -> Reduced:
    return _make_local, (dict(vars(local)),)


def _make_local(values: dict[str, Any]) -> threading.local:
    local = threading.local()
    vars(local).update(values)
    return local


def _executor(executor: Any) -> Reduced:
    """A new one with the same settings. What its threads are doing stays with them."""
    if executor._shutdown or executor._broken:
        raise CannotTravelError(executor, "has been shut down", "Make it inside the function that the ranks run.")
    if not executor._work_queue.empty():
        raise CannotTravelError(
            executor, "has work that is not done", "Wait for its futures before the run; idle it travels, and " + _OWN
        )
    make = functools.partial(
        ThreadPoolExecutor, executor._max_workers, executor._thread_name_prefix, executor._initializer, executor._initargs
    )
    return make, ()


def _future(future: Any) -> Reduced:
    if not future.done():
        raise CannotTravelError(future, "has no result yet", "Send the result itself: future.result() waits for it.")
    if future.cancelled():
        raise CannotTravelError(future, "was cancelled", "Leave it out.")
    return _make_future, (future._result, future._exception)


def _make_future(result: Any, error: BaseException | None) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result) if error is None else future.set_exception(error)
    return future


def _process_or_thread(obj: Any) -> Reduced:
    raise CannotTravelError(obj, "belongs to the process that made it", "Start it inside the function that the ranks run.")


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
# Also of classes of the student's own. Their locks and events alone could travel, and make something that only looks like them.
_BOUND: Final = (threading.Thread, subprocess.Popen, multiprocessing.process.BaseProcess, Executor)
