"""Lessons for nbgrader: source notebooks with tests, their configuration, and a submission of the reference solutions.

The students' cells hold the lesson's own stubs, so nbgrader's step that replaces solutions by a stub is turned off. The
reference solutions are the submission of a student called `reference`, who must get all points.

Source: nbgrader's documentation, https://nbgrader.readthedocs.io, and its cell metadata, schema 3, in version 0.9.6.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, Final

from labkit.teaching.classroom.handout import AssignedExercise, Handout, Order, code_cell

REFERENCE: Final = "reference"
TIMEOUT_S: Final = 240  # for a cell: labkit ends an answer after 60 s, and a test runs one twice

CONFIG: Final = f'''"""How nbgrader handles labkit's lessons; written by `python -m labkit assign`."""

from labkit.teaching.classroom.grader_plugins import only_answers

c = get_config()
c.CourseDirectory.course_id = "labkit"
c.Execute.timeout = {TIMEOUT_S}  # seconds for a cell; nbgrader's default, 30, is less than a check may take
c.Execute.raise_on_iopub_timeout = False
c.ClearSolutions.enabled = False  # the source notebooks have the lessons' stubs
c.OverwriteCells.add_missing_cells = True  # a deleted test costs its points, not the run
c.Autograde.autograde_preprocessors.insert(0, only_answers)  # cells that no answer needs do not run
'''


def write_nbgrader(order: Order) -> list[str]:
    """Write an assignment for each lesson, and the configuration unless there is one; return what to type next."""
    for one in order.handouts:
        one.write(order.folder / "source" / one.name, tested_cells(one, order.seed))
        _write_reference(one, order.folder / "submitted" / REFERENCE / one.name)
    config = order.folder / "nbgrader_config.py"
    names = " ".join(one.name for one in order.handouts)
    if config.exists() and config.read_text(encoding="utf-8") != CONFIG:
        return [f"{config} exists and was kept. It needs these lines:", CONFIG]
    config.write_text(CONFIG, encoding="utf-8")
    return [
        f"In {order.folder}, for each of {names}:",
        "nbgrader generate_assignment NAME                       # writes what students get into release/NAME",
        f"nbgrader autograde NAME --student {REFERENCE}             # the reference solutions must get all points",
        "nbgrader autograde NAME                                 # grades what lies in submitted/STUDENT/NAME",
    ]


def tested_cells(handout: Handout, seed: int) -> list[dict[str, Any]]:
    """Return the cells of a source notebook: those of the lesson, and a test after each exercise."""
    by_cell = {exercise.cell: exercise for exercise in handout.exercises}
    cells = []
    for index, cell in enumerate(handout.notebook["cells"]):
        cells.append(copy.deepcopy(cell))
        if exercise := by_cell.get(index):
            cells[-1]["metadata"]["nbgrader"] = _metadata(exercise.name, grade=False)
            cells.append(_test(exercise, seed))
    return cells


def _test(exercise: AssignedExercise, seed: int) -> dict[str, Any]:
    call = f'verdict = check_afresh("{exercise.name}", {exercise.answer}'
    source = f"""# {exercise.points:g} point{"s" * (exercise.points != 1)} for {exercise.name}
from labkit.teaching.classroom.grader_plugins import check_afresh

{call})
assert verdict, verdict
### BEGIN HIDDEN TESTS
{call}, seed={seed})
assert verdict, verdict
### END HIDDEN TESTS"""
    cell = code_cell(f"test-{exercise.name}".replace("_", "-")[:64], source)
    cell["metadata"]["nbgrader"] = _metadata(f"test_{exercise.name}", grade=True) | {"points": exercise.points}
    return cell


def _metadata(grade_id: str, *, grade: bool) -> dict[str, Any]:
    return {
        "schema_version": 3, "grade_id": grade_id, "grade": grade, "locked": grade, "solution": not grade, "task": False,
        "cell_type": "code",
    }  # fmt: skip


def _write_reference(handout: Handout, folder: Path) -> None:
    """Write the submission of a student whose answers are the reference solutions."""
    notebook = json.loads((handout.lesson.parent / "solutions" / handout.lesson.name).read_bytes())
    solutions = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    cells = tested_cells(handout, 0)
    by_name = {exercise.name: exercise for exercise in handout.exercises}
    for cell in cells:
        exercise = by_name.get(cell["metadata"].get("nbgrader", {}).get("grade_id", ""))
        if exercise is not None:
            check = f'lab.check("{exercise.name}"'
            until = next(i for i, source in enumerate(solutions) if check in source) + 1
            cell["source"] = "\n\n".join(solutions[:until])
            solutions = solutions[until:]
    handout.write(folder, cells)
