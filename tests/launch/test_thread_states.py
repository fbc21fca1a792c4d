"""Which threads of a rank may still act: judged from stacks made by hand and from those of real ranks."""

from __future__ import annotations

import inspect
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.pool import ThreadPool

import pytest

import labkit as lab
from labkit.launch.frames import frame_at
from labkit.launch.thread_states import RankThreads, Thread, Threads, _interrupted, _thread, active
from labkit.worker.stack_writer import ThreadLook

STUDENTS = "/students/own.py"
THREADING = threading.__file__
COMM = os.path.join(os.path.dirname(lab.__file__), "worker", "comm", "work.py")


def at(*places: tuple[str, str], number: int = 7, endless: bool = False, cpu_ns: int = 3) -> Thread:
    return Thread(tuple(frame_at(file, 1, function) for file, function in places), number, number, endless, cpu_ns)


MAIN = at((STUDENTS, "train"), (COMM, "wait"), number=1)
WAITS = at((THREADING, "run"), (STUDENTS, "work"), (THREADING, "wait"), endless=True)
SLEEPS = replace(WAITS, endless=False)
SERVES = at((os.path.join(os.path.dirname(lab.__file__), "rank.py"), "serve"), number=1)


def kind(
    now: RankThreads, before: RankThreads | None = None, blocked: set[int] | None = frozenset({1}), *, idle: bool = False
) -> str:
    found = active(now, before, blocked=blocked, idle_main=idle)
    return "" if found is None else found.kind


def test_only_a_main_thread_in_an_operation() -> None:
    assert kind(RankThreads(MAIN)) == ""


def test_a_rank_that_does_not_answer_may_do_anything() -> None:
    assert kind(RankThreads(None)) == "silent"


def test_a_thread_that_waits_without_a_limit_can_only_be_woken() -> None:
    assert kind(RankThreads(MAIN, (WAITS,)), RankThreads(MAIN, (WAITS,))) == ""
    assert kind(RankThreads(MAIN, (WAITS,)), RankThreads(MAIN, (replace(WAITS, cpu_ns=2),))) == "thread", "it has moved meanwhile"
    assert kind(RankThreads(MAIN, (WAITS,)), RankThreads(MAIN)) == "thread", "it is new"
    assert kind(RankThreads(MAIN), RankThreads(MAIN, (WAITS,))) == "thread", "it has gone: who has woken it?"


def test_a_thread_that_sleeps_may_act() -> None:
    assert kind(RankThreads(MAIN, (SLEEPS,)), RankThreads(MAIN, (SLEEPS,))) == "thread"


def test_a_thread_in_an_operation_is_judged_by_the_operation() -> None:
    sleeping = replace(SLEEPS, number=9)
    assert kind(RankThreads(MAIN, (sleeping,)), RankThreads(MAIN, (sleeping,)), {1, 9}) == ""
    second = at((STUDENTS, "work"), (COMM, "_wait"))  # waits for what another thread waits for
    assert kind(RankThreads(MAIN, (second,)), RankThreads(MAIN, (second,))) == ""
    callback = at((COMM, "_finish"), (STUDENTS, "callback"))
    assert kind(RankThreads(MAIN, (callback,)), RankThreads(MAIN, (callback,))) == "thread"


def test_a_thread_in_a_collective_of_tensorflow_waits_for_other_ranks() -> None:
    file = os.path.join(os.sep, "lib", "tensorflow", "python", "ops", "gen_collective_ops.py")
    collective = at((THREADING, "run"), (file, "collective_reduce_v2"))
    assert kind(RankThreads(MAIN, (collective,)), RankThreads(MAIN, (collective,))) == ""
    assert kind(RankThreads(MAIN, (replace(collective, cpu_ns=9),)), RankThreads(MAIN, (collective,))) == "thread", "it moved"
    elsewhere = at((THREADING, "run"), (file, "collective_reduce_v2"), (STUDENTS, "callback"))
    assert kind(RankThreads(MAIN, (elsewhere,)), RankThreads(MAIN, (elsewhere,))) == "thread"


@pytest.mark.parametrize(
    ("file", "function"),
    [("tqdm/_monitor.py", "run"), ("torch/utils/data/_utils/pin_memory.py", "do_one_step"), ("labkit", "_serve")],
)
def test_housekeeping_threads_of_libraries(file: str, function: str) -> None:
    place = lab.__file__ if file == "labkit" else f"/lib/site-packages/{file}"
    keeps = at((THREADING, "run"), (place, function), (THREADING, "wait"))
    assert kind(RankThreads(MAIN, (keeps,))) == ""
    runs_more = at((place, function), (STUDENTS, "callback"))
    assert kind(RankThreads(MAIN, (runs_more,))) == "thread"


def test_an_unknown_librarys_thread_may_act() -> None:
    assert kind(RankThreads(MAIN, (at((THREADING, "run"), ("/lib/site-packages/other/loop.py", "run")),))) == "thread"


def test_a_main_thread_elsewhere() -> None:
    waits = replace(WAITS, number=1)
    assert kind(RankThreads(waits), RankThreads(waits), {9}) == "", "another one is in an operation"
    assert kind(RankThreads(waits, handles_signals=True), RankThreads(waits), {9}) == "main", "a handler of SIGALRM may act"
    assert kind(RankThreads(replace(waits, endless=False)), RankThreads(waits), {9}) == "main"
    assert kind(RankThreads(SERVES), idle=True) == ""
    assert kind(RankThreads(waits), idle=True) == "main", "it has not returned after all"
    assert kind(RankThreads(SERVES), blocked=None) == "", "in an operation whose thread is not known"


def test_a_child_process_may_act() -> None:
    assert kind(RankThreads(MAIN, children=("sleep 100",))) == "child"


# Real threads.

KEPT: list[object] = []


def _executor() -> None:
    pool = ThreadPoolExecutor(1)
    pool.submit(int).result()
    KEPT.append(pool)


def _thread_pool() -> None:
    pool = ThreadPool(1)
    pool.apply(int)
    KEPT.append(pool)


def _event_loop() -> None:
    import asyncio

    threading.Thread(target=asyncio.new_event_loop().run_forever, daemon=True).start()


def _threads(body: Callable[[], object]) -> Callable[[], None]:
    return lambda: threading.Thread(target=body, daemon=True).start()


def _joins(thread: threading.Thread, limit_s: float | None = None) -> None:
    thread.start()
    threading.Thread(target=thread.join, args=(limit_s,), daemon=True).start()


ENDLESS: dict[str, Callable[[], None]] = {
    "an event": _threads(lambda: threading.Event().wait()),
    "a queue": _threads(lambda: queue.Queue[int]().get()),
    "another thread's end": lambda: _joins(threading.Thread(target=threading.Event().wait, daemon=True)),
    "an idle executor": _executor,
    "an idle pool of threads": _thread_pool,
}
LIMITED: dict[str, Callable[[], None]] = {
    "asleep": _threads(lambda: time.sleep(600)),
    "another thread's end with a time limit": lambda: _joins(threading.Timer(600, int), 600),
    "an event with a time limit": _threads(lambda: threading.Event().wait(600)),
    "a queue with a time limit": _threads(lambda: queue.Queue[int]().get(timeout=600)),
    "a timer": lambda: threading.Timer(600, int).start(),
    "an event loop": _event_loop,
    "a pipe": _threads(lambda: os.read(os.pipe()[0], 1)),
    "sockets": _threads(lambda: select.select([], [], [], 600)),
    "a busy executor": lambda: KEPT.append(ThreadPoolExecutor(1).submit(time.sleep, 600)),
}


@pytest.fixture
def rank() -> Iterator[lab.Group]:
    with lab.Group(1, runtime="bare", timeout_s=200) as group:
        yield group


def seen(group: lab.Group) -> RankThreads:
    """The threads of the only rank, and its children."""
    assert group._pool is not None
    (threads,) = group._pool.ask(Threads(children=True), group._pool.members)
    return threads


def settled(group: lab.Group) -> str:
    """What may still act in the only rank, once its threads have reached their waits."""
    until = time.monotonic() + 150
    while (found := kind(seen(group), seen(group), idle=True)) and time.monotonic() < until:
        pass
    return found


@pytest.mark.processes
def test_real_threads_that_can_only_be_woken(rank: lab.Group) -> None:
    for start in ENDLESS.values():
        rank.run(start)
    assert len(seen(rank).others) >= len(ENDLESS)
    assert settled(rank) == ""


def test_a_woken_thread_without_a_core_may_act() -> None:
    """It has neither moved nor used CPU time since the first look."""
    source, first = inspect.getsourcelines(threading.Condition.wait)
    line = first + next(i for i, text in enumerate(source) if text.strip() == "waiter.acquire()")
    for runnable in (False, True):
        thread = ThreadLook(1, 1, 5, runnable, False, [(THREADING, line, "wait")])
        assert _thread(thread).endless is not runnable


def test_a_rank_in_which_c_code_holds_the_interpreters_lock() -> None:
    """As TensorFlow does while it waits for other ranks. `faulthandler` writes the stacks, and not more."""
    now = _interrupted([SERVES.frames, MAIN.frames], 1, ())
    assert kind(now, now, blocked=None) == ""
    sleeps = _interrupted([SLEEPS.frames, MAIN.frames], 1, ())
    assert kind(sleeps, sleeps, blocked=None) == "thread"
    elsewhere = _interrupted([WAITS.frames], 1, ())
    assert kind(elsewhere, elsewhere, blocked={9}) == "main", "it may handle signals"
    assert kind(_interrupted([], 1, ())) == "silent"


@pytest.mark.processes
def test_a_programs_handler_of_a_signal_is_seen(rank: lab.Group) -> None:
    rank.run(int)
    assert not seen(rank).handles_signals
    rank.run(signal.signal, signal.SIGALRM, print)
    assert seen(rank).handles_signals


@pytest.mark.processes
def test_real_threads_that_continue_by_themselves(rank: lab.Group) -> None:
    for start in LIMITED.values():
        rank.run(start)
    found = seen(rank)
    assert len(found.others) >= len(LIMITED)
    for thread in found.others:
        alone = replace(found, others=(thread,))
        assert kind(alone, alone, idle=True) == "thread", thread


def _starts(*command: str) -> int:
    process = subprocess.Popen(command)
    KEPT.append(process)
    return process.pid


@pytest.mark.processes
def test_child_processes_that_may_act(rank: lab.Group) -> None:
    rank.run(int)
    assert seen(rank).children == ()
    rank.run(_starts, "sleep", "600")
    assert seen(rank).children == ("sleep 600",)


def _forks() -> None:
    if os.fork() == 0:
        time.sleep(600)
        os._exit(0)


@pytest.mark.processes
def test_a_forked_child_may_act(rank: lab.Group) -> None:
    rank.run(_forks)
    assert seen(rank).children == ("",)


@pytest.mark.processes
def test_housekeeping_child_processes(rank: lab.Group) -> None:
    rank.run(_starts, sys.executable, "-c", "from multiprocessing.resource_tracker import main; import time; time.sleep(600)")
    assert seen(rank).children == ()
