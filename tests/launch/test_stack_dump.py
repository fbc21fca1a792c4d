"""`group.stacks()`: where every rank is, also one that is blocked in C++ or holds the interpreter's lock."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import tempfile
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import cells as in_cells
import pytest

import labkit as lab
from labkit.group.deadlock_words import readable
from labkit.group.open_groups import notebook
from labkit.group.output import Output
from labkit.group.processes import RankPool
from labkit.launch.frames import stacks_in
from labkit.launch.rank_process import Status
from labkit.launch.thread_states import RankThreads, Thread, ask
from labkit.worker import stack_writer
from labkit.worker.stack_writer import ANSWER_AT, ASK, INTERRUPT, TEXT_AT, TEXT_BYTES

RAW = """Thread 0x00007f2b4c9fd700 (most recent call first):
  File "{library}", line 1002 in _bootstrap

Current thread 0x00007f2b4d1fe740 (most recent call first):
  File "{library}", line 2930 in all_reduce
  File "{library}", line 83 in wrapper
  File "{mine}", line 4 in average
  File "{mine}", line 9 in train
  File "{labkit}", line 168 in _timed
  File "<string>", line 1 in <module>
"""
PLACES = {
    "library": os.path.join(os.path.dirname(os.__file__), "site-packages", "torch", "distributed_c10d.py"),
    "mine": os.path.join(os.path.dirname(__file__), "no_such_cell.py"),
    "labkit": lab.__file__,
}


def report(raw: str) -> str:
    return readable(RankThreads(Thread(stacks_in(raw)[-1])), Status("sleeping", exiting=False, cpu_s=0.0))


def test_a_stack_is_cut_to_the_students_frames_and_what_they_called() -> None:
    assert report(RAW.format(**PLACES)).splitlines() == [
        "is here:",
        '    File "no_such_cell.py", line 9, in train',
        '    File "no_such_cell.py", line 4, in average',
        '    File "distributed_c10d.py", line 83, in wrapper',
    ]


def test_an_idle_rank() -> None:
    assert report(RAW.format(**PLACES | {"mine": PLACES["labkit"]})) == "is idle: no function of yours is running"


def stacks_with(group: lab.Group, *lines: str) -> Any:
    """The stacks of the ranks, read until each rank is on its given line: it may have no core for a while."""
    until = time.monotonic() + 60
    while True:
        stacks = group.stacks()
        if all(line in text for line, text in zip(lines, stacks.values(), strict=True)) or time.monotonic() > until:
            return stacks


class UntilPrinted:
    """Reads a group's stacks as soon as all its ranks have printed something, until each is on its line."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, group: lab.Group, *lines: str) -> None:
        self.stacks: Any = None
        seen: set[int] = set()
        feed = Output.feed

        def feed_and_look(output: Output, rank: int, data: bytes) -> None:
            feed(output, rank, data)
            seen.add(rank)
            if len(seen) == len(group):
                monkeypatch.setattr(Output, "feed", feed)
                self.stacks = stacks_with(group, *lines)
                signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr(Output, "feed", feed_and_look)


WHERE = {
    "in Python": "while True: pass",
    "waiting for a lock": "threading.Event().wait()",
    "in C without the interpreter's lock": "ctypes.CDLL(None).pause()",
    "in C with the interpreter's lock": "sum(range(10 ** 13))",
}


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.processes
def test_ranks_that_are_blocked_say_where(
    where: str, ranks: lab.Group, cells: in_cells.Cells, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells(f"""
        import ctypes, threading
        def inner():
            print("here")
            {WHERE[where]}
        def outer():
            inner()
    """)
    look = UntilPrinted(monkeypatch, ranks, WHERE[where], WHERE[where])
    with pytest.raises(KeyboardInterrupt):
        ranks.run(cells.outer)
    assert list(look.stacks) == ["rank 0", "rank 1"]
    for text in look.stacks.values():
        lines = [re.sub(".* in ", "in ", line.strip()) for line in text.splitlines()]
        assert lines[:5] == ["is here:", "in outer", "inner()", "in inner", WHERE[where]]
    assert repr(look.stacks).startswith("rank 0 is here:")


@pytest.mark.processes
def test_reading_threads_that_run_python_does_not_crash_them(ranks: lab.Group, cells: in_cells.Cells) -> None:
    """Their frames change while they are read: reading without the GIL ended the rank by SIGSEGV."""
    cells("""
        import os, threading
        def deep(n):
            return deep(n - 1) + len([eval("x + 1") for x in range(2)]) if n else 1
        def work(go):
            while os.path.exists(go):
                exec("def g(n): return g(n - 1) if n else 0\\ng(20)", {})
                deep(200)
        def busy(go):
            threads = [threading.Thread(target=work, args=(go,)) for _ in range(4)]
            for thread in threads: thread.start()
            for thread in threads: thread.join()
            return "whole"
    """)
    with tempfile.NamedTemporaryFile() as go, ThreadPoolExecutor(1) as pool:
        pool.submit(ranks.run, int).result()
        run = pool.submit(ranks.run, cells.busy, go.name)
        for _ in range(25):
            ranks.stacks()
        go.close()
        assert run.result().results == ["whole", "whole"]


@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.processes
def test_reading_stacks_of_starting_ranks_does_not_end_them(start: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signals would end a process that does not handle them yet."""
    monkeypatch.setattr("labkit.launch.thread_states.ANSWER_LIMIT_S", 0.1)
    set_up, looks = RankPool._set_up, []

    def look_first(pool: RankPool) -> None:
        looks.append(group.stacks())
        set_up(pool)

    monkeypatch.setattr(RankPool, "_set_up", look_first)
    with lab.Group(2, runtime="bare", start=start, timeout_s=200) as group:
        assert group.run(os.getpid).ranks == ("rank 0", "rank 1")
    assert [list(look) for look in looks] == [["rank 0", "rank 1"]]


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux only")
@pytest.mark.processes
def test_ranks_are_forked_from_a_process_that_ignores_the_signals() -> None:
    """They inherit its state: a signal may arrive before they have done anything."""
    server = notebook.starter("bare", "fork")
    with lab.Group(1, runtime="bare", start="fork") as group:
        group.run(int)
        for number in (ASK, INTERRUPT):
            os.kill(server._process.pid, number)
        with lab.Group(1, runtime="bare", start="fork") as another:
            assert another.run(int).results == [0]
        assert server.alive()


def test_one_answer_for_all_requests_while_a_rank_held_the_gil(monkeypatch: pytest.MonkeyPatch) -> None:
    requests, answers = [ASK, ASK, ASK], []

    def take(_: object) -> None:
        if not requests:
            raise InterruptedError
        requests.pop()

    monkeypatch.setattr(signal, "sigwait", take)
    monkeypatch.setattr(signal, "sigpending", lambda: set(requests))
    monkeypatch.setattr(stack_writer, "_write", lambda memory, main: answers.append((memory, main, len(requests))))
    with pytest.raises(InterruptedError):
        stack_writer._serve(7, 1)
    assert answers == [(7, 1, 0)]


def test_an_answer_is_complete_and_newer_than_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("labkit.launch.thread_states.ANSWER_LIMIT_S", 0.05)
    monkeypatch.setattr("labkit.launch.thread_states.EACH_S", 0.0)
    pread = os.pread

    def change_meanwhile(memory: int, size: int, at: int) -> bytes:
        data = pread(memory, size, at)
        if at > ANSWER_AT:  # the body
            stack_writer._write(memory, 0)
        return data

    with tempfile.TemporaryFile() as file:
        memory = file.fileno()
        alive = {"memory": memory, "status": lambda: SimpleNamespace(exiting=False)}
        answering: Any = SimpleNamespace(**alive, signal=lambda _: stack_writer._write(memory, threading.get_ident()))
        late: Any = SimpleNamespace(**alive, signal=lambda _: None)
        assert ask([answering]) != [None]
        assert ask([late], insist=False) == [None], "that was the answer to an earlier question"
        monkeypatch.setattr(os, "pread", change_meanwhile)
        assert ask([answering], insist=False) == [None], "the rank answers somebody else meanwhile"


def test_a_rank_that_is_about_to_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("labkit.launch.thread_states.ANSWER_LIMIT_S", 10**6)
    with tempfile.TemporaryFile() as file:
        ending: Any = SimpleNamespace(memory=file.fileno(), signal=lambda _: None, status=lambda: SimpleNamespace(exiting=True))
        assert ask([ending], insist=False) == [None]


def test_a_look_at_all_threads() -> None:
    asleep, go = threading.Event(), threading.Event()

    def sleeps() -> None:
        asleep.set()
        go.wait()

    thread = threading.Thread(target=sleeps)
    with ThreadPoolExecutor(1) as pool:
        thread.start()
        asleep.wait()
        main, *others = pool.submit(stack_writer.look, threading.get_ident()).result().threads
        go.set()
        thread.join()
    assert (main.ident, main.number) == (threading.get_ident(), threading.get_native_id())
    (other,) = [other for other in others if other.ident == thread.ident]
    assert (other.number, other.runnable, other.joins) == (thread.native_id, False, False)
    assert 0 < other.cpu_ns < main.cpu_ns
    assert [function for _, _, function in other.frames][-4:] == ["sleeps", "run", "_bootstrap_inner", "_bootstrap"]


@pytest.mark.parametrize("ended", ["before its clock is read", "before its state is read"])
def test_a_thread_that_ends_meanwhile_is_unknown(ended: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if ended == "before its clock is read":
        monkeypatch.setattr(time, "clock_gettime_ns", lambda _: os.close(-1))
    else:
        monkeypatch.setattr(stack_writer, "_clocks", lambda: {threading.main_thread().ident: -1 << 31})
    with ThreadPoolExecutor(1) as pool:
        main, *_ = pool.submit(stack_writer.look, threading.main_thread().ident).result().threads
    assert (main.number, main.cpu_ns) == (0, -1)


def test_a_look_keeps_no_frame() -> None:
    """A cycle of references would keep what the threads' variables hold until the next garbage collection."""

    class Held:
        pass

    def look() -> None:
        held = Held()
        dead.append(weakref.ref(held))
        stack_writer.look(0)

    dead: list[weakref.ref[Held]] = []
    gc.disable()
    try:
        look()
        assert dead[0]() is None
    finally:
        gc.enable()


@pytest.mark.processes
def test_ranks_without_a_core_are_waited_for(ranks: lab.Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupting one that runs Python could crash it."""
    for name, limit_s in (("ANSWER_LIMIT_S", 0.0), ("EACH_S", 0.0), ("STARVED_S", 60.0)):
        monkeypatch.setattr(f"labkit.launch.thread_states.{name}", limit_s)
    ranks.run(int)
    assert ranks._pool is not None
    assert None not in ask([member.process for member in ranks._pool.members])


@pytest.mark.processes
def test_between_two_runs_ranks_are_idle(ranks: lab.Group) -> None:
    ranks.run(int)
    assert dict(ranks.stacks()) == dict.fromkeys(["rank 0", "rank 1"], "is idle: no function of yours is running")


@pytest.mark.processes
def test_a_suspended_rank_does_not_answer(ranks: lab.Group, monkeypatch: pytest.MonkeyPatch) -> None:
    pids = ranks.run(os.getpid).results
    assert ranks._pool is not None
    memory = ranks._pool.members[1].process.memory
    before = os.pread(memory, TEXT_BYTES, TEXT_AT)
    monkeypatch.setattr("labkit.launch.thread_states.ANSWER_LIMIT_S", 0.2)
    os.kill(pids[1], signal.SIGSTOP)
    try:
        stacks = ranks.stacks()
    finally:
        os.kill(pids[1], signal.SIGCONT)
    assert stacks["rank 0"].startswith("is idle")
    assert stacks["rank 1"].startswith("does not answer: its process was stopped")
    assert ranks.run(os.getpid).results == pids, "nothing was hurt"
    assert os.pread(memory, TEXT_BYTES, TEXT_AT) == before, "a signal handler read its frames while it ran"


@pytest.mark.processes
def test_without_ranks_there_are_no_stacks() -> None:
    group = lab.Group(2, runtime="bare")
    with pytest.raises(lab.LabError, match="this group has no running ranks"):
        group.stacks()
    group.close()


@pytest.mark.processes
def test_in_a_collective(monkeypatch: pytest.MonkeyPatch, cells: in_cells.Cells) -> None:
    pytest.importorskip("torch")
    cells("""
        import torch
        import torch.distributed as dist
        def f():
            print("here")
            if dist.get_rank() == 1:
                while True: pass
            dist.all_reduce(torch.ones(1))
    """)
    lines = "dist.all_reduce(torch.ones(1))", "while True: pass"
    with lab.Group(2, timeout_s=200) as group:
        look = UntilPrinted(monkeypatch, group, *lines)
        with pytest.raises(KeyboardInterrupt):
            group.run(cells.f)
    assert [line in text for line, text in zip(lines, look.stacks.values(), strict=True)] == [True, True]


@pytest.mark.processes
def test_many_ranks_answer_in_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("labkit.launch.thread_states.ANSWER_LIMIT_S", 60.0)
    with lab.Group(64, runtime="bare", timeout_s=200) as group:
        group.run(int)
        assert set(group.stacks().values()) == {"is idle: no function of yours is running"}
