"""`breakpoint()` in a rank: pdb, whose prompt the notebook shows below the cell."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Final

from labkit.ipc.protocol import AtBreakpoint, Command, LeftBreakpoint, Message
from labkit.recording.import_hook import when_imported
from labkit.recording.record import here, span

_IN_CHILD = "in a process that the rank has started. In a worker of a DataLoader: set num_workers=0 while you debug."
_SERVING = "in code that the rank runs for other ranks, or after its function has returned."
_PDBS_NAMES: Final = ("__exception__", "__return__", "__pdb_convenience_variables")  # among those of a module, or of a cell


class Debugger:
    """The debugger of this rank. All of pdb's functions use it: `breakpoint()`, `pdb.set_trace()`, `pdb.post_mortem()`.

    Threads that the student's function has started may stop as well, one at a time. Code that the rank runs for others
    may not: the main thread then receives the notebook's messages, and would take the student's commands.

    Args:
        send: sends a message to the notebook.
        receive: waits for a message from the notebook.
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
        """Make pdb ask at the notebook's prompt, as soon as it is imported."""
        when_imported("pdb", self._patch)

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
            sys.modules["pdb"].Pdb().clear_all_breaks()  # their lines may be those of another cell in the next run
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

    def _patch(self, module: ModuleType) -> None:
        from labkit.worker.rank_pdb import RankPdb

        vars(module)["Pdb"] = type("Pdb", (RankPdb,), {"debugger": self})
        vars(module)["input"] = self.stream.answer  # for pdb's questions, such as that of `clear`

    def _ask(self, text: str) -> str:
        self._send(AtBreakpoint(text))
        message = self._receive()
        assert isinstance(message, Command), f"expected a command at the debugger's prompt, got {message}"
        if message.line is None:
            self._nobody = True
            return "continue\n"
        return message.line


class _Stream(io.TextIOBase):
    """What pdb reads from and writes to.

    Args:
        ask: sends the notebook what pdb has written, and returns the student's line; "" at the end of the input.
    """

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
