"""What goes wrong, in words for the student: `LabError`, `RankError` and how a notebook shows them."""

from __future__ import annotations

import functools
import textwrap
from dataclasses import dataclass
from typing import Any, Final

__all__ = [
    "DeadlockError",
    "LabError",
    "MismatchError",
    "RankError",
    "RankFailure",
    "RunTimeoutError",
    "Stopped",
    "install_command",
    "missing",
]

_RULE = "─" * 70
WIDTH: Final = 110  # characters that fit beside a notebook's file browser


class LabError(Exception):
    """A use of labkit that cannot work; the message says what was given, what was expected and what to do."""

    def _render_traceback_(self) -> list[str]:
        """IPython's hook: the message alone, since the frames between the cell and labkit teach nothing."""
        return [f"{type(self).__name__}: {self}"]


def install_command(extra: str) -> str:
    """What brings the libraries of one of labkit's extras: "torch", "tf", "plot", "course" or "test"."""
    return f'pip install "labkit[{extra}]"'


def missing(what: str, extra: str) -> LabError:
    """The error for a library that is not installed: `raise missing("TensorFlow", "tf") from None`.

    Args:
        what: the library, as its users write it.
        extra: the extra of labkit that brings it.
    """
    command = install_command(extra)
    return LabError(f"{what} is not installed; the extra {extra!r} brings it:  {command}  (in a notebook cell: %{command})")


@dataclass(frozen=True, slots=True)
class RankFailure:
    """How one rank ended.

    Args:
        rank: its number.
        name: its name, as in "rank 2" or "master".
        headline: one line: the exception's type and message, or the signal and its likely cause.
        traceback: the student's frames with their source lines; empty where a rank died without a report.
        at_ns: when it happened, on `time.perf_counter_ns`.
        verb: how the headline follows on the name: "failed:"; "" where it is a sentence with it.
        consequence: whether it came of another rank's end.
        own: whether a line of the student's own raised it, and no library.
        last: of a rank that died without a report, what it was doing: a sentence.
        broken: whether the process cannot be used again although it lives: CUDA no longer works in it.
    """

    rank: int
    name: str
    headline: str
    traceback: str = ""
    at_ns: int = 0
    verb: str = "failed:"
    consequence: bool = False
    last: str = ""
    own: bool = False
    broken: bool = False

    def __str__(self) -> str:
        return " ".join(filter(None, (self.name, self.verb, self.headline)))


class RankError(LabError):
    """One or more ranks failed; the first cause comes first, the consequences take one line each.

    Args:
        failures: how the ranks failed, the first cause first.
        others: one line for each rank that was stopped because of it: what it was doing.
        stopped: whether the ranks were ended; where all came back and none had talked to another, they need not be.
        hint: what is usually wrong then; "" where nothing is usual.
    """

    def __init__(
        self, failures: list[RankFailure], others: list[str] | None = None, *, stopped: bool = True, hint: str = ""
    ) -> None:
        assert failures, "an error without a failure"
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
        """The whole story as text: the first cause with its source lines, then a line for each other rank."""
        first = self.failures[0]
        same = [f for f in self.failures[1:] if f.headline == first.headline]
        lines = [_RULE, str(first)]
        if same:
            lines.append(f"    (the same on {', '.join(f.name for f in same)})")
        lines += [_wrapped(text) for text in (first.last, self.hint) if text]
        if first.traceback:
            lines += ["", first.traceback.rstrip()]
        rest = [f"{f.name}: {f.headline}" for f in self.failures[1:] if f not in same] + self.others
        if rest:
            lines += ["", "Meanwhile:", *(f"    {line}" for line in rest)]
        end = (
            "All ranks were stopped; the next run starts fresh ones."
            if self.stopped
            else "The ranks are still running and keep their state."
        )
        lines += ["", end, _RULE]
        return "\n".join(lines)

    def __str__(self) -> str:
        return "\n" + self.report()

    def _render_traceback_(self) -> list[str]:
        return [f"RankError: {self.report()}"]


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


class _EndedByGroupError(LabError):
    """A run that the group ended although no rank had failed; the report has a line for each rank."""

    why = "{}"

    def __init__(self, headline: str, hint: str, doings: list[str]) -> None:
        self.headline, self.hint, self.doings = headline, hint, doings
        super().__init__(headline, hint, doings)

    def __str__(self) -> str:
        why = [_wrapped(text) for text in (self.why.format(self.headline), self.hint) if text]
        doings = [f"    {line}" for line in self.doings]
        end = "All ranks were stopped; the next run starts fresh ones."
        return "\n" + "\n".join([_RULE, *why, "", *doings, "", end, _RULE])

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {str(self).lstrip()}"]  # the rule beside the name, as in a `RankError`


class DeadlockError(_EndedByGroupError):
    """Ranks in a deadlock were stopped.

    Args:
        headline: who waits for whom.
        hint: what is usually wrong then; "" where nothing is usual.
        doings: a line for each rank.
    """

    why = "Deadlock: {}."


class MismatchError(_EndedByGroupError):
    """All ranks returned, but with wrong results: they came to one operation with different types, sizes or reductions.

    Args:
        headline: what the operation was on which ranks.
        hint: what must be alike.
        doings: a line for each rank: what it gave.
    """

    why = "The results are wrong: {}."


class RunTimeoutError(_EndedByGroupError):
    """A run took longer than the group's `timeout_s`, and its ranks were stopped.

    Args:
        headline: what took longer than what.
        hint: who waits for whom, where somebody does; else "".
        doings: a line for each rank.
    """

    why = "{}."


class Stopped(KeyboardInterrupt):
    """Stop was pressed during a run: what each rank was doing then. It is a `KeyboardInterrupt`, so loops around it end as well.

    Args:
        name: the function that ran.
        doings: a line for each rank.
    """

    def __init__(self, name: str, doings: list[str]) -> None:
        self.name, self.doings = name, doings
        super().__init__(name, doings)

    def __str__(self) -> str:
        lines = [f"{self.name} was stopped.", *(f"    {line}" for line in self.doings), "The next run starts fresh ranks."]
        return "\n".join(lines)

    def _render_traceback_(self) -> list[str]:
        return [f"Stopped: {self}"]
