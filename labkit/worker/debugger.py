"""`breakpoint()` in a rank: pdb, whose prompt the notebook shows below the cell, with the student's frames only.

`q` at a prompt raises an exception in the rank, and is a failure of the run.
"""

from __future__ import annotations

import bdb
import contextlib
import io
import os
import pdb  # noqa: T100  # not left behind: this is the debugger
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, Final

from labkit.errors.exceptions import OWN_CODE, RankFailure
from labkit.ipc.protocol import AtBreakpoint, Command, LeftBreakpoint, Message
from labkit.recording.record import here, is_students, span

_LABKITS: Final = (*OWN_CODE, "<labkit")
_NOT_HERE: Final = ("interact", "run", "restart")


class RankPdb(pdb.Pdb):
    """Replaces `pdb.Pdb` in a rank. Arguments are accepted and ignored: input and output are the notebook's."""

    debugger: Any  # the rank's `Debugger`, which replaces pdb's class by a subclass that has it

    def __init__(self, *_: Any, **__: Any) -> None:
        stream = self.debugger.stream
        super().__init__(stdin=stream, stdout=stream, skip=["labkit.*"], nosigint=True)
        self._ends_run = True  # whether `q` does

    def set_trace(self, frame: FrameType | None = None, **kwargs: Any) -> None:
        """Stop at the next line, if the notebook can be asked."""
        if self.debugger.may_stop():
            super().set_trace(frame or sys._getframe().f_back, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> None:
        """Execute a statement, for pdb's `debug` and `pdb.run`. `q` ends the statement only."""
        self._ends_run = False
        with contextlib.suppress(Quit):
            super().run(*args, **kwargs)

    def trace_dispatch(self, *args: Any) -> Any:
        """See bdb. Raise `Quit`, where bdb raises an `Exception`."""
        try:
            return super().trace_dispatch(*args)
        except bdb.BdbQuit:
            raise Quit from None

    def interaction(self, frame: FrameType | None, *args: Any, **kwargs: Any) -> None:
        """Ask for commands until one of them continues the program."""
        self._ends_run &= frame is not None  # otherwise it is `pdb.post_mortem`, after which the program goes on
        if not self.debugger.may_stop():  # in a process that was forked while its parent was traced, for example
            sys.settrace(None)
            return
        with self.debugger.at_prompt() as running:
            if running:
                super().interaction(frame, *args, **kwargs)
            else:
                sys.settrace(None)

    def set_continue(self) -> None:
        """Continue until the next breakpoint."""
        super().set_continue()
        self.debugger.left()

    def set_quit(self) -> None:
        """End the program."""
        super().set_quit()
        self.debugger.left(quits=self._ends_run)

    def onecmd(self, line: str) -> bool:
        """Execute a command, except those that need a terminal, or start the program again."""
        command = self.parseline(line)[0]
        if command in _NOT_HERE:
            self.error(f"{command} does not work in a rank")
            return False
        return bool(super().onecmd(line))

    def get_names(self) -> list[str]:
        """Return the names among which pdb's `help` looks for commands."""
        return [name for name in super().get_names() if name.removeprefix("do_") not in _NOT_HERE]

    def get_stack(self, f: FrameType | None, t: TracebackType | None) -> tuple[list[tuple[FrameType, int]], int]:
        """Return the frames from the student's outermost one, without labkit's, and the number of the current frame."""
        stack, current = super().get_stack(f, t)
        students = (i for i, (frame, _) in enumerate(stack) if is_students(frame.f_code.co_filename))
        first = min(next(students, 0), current)
        kept = [i for i in range(first, len(stack)) if i == current or not stack[i][0].f_code.co_filename.startswith(_LABKITS)]
        return [stack[i] for i in kept], kept.index(current)


class Quit(BaseException):
    """The student has typed `q`. A program that catches `Exception`, for example to skip a bad batch, ends as well."""


QUITS: Final = (Quit, bdb.BdbQuit)  # what a function raises after the debugger's `q`


def quit_failure(rank: int, name: str, at_ns: int) -> RankFailure:
    """Return the failure of a rank that the student has ended with `q`."""
    return RankFailure(rank, name, "was ended at a breakpoint, with q", at_ns=at_ns, verb="", own=True)


_IN_CHILD: Final = "in a process that the rank has started. In a worker of a DataLoader: set num_workers=0 while you debug."
_SERVING: Final = "in code that the rank runs for other ranks, or after its function has returned."
_PDBS_NAMES: Final = ("__exception__", "__return__", "__pdb_convenience_variables")  # among those of a module, or of a cell


class Debugger:
    """The debugger of this rank. All of pdb's functions use it: `breakpoint()`, `pdb.set_trace()`, `pdb.post_mortem()`.

    Threads that the student's function has started may stop as well, one at a time. Code that the rank runs for others
    may not: the main thread then receives the notebook's messages, and would take the student's commands.
    """

    def __init__(self, send: Callable[[Message], None], receive: Callable[[], Message]) -> None:
        self._send, self._receive, self._rank_pid = send, receive, os.getpid()
        self._prompt = threading.RLock()  # held by the thread that is at the prompt
        self._running = False  # whether a function or a cell is running
        self._nobody = False  # whether nobody can be asked in this run
        self._said: set[str] = set()  # why breakpoints were skipped
        self.used = False
        self.stream: Any = _Stream(self._ask)

    def install(self) -> None:
        """Make pdb ask at the notebook's prompt."""
        vars(pdb)["Pdb"] = type("Pdb", (RankPdb,), {"debugger": self})
        vars(pdb)["input"] = self.stream.answer  # for pdb's questions, such as that of `clear`

    def begin(self) -> None:
        """A function or a cell begins."""
        self._running, self._nobody = True, False
        self._said.clear()
        self.stream.taken()  # what no prompt has shown belongs to an earlier run

    def end(self) -> None:
        """A function or a cell has ended. Wait for a thread that is at the prompt, and stop tracing."""
        with self._prompt:
            self._running = False
        if self.used:
            self.used = False
            sys.settrace(None)
            pdb.Pdb().clear_all_breaks()  # their lines may be those of another cell in the next run
            for name in _PDBS_NAMES:
                sys.modules["__main__"].__dict__.pop(name, None)

    def may_stop(self) -> bool:
        """Return whether this thread may stop here; say why not, once."""
        why = _IN_CHILD if os.getpid() != self._rank_pid else "" if self._running else _SERVING
        if why and why not in self._said:
            self._said.add(why)
            print(f"labkit: breakpoint() is skipped {why}", flush=True)
        return not why and not self._nobody

    @contextlib.contextmanager
    def at_prompt(self) -> Iterator[bool]:
        """Hold the prompt, and record that the rank is there. Give False if the function has ended meanwhile."""
        with self._prompt:
            if not self._running:
                yield False
                return
            with span("breakpoint"):
                self.used = True
                yield True

    def left(self, *, quits: bool = False) -> None:
        """The rank continues until its next breakpoint, or the student ends the run."""
        if self.used and os.getpid() == self._rank_pid:
            self._send(LeftBreakpoint(self.stream.taken(), quits))

    def _ask(self, text: str) -> str:
        self._send(AtBreakpoint(text))
        message = self._receive()
        assert isinstance(message, Command), f"expected a command at the debugger's prompt, got {message}"
        if message.line is None:
            self._nobody = True
            return "continue\n"
        return message.line


class _Stream(io.TextIOBase):
    """What pdb reads from and writes to."""

    def __init__(self, ask: Callable[[str], str]) -> None:
        self._ask = ask
        self._written: list[str] = []

    def write(self, text: str) -> int:
        self._written.append(text)
        return len(text)

    def readline(self, _: int | None = -1, /) -> str:  # type: ignore[override]
        return self._ask(self.taken())

    def answer(self, question: str) -> str:
        self.write(question)
        return self.readline().rstrip("\n")

    def taken(self) -> str:
        """Return what was written since the last call, with the student's names for files."""
        text = "".join(self._written)
        self._written.clear()
        for filename, name in here.files.items():
            text = text.replace(filename, name)
        return text.expandtabs()  # before the notebook puts the rank's name in front, which moves the tab stops
