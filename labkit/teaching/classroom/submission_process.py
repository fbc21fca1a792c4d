"""The process of a submission: runs its statements and packs its answers. Nothing that it says is trusted.

It reads a `Job` from standard input, as JSON, and writes what it found into the file descriptor that is its argument.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import linecache
import os
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from labkit.errors.exceptions import LabError
from labkit.launch.descendants import adopt_orphans, end_children
from labkit.teaching.classroom.confined_process import Cover, go_on_in_child
from labkit.teaching.classroom.packed_answer import packed
from labkit.teaching.classroom.statements import Statement, SubmittedProgram, compiled, parsed, without_magics

VALUES: Final = (bool, int, float, str)  # answers that need not be functions; also lists of them
SELECTED: Final = "Only what the answer seems to need was run; --execute runs the whole notebook."

Examine = Callable[[Any, types.ModuleType], dict[str, Any]]


@dataclass(frozen=True)
class Job:
    """What to collect from a notebook."""

    cells: Sequence[str]  # the sources of its code cells
    exercises: Sequence[str]  # their names
    execute: bool  # whether to run all statements, and not only those that answers need
    hidden: Sequence[str] = ()  # files and folders that do not exist for it


def main(result: int, cover: Cover) -> None:
    """Run the submission; write what was found: a JSON object with an entry for each submitted exercise."""
    job = Job(**json.load(sys.stdin))
    home, python = _namespace(job.execute)
    examine = _examiner()
    cover(job.hidden)
    go_on_in_child()  # a thread that a library has started could undo what `cover` has done; the child has none
    adopt_orphans()
    found = _collect(job, parsed(job.cells, python), home, examine)
    with os.fdopen(result, "w") as file:
        json.dump(found, file)
    end_children()
    os._exit(0)  # without waiting for what the submission has left behind


def _namespace(execute: bool) -> tuple[types.ModuleType, Callable[[str], str]]:
    """Return the module in which the submission runs, and what turns a cell into Python."""
    if not execute:
        home = types.ModuleType("__main__")
        sys.modules["__main__"] = home
        return home, without_magics
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))  # else a thread writes a file
    import labkit  # noqa: F401  # with `%%ranks`

    return shell.user_module, shell.transform_cell


def _examiner() -> Examine:
    """Return a function that packs an answer. All that it imports is imported now: the files will be hidden."""
    from labkit.errors.wrong_calls import one_number
    from labkit.teaching import guesses  # noqa: F401  # the submission may use it
    from labkit.teaching.exercises.check import is_unwritten, refused

    def examine(answer: Any, home: types.ModuleType) -> dict[str, Any]:
        if is_unwritten(answer):
            return {"unwritten": True}
        if isinstance(answer, (list, tuple)) and all(type(one) in VALUES for one in answer):
            return {"value": list(answer)}
        number = answer if isinstance(answer, VALUES) or callable(answer) else one_number(answer)
        if isinstance(number, VALUES):
            return {"value": number}
        if (why := refused(answer)) is not None:
            return {"refused": why}
        try:
            return {"packed": packed(answer, home).to_json()}
        except LabError as error:
            return {"refused": str(error)}

    return examine


def _collect(job: Job, program: SubmittedProgram, home: types.ModuleType, examine: Examine) -> dict[str, Any]:
    for number, lines in program.lines.items():
        linecache.cache[_file(number)] = (sum(map(len, lines)), None, lines, _file(number))
    wanted = [(at, name, program.statements[at].answers[name]) for at, name in program.answers() if name in job.exercises]
    named = program.submitted_by_name(job.exercises).items()
    wanted += [(at + 1, name, ast.parse(name, mode="eval").body) for name, at in named]
    selected = _selected(program, wanted, job.execute)
    found: dict[str, Any] = {}
    failures: list[str] = [f"cell {cell}: {why}" for cell, why in program.errors.items()]
    for position, statement in enumerate([*program.statements, None]):
        for name, expression in [(name, answer) for at, name, answer in wanted if at == position]:
            found[name] = _examined(expression, home, examine, failures)
            if "missing" in found[name] and not job.execute:
                found[name]["missing"] += f". {SELECTED}"
        if statement is not None and position in selected and not statement.answers:
            _run(statement, home, failures)
    return found | {"": {"failures": failures}}


def _selected(program: SubmittedProgram, wanted: list[tuple[int, str, ast.expr]], execute: bool) -> set[int]:
    if execute:
        return set(range(len(program.statements)))
    names = [(at, {node.id for node in ast.walk(answer) if isinstance(node, ast.Name)}) for at, _, answer in wanted]
    return {position for at, used in names for position in program.needed(at, used)}


def _examined(expression: ast.expr, home: types.ModuleType, examine: Examine, failures: list[str]) -> dict[str, Any]:
    try:
        answer = eval(compile(ast.Expression(expression), "answer", "eval"), home.__dict__)
        return examine(answer, home)
    except Exception as error:  # noqa: BLE001  # the submission's own
        return {"missing": f"There is no answer: {type(error).__name__}: {error}", "failures": list(failures)}


def _run(statement: Statement, home: types.ModuleType, failures: list[str]) -> None:
    try:
        code = compiled(statement.node, statement.cell)
        running = eval(code, home.__dict__)
        if code.co_flags & inspect.CO_COROUTINE:  # it has an `await`
            asyncio.run(running)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  # also `exit()`
        failures.append(f"{_file(statement.cell)}, line {statement.node.lineno}: {type(error).__name__}: {error}")


def _file(cell: int) -> str:
    return f"cell {cell}"
