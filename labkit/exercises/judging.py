"""What all exercises share: `Exercise`, `AnswerError`, and how answers run and are explained."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from labkit.errors.exceptions import RankError

if TYPE_CHECKING:  # ranks import this file, too, and do not need it
    from labkit.group.run import Run

Hint = str | tuple[str, str]  # what points at a mistake, alone or with its cure
MOST_ITEMS: Final = 10_000  # of an iterator, which may have no end; right answers have a hundred
# What Python says to code that treats a whole number as a list.
NUMBER_FOR_LIST: Final = (
    "'int' object is not iterable", "object of type 'int' has no len()", "'int' object is not subscriptable"
)  # fmt: skip


class Results(list[Any]):
    """The result of each rank, in rank order, and the trace of the run.

    Args:
        run: the completed run.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run.results)
        self.trace = run.trace


class OnRanks(Protocol):
    """Runs a function on new ranks, for a judge."""

    def __call__(self, ranks: Any, function: Callable[..., Any], *args: Any, **options: Any) -> Results:
        """Start a group, and call `function(*args)` on each rank.

        Args:
            ranks: the number of ranks, or their names.
            function: the function to call.
            args: its arguments.
            options: options of the group.

        Returns:
            the result of each rank, in rank order.
        """


class Passed(NamedTuple):
    """The judgement on a right answer.

    Args:
        message: what the answer achieves.
        score: its place on a leaderboard, where lower is better; None for an exercise without one.
    """

    message: str
    score: float | None = None


@dataclass(frozen=True, slots=True)
class Exercise:
    """An exercise, and the function that judges answers to it.

    Args:
        name: its name in `lab.check`.
        lesson: the notebook that contains it, such as "02_data_parallel".
        target: the task, in one or two sentences.
        judge: called with the student's answer and an `OnRanks`; returns the judgement on a right answer, or raises
            `AnswerError`.
        number: whether the answer is a number rather than a function or a class.
    """

    name: str
    lesson: str
    target: str
    judge: Callable[[Any, OnRanks], Passed]
    number: bool = False


class AnswerError(Exception):
    """A wrong answer.

    Args:
        message: one sentence: what is wrong and where to look; or a pair of it and the cure.
        details: further lines, such as what was given and what was expected.
        cure: a sentence that says what to do, where the message only points at the mistake. `check` adds it to the
            message from the second wrong answer on.
        deadlock: whether ranks waited for each other for ever.
        waits_in: the operations in which they did.
    """

    def __init__(
        self, message: Hint, *details: str, cure: str = "", deadlock: bool = False, waits_in: tuple[str, ...] = ()
    ) -> None:
        if isinstance(message, tuple):
            message, cure = message
        super().__init__(message)
        self.message = message
        self.details = details
        self.cure = cure
        self.deadlock, self.waits_in = deadlock, waits_in


def exercise(
    lesson: str, target: str, passed: str, *, name: str = "", number: bool = False
) -> Callable[[Callable[[Any, OnRanks], float | None]], Exercise]:
    """Make an exercise of a judge, `_ring_all_reduce` say; it has the judge's name without the underscore.

    The judge raises `AnswerError` for a wrong answer. It may return a score, lower for a better answer.

    Args:
        lesson: the notebook that contains it, such as "02_data_parallel".
        target: the task, in one or two sentences.
        passed: the message for a right answer; with a score, a format for it, such as "{score:.1f} ms".
        name: its name in `lab.check`, if it is another one: that of a class.
        number: whether the answer is a number rather than a function or a class.
    """

    def made(judge: Callable[[Any, OnRanks], float | None]) -> Exercise:
        def judged(answer: Any, on: OnRanks) -> Passed:
            score = judge(answer, on)
            return Passed(passed if score is None else passed.format(score=score), score)

        return Exercise(name or judge.__name__.removeprefix("_"), lesson, target, judged, number)

    return made


def reject(faults: Mapping[Any, object], *details: str) -> None:
    """Give the hint of the first fault that an answer has, if it has one.

    Args:
        faults: by its hint, or pair of hint and cure, whether the answer has this fault.
        details: further lines of the verdict.

    Raises:
        AnswerError: it has one.
    """
    for hint, present in faults.items():
        if present:
            raise AnswerError(hint, *details)


@contextlib.contextmanager
def showing(call: str, *details: str) -> Iterator[None]:
    """Let every `AnswerError` of the `with` block show the call that was judged, and details of it.

    Args:
        call: the call, such as "average_gradients(model) on 3 ranks".
        details: further lines, such as what was given and what was expected; they come last.
    """
    try:
        yield
    except AnswerError as wrong:
        wrong.details = (*([] if call in wrong.message else [call]), *wrong.details, *details)
        raise


@contextlib.contextmanager
def explaining(messages: Mapping[str, Hint]) -> Iterator[None]:
    """Explain what Python and libraries say after common mistakes, if a run in the `with` block fails with it.

    Args:
        messages: parts of error messages, and what they mean for the student; "" is a part of every message.

    Raises:
        AnswerError: a run has failed with one of the messages.
    """
    try:
        yield
    except RankError as error:
        first = error.failures[0]
        text = f"{first.headline}\n{first.traceback}\n{error.hint}"
        known = next((message for message in messages if message in text), None)
        if known is None:
            raise
        shown = [error.hint] if known and known in error.hint else [str(first), first.traceback]
        raise AnswerError(messages[known], *filter(None, shown)) from None


def call(answer: Callable[..., Any], *args: Any) -> Any:
    """Call the student's function, on a rank, with nothing around it; a list of what an iterator gives can be sent."""
    result = answer(*args)
    return list(itertools.islice(result, MOST_ITEMS)) if isinstance(result, Iterator) else result


def call_reporting_exit(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function on a rank, for which `exit()` would be a normal end, with None as its result.

    Raises:
        RuntimeError: it called `exit()`.
    """
    try:
        return function(*args)
    except SystemExit:
        raise RuntimeError("it called exit(): end a function with `return`") from None


def without_judges(modules: Iterable[str], function: Callable[..., Any], *args: Any) -> Any:
    """`call_reporting_exit` on a rank to which the judge was sent by value: it needs no module with exercises."""
    for name in modules:
        sys.modules[name] = None  # type: ignore[assignment]  # an `import` of it, or of a part of it, fails
    return call_reporting_exit(function, *args)


def judge_exchange(results: Results, least: int, subject: str) -> None:
    """Check that every rank took part in the exchange, whose result is right.

    Args:
        results: the run.
        least: bytes that each rank must have exchanged.
        subject: "the gradients".

    Raises:
        AnswerError: a rank exchanged fewer.
    """
    for rank in range(len(results)):
        spans = results.trace.filter(rank=rank, kind="communication").spans
        if all(span.sized for span in spans) and (exchanged := sum(span.nbytes for span in spans)) < least:
            raise AnswerError(
                f"{subject} are right, but the ranks have not exchanged them: how can a rank know those of the others?",
                f"rank {rank} took part in operations on {exchanged} bytes; {subject} have {least}",
            )
