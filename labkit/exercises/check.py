"""`check("name", answer)`: an exercise's verdict in readable words."""

from __future__ import annotations

import ast
import html
import inspect
import reprlib
import textwrap
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from labkit.errors.causes import Cause
from labkit.errors.exceptions import DeadlockError, RankError, RunTimeoutError
from labkit.errors.wrong_calls import public_api
from labkit.exercises import find
from labkit.exercises.judging import AnswerError, Exercise
from labkit.exercises.time_limit import OutOfTimeError, TimeLimit
from labkit.group.group import Group
from labkit.recording.record import is_students, label

__all__ = ["Verdict", "check"]

SERIAL_LIMIT_S = 60.0  # for what an exercise does in this process, where TensorFlow may have to be imported from a cold disk
LIMIT_S = 60.0  # for one run of an exercise; the slowest right answer, on TensorFlow, takes 4 s on two busy cores
# Symbol and colour of each state: never the colour alone, and apart for colour-blind readers.
_LOOKS = {"passed": ("✓", "#0072b2"), "wrong": ("✗", "#d55e00"), "not written yet": ("○", "#767676")}


@dataclass(frozen=True, repr=False)
class Verdict:
    """What `check` found. A notebook shows it at the end of the cell; `print` shows the same as text.

    Args:
        name: of the exercise.
        passed: whether the answer is right.
        message: one sentence: what was shown, or what is wrong and where to look.
        details: lines beside it: what was given, what was expected.
        written: False where the stub is still untouched.
    """

    name: str
    passed: bool
    message: str
    details: tuple[str, ...] = ()
    written: bool = True

    @property
    def state(self) -> str:
        """One of "passed", "wrong" and "not written yet"."""
        return "passed" if self.passed else "wrong" if self.written else "not written yet"

    def __bool__(self) -> bool:
        return self.passed

    def __repr__(self) -> str:
        symbol, _ = _LOOKS[self.state]
        lines = [f"{symbol} {self.name}: {self.state}", *textwrap.wrap(self.message, 110)]
        return "\n  ".join(lines + [part for detail in self.details for part in detail.splitlines()])

    def _repr_html_(self) -> str:
        symbol, colour = _LOOKS[self.state]
        details = f'<pre style="margin:4px 0 0">{html.escape(chr(10).join(self.details))}</pre>' if self.details else ""
        return (
            f'<div style="border-left:4px solid {colour};padding:4px 12px">'
            f'<b style="color:{colour}">{symbol} {html.escape(self.name)}: {self.state}</b>'
            f"<div>{html.escape(self.message)}</div>{details}</div>"
        )


@public_api
def check(name: str, answer: Any = ...) -> Verdict:
    """Judge the answer to an exercise of the course.

    Most exercises are judged on real ranks: a group of the size that the exercise needs is started and closed again. The oracle
    is one process doing the same work.

    Args:
        name: of the exercise.
        answer: the function (or class, or number) that the exercise asks for; left out, the verdict repeats what is asked.

    Returns:
        the verdict. It is true if the answer is right. A wrong answer is no exception: neither is one that raises, which the
        verdict says; nor is one that never comes to its end, which is stopped.

    Raises:
        TypeError: the name is no string.
        LabError: there is no exercise of that name; the message names close ones.
    """
    if not isinstance(name, str):
        raise TypeError(
            f"check({reprlib.repr(name)}): expected an exercise's name first, as in lab.check('introduce', introduce)"
        )
    exercise = find(name)
    if _is_unwritten(answer):
        return _not_written(exercise)
    if not (exercise.number or callable(answer)):
        hint = f"given {reprlib.repr(answer)}: hand over the function itself, not what it returns"
        return Verdict(name, False, _sentence(hint), (f'lab.check("{name}", {name})',))
    limit = TimeLimit(SERIAL_LIMIT_S)

    def on_ranks(*args: Any, **options: Any) -> list[Any]:
        with limit.paused():  # runs have a limit of their own
            return _on_ranks(*args, **options)

    try:
        with limit:
            message = exercise.judge(answer, on_ranks)
    except OutOfTimeError as late:
        limit.close()
        hint = f"not finished after {SERIAL_LIMIT_S:.0f} s, so it was stopped: does every loop come to its end?"
        return Verdict(name, False, _sentence(hint), tuple(_students_frames(late)))
    except AnswerError as wrong:
        return Verdict(name, False, _sentence(wrong.message), wrong.details)
    except NotImplementedError:
        return _not_written(exercise)
    except RankError as error:
        first = error.failures[0]
        if first.cause is Cause.NOT_IMPLEMENTED:
            return _not_written(exercise)
        details = [error.hint, *(first.traceback.splitlines() or error.others)]
        return Verdict(name, False, str(first), tuple(filter(None, details)))
    except Exception as error:  # the student's function may raise anything
        frames = list(_students_frames(error))
        if not frames:
            raise  # ours
        return Verdict(name, False, f"it raised {type(error).__name__}: {error}", tuple(frames))
    return Verdict(name, True, message)


def _not_written(exercise: Exercise) -> Verdict:
    return Verdict(exercise.name, False, exercise.target, written=False)


def _on_ranks(ranks: Any, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    with Group(ranks, devices="cpu", timeout_s=LIMIT_S, **options) as group:  # the same verdict with and without GPUs
        try:
            return list(group.run(function, *args).results)
        except DeadlockError as stuck:
            details = filter(None, (stuck.hint, *stuck.doings))
            raise AnswerError(f"deadlock: {stuck.headline}", *details) from None
        except RunTimeoutError as late:
            hint = (
                f"not finished after {LIMIT_S:.0f} s: does every loop come to its end, and do all ranks call the same operations "
                f"in the same order?"
            )
            raise AnswerError(hint, *late.doings) from None


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _students_frames(error: BaseException) -> Iterator[str]:
    for frame in traceback.extract_tb(error.__traceback__):
        if is_students(frame.filename):
            yield f"{label(frame.filename)}, line {frame.lineno}: {frame.line}"


def _is_unwritten(answer: Any) -> bool:
    """Whether the answer is a stub: no value at all, or code in which a `...` (or nothing but `pass`) still holds a place."""
    if answer is ... or answer is None:
        return True
    if inspect.isclass(answer):
        return any(_is_unwritten(part) for part in vars(answer).values() if inspect.isfunction(part))
    if not inspect.isfunction(answer):
        return False
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(answer)))
    except (OSError, TypeError, SyntaxError):  # typed in a plain REPL, or a lambda inside a longer expression: let it run
        return False
    function = tree.body[0]
    body = function.body if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)) else []
    if body and all(isinstance(s, ast.Pass) or (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant)) for s in body):
        return True
    return any(
        isinstance(node, (ast.Expr, ast.Assign, ast.Return)) and isinstance(node.value, ast.Constant) and node.value.value is ...
        for node in ast.walk(tree)
    )
