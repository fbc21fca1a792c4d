"""`check("name", answer)` judges the answer to an exercise and explains the verdict."""

from __future__ import annotations

import ast
import html
import inspect
import re
import reprlib
import textwrap
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from labkit.errors.causes import Cause
from labkit.errors.exceptions import DeadlockError, RankError, RunTimeoutError, Stopped
from labkit.errors.wrong_calls import public_api
from labkit.exercises import find
from labkit.exercises.judging import AnswerError, Exercise, Results
from labkit.exercises.time_limit import OutOfTimeError, TimeLimit
from labkit.group.group import Group
from labkit.recording.group_keys import DIST_BACKWARD
from labkit.recording.record import is_students, label

__all__ = ["Verdict", "check"]

SERIAL_LIMIT_S = 60.0  # for code in this process, which may have to import TensorFlow from a cold disk
LIMIT_S = 60.0  # for one run on ranks; the slowest right answer, with TensorFlow, takes 4 s on two busy cores
# A call, an attribute, a name of one letter or with a number: these have no capital at the start of a sentence.
_CODE = re.compile(r"`|\w+[(._\[]\w|(?!a\b)[a-z]\b|[a-z]+\d")
# Symbol and colour of each state: the symbols do not need the colours, which are legible in light and dark themes.
_SYMBOL_AND_COLOUR = {"passed": ("✓", "#12885c"), "wrong": ("✗", "#d55e00"), "not written yet": ("○", "#767676")}


@dataclass(frozen=True, repr=False)
class Verdict:
    """The result of `check`. A notebook shows it below the cell; `print` shows the same as text.

    Args:
        name: the exercise's name.
        passed: whether the answer is right.
        message: one sentence: what the answer achieves, or what is wrong and where to look.
        details: further lines, such as what was given and what was expected.
        written: False if the stub has not been changed yet.
    """

    name: str
    passed: bool
    message: str
    details: tuple[str, ...] = ()
    written: bool = True

    @property
    def state(self) -> str:
        """The state in words: "passed", "wrong" or "not written yet"."""
        return "passed" if self.passed else "wrong" if self.written else "not written yet"

    def __bool__(self) -> bool:
        return self.passed

    def __repr__(self) -> str:
        symbol, _ = _SYMBOL_AND_COLOUR[self.state]
        lines = [f"{symbol} {self.name}: {self.state}", *textwrap.wrap(self.message, 110)]
        return "\n  ".join(lines + [part for detail in self.details for part in detail.splitlines()])

    def _repr_html_(self) -> str:
        symbol, colour = _SYMBOL_AND_COLOUR[self.state]
        details = f'<pre style="margin:4px 0 0">{html.escape(chr(10).join(self.details))}</pre>' if self.details else ""
        return (
            f'<div style="border-left:4px solid {colour};padding:4px 12px">'
            f'<b style="color:{colour}">{symbol} {html.escape(self.name)}: {self.state}</b>'
            f"<div>{html.escape(self.message)}</div>{details}</div>"
        )


@public_api
def check(name: str, answer: Any = ...) -> Verdict:
    """Judge the answer to an exercise of the course.

    Most exercises run on real ranks: `check` starts a group of the required size and closes it again. The result must
    equal that of one process that does the same work.

    Args:
        name: the exercise's name.
        answer: the function, class or number that the exercise asks for. Without it, the verdict repeats the task.

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
    if _is_unwritten(answer):
        absent = answer is ... and not exercise.number  # a number that is not filled in yet is `...`, too
        return _not_written(exercise, f'lab.check("{name}", {name}) judges your answer' if absent else "")
    if not (exercise.number or callable(answer)):
        hint = f"given {reprlib.repr(answer)}: pass the function itself, not its return value"
        return Verdict(name, False, _sentence(hint), (f'lab.check("{name}", {name})',))
    limit = TimeLimit(SERIAL_LIMIT_S)

    def on_ranks(*args: Any, **options: Any) -> Results:
        with limit.paused():  # runs have their own limit
            return _on_ranks(*args, **options)

    try:
        with limit:
            message = exercise.judge(answer, on_ranks)
    except OutOfTimeError as late:
        limit.close()
        hint = f"not finished after {SERIAL_LIMIT_S:.0f} s, so it was stopped: does every loop end?"
        return Verdict(name, False, _sentence(hint), tuple(_students_frames(late)))
    except Stopped as stopped:  # it names a function of the judge
        raise Stopped(f'lab.check("{name}")', stopped.doings) from None
    except AnswerError as wrong:
        return Verdict(name, False, _sentence(wrong.message), wrong.details)
    except NotImplementedError:
        return _not_written(exercise)
    except SystemExit:
        return Verdict(name, False, "It called exit(): end a function with `return`")
    except RankError as error:
        first = error.failures[0]
        if first.cause is Cause.NOT_IMPLEMENTED:
            return _not_written(exercise)
        details = [error.hint, *(first.traceback.splitlines() or error.others)]
        return Verdict(name, False, str(first), tuple(filter(None, details)))
    except Exception as error:  # the student's function may raise anything
        frames = list(_students_frames(error))
        if _takes_other_arguments(answer, error):
            frames = [exercise.target]
        if not frames and _is_students_own(answer):
            raise  # a bug in labkit
        return Verdict(name, False, f"it raised {type(error).__name__}: {error}", tuple(frames))
    return Verdict(name, True, message)


def _not_written(exercise: Exercise, hint: str = "") -> Verdict:
    return Verdict(exercise.name, False, exercise.target, (hint,) if hint else (), written=False)


def _on_ranks(ranks: Any, function: Callable[..., Any], *args: Any, **options: Any) -> Results:
    """Run a function on new ranks; a second time if TensorFlow has crashed, which a right answer does not prevent.

    TensorFlow 2.21 crashes in about one of 400 runs of a ClusterCoordinator on busy cores, in its own thread.
    """
    try:
        return _run_once(ranks, function, *args, **options)
    except RankError as error:
        if options.get("runtime") != "tensorflow" or error.failures[0].cause is not Cause.CRASHED:
            raise
    return _run_once(ranks, function, *args, **options)


def _run_once(ranks: Any, function: Callable[..., Any], *args: Any, **options: Any) -> Results:
    with Group(ranks, devices="cpu", timeout_s=LIMIT_S, **options) as group:  # the same verdict with and without GPUs
        try:
            return Results(group.run(function, *args))
        except DeadlockError as deadlock:
            details = filter(None, (deadlock.hint, *deadlock.doings))
            raise AnswerError(f"deadlock: {deadlock.headline}", *details, deadlock=True, waits_in=deadlock.operations) from None
        except RunTimeoutError as late:
            hint = (
                f"not finished after {LIMIT_S:.0f} s: does every loop end, and do all ranks call the same operations "
                f"in the same order?"
            )
            if any(DIST_BACKWARD in doing for doing in late.doings):
                hint = (
                    f"not finished after {LIMIT_S:.0f} s: does the loss use every result of a remote call in its context? "
                    "Otherwise dist_autograd.backward waits for ever"
                )
            raise AnswerError(hint, *late.doings) from None


def _sentence(text: str) -> str:
    return text if _CODE.match(text) else text[0].upper() + text[1:]


def _students_frames(error: BaseException) -> Iterator[str]:
    for frame in traceback.extract_tb(error.__traceback__):
        if is_students(frame.filename):
            yield f"{label(frame.filename)}, line {frame.lineno}: {frame.line}"


def _is_students_own(answer: Any) -> bool:
    """Whether an answer is not a function of Python or a library, such as `max`, of which no line can be shown."""
    code = getattr(answer, "__code__", None)
    return is_students(code.co_filename) if code is not None else getattr(answer, "__module__", "") == "__main__"


def _takes_other_arguments(answer: Any, error: BaseException) -> bool:
    """Whether Python could not call the answer with the exercise's arguments: then no line of the answer has run."""
    called = getattr(answer, "__qualname__", "")
    return isinstance(error, TypeError) and str(error).startswith((f"{called}() ", f"{called}.__init__() "))


def _is_unwritten(answer: Any) -> bool:
    """Whether the answer is a stub: no value, or code that still contains a `...` or consists of `pass` alone."""
    if answer is ... or answer is None:
        return True
    if inspect.isclass(answer):
        return any(_is_unwritten(part) for part in vars(answer).values() if inspect.isfunction(part))
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
