"""`check("name", answer)` judges the answer to an exercise and explains the verdict."""

from __future__ import annotations

import ast
import html
import inspect
import re
import reprlib
import sys
import textwrap
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

from labkit.errors.exceptions import LabError, RankError, Stopped
from labkit.errors.exit_reasons import Cause
from labkit.errors.wrong_calls import public_api
from labkit.group.output import encodable
from labkit.ipc import pickling
from labkit.teaching.exercises import find
from labkit.teaching.exercises.answer_ranks import AnswerRanks, require_data
from labkit.teaching.exercises.comparisons import AnswerError
from labkit.teaching.exercises.exercise import Exercise
from labkit.teaching.exercises.random_state import other_inputs, unchanged_generators

MORE_LATER: Final = "After another wrong answer, the verdict says more."
MOST_CHARACTERS: Final = 2000  # of a verdict's message, and of each of its details
# Names in an answer's code with which it could find the expected result instead of computing it.
_LOOKS_AT_JUDGE: Final = (
    "labkit.teaching.exercises", "_getframe", "_current_frames", "currentframe", "f_back", "f_locals", "f_globals", "get_objects",
    "get_referrers",
)  # fmt: skip
# A call, an attribute, a name of one letter or with a number: these have no capital at the start of a sentence.
_CODE = re.compile(r"`|\w+[(._\[]\w|(?!a\b)[a-z]\b|[a-z]+\d")
_BACKTICKS, _AS_CODE = re.compile(r"`([^`\n]+)`"), r"<code>\1</code>"  # Python in a message, and in HTML
# Symbol and colour of each state: the symbols do not need the colours, which are legible in light and dark themes.
_SYMBOL_AND_COLOUR = {"passed": ("✓", "#12885c"), "wrong": ("✗", "#d55e00"), "not written yet": ("○", "#767676")}


# Wrong answers since the last right one, by exercise: a verdict's first hint is shorter than the next.
wrong_tries: Final = Counter[str]()


@dataclass(frozen=True, repr=False)
class Verdict:
    """The result of `check`. A notebook shows it below the cell; `print` shows the same as text.

    Args:
        name: the exercise's name.
        passed: whether the answer is right.
        message: one sentence: what the answer achieves, or what is wrong and where to look.
        details: further lines, such as what was given and what was expected.
        written: False if the stub has not been changed yet.
        score: of a right answer to an exercise with a leaderboard; lower is better. None otherwise.
    """

    name: str
    passed: bool
    message: str
    details: tuple[str, ...] = ()
    written: bool = True
    score: float | None = None

    @property
    def state(self) -> str:
        """The state in words: "passed", "wrong" or "not written yet"."""
        return "passed" if self.passed else "wrong" if self.written else "not written yet"

    def __bool__(self) -> bool:
        return self.passed

    def __repr__(self) -> str:
        symbol, _ = _SYMBOL_AND_COLOUR[self.state]
        lines = [f"{symbol} {self.name}: {self.state}", *textwrap.wrap(self.message, 110)]
        return encodable("\n  ".join(lines + [part for detail in self.details for part in detail.splitlines()]))

    def _repr_html_(self) -> str:
        symbol, colour = _SYMBOL_AND_COLOUR[self.state]
        style = "margin:4px 0 0;white-space:pre-wrap;word-break:normal"  # JupyterLab's own breaks words
        details = f'<pre style="{style}">{html.escape(chr(10).join(self.details))}</pre>' if self.details else ""
        return (
            f'<div style="border-left:4px solid {colour};padding:4px 12px">'
            f'<b style="color:{colour}">{symbol} {html.escape(self.name)}: {self.state}</b>'
            f"<div>{_BACKTICKS.sub(_AS_CODE, html.escape(self.message))}</div>{details}</div>"
        )


@public_api
def check(name: str, answer: Any = ..., *, seed: int = 0) -> Verdict:
    """Judge the answer to an exercise of the course.

    The answer runs on ranks, never in the notebook's process: `check` starts a group of the required size and closes it
    again. The result must equal that of one process that does the same work.

    Args:
        name: the exercise's name.
        answer: the function, class or number that the exercise asks for. Without it, the verdict repeats the task.
        seed: another number than 0 judges with other inputs of the same kind, for graders.

    Returns:
        the verdict, which is true if the answer is right. A wrong answer raises nothing: if the answer itself raises an
        exception, the verdict reports it, and an answer that does not finish is stopped.

    Raises:
        TypeError: the name is not a string.
        LabError: there is no exercise with this name; the message lists similar names.
    """
    if not isinstance(name, str):
        raise TypeError(
            f"check({reprlib.repr(name)}): expected an exercise's name first, as in lab.check('introduce', introduce)"
        )
    exercise = find(name)
    if is_unwritten(answer):
        absent = answer is ... and not exercise.number  # a number that is not filled in yet is `...`, too
        return not_written(exercise, f'lab.check("{name}", {name}) judges your answer' if absent else "")
    if (refusal := refused(answer)) is not None:
        return Verdict(name, False, refusal)
    verdict = judged(exercise, answer, seed)
    wrong_tries[name] = wrong_tries[name] + verdict.written if not verdict.passed else 0
    return verdict


def judged(exercise: Exercise, answer: Any, seed: int) -> Verdict:
    """Judge an answer that is written and not refused, or what becomes the answer when a rank unpickles it."""
    if not (exercise.number or callable(answer)):
        hint = f"given {reprlib.repr(answer)}: pass the function itself, not its return value"
        return Verdict(exercise.name, False, _sentence(hint), (f'lab.check("{exercise.name}", {exercise.name})',))
    with unchanged_generators(), other_inputs(seed), AnswerRanks(exercise.name, answer) as ranks:
        return _judged_on(exercise, answer, ranks)


def _judged_on(exercise: Exercise, answer: Any, ranks: AnswerRanks) -> Verdict:
    name, details = exercise.name, tuple[str, ...]()
    try:
        if exercise.number:
            require_data(answer)
        score = exercise.judge(answer if exercise.number else ranks)
        return Verdict(name, True, exercise.passed if score is None else exercise.passed.format(score=score), score=score)
    except Stopped as stopped:  # it names a function of the judge
        raise Stopped(f'lab.check("{name}")', stopped.doings) from None
    except AnswerError as wrong:
        message, details = _sentence(wrong.message), wrong.details
        if wrong.cure and wrong_tries[name]:
            message = f"{message}{'' if message.endswith('?') else '.'} {_sentence(wrong.cure)}"
        elif wrong.cure:
            details = (*details, MORE_LATER)
    except RankError as error:
        first = error.failures[0]
        if first.cause is Cause.NOT_IMPLEMENTED:
            return not_written(exercise)
        message = str(first)
        target = exercise.target if _takes_other_arguments(answer, first.headline) else ""
        details = tuple(filter(None, (target, error.hint, *(first.traceback.splitlines() or error.others))))
    except LabError:
        raise
    except Exception as error:
        if not ranks.last_call:
            raise  # a bug in labkit
        message = f"What it returned cannot be judged ({type(error).__name__}: {error})"
    if ranks.last_call and not any(f"{name}(" in line for line in (message, *details)):
        details = (*details, f"last call: {ranks.last_call}")
    return Verdict(name, False, _cut(message), tuple(map(_cut, details)))


def not_written(exercise: Exercise, hint: str = "") -> Verdict:
    """Return the verdict on a stub: the task, and a hint."""
    return Verdict(exercise.name, False, exercise.target, (hint,) if hint else (), written=False)


def refused(answer: Any) -> str | None:
    """Say why an answer is not run at all; None if it is."""
    if inspect.iscoroutinefunction(answer) or inspect.isasyncgenfunction(answer):
        return "It is an `async def`, and calling one runs none of its lines: write it as a plain `def`"
    if inspect.isgeneratorfunction(answer):
        return "It contains `yield`, and calling it runs none of its lines: collect the values in a list and `return` that"
    try:
        sent = pickling.pack(answer, home=sys.modules["__main__"])
    except LabError:
        return None  # the run says what cannot be sent
    sent.close()
    return looks_at_judge(sent.data)


def looks_at_judge(pickled: bytes) -> str | None:
    """Say why an answer is refused for what its pickled code names; None if it is not."""
    if any(name.encode() in pickled for name in _LOOKS_AT_JUDGE):
        return "It looks at the code that judges it: compute the result from the arguments and from what other ranks send"
    return None


def _cut(text: str) -> str:
    """At most the beginning of a text, which may contain all that an answer has returned."""
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]} ..."


def _sentence(text: str) -> str:
    return text if _CODE.match(text) else text[0].upper() + text[1:]


def _takes_other_arguments(answer: Any, headline: str) -> bool:
    """Whether Python could not call the answer with the exercise's arguments: then no line of the answer has run."""
    called = getattr(answer, "__qualname__", "")
    return headline.startswith((f"TypeError: {called}() ", f"TypeError: {called}.__init__() "))


def is_unwritten(answer: Any) -> bool:
    """Whether the answer is a stub: no value, or code that still contains a `...` or consists of `pass` alone."""
    if answer is ... or answer is None:
        return True
    if inspect.isclass(answer):
        return any(is_unwritten(part) for part in vars(answer).values() if inspect.isfunction(part))
    if not inspect.isfunction(answer):
        return False
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(answer)))
    except (OSError, TypeError, SyntaxError):  # typed in a plain REPL, or a lambda in a longer expression
        return False
    function = tree.body[0]
    body = function.body if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)) else []
    if body and all(isinstance(s, ast.Pass) or (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant)) for s in body):
        return True
    return any(
        isinstance(node, (ast.Expr, ast.Assign, ast.Return)) and isinstance(node.value, ast.Constant) and node.value.value is ...
        for node in ast.walk(tree)
    )
