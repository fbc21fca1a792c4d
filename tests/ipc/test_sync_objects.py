"""Locks, events, queues and executors are sent as fresh ones; those in use are named by the variable that holds
them."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import cells as in_cells
import pytest

import labkit as lab
from labkit.ipc import pickling


@pytest.fixture(scope="module")
def ranks() -> Iterator[lab.Group]:
    with lab.Group(2, runtime="bare", timeout_s=200) as group:
        yield group


def travel(value: Any) -> Any:
    return pickling.unpack(pickling.pack(value))


def locked(lock: Any) -> Any:
    lock.acquire()
    return lock


@pytest.mark.processes
def test_module_level_ones_work_in_ranks(ranks: lab.Group, cells: in_cells.Cells) -> None:
    cells("""
        import queue, threading
        from concurrent.futures import ThreadPoolExecutor
        global_lock, again = threading.Lock(), threading.RLock()
        ready, changed = threading.Event(), threading.Condition()
        slots, bounded, meeting = threading.Semaphore(2), threading.BoundedSemaphore(3), threading.Barrier(1)
        jobs, last_first, plain = queue.Queue(5), queue.LifoQueue(), queue.SimpleQueue()
        pool = ThreadPoolExecutor(3, "mine")
        own = threading.local()
        own.name = "given"

        class Store:
            lock = threading.Lock()
            def add(self, x):
                with global_lock, self.lock:
                    return x + 1

        def f():
            with again, again, changed, slots, bounded:
                changed.notify_all()
            ready.set()
            meeting.wait(5)
            for each in (jobs, last_first, plain):
                each.put(1)
                each.put(2)
            got = [each.get() for each in (jobs, last_first, plain)]
            return Store().add(1), got, pool.submit(int, "7").result(), pool._max_workers, ready.is_set(), jobs.maxsize, own.name
    """)
    assert ranks.run(cells.f).results == [(2, [1, 2, 1], 7, 3, True, 5, "given")] * 2
    assert not cells.ready.is_set()
    assert cells.jobs.empty()


def test_transferable_state_is_sent() -> None:
    event, jobs, semaphore = threading.Event(), queue.PriorityQueue(4), threading.Semaphore(0)
    event.set()
    for item in (3, 1):
        jobs.put(item)
    event, jobs, semaphore = travel((event, jobs, semaphore))
    assert event.is_set()
    assert [jobs.get(), jobs.get(), jobs.maxsize, jobs.unfinished_tasks] == [1, 3, 4, 2]
    assert not semaphore.acquire(blocking=False)
    future: Future[int] = Future()
    future.set_result(5)
    failed: Future[int] = Future()
    failed.set_exception(ZeroDivisionError("zero"))
    future, failed = travel((future, failed))
    assert future.result(0) == 5
    assert str(failed.exception(0)) == "zero"


def test_a_lock_that_two_objects_share_stays_one_lock() -> None:
    lock = threading.Lock()
    first, second, condition = travel((lock, [lock], threading.Condition(lock)))
    assert second == [first]
    with condition:
        assert first.locked()


def held_by_a_thread(make: Callable[[], Any], wait: Callable[[Any], Any], let_go: Callable[[Any], Any]) -> Iterator[Any]:
    held = make()
    thread = threading.Thread(target=wait, args=(held,))
    thread.start()
    yield held
    let_go(held)
    thread.join()


def awaited_event() -> Iterator[Any]:
    for event in held_by_a_thread(threading.Event, threading.Event.wait, threading.Event.set):
        while not event._cond._waiters:
            pass
        yield event


def busy_executor() -> Iterator[Any]:
    go = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        futures = [pool.submit(go.wait) for _ in range(2)]
        yield pool
        go.set()
        assert all(f.result() for f in futures)


def ended_executor() -> Iterator[Any]:
    pool = ThreadPoolExecutor(1)
    pool.shutdown()
    yield pool


def ended_process() -> Iterator[Any]:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        yield process


def of(make: Callable[[], Any]) -> Callable[[], Iterator[Any]]:
    return lambda: iter([make()])


IN_USE: dict[str, tuple[Callable[[], Iterator[Any]], str, str]] = {
    "lock": (of(lambda: locked(threading.Lock())), "this lock is locked at this moment", "Release it before the run"),
    "rlock": (of(lambda: locked(threading.RLock())), "this RLock is locked at this moment", "Release it before the run"),
    "bounded": (of(lambda: locked(threading.BoundedSemaphore())), "this BoundedSemaphore is locked", "Release it before the run"),
    "event": (awaited_event, "this Event is in use: a thread of the notebook waits", "End that thread"),
    "barrier": (of(lambda: (b := threading.Barrier(2), b.abort())[0]), "this Barrier is broken", "Call its reset"),
    "simple": (of(lambda: (q := queue.SimpleQueue(), q.put(1))[0]), "this SimpleQueue holds items", "Send a list of the items"),
    "busy": (busy_executor, "this ThreadPoolExecutor has unfinished work", "Wait for its futures"),
    "ended": (ended_executor, "this ThreadPoolExecutor has been shut down", "Make it inside the function"),
    "future": (of(Future), "this Future has no result yet", "Send the result itself"),
    "thread": (of(threading.Thread), "this Thread belongs to the process that made it", "Start it inside the function"),
    "process": (ended_process, "this Popen belongs to the process that made it", "Start it inside the function"),
}


@pytest.mark.parametrize("name", IN_USE)
@pytest.mark.processes
def test_an_object_in_use_is_named_by_its_variable(name: str, cells: in_cells.Cells) -> None:
    make, says, remedy = IN_USE[name]
    with lab.Group(1, runtime="bare") as group:
        for thing in make():
            cells("""
                class Service:
                    def work(self): return thing
                def f(): return Service().work()
            """)._main.thing = thing
            with pytest.raises(lab.LabError) as caught:
                group.run(cells.f)
            first, second = str(caught.value).splitlines()
            assert first.startswith(f"the variable 'thing' used by Service.work() cannot be sent: {says}")
            assert second.startswith(remedy)


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("class A:\n    lock = locked\ndef f(): A", "the class attribute A.lock"),
        ("class A:\n    @property\n    def p(self): return locked\ndef f(): A", "the variable 'locked' used by A.p()"),
        ("class A:\n    @staticmethod\n    def s(x=locked): ...\ndef f(): A", "the default value 1 of A.s()"),
        ("class B:\n    lock = locked\nclass A(B): ...\ndef f(): A", "the class attribute B.lock"),
        ("class A:\n    lock = locked\na = A()\ndef f(): a", "the class attribute A.lock"),
        ("import functools\n@functools.cache\ndef c(): return locked\ndef f(): c", "the variable 'locked' used by c()"),
        ("def f(*, lock=locked): ...", "the default value of 'lock' of f()"),
        ("def g(): ...\ng.lock = locked\ndef f(): g", "g.lock"),
    ],
)
@pytest.mark.processes
def test_the_innermost_name_is_reported(source: str, named: str, cells: in_cells.Cells) -> None:
    cells._main.locked = locked(threading.Lock())
    cells(source)
    with lab.Group(1, runtime="bare") as group, pytest.raises(lab.LabError) as caught:
        group.run(cells.f)
    assert str(caught.value).startswith(f"{named} cannot be sent: this lock is locked at this moment.")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import multiprocessing\nthing = multiprocessing.Lock()", "Only processes that multiprocessing starts can share it"),
        ("import socket\nthing = socket.socket()\nthing.close()", "Connect inside the function"),
        ("thing = (i for i in range(3))", r"A generator runs only in the process that made it: send list\(...\) of it"),
        ("thing = open(__import__('os').devnull, 'wb')\nthing.close()", "Open the file inside the function"),
    ],
)
@pytest.mark.processes
def test_objects_that_cannot_be_sent_are_named_by_their_variable(source: str, says: str, cells: in_cells.Cells) -> None:
    cells(source)("def f(): return thing")
    with lab.Group(1, runtime="bare") as group, pytest.raises(lab.LabError, match=says) as caught:
        group.run(cells.f)
    assert str(caught.value).startswith("the variable 'thing' used by f() cannot be sent")
