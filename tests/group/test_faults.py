"""The fault zoo: for each fault in a rank, the student reads what happened, where, and what the others did, and can
continue."""

from __future__ import annotations

import contextlib
import json
import linecache
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cells as in_cells
import psutil
import pytest
from doings import computing, failure, returned, waiting
from pressed_stop import stop_when_printed
from processes import left_after

import labkit as lab
from labkit.errors.exit_reasons import Cause, explain_exit
from labkit.group.pool_state import Member
from labkit.group.run import GRACE_S, Execution
from labkit.ipc.protocol import Message
from labkit.ipc.tracebacks import HEADLINE_CHARACTERS, TEXT_CHARACTERS
from labkit.launch.rank_process import RankProcess, Status
from labkit.recording.schema import ENDED, Pending

pytestmark = pytest.mark.processes

RULE = "─" * 70
KEPT = "The ranks are still running and keep their state."


@pytest.fixture(scope="module")
def ranks(start: str) -> Iterator[lab.Group]:
    with lab.Group(3, runtime="bare", start=start, timeout_s=200) as group:
        yield group


@pytest.fixture(scope="module")
def gloo() -> Iterator[lab.Group]:
    pytest.importorskip("torch")
    with lab.Group(3, start="fork", timeout_s=200) as group:
        yield group


def pids(group: lab.Group) -> list[int]:
    return group.run(os.getpid).results


# One rank, all ranks, and the fate of the others


@pytest.mark.usefixtures("patient")
def test_one_rank_raises_after_the_others_returned(ranks: lab.Group, cells: in_cells.Cells) -> None:
    cells("""
        import os

        def f():
            if os.environ["RANK"] == "1":
                return divide(1, 0)
            f.kept = "kept"

        def divide(a, b):
            return a / b

        def kept():
            import __main__
            return getattr(__main__.f, "kept", None)
    """)
    before = pids(ranks)
    error = failure(ranks, cells.f)
    assert error.report().splitlines() == [
        RULE,
        "rank 1 failed: ZeroDivisionError: division by zero",
        "",
        "Traceback (most recent call last):",
        '  File "<ipython-input-1-test>", line 6, in f',
        "    return divide(1, 0)",
        "           ^^^^^^^^^^^^",
        '  File "<ipython-input-1-test>", line 10, in divide',
        "    return a / b",
        "           ~~^~~",
        "ZeroDivisionError: division by zero",
        "",
        "Meanwhile:",
        f"    {returned('rank 0')}",
        f"    {returned('rank 2')}",
        "",
        KEPT,
        RULE,
    ]
    assert pids(ranks) == before
    assert ranks.run(cells.kept).results == ["kept", None, "kept"]


@pytest.mark.usefixtures("patient")
def test_the_same_error_on_all_ranks_is_reported_once(ranks: lab.Group, cells: in_cells.Cells) -> None:
    cells("def f(): return undefined")
    before = pids(ranks)
    error = failure(ranks, cells.f)
    assert error.rank == 0, "always the lowest: a checked cell must read the same each time"
    assert str(error).count("NameError: name 'undefined' is not defined") == 2
    assert "    (the same on rank 1, rank 2)" in str(error)
    assert not error.stopped
    assert pids(ranks) == before


@pytest.mark.usefixtures("patient")
def test_an_error_that_ends_the_with_block_does_not_say_that_the_ranks_go_on(ranks: lab.Group) -> None:
    with pytest.raises(lab.RankError) as caught, lab.Group(2, runtime="bare") as group:
        group.run(int, "y")
    assert "invalid literal" in caught.value.report()
    assert KEPT not in caught.value.report()
    assert KEPT in failure(ranks, int, "y").report()


def test_one_rank_raises_and_the_others_are_stopped(ranks: lab.Group, cells: in_cells.Cells) -> None:
    cells("""
        import os, threading
        def f():
            if os.environ["RANK"] == "2":
                raise ValueError("the one")
            threading.Event().wait()
    """)
    before = pids(ranks)
    error = failure(ranks, cells.f)
    assert (error.rank, error.failures[0].name) == (2, "rank 2")
    assert error.others == [computing("rank 0"), computing("rank 1")]
    assert error.stopped
    assert not set(pids(ranks)) & set(before)


def test_a_rank_without_a_core_since_another_failed_is_waited_for(
    ranks: lab.Group, cells: in_cells.Cells, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Rank 1 is treated as one that only lacks a core; it returns long after the time limit of the others."""
    cells("""
        import os
        def f(path):
            if os.environ["RANK"] == "0":
                raise ValueError("the one")
            while os.environ["RANK"] == "1" and not os.path.exists(path):
                pass
    """)
    go_on, failed = tmp_path / "go on", []

    def status(_: RankProcess) -> Status:
        failed.append(time.monotonic())
        if failed[-1] - failed[0] > 3 * GRACE_S:
            go_on.touch()
        return Status("running", exiting=False, cpu_s=0.0)

    monkeypatch.setattr(RankProcess, "status", status)
    monkeypatch.setattr("labkit.launch.resource_usage.STARVED_S", 60.0)
    assert failure(ranks, cells.f, str(go_on)).others == [returned("rank 1"), returned("rank 2")]


def test_the_processor_time_of_a_process_and_whether_it_is_runnable(ranks: lab.Group) -> None:
    ranks.run(int)
    assert ranks._pool is not None
    process = ranks._pool.members[0].process

    def spin() -> None:
        until = time.process_time() + 0.2
        while time.process_time() < until:
            pass

    before, seen = process.status().cpu_s, []
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(ranks[0].run, spin)
        while not run.done():
            seen.append(process.status().wants_core)
        run.result()
    assert process.status().cpu_s - before >= 0.15
    assert any(seen)
    until = time.monotonic() + 60
    while process.status().wants_core and time.monotonic() < until:
        time.sleep(0.01)
    assert not process.status().wants_core, "it waits for its next run"


def test_one_rank_raises_while_the_others_wait_for_it(
    gloo: lab.Group, cells: in_cells.Cells, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("labkit.group.run.GRACE_S", 2.0)  # until then, they have come
    cells("""
        import torch
        import torch.distributed as dist

        def f():
            if dist.get_rank() == 1:
                raise ValueError("rank 1 does not come")
            dist.all_reduce(torch.ones(1))
    """)
    error = failure(gloo, cells.f)
    assert error.failures[0].headline == "ValueError: rank 1 does not come"
    assert error.rank == 1
    assert len(error.failures) == 1
    for line, name in zip(error.others, ("rank 0", "rank 2"), strict=True):
        assert waiting(name, "all_reduce", "<ipython-input-1-test>, line 8").fullmatch(line), line
    assert error.stopped


@pytest.mark.usefixtures("patient")
def test_after_a_finished_collective_a_mistake_of_all_ranks_keeps_the_ranks(gloo: lab.Group, cells: in_cells.Cells) -> None:
    """All returned, and nothing is under way between them."""
    cells("""
        import torch
        import torch.distributed as dist
        def f():
            dist.all_reduce(torch.ones(1))
            raise ValueError("after it")
    """)
    before = pids(gloo)
    error = failure(gloo, cells.f)
    assert not error.stopped
    assert pids(gloo) == before


def test_after_a_message_that_nobody_received_the_ranks_are_not_kept(gloo: lab.Group, cells: in_cells.Cells) -> None:
    """All returned, but the next run would receive what this one has sent."""
    cells("""
        import torch
        import torch.distributed as dist
        def f():
            if dist.get_rank() == 0:
                dist.isend(torch.ones(1), 1)
            raise ValueError("after it")
    """)
    before = pids(gloo)
    error = failure(gloo, cells.f)
    assert error.stopped
    assert not set(pids(gloo)) & set(before)


def test_the_death_of_a_rank_is_reported_before_broken_connections(gloo: lab.Group, cells: in_cells.Cells) -> None:
    cells("""
        import os, signal
        import torch
        import torch.distributed as dist
        def f():
            dist.barrier()
            if dist.get_rank() == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(torch.ones(1))
    """)
    error = failure(gloo, cells.f)
    assert [(f.name, f.cause) for f in error.failures] == [("rank 2", Cause.KILLED)]
    assert [(s.rank, s.name) for s in error.run.trace.scalars] == [(2, ENDED)], "for the picture"
    for line, name in zip(error.others, ("rank 0", "rank 1"), strict=True):
        assert waiting(name, "all_reduce", "<ipython-input-1-test>, line 9").fullmatch(line), line
    assert gloo.run(int).results == [0, 0, 0]


# How processes end


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("end", "cause", "headline"),
    [
        ("os._exit(3)", Cause.EXITED, "the process ended with exit code 3 (os._exit, or a library that ended the process)"),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            Cause.KILLED,
            "killed by SIGKILL (sent by this or another process; if by none of yours, the machine",
        ),
        (
            "ctypes.string_at(0)",
            Cause.CRASHED,
            "killed by SIGSEGV (segmentation fault: C or C++ code accessed memory outside its address space)",
        ),
        ("os.abort()", Cause.ABORTED, "killed by SIGABRT (C or C++ code aborted; its message is in the rank's output)"),
        ("os.kill(os.getpid(), signal.SIGTERM)", Cause.SIGNALLED, "killed by SIGTERM"),
        (
            "os.kill(os.getpid(), signal.SIGBUS)",
            Cause.CRASHED,
            "killed by SIGBUS (access to shared memory or a mapped file that no longer exists",
        ),
        ("os.execv('/bin/true', ['true'])", Cause.EXITED, ""),
    ],
)
def test_a_rank_that_ends_is_explained(
    ranks: lab.Group, cells: in_cells.Cells, end: str, cause: Cause, headline: str, capfd: pytest.CaptureFixture[str]
) -> None:
    cells(f"""
        import ctypes, os, signal
        def f():
            if os.environ["RANK"] == "1":
                os.write(1, b"last words")
                os.write(2, b" and errors")
                {end}
    """)
    error = failure(ranks, cells.f)
    assert capfd.readouterr().out == "[rank 1] last words and errors\n"
    assert error.rank == 1
    assert error.failures[0].headline.startswith(headline)
    assert error.failures[0].cause is cause
    crashed = cause in (Cause.CRASHED, Cause.ABORTED)
    assert ('File "<ipython-input-1-test>", line 7, in f' in error.failures[0].traceback) == crashed
    assert error.others == [returned("rank 0"), returned("rank 2")]
    assert error.stopped
    assert ranks.run(int).results == [0, 0, 0]


def test_a_rank_that_dies_after_it_has_returned(ranks: lab.Group, cells: in_cells.Cells, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process can serve no further run, even if its result arrived in time."""
    cells("""
        import os, threading
        def f():
            if os.environ["RANK"] != "0":
                threading.Event().wait()
    """)
    real = Execution.message

    def kill_then(execution: Execution, member: Member, message: Message) -> None:
        real(execution, member, message)
        os.kill(member.process.pid, signal.SIGKILL)

    monkeypatch.setattr(Execution, "message", kill_then)
    error = failure(ranks, cells.f)
    monkeypatch.undo()
    assert error.rank == 0
    assert error.failures[0].cause is Cause.KILLED
    assert ranks.run(int).results == [0, 0, 0]


def test_a_rank_that_dies_between_two_runs(ranks: lab.Group) -> None:
    victim = pids(ranks)[1]
    os.kill(victim, signal.SIGKILL)
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(victim).status() != psutil.STATUS_ZOMBIE:
            os.sched_yield()
    error = failure(ranks, int)
    assert error.rank == 1
    assert error.failures[0].cause is Cause.KILLED
    assert ranks.run(int).results == [0, 0, 0]


def test_a_rank_of_an_rpc_group_that_dies_between_two_runs() -> None:
    """The functions are sent to all ranks before one is called: this must not fail with a socket error."""
    pytest.importorskip("torch")
    with lab.Group(["master", "worker"], runtime="rpc", timeout_s=200) as group:
        (pid,) = group["worker"].run(os.getpid).results
        os.kill(pid, signal.SIGKILL)
        assert not left_after(60, [pid])
        with pytest.raises(lab.RankError) as caught:
            group.run(os.getpid)
        assert [(f.name, f.cause) for f in caught.value.failures] == [("worker", Cause.KILLED)]
        assert len(group.run(os.getpid).results) == 2


def test_a_rank_that_only_serves_dies(ranks: lab.Group) -> None:
    victim = pids(ranks)[2]

    def f(victim: int) -> None:
        os.kill(victim, signal.SIGKILL)
        threading.Event().wait()

    error = failure(ranks[0], f, victim)
    assert error.rank == 2
    assert error.others == [computing("rank 0")]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "the process ended with exit code 0"),
        (-signal.SIGILL, "killed by SIGILL (an instruction that this processor does not support)"),
        (-signal.SIGFPE, "killed by SIGFPE (integer division by zero"),
        (-64, ("killed by SIGRTMAX", "killed by signal 64")),
        (-99, "killed by signal 99"),
    ],
)
def test_exit_codes_as_text(code: int, words: str | tuple[str, ...]) -> None:
    assert explain_exit(code)[1].startswith(words)


# Exceptions of all kinds


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("body", "headline"),
    [
        ("import sys; sys.exit(3)", "the function called exit(3)"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("raise StopIteration", "StopIteration"),
        ("raise Needs(1, 2)", "Needs: 1 and 2"),
        ("raise Silent", "Silent: <exception str() failed>"),
        ("raise MemoryError", "MemoryError"),
        (
            "input()",
            "LabError: input(''): a rank has no keyboard. Ask in the notebook, and pass the answer: group.run(f, answer)",
        ),
        ("raise ConnectionResetError(104, 'by the student')", "ConnectionResetError: [Errno 104] by the student"),
        ("raise BaseException('base')", "BaseException: base"),
        ("eval('1 +')", "SyntaxError: invalid syntax"),
        ("return f()", "RecursionError: maximum recursion depth exceeded"),
        ("raise ValueError('one\\ntwo')", "ValueError: one"),
        ("assert False, 'said'", "AssertionError: said"),
    ],
)
def test_exceptions(ranks: lab.Group, cells: in_cells.Cells, body: str, headline: str) -> None:
    cells(f"""
        class Needs(Exception):
            def __init__(self, a, b): super().__init__(f"{{a}} and {{b}}")
        class Silent(Exception):
            def __str__(self): raise ValueError
        def f():
            {body}
    """)
    before = pids(ranks)
    error = failure(ranks, cells.f)
    assert error.failures[0].headline == headline
    assert ", in f\n" in error.failures[0].traceback
    assert len(error.failures[0].traceback.splitlines()) < 40
    assert [f.headline for f in error.failures] == [headline] * 3
    assert pids(ranks) == before


@pytest.mark.parametrize("leave", ["exit()", "sys.exit(0)"])
def test_a_function_that_exits_with_success_has_no_result(ranks: lab.Group, cells: in_cells.Cells, leave: str) -> None:
    cells(f"""
        import os, sys
        def f(value, leaving):
            if os.environ["RANK"] in leaving:
                {leave}
            return value
    """)
    before = pids(ranks)
    error = failure(ranks, cells.f, 3, "1")
    assert [(f.rank, f.cause) for f in error.failures] == [(1, Cause.RAISED)]
    assert ", in f\n" in error.failures[0].traceback
    # No result is missing if all exit, as at the end of a script, or if the others return nothing.
    assert ranks.run(cells.f, 3, "012").results == [None] * 3
    assert ranks.run(cells.f, None, "02").results == [None] * 3
    assert ranks[2].run(cells.f, 3, "2").results == [None]
    assert pids(ranks) == before


def test_a_builtin_that_raises(ranks: lab.Group) -> None:
    """None of the frames is the student's."""
    assert failure(ranks, os.read, 10**6, 1).failures[0].headline == "OSError: [Errno 9] Bad file descriptor"
    assert failure(ranks, int, "x").failures[0].headline.startswith("ValueError: invalid literal for int()")


def test_an_enormous_message_is_cut(ranks: lab.Group, cells: in_cells.Cells) -> None:
    cells("def f(): raise ValueError('a' + 10**7 * 'x' + 'z')")
    error = failure(ranks[0], cells.f)
    assert error.failures[0].headline.startswith("ValueError: axxx")
    assert error.failures[0].headline.endswith("xxz")
    assert "characters left out" in error.failures[0].headline
    assert len(error.failures[0].headline) < HEADLINE_CHARACTERS + 100
    assert len(error.failures[0].traceback) < TEXT_CHARACTERS + 100


def test_library_frames_are_omitted_except_the_innermost(ranks: lab.Group, cells: in_cells.Cells) -> None:
    cells("""
        import json
        def f():
            return parse('{"a": }')
        def parse(text):
            return json.loads(text)
    """)
    text = failure(ranks[0], cells.f).failures[0].traceback
    assert [line.strip().rsplit(", in ")[1] for line in text.splitlines() if line.startswith("  File")] == [
        "f",
        "parse",
        "raw_decode",
    ]
    assert 'File "decoder.py"' in text


def test_causes_contexts_and_exception_groups_are_cut_too(ranks: lab.Group, cells: in_cells.Cells) -> None:
    cells("""
        import json
        def first(): json.loads("{")
        def second():
            try:
                first()
            except ValueError as error:
                raise KeyError("wrapped") from error
        def f():
            errors = []
            for function in (first, second):
                try:
                    function()
                except Exception as error:
                    errors.append(error)
            raise ExceptionGroup("several", errors)
    """)
    error = failure(ranks[0], cells.f)
    text = error.failures[0].traceback
    assert error.failures[0].headline == "ExceptionGroup: several (2 sub-exceptions)"
    assert "The above exception was the direct cause of the following exception" in text
    assert "KeyError: 'wrapped'" in text
    assert text.count("JSONDecodeError") == 2
    assert "in loads" not in text
    assert text.count("in raw_decode") == 2


def test_a_warning_names_the_cell(ranks: lab.Group, cells: in_cells.Cells) -> None:
    cells("""
        import json, warnings
        def f():
            warnings.simplefilter("always")
            warnings.warn("careful")
            warnings.warn_explicit("of a library", DeprecationWarning, json.__file__, 2, registry={})
    """)
    assert ranks[0].run(cells.f).output.splitlines() == [
        "[rank 0] <ipython-input-1-test>, line 5: UserWarning: careful",
        '[rank 0]     warnings.warn("careful")',
        f"[rank 0] {json.__file__}, line 2: DeprecationWarning: of a library",
        f"[rank 0]     {linecache.getline(json.__file__, 2).strip()}",
    ]


def test_a_cell_that_was_redefined_shows_its_own_lines(ranks: lab.Group, cells: in_cells.Cells) -> None:
    cells("def f():\n    return 1 / 0  # the old one\n")
    assert "# the old one" in str(failure(ranks, cells.f))
    cells("def f():\n    x = 1\n    return x / 0  # the new one\n")
    assert "# the new one" in str(failure(ranks, cells.f))


# Stop


HANGS = {
    "in Python": "threading.Event().wait()",
    "in a loop": "while True: pass",
    "in C without the interpreter's lock": "ctypes.CDLL(None).pause()",
    "in C with the interpreter's lock": "sum(range(10 ** 13))",
    "ignoring signals": "[signal.signal(s, signal.SIG_IGN) for s in (2, 15)], threading.Event().wait()",
    "stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
}


@pytest.mark.parametrize("where", HANGS)
def test_stop_while_ranks_hang(where: str, ranks: lab.Group, cells: in_cells.Cells, monkeypatch: pytest.MonkeyPatch) -> None:
    cells(f"""
        import ctypes, os, signal, subprocess, threading
        def f():
            child = subprocess.Popen(["sleep", "600"])
            print("here", child.pid)
            {HANGS[where]}
    """)
    before = pids(ranks)
    with monkeypatch.context() as patch:
        stop_when_printed(patch, 3)
        with pytest.raises(KeyboardInterrupt) as caught:
            ranks.run(cells.f)
    names = [f"rank {i}" for i in range(3)]
    first, *lines, last = str(caught.value).splitlines()
    assert (first, last) == ("f was stopped.", "The next run starts fresh ranks.")
    for name, line in zip(names, lines, strict=True):
        doing, _, at = line.strip().partition(", at ")
        assert doing == (f"{name} was stopped by a signal (SIGSTOP)" if where == "stopped" else computing(name))
        assert where == "stopped" or at.endswith(('print("here", child.pid)', HANGS[where][:60], f"{HANGS[where][:60]}...")), at
    assert not set(pids(ranks)) & set(before)
    assert not [p for p in before if psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE]


class StopWhenBlocked:
    """A live view that presses Stop as soon as a given number of ranks wait for communication, and keeps its last
    update."""

    interval_s = 0.01

    def __init__(self, count: int) -> None:
        self._count = count
        self.reported: tuple[Any, str] | None = None

    def begin(self, *_: Any) -> None:
        """Nothing."""

    def update(self, _now_ns: int, _new: Any, pending: Sequence[Sequence[Pending]], *_: Any) -> None:
        if sum(any(p.wait_start_ns for p in of_rank) for of_rank in pending) == self._count:
            self._count = -1  # once
            signal.raise_signal(signal.SIGINT)

    def end(self, trace: lab.Trace, stopped: str) -> None:
        self.reported = trace, stopped


def test_the_picture_of_a_stopped_run_shows_what_was_under_way(
    gloo: lab.Group, cells: in_cells.Cells, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells("""
        import threading
        import torch
        import torch.distributed as dist
        def f():
            if dist.get_rank() == 2:
                threading.Event().wait()
            dist.all_reduce(torch.ones(1))
    """)
    picture = StopWhenBlocked(2)
    monkeypatch.setattr(lab.Group, "picture", lambda: picture)
    with pytest.raises(KeyboardInterrupt):
        gloo.watch(cells.f)
    assert picture.reported is not None
    trace, stopped = picture.reported
    assert stopped == "stopped"
    calls, waits = trace.filter(kind="call").spans, trace.filter(kind="communication").spans
    assert [(c.rank, c.name, c.start_ns, c.end_ns, c.done) for c in calls] == [
        (rank, "f", trace.start_ns, trace.end_ns, False) for rank in range(3)
    ]
    assert [(w.rank, w.name, w.end_ns, w.wait_end_ns, w.done) for w in sorted(waits, key=lambda w: w.rank)] == [
        (rank, "all_reduce", trace.end_ns, trace.end_ns, False) for rank in (0, 1)
    ]
    computing, blocked = trace.shares()[2], trace.shares()[0]
    assert computing.compute_ns == trace.duration_ns
    assert blocked.compute_ns + blocked.waiting_ns + blocked.exposed_ns == trace.duration_ns
    assert blocked.waiting_ns > 0


def test_ctrl_c_in_a_terminal_does_not_reach_the_ranks(start: str) -> None:
    """A terminal sends SIGINT to all foreground processes; only the program itself may act on it."""
    program = """
import os, signal, threading
import labkit as lab
signal.signal(signal.SIGINT, signal.default_int_handler)
def f():
    print("here", flush=True)
    threading.Event().wait()
group = lab.Group(2, runtime="bare")
try:
    group.run(f)
except KeyboardInterrupt:
    print("stopped", group.run(lambda: "again").results, flush=True)
"""
    child = subprocess.Popen(
        [sys.executable, "-c", program],
        env=os.environ | {"LABKIT_START": start},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert child.stdout is not None
    try:
        assert {child.stdout.readline() for _ in range(2)} == {"[rank 0] here\n", "[rank 1] here\n"}
        os.killpg(child.pid, signal.SIGINT)
        assert child.stdout.read() == "stopped ['again', 'again']\n"
    finally:
        child.kill()
        child.communicate()
