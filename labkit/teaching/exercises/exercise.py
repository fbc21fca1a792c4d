"""The form of an exercise: cases, what each rank does with the answer, and a check that reads from top to bottom."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from random import Random
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from labkit.errors.exceptions import RankError
from labkit.recording.operations import SEND, type_of
from labkit.teaching.exercises.comparisons import AnswerError, Hint, shown
from labkit.teaching.exercises.random_state import case_random, other_cases

if TYPE_CHECKING:  # ranks import this file, too, and do not need it
    from labkit.group.run import Run

# What Python says to code that treats a whole number as a list.
NUMBER_FOR_LIST: Final = (
    "'int' object is not iterable", "object of type 'int' has no len()", "'int' object is not subscriptable"
)  # fmt: skip
Cases = Iterable[tuple[Any, ...]]
WITHOUT_ARGUMENTS: Final = ((),)


class Results(list[Any]):
    """The result of each rank, in rank order, and the trace of the run.

    Args:
        run: the completed run.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run.results)
        self.trace = run.trace


@dataclass(frozen=True, slots=True)
class Exercise:
    """An exercise, and the function that judges answers to it.

    Args:
        name: its name in `lab.check`.
        lesson: the notebook that contains it, such as "02_data_parallel".
        target: the task, in one or two sentences.
        passed: what a right answer achieves; a format for its score, if it has one.
        judge: called with the answer as `AnswerRanks`, or with the number; returns the score of a right answer, where
            lower is better, or None in an exercise without a leaderboard; of a wrong one, raises `AnswerError`.
        number: whether the answer is a number, a text or a list of them, rather than a function or a class.
    """

    name: str
    lesson: str
    target: str
    passed: str
    judge: Callable[[Any], float | None]
    number: bool = False


def exercise(
    lesson: str,
    passed: str,
    cases: Cases | Callable[[Random], Cases] = WITHOUT_ARGUMENTS,
    *,
    on_ranks: Callable[..., Any] | None = None,
    ranks: Any = None,
    call: str | Callable[..., str] = "",
    errors: Mapping[str, Hint] | Callable[..., Mapping[str, Hint]] = MappingProxyType({}),
    other: Callable[[Random], tuple[Any, ...]] | None = None,
    number: bool = False,
    **options: Any,
) -> Callable[[Callable[..., float | None]], Exercise]:
    """Make an exercise of a check, whose docstring is the task.

    For each case, the check gets what `on_ranks` has returned on each rank (`Results`), and then the case. It calls
    `wrong_if` and `expect`. Without `on_ranks` it gets the answer itself: a call of it runs on one rank, and
    `answer.on(ranks, function, answer, ...)` runs a function on several. It may return a score, lower being better.

    Args:
        lesson: the notebook that contains it, such as "02_data_parallel".
        passed: the message for a right answer; with a score, a format for it, such as "{score:.1f} ms".
        cases: the arguments of each judgement; or a function that draws some at random, from the generator that it
            gets: others in each check, but for a grader's seed always the same. The first case tells the known mistakes
            apart.
        on_ranks: what each rank does: a function of the answer and the case.
        ranks: the number of ranks, or their names; by default the first in the case, which `on_ranks` does not get.
        call: the call in words, as verdicts show it: a format for the case with the names of the check's parameters,
            such as "average_gradients(model) on {ranks} ranks", or a function of the case. By default, without
            `on_ranks`, the name and the case.
        errors: parts of the messages of Python and libraries, and the hints for them; "" is a part of each message.
            "deadlock" stands for each deadlock, "deadlock in send" for one in which all waited in a send. Or a function
            of the case that returns them.
        other: makes one more case, with which graders judge: an answer that knows only the results of `cases`, which
            verdicts show, fails.
        number: whether the answer is a number, a text or a list of them, rather than a function or a class.
        options: options of the group. `ranks` and options may be functions of the case, too.
    """

    def made(check: Callable[..., float | None]) -> Exercise:
        parameters = [*inspect.signature(check).parameters][1:]

        def in_words(case: tuple[Any, ...]) -> str:
            if callable(call):
                return call(*case)
            if call:
                return call.format(**dict(zip(parameters, case, strict=False)))
            return f"{check.__name__}({', '.join(map(shown, case))})" if case and on_ranks is None else ""

        def observed(answer: Any, case: tuple[Any, ...]) -> Any:
            if on_ranks is None:
                return answer
            of_group = {key: value(*case) if callable(value) else value for key, value in options.items()}
            if ranks is None:
                return answer.on(case[0], on_ranks, answer, *case[1:], **of_group)
            return answer.on(ranks(*case) if callable(ranks) else ranks, on_ranks, answer, *case, **of_group)

        def judge(answer: Any) -> float | None:
            score = None
            drawn = cases(case_random()) if callable(cases) else cases
            for case in (*drawn, *(other_cases(other) if other is not None else ())):
                with showing(in_words(case)), explaining(errors(*case) if callable(errors) else errors):
                    score = check(observed(answer, case), *case)
            return score

        return Exercise(check.__name__, lesson, " ".join((check.__doc__ or "").split()), passed, judge, number)

    return made


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
def explaining(errors: Mapping[str, Hint]) -> Iterator[None]:
    """Explain what Python and libraries say after common mistakes, if a run in the `with` block fails with it.

    Args:
        errors: as for `exercise`.

    Raises:
        AnswerError: a run has failed with one of the messages.
    """
    try:
        yield
    except RankError as error:
        first = error.failures[0]
        text = f"{first.headline}\n{first.traceback}\n{error.hint}"
        known = next((message for message in errors if message in text), None)
        if known is None:
            raise
        details = [error.hint] if known and known in error.hint else [str(first), first.traceback]
        raise AnswerError(errors[known], *filter(None, details)) from None
    except AnswerError as wrong:
        waits = {type_of(name).name for name in wrong.waits_in}
        text = f"deadlock in {waits.pop()}" if len(waits) == 1 else "deadlock" if waits else ""
        known = next((message for message in errors if message and message in text), None)
        if known is None:
            raise
        raise AnswerError(errors[known], wrong.message, *wrong.details) from None


def judge_exchange(results: Results, least: int) -> None:
    """Check that every rank took part in the exchange of the gradients, which are right.

    Args:
        results: the run.
        least: bytes that each rank must have exchanged.

    Raises:
        AnswerError: a rank exchanged fewer.
    """
    for rank in range(len(results)):
        spans = results.trace.filter(rank=rank, kind="communication").spans
        if all(span.sized for span in spans) and (exchanged := sum(span.nbytes for span in spans)) < least:
            raise AnswerError(
                "the gradients are right, but the ranks have not exchanged them: how can a rank know those of the others?",
                f"rank {rank} took part in operations on {exchanged} bytes; the gradients have {least}",
            )


def messages_sent(results: Results, unit: int) -> list[list[tuple[int, int]]]:
    """Return receiving rank and size of each message that a rank sent, in order, for each rank.

    A call to the store has a span only if it had to wait: a judge finds it by the messages that are missing.

    Args:
        results: the run.
        unit: bytes of what the sizes count, such as 4 for numbers in float32.
    """
    spans = sorted(results.trace.filter(kind="communication"), key=lambda span: span.start_ns)
    sends = [span for span in spans if type_of(span.name) is SEND]
    return [[(s.peer, s.nbytes // unit) for s in sends if s.rank == rank] for rank in range(len(results))]
