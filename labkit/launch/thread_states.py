"""The threads of ranks, also of ranks that are blocked in C++: where they are, and which may still act by themselves.

A rank is blocked for ever only if none of its threads can act. A thread that sleeps, polls, reads or computes may do
anything next. A thread that waits for a lock or a queue without a time limit only continues when another thread of its
process wakes it. Its source line tells whether the wait has a time limit; its frames and the CPU time that it has used
tell whether it has moved between two checks.

What can go wrong, and the tests in `tests/launch/test_thread_states.py` that show it. A mistake in one direction ends a
healthy run, in the other it lets a stuck one wait for ever, so all doubts count as "may act":

- A thread is woken between two looks, or has ended, or is new: somebody has acted
  (`test_a_thread_that_waits_without_a_limit_can_only_be_woken`).
- A wait with a time limit looks like one without (`test_real_threads_that_continue_by_themselves`).
- A thread was woken before both looks, and still has no core (`test_a_woken_thread_without_a_core_may_act`).
- A library's thread that wakes up regularly would keep every rank "active" for ever, and an unknown one may be the
  student's (`test_housekeeping_threads_of_libraries`, `test_an_unknown_librarys_thread_may_act`).
- A callback runs on a thread that is inside an operation (`test_a_thread_in_an_operation_is_judged_by_the_operation`).
- A handler of a signal may act in a rank whose threads all wait (`test_a_main_thread_elsewhere`).
- A child process may send for the rank (`test_child_processes_that_may_act`).
- The rank has no core, and does not answer in time (`test_a_rank_that_does_not_answer_may_do_anything`).
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, TypeVar

import psutil

from labkit.launch.frames import Owner, StackFrame, frame_at, stacks_in
from labkit.launch.rank_process import RankProcess
from labkit.worker.stack_writer import ANSWER_AT, ASK, HEADER, INTERRUPT, TEXT_AT, TEXT_BYTES, Look, ThreadLook

_Answer = TypeVar("_Answer")

ANSWER_LIMIT_S: Final = 1.0  # for the ranks to write; they may have to wait for a core
EACH_S: Final = 0.02  # more for each rank
SWITCHES_S: Final = 0.1  # of CPU time, in which a rank that runs Python releases the GIL about twenty times
STARVED_S: Final = 3.0  # more for a rank that gets no core
CHECK_EVERY_S: Final = 0.002
QUIET_S: Final = 0.02  # `faulthandler` writes line by line: it is done this long after a line that may be the last
COMPLETE: Final = ("in <module>\n", "\n  ...\n")  # the end of the main thread's stack, which is the last: its outermost frame

_COMM: Final = os.path.join("labkit", "worker", "comm") + os.sep
# In which a thread of TensorFlow's waits for the other ranks, while the main thread waits for that thread.
_TF_COLLECTIVES: Final = os.path.join("tensorflow", "python", "ops", "gen_collective_ops.py")
# Lines of the standard library in which a thread waits without a time limit: in `threading`, in an executor's thread,
# and in three threads of a `ThreadPool`.
_ENDLESS: Final = (
    "waiter.acquire()",
    "work_item = work_queue.get(block=True)",
    "task = get()",
    "for taskseq, set_length in iter(taskqueue.get, None):",
)
# Files of library threads that wake up regularly, and never run the student's code.
_HOUSEKEEPING: Final = tuple(
    os.path.join(*parts)
    for parts in (
        ("tqdm", "_monitor.py"),
        ("torch", "utils", "data", "_utils", "pin_memory.py"),
        ("tensorboard", "summary", "writer", "event_file_writer.py"),
        ("IPython", "core", "history.py"),
    )
)
# The thread of `multiprocessing.pool` that replaces workers that have ended.
_POOL: Final = os.path.join("multiprocessing", "pool.py")
_POOL_THREAD: Final = "_handle_workers"
# Child processes that never communicate for the rank: by name, or by a word of their command line.
_HARMLESS_NAMES: Final = ("pt_data_worker",)
_HARMLESS_COMMANDS: Final = ("multiprocessing.resource_tracker", "torch/_inductor/compile_worker")


@dataclass(frozen=True, slots=True)
class Thread:
    """One thread that runs Python."""

    frames: tuple[StackFrame, ...]  # its stack, outermost frame first
    ident: int = 0  # its `threading.Thread.ident`
    number: int = 0  # its native id; 0 if unknown
    endless: bool = False  # whether it waits without a time limit for another thread of its process
    cpu_ns: int = -1  # the CPU time that it has used; -1 if unknown. While this and the frames stay the same, it has not moved.

    @property
    def innermost(self) -> StackFrame | None:
        """Its current frame."""
        return self.frames[-1] if self.frames else None

    @property
    def students(self) -> StackFrame | None:
        """The innermost frame of the student's code."""
        return next((frame for frame in reversed(self.frames) if frame.own is Owner.STUDENT), None)


@dataclass(frozen=True, slots=True)
class RankThreads:
    """A rank's threads at one moment."""

    main: Thread | None  # the main thread; None if the rank did not answer
    others: tuple[Thread, ...] = ()  # the other threads that run Python
    children: tuple[str, ...] = ()  # the command lines of its child processes, which may act for it; "" for a forked process
    handles_signals: bool = False  # whether the program handles signals, besides the usual ones


@dataclass(frozen=True, slots=True)
class Active:
    """What may still act in a rank."""

    kind: str  # "silent" (the rank did not answer), "main", "thread" or "child"
    thread: Thread | None = None  # the thread, if it is one
    child: str = ""  # the command line of the child process; "" for a forked process


@dataclass(frozen=True, slots=True)
class Threads:
    """A question: what do the threads of these ranks do?"""

    unknown: ClassVar = RankThreads(None)  # see `Question`
    children: bool = False  # whether also their child processes matter
    insist: bool = True  # whether to interrupt ranks that do not answer because a thread holds the GIL

    def answer(self, processes: Sequence[RankProcess]) -> list[RankThreads]:
        """Return the threads of each."""
        children = children_of(processes) if self.children else {}
        looks = ask(processes, insist=self.insist)
        silent = [process for process, look in zip(processes, looks, strict=True) if look is None and self.insist]
        # A suspended rank would handle the signal when it continues, long after the question.
        silent = [process for process in silent if not process.status().frozen]
        stacks = dict(zip((process.number for process in silent), interrupt(silent), strict=True))
        found = []
        for process, look in zip(processes, looks, strict=True):
            of_rank = tuple(children.get(process.number, ()))
            if look is None:
                found.append(_interrupted(stacks.get(process.number, []), process.pid, of_rank))
            else:
                main, *others = map(_thread, look.threads)
                found.append(RankThreads(main, tuple(others), of_rank, look.handles_signals))
        return found


def _interrupted(stacks: Sequence[tuple[StackFrame, ...]], pid: int, children: tuple[str, ...]) -> RankThreads:
    """The threads of a rank that was interrupted, from their stacks, the main thread's last."""
    if not stacks:
        return RankThreads(None)
    others = tuple(Thread(frames, -n, 0, _is_endless(frames)) for n, frames in enumerate(stacks[:-1], 1))
    return RankThreads(Thread(stacks[-1], 0, pid, _is_endless(stacks[-1])), others, children, handles_signals=True)


def active(now: RankThreads, before: RankThreads | None, *, blocked: Collection[int] | None, idle_main: bool) -> Active | None:
    """What may still act in a rank by itself; None if nothing can, unless other ranks wake it.

    Without its threads some time `before`, it is judged by those `now`, which does not suffice to report a deadlock.
    `blocked` has the native ids of threads that are blocked in a pending operation; None if one has an unknown thread:
    then it is the main thread. `idle_main` says that the function has returned or was not called.
    """
    if now.main is None:
        return Active("silent")
    if now.children:
        return Active("child", child=now.children[0])
    if idle_main:
        if now.main.students is not None:
            return Active("main", now.main)
    elif not (blocked is None or now.main.number in blocked or _in_operation(now.main) or (blocked and _in_backward(now.main))):
        unmoved = before is None or (before.main is not None and before.main.frames == now.main.frames)
        if now.handles_signals or not now.main.endless or not unmoved:
            return Active("main", now.main)
    earlier = {thread.ident: thread for thread in before.others} if before is not None else {}
    ended = earlier.keys() - {thread.ident for thread in now.others}
    if ended:
        return Active("thread", earlier[min(ended)])  # it was not blocked
    for thread in now.others:
        if thread.number in (blocked or ()) or _is_labkits(thread) or _is_housekeeping(thread):
            continue
        unmoved = before is None or earlier.get(thread.ident) == thread
        if not unmoved or not (thread.endless or _in_operation(thread) or _in_collective(thread)):
            return Active("thread", thread)
    return None


def children_of(processes: Iterable[RankProcess]) -> dict[int, list[str]]:
    """The command lines of the living child processes that may act for a rank, by the rank's number.

    The command line of a forked process is "".
    """
    ranks = {process.pid: process.number for process in processes}
    found: dict[int, list[str]] = {}
    for pid in set(psutil.pids()) - ranks.keys():
        try:
            # A rank leads a process group of its own; a process that has left the group may still be a child.
            rank = next((of for of in (os.getpgid(pid), psutil.Process(pid).ppid()) if of in ranks), 0)
        except (ProcessLookupError, psutil.Error):  # it has just ended
            continue
        command = _command(pid) if rank else None
        if command is not None:
            found.setdefault(ranks[rank], []).append("" if command == _command(rank) else command)
    return found


def _command(pid: int) -> str | None:
    """The command line of a process; None if it has ended, or never communicates for the rank that started it."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE or process.name() in _HARMLESS_NAMES:
            return None
        command = " ".join(process.cmdline()) or process.name()
    except psutil.Error:
        return None
    return None if any(word in command for word in _HARMLESS_COMMANDS) else command


def _thread(look: ThreadLook) -> Thread:
    frames = tuple(frame_at(*place, innermost=i == 0) for i, place in enumerate(look.frames))[::-1]
    # A thread that was woken and has no core yet has neither moved nor used CPU time, but is runnable.
    endless = (_is_endless(frames) or look.joins) and not look.runnable
    return Thread(frames, look.ident, look.number, endless, look.cpu_ns)


def _is_endless(frames: Sequence[StackFrame]) -> bool:
    """Whether a thread waits without a time limit at a line of the standard library.

    Elsewhere, the owner of a lock may be C++ code that computes without running Python.
    """
    return bool(frames) and frames[-1].own is Owner.STDLIB and frames[-1].source in _ENDLESS


def _is_labkits(thread: Thread) -> bool:
    """Whether it is a thread of labkit's, and runs nothing but labkit and the standard library."""
    owners = {frame.own for frame in thread.frames}
    return Owner.LABKIT in owners and owners <= {Owner.LABKIT, Owner.STDLIB}


def _is_housekeeping(thread: Thread) -> bool:
    if any(frame.file.endswith(_POOL) and frame.function == _POOL_THREAD for frame in thread.frames):
        return all(frame.own is Owner.STDLIB for frame in thread.frames)
    libraries = [frame.file for frame in thread.frames if frame.own is not Owner.STDLIB]
    return bool(libraries) and all(file.endswith(_HOUSEKEEPING) for file in libraries)


def _in_backward(main: Thread) -> bool:
    """Whether it waits for threads of torch's autograd engine, which may be communicating."""
    return main.innermost is not None and main.innermost.function == "_engine_run_backward"


def _in_operation(thread: Thread) -> bool:
    """Whether it waits in an operation that labkit records, perhaps for another thread in the same operation."""
    for frame in reversed(thread.frames):
        if frame.own is Owner.LABKIT and _COMM in frame.file:
            return True
        if frame.own is Owner.STUDENT:
            return False
    return False


def _in_collective(thread: Thread) -> bool:
    """Whether it waits in a collective of TensorFlow's outside of a tf.function."""
    return thread.innermost is not None and thread.innermost.file.endswith(_TF_COLLECTIVES)


def ask(processes: Sequence[RankProcess], *, insist: bool = True) -> list[Look | None]:
    """The threads of living ranks; None for a rank that does not answer in time.

    With `insist`, ranks that lack a core get more time: `interrupt` may crash a rank that was only waiting for one.
    """
    asked_ns = time.perf_counter_ns()  # earlier answers do not count
    for process in processes:
        _send(process, ASK)
    answers = _answers(processes, lambda process: _look(process, asked_ns), ANSWER_LIMIT_S + EACH_S * len(processes))
    late = [i for i, answer in enumerate(answers) if answer is None] if insist else []
    enough_s = {i: processes[i].status().cpu_s + SWITCHES_S for i in late}
    until = time.monotonic() + STARVED_S
    while late and time.monotonic() < until:
        time.sleep(CHECK_EVERY_S)
        for i in late:
            with contextlib.suppress(OSError):
                answers[i] = _look(processes[i], asked_ns)
        late = [i for i in late if answers[i] is None and _lacks_core(processes[i], enough_s[i])]
    return answers


def interrupt(processes: Sequence[RankProcess]) -> list[list[tuple[StackFrame, ...]]]:
    """The stacks of living ranks in which a thread holds the GIL, the main thread's last; [] if one does not answer."""
    if not processes:
        return []
    for process in processes:
        with contextlib.suppress(OSError):  # it has just ended
            os.ftruncate(process.memory, TEXT_AT)
            os.lseek(process.memory, TEXT_AT, os.SEEK_SET)  # the rank's descriptor shares this file position
        _send(process, INTERRUPT)
    _answers(processes, lambda process: _text(process).endswith(COMPLETE) or None, ANSWER_LIMIT_S + EACH_S * len(processes))
    time.sleep(QUIET_S)
    texts = [_text(process) for process in processes]
    return [stacks_in(text) if text.endswith(COMPLETE) else [] for text in texts]


def _send(process: RankProcess, number: int) -> None:
    with contextlib.suppress(OSError):  # it has just ended
        process.signal(number)


def _lacks_core(process: RankProcess, enough_s: float) -> bool:
    """Whether a rank has had less CPU time than it needs, and will continue when it gets a core."""
    status = process.status()
    return not status.frozen and not status.exiting and status.cpu_s < enough_s


def _answers(
    processes: Sequence[RankProcess], answer: Callable[[RankProcess], _Answer | None], limit_s: float
) -> list[_Answer | None]:
    answers: list[_Answer | None] = [None] * len(processes)
    until, awaited = time.monotonic() + limit_s, [*range(len(processes))]
    while awaited and time.monotonic() < until:
        time.sleep(CHECK_EVERY_S)
        exiting = {i for i in awaited if processes[i].status().exiting}
        for i in awaited:
            with contextlib.suppress(OSError):  # it has ended, and another thread has closed its memory
                answers[i] = answer(processes[i])
        awaited = [i for i in awaited if answers[i] is None and i not in exiting]
    return answers


def _look(process: RankProcess, asked_ns: int) -> Look | None:
    """What a rank has written since then; None if it has not, or is writing."""
    header = os.pread(process.memory, HEADER.size, ANSWER_AT)
    looked_ns, nbytes = HEADER.unpack(header) if len(header) == HEADER.size else (0, 0)
    if looked_ns < asked_ns:
        return None
    body = os.pread(process.memory, nbytes, ANSWER_AT + HEADER.size)
    if os.pread(process.memory, HEADER.size, ANSWER_AT) != header:  # it was writing again
        return None
    threads, handles_signals = json.loads(body)
    return Look([ThreadLook(*thread) for thread in threads], handles_signals)


def _text(process: RankProcess) -> str:
    """What `faulthandler` has written; "" if another thread has closed the memory."""
    with contextlib.suppress(OSError):
        return os.pread(process.memory, TEXT_BYTES, TEXT_AT).rstrip(b"\0").decode("ascii", errors="replace")
    return ""


def crashed_in(process: RankProcess) -> tuple[StackFrame, ...]:
    """The frames, outermost first, of the thread in which a rank crashed in C code; none if it did not crash."""
    _, crashed, stack = _text(process).rpartition("Fatal Python error")
    return next(iter(stacks_in(stack)), ()) if crashed else ()
