"""Calls each public function of labkit wrongly, inside a real kernel, and reports what a student would see for each
call."""

from __future__ import annotations

import inspect
import json
import math
import os
import types
from collections.abc import Callable, Iterator
from traceback import walk_tb
from typing import Any

from synthetic import data_parallel

import labkit as lab

WRONG: dict[str, Any] = {
    "None": None, "3": 3, "nan": math.nan, "'x'": "x", "object()": object(), "[3]": [3], "{'a': 3}": {"a": 3},
    "lambda: 1": lambda: 1,
}  # fmt: skip
# Valid values by annotation, so that only one argument is wrong. If none is known, all arguments are wrong.
RIGHT: dict[str, Any] = {
    "int": 2, "float": 2.0, "str": "pass", "Link": lab.Link.ethernet_1g, "Callable[..., Any]": lambda: 1, "int | None": 1,
}  # fmt: skip
os.environ["JPY_SESSION_NAME"] = "pressed_by_hand.ipynb"  # else `press_stop(3)`, which is right, interrupts a later call
LABKIT = os.path.dirname(lab.__file__) + os.sep
SKIPPED = {"labkit.Run", "labkit.Span", "labkit.RankError", "labkit.LabError"}  # students get these, and do not make them
SKIPPED |= {"labkit.data", "labkit.models"}  # of the lessons, which only read them


def public(group: Any, run: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Each public function, and each public method of what they return."""
    for name in lab.__all__:
        value = getattr(lab, name)
        if f"labkit.{name}" in SKIPPED:
            continue
        if isinstance(value, types.ModuleType):
            yield from ((f"{name}.{inner}", getattr(value, inner)) for inner in value.__all__)
        else:
            yield name, value
    for what in (group, group[0], run, run.trace, lab.Link.ethernet_1g, lab.span("forward")):
        for name in dir(type(what)):
            is_public = name in ("__getitem__", "__call__") or not name.startswith("_")
            if is_public and name != "close" and callable(getattr(what, name, None)):
                yield f"{type(what).__name__}.{name}", getattr(what, name)


def calls(function: Callable[..., Any], trace: Any, group: Any) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Wrong calls of a function: a description, and the arguments."""
    yield "too many", (1,) * 15, {}
    yield "no_such_argument=1", (), {"no_such_argument": 1}
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # it is made in C
        parameters = []
    needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = [p for p in parameters if p.default is p.empty and p.kind is p.KEYWORD_ONLY]
    if needed or named:
        yield "", (), {}
    for words, wrong in WRONG.items():
        if len(needed) + len(named) != 1:  # else it is what comes next
            yield f"all {words}", (wrong,) * max(1, len(needed)), {p.name: wrong for p in named}
        right = RIGHT | {"HasTrace | Trace": trace, "Group": group}
        known = {p.name: right.get(str(p.annotation), right["str"]) for p in needed + named}
        for p in parameters:
            may_be_3 = wrong == 3 and str(p.annotation) in ("int", "float")
            if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) or str(p.annotation) == "bool" or may_be_3:
                continue
            args = tuple(wrong if q is p else known[q.name] for q in needed)
            kwargs = {q.name: wrong if q is p else known[q.name] for q in named}
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p not in needed + named:
                kwargs[p.name] = wrong
            yield f"{p.name}={words}", args, kwargs


def files(error: BaseException, shell: Any) -> list[str]:
    """The frames of which the notebook would show lines."""

    def listed(_type: Any, _error: Any, traceback: Any) -> list[str]:
        return [frame.f_code.co_filename for frame, _ in walk_tb(traceback)]

    if not hasattr(error, "_render_traceback_"):
        return listed(None, None, error.__traceback__)
    shell.InteractiveTB.structured_traceback = listed  # IPython's own takes 30 ms
    try:
        return error._render_traceback_()
    finally:
        del shell.InteractiveTB.structured_traceback


def complaints(group: Any, run: Any, shell: Any, part: slice) -> str:
    """As JSON, for a part of the functions: which were tried, how many calls were refused, which show too much."""
    from matplotlib import pyplot

    trace, tried, refused, wrong = data_parallel(), [], 0, []
    for name, function in list(public(group, run))[part]:
        tried.append(name)
        for words, args, kwargs in calls(function, trace, group):
            try:
                function(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001 - whatever it is, a student would see it
                refused += 1
                if isinstance(error, lab.RankError):  # the function ran
                    continue
                inner = [file for file in files(error, shell) if file.startswith(LABKIT)]
                short = len(str(error)) < 700 and str(error).count("\n") < 2
                if inner or not short or not isinstance(error, TypeError | ValueError | lab.LabError):
                    wrong.append(f"{name}({words}): {type(error).__name__}: {error} {inner}")
        pyplot.close("all")
    return json.dumps({"tried": tried, "refused": refused, "wrong": wrong})
