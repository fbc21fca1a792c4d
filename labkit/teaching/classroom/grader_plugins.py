"""What nbgrader and Otter call when they grade: plugins that leave out cells, and judges that are imported afresh.

Only the cells are executed that answers need, and not the figures and long runs of a lesson. nbclient, with which both
execute notebooks, passes over cells with the tag `skip-execution`
(https://nbclient.readthedocs.io/en/latest/reference/nbclient.html). The tags are set when a submission is graded: a tag
that a student has set does not count.

A student's cell can rebind `lab.check`, by mistake or not. It can also change anything else in its kernel, and no code
in the same kernel can prevent this: `python -m labkit grade` judges in processes in which no code of a student runs.
"""

from __future__ import annotations

import ast
import importlib
import sys
from typing import Any, Final

from labkit.ipc.code_names import names_read
from labkit.teaching.classroom.statements import SubmittedProgram, parsed
from labkit.teaching.exercises import exercise_names

SKIP: Final = "skip-execution"
DONE: Final = "labkit_only_answers"  # in the notebook's metadata: nbgrader reads its configuration more than once


def only_answers(notebook: Any, resources: Any = None) -> tuple[Any, Any]:
    """Tag the cells that no answer needs, and turn the checks of students' cells into comments: changes the notebook.

    This is a preprocessor, as nbconvert calls them. Cells that nbgrader grades are left alone, and run.
    """
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for cell in code:
        if _is_graded(cell):
            cell["metadata"].pop("tags", None)
    if notebook["metadata"].get(DONE):
        return notebook, resources
    notebook["metadata"][DONE] = True
    program = parsed(["" if _is_graded(cell) else "".join(cell["source"]) for cell in code])
    needed = _needed_cells(program)
    for number, cell in enumerate(code, 1):
        if number not in needed and not _is_graded(cell):
            cell["metadata"]["tags"] = [SKIP]
        else:
            cell["metadata"].pop("tags", None)
    for statement in program.statements:
        if statement.answers and statement.node.col_offset == 0:  # a statement, and not a part of one
            cell = code[statement.cell - 1]
            lines = "".join(cell["source"]).splitlines()
            first, last = statement.node.lineno - 1, statement.node.end_lineno
            lines[first:last] = [f"# {line}" for line in lines[first:last]]
            cell["source"] = "\n".join(lines)
    return notebook, resources


class OtterPlugin:
    """The same for Otter, which calls its plugins' methods by name."""

    def __init__(self, *_: Any) -> None: ...

    def before_execution(self, submission: Any) -> Any:
        """Return the submission with tags."""
        return submission if isinstance(submission, str) else only_answers(submission)[0]


def _needed_cells(program: SubmittedProgram) -> set[int]:
    """Return the numbers of the cells that define what the answers refer to."""
    needed = set()
    for position, name in program.answers():
        answer = ast.Expression(program.statements[position].answers[name])
        names = names_read(compile(answer, "answer", "eval"))
        needed |= {position} | program.needed(position, names)
    every = [name for names in exercise_names().values() for name in names]
    for position in program.submitted_by_name(every).values():  # the check was deleted
        needed |= {position} | program.needed(position, program.statements[position].reads)
    return {program.statements[position].cell for position in needed}


def _is_graded(cell: Any) -> bool:
    return bool(cell["metadata"].get("nbgrader", {}).get("grade"))


def check_afresh(name: str, answer: Any, seed: int = 0) -> Any:
    """Judge an answer as `labkit.check` does, and return its verdict."""
    for module in [module for module in sys.modules if module.startswith("labkit.teaching.exercises")]:
        del sys.modules[module]
    return importlib.import_module("labkit.teaching.exercises.check").check(name, answer, seed=seed)
