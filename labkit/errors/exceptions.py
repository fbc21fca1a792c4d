"""The exceptions that students see: `LabError`, `RankError` and others, and how a notebook displays them."""

from __future__ import annotations

import functools
import os
import textwrap
from dataclasses import dataclass
from typing import Any, Final

from labkit.errors.exit_reasons import Cause

LABKIT: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# Where labkit's own code is, whose frames tracebacks leave out: the package, and the judges beside a checkout's lessons
OWN_CODE: Final = (LABKIT, os.path.join(os.path.dirname(LABKIT[:-1]), "notebooks", "judges") + os.sep)
_RULE = "─" * 70
_ALL_STOPPED = "All ranks were stopped; the next run starts fresh ones."
WIDTH: Final = 100  # characters that fit next to a file browser in a window of 1,280 pixels


class LabError(Exception):
    """Base class of labkit's errors. The message says what was given, what was expected and what to do."""

    def _render_traceback_(self) -> list[str]:
        """IPython's hook: show the message without a traceback, since labkit's frames do not help the student."""
        return [f"{type(self).__name__}: {self}"]


def install_command(extra: str) -> str:
    """Return the command that installs one of labkit's extras: "torch", "tf", "plot", "hosted", "course" or "test"."""
    return f'pip install "labkit[{extra}]"'


def missing(library: str, extra: str) -> LabError:
    """Return the error for a library that is not installed: `raise missing("TensorFlow", "tf") from None`."""
    command = install_command(extra)
    return LabError(f"{library} is not installed; the extra {extra!r} brings it:  {command}  (in a notebook cell: %{command})")


@dataclass(frozen=True, slots=True)
class RankFailure:
    """How one rank ended."""

    rank: int
    name: str  # as in "rank 2" or "master"
    headline: str  # one line: the exception's type and message, or the signal and its likely cause
    traceback: str = ""  # the student's frames with their source lines; "" if the rank died without a report
    at_ns: int = 0  # when it happened, on the clock of `time.perf_counter_ns`
    verb: str = "failed:"  # the words between name and headline, such as "failed:"; "" if name and headline form a sentence
    cause: Cause = Cause.RAISED
    last: str = ""  # a sentence on what the rank was doing, if it died without a report
    own: bool = False  # whether the student's own code raised the exception, rather than a library
    broken: bool = False  # whether the process is alive but cannot be reused, because CUDA no longer works in it
    own_limit: str = ""  # a sentence on the program's own time limit, if that ended the operation that failed

    @property
    def consequence(self) -> bool:
        """Whether another rank's end caused this failure."""
        return self.cause.is_consequence

    def __str__(self) -> str:
        return " ".join(filter(None, (self.name, self.verb, self.headline)))


class RunError(LabError):
    """Base class of the errors that end a run. Stop is none: it raises a `KeyboardInterrupt`, see `Stopped`.

    Attributes:
        run: the `Run` until the error, with its trace and output, for figures; None in an error that was copied.
    """

    run: Any = None


class RankError(RunError):
    """One or more ranks failed. The report begins with the root cause; each consequence takes one line.

    Args:
        failures: how the ranks failed, the root cause first.
        others: for each rank that was stopped because of it, one line on what it was doing.
        stopped: whether all ranks were stopped. The exceptions are those of `group.unfinished.may_go_on`.
        hint: the usual mistake behind such a failure; "" if there is none.
    """

    closed = False  # whether it ended the `with` block of a group, and so closed it
    restarts = 0  # how many times the run had replaced all ranks before

    def __init__(
        self, failures: list[RankFailure], others: list[str] | None = None, *, stopped: bool = True, hint: str = ""
    ) -> None:
        assert failures, "a RankError needs at least one failure"
        self.failures, self.hint = failures, hint
        self.others = others or []
        self.stopped = stopped
        first = failures[0]
        super().__init__(f"{first.name}: {first.headline}")

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(RankError, stopped=self.stopped, hint=self.hint), (self.failures, self.others)

    @property
    def rank(self) -> int:
        """The number of the rank that failed first."""
        return self.failures[0].rank

    def report(self) -> str:
        """Return the full report: the root cause with its source lines, then one line for each other rank."""
        first = self.failures[0]
        same = [f for f in self.failures[1:] if f.headline == first.headline]
        lines = [_RULE, str(first)]
        if same:
            lines.append(f"    (the same on {', '.join(f.name for f in same)})")
        lines += [wrapped(text) for text in (first.last, self.hint) if text]
        if first.traceback:
            lines += ["", first.traceback.rstrip()]
        rest = [f"{f.name}: {f.headline}" for f in self.failures[1:] if f not in same] + self.others
        if rest:
            lines += ["", "Meanwhile:", *(f"    {line}" for line in rest)]
        if self.restarts:
            times = "once" if self.restarts == 1 else f"{self.restarts} times"
            lines += ["", f"Before that, this run had failed and started again on fresh ranks {times}."]
        end = _ALL_STOPPED if self.stopped else "The ranks are still running and keep their state."
        lines += [_RULE] if self.closed else ["", end, _RULE]
        return "\n".join(lines)

    def __str__(self) -> str:
        return "\n" + self.report()

    def _render_traceback_(self) -> list[str]:
        return [f"RankError: {self.report()}"]


def wrapped(text: str) -> str:
    """Return a text in lines that fit below a cell: JupyterLab breaks longer ones inside words."""
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


class _EndedByGroupError(RunError):
    """A run that the group stopped although no rank had failed; `doings` says, by rank, what it was doing."""

    why = "{}"

    def __init__(self, headline: str, hint: str, doings: list[str]) -> None:
        self.headline, self.hint, self.doings = headline, hint, doings
        super().__init__(headline, hint, doings)

    def __str__(self) -> str:
        why = [wrapped(text) for text in (self.why.format(self.headline), self.hint) if text]
        doings = [f"    {line}" for line in self.doings]
        return "\n" + "\n".join([_RULE, *why, "", *doings, "", _ALL_STOPPED, _RULE])

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {str(self).lstrip()}"]  # name and rule share a line, as in a `RankError`


class DeadlockError(_EndedByGroupError):
    """The ranks were in a deadlock and have been stopped; `operations` are those in which they wait."""

    why = "Deadlock: {}."

    def __init__(self, headline: str, hint: str, doings: list[str], operations: tuple[str, ...] = ()) -> None:
        super().__init__(headline, hint, doings)
        self.operations = operations


class MismatchError(_EndedByGroupError):
    """All ranks returned, with wrong results: they called one operation with different dtypes, sizes or reductions."""

    why = "The results are wrong: {}."


class RunTimeoutError(_EndedByGroupError):
    """A run took longer than the group's `timeout_s`, and its ranks were stopped."""

    why = "{}."


class Stopped(KeyboardInterrupt):
    """Stop was pressed during a run. It is a `KeyboardInterrupt`, so that loops around the run end as well.

    Attributes:
        name: the function that ran.
        doings: for each rank, one line on what it was doing.
        run: as for `RunError`.
    """

    run: Any = None

    def __init__(self, name: str, doings: list[str]) -> None:
        self.name, self.doings = name, doings
        super().__init__(name, doings)

    def __str__(self) -> str:
        lines = [f"{self.name} was stopped.", *(f"    {line}" for line in self.doings), "The next run starts fresh ranks."]
        return "\n".join(lines)

    def _render_traceback_(self) -> list[str]:
        return [f"Stopped: {self}"]
