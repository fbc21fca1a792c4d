"""`RankPdb`: Python's debugger in a rank, with the student's frames only."""

from __future__ import annotations

import bdb
import contextlib
import pdb  # noqa: T100  # not left behind: this is the debugger
import sys
from types import FrameType, TracebackType
from typing import Any, Final

from labkit.errors.own_code import LABKIT
from labkit.recording.record import is_students
from labkit.worker.quit_command import Quit

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
        kept = [i for i in range(first, len(stack)) if i == current or not _is_labkits(stack[i][0].f_code.co_filename)]
        return [stack[i] for i in kept], kept.index(current)


def _is_labkits(filename: str) -> bool:
    return filename.startswith((LABKIT, "<labkit"))
