"""Where an answer runs: on ranks of its own, which can be ended, and not beside its judge in the notebook's process."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Self

import cloudpickle
import numpy as np

from labkit.errors.exceptions import DeadlockError, RankError, RunTimeoutError
from labkit.errors.exit_reasons import Cause
from labkit.group.group import Group
from labkit.recording.group_keys import DIST_BACKWARD
from labkit.teaching import exercises
from labkit.teaching.exercises.comparisons import AnswerError
from labkit.teaching.exercises.exercise import Results

RUN_LIMIT_S = 60.0  # for one run on ranks; the slowest right answer, with TensorFlow, takes 4 s on two busy cores
_DATA: Final = ("builtins", "collections", "decimal", "fractions", "numpy", "torch", "tensorflow")  # whose types are data
MOST_ITEMS: Final = 10_000  # of an iterator, which may have no end; right answers have a hundred
MOST_SHOWN: Final = 200  # characters of a value in a verdict


class AnswerRanks:
    """Runs an answer for a judge. Use it as a context manager, which ends the ranks.

    A judge calls it as it would call the answer. The call runs on a single rank, kept for the next call: the answer
    can then neither change the notebook's process nor look into it, where the judge compares. The answer's prints are
    labelled with the exercise's name.
    """

    def __init__(self, name: str, answer: Any) -> None:
        self._name, self.answer = name, answer
        self.is_class = getattr(answer, "is_class", isinstance(answer, type))  # a packed answer says it itself
        self._group: Group | None = None
        self.last_call = ""  # the judge's last call and what it returned

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._group is not None:
            self._group.close()

    def __call__(self, *args: Any) -> Any:
        """Call the answer; raise `AnswerError` if it does not finish, or returns something that is no data."""
        if self._group is None:
            runtime = "torch" if "torch" in sys.modules else "bare"  # a rank has what judge and answer may need of torch
            self._group = Group([self._name], runtime=runtime, devices="cpu", timeout_s=RUN_LIMIT_S)
        self.last_call = f"{self._name}({', '.join(map(_shown, args))})"
        try:
            (given,) = _run(self._group, call_answer, self.answer, *args)
        except RunTimeoutError as late:
            hint = f"not finished after {RUN_LIMIT_S:.0f} s, so it was stopped: does every loop end?"
            raise AnswerError(hint, self.last_call, *late.doings) from None
        self.last_call += f" returned {_shown(given)}"
        return given

    def on(self, ranks: Any, function: Callable[..., Any], *args: Any, **options: Any) -> Results:
        """Run a function on new ranks, as `run_on_ranks` does; for this object, they get the answer."""
        return run_on_ranks(ranks, function, *(self.answer if arg is self else arg for arg in args), **options)


def run_on_ranks(ranks: Any, function: Callable[..., Any], *args: Any, **options: Any) -> Results:
    """Run a function of a judge on new ranks; a second time if TensorFlow has crashed, which no right answer prevents.

    TensorFlow 2.21 crashes in about one of 400 runs of a ClusterCoordinator on busy cores, in its own thread.
    `options` are those of the group. Raises `AnswerError` if the ranks waited for each other for ever, or did not
    finish.
    """
    try:
        return _run_once(ranks, function, *args, **options)
    except RankError as error:
        if options.get("runtime") != "tensorflow" or error.failures[0].cause is not Cause.CRASHED:
            raise
    return _run_once(ranks, function, *args, **options)


def _run_once(ranks: Any, function: Callable[..., Any], *args: Any, **options: Any) -> Results:
    with Group(ranks, devices="cpu", timeout_s=RUN_LIMIT_S, **options) as group:  # the same verdict with and without GPUs
        try:
            return _run(group, function, *args)
        except RunTimeoutError as late:
            hint = (
                f"not finished after {RUN_LIMIT_S:.0f} s: does every loop end, and do all ranks call the same operations "
                f"in the same order?"
            )
            if any(DIST_BACKWARD in doing for doing in late.doings):
                hint = (
                    f"not finished after {RUN_LIMIT_S:.0f} s: does the loss use every result of a remote call in its context? "
                    "Otherwise dist_autograd.backward waits for ever"
                )
            raise AnswerError(hint, *late.doings) from None


def _run(group: Group, function: Callable[..., Any], *args: Any) -> Results:
    try:
        if group.runtime == "rpc":  # its ranks look up the functions that they call in labkit's modules
            results = Results(group.run(call_reporting_exit, function, *args))
        else:
            with by_value() as modules:
                results = Results(group.run(without_judges, modules, function, *args))
    except DeadlockError as deadlock:
        details = filter(None, (deadlock.hint, *deadlock.doings))
        raise AnswerError(f"deadlock: {deadlock.headline}", *details, waits_in=deadlock.operations) from None
    if function is call_answer:
        require_data(list(results))
    return results


def call_answer(answer: Callable[..., Any], *args: Any) -> Any:
    """Call the student's function, on a rank, with nothing around it; a list of what an iterator gives can be sent."""
    result = answer(*args)
    return list(itertools.islice(result, MOST_ITEMS)) if isinstance(result, Iterator) else result


def call_reporting_exit(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function on a rank, for which `exit()` would be a normal end with None as its result."""
    try:
        return function(*args)
    except SystemExit:
        raise RuntimeError("it called exit(): end a function with `return`") from None


def without_judges(modules: Iterable[str], function: Callable[..., Any], *args: Any) -> Any:
    """`call_reporting_exit` on a rank to which the judge was sent by value: it needs no module with exercises."""
    for name in modules:
        sys.modules[name] = None  # type: ignore[assignment]  # an `import` of it, or of a part of it, fails
    return call_reporting_exit(function, *args)


@contextlib.contextmanager
def by_value() -> Iterator[set[str]]:
    """Send a judge's functions by value, so that the modules with the expected results are not there to be found.

    Yields the names of the modules with exercises.
    """
    modules = {exercises.__name__, *exercises.own_exercises()} - {"__main__"}
    new = [sys.modules[name] for name in modules - cloudpickle.list_registry_pickle_by_value()]
    for module in new:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield modules
    finally:
        for module in new:
            cloudpickle.unregister_pickle_by_value(module)


def _shown(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]} ..."


def require_data(value: Any) -> None:
    """Raise `AnswerError` if a value is no data: its comparison with the expected one would run the student's code."""
    if callable(value) or type(value).__module__.partition(".")[0] not in _DATA:
        raise AnswerError(f"given an object of type {type(value).__name__}: expected numbers, texts, or lists of them")
    if isinstance(value, np.ndarray) and value.dtype == object:
        value = value.ravel().tolist()
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        for part in value:
            require_data(part)
