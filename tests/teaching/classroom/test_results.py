"""The forms in which the results of a class are written."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from labkit.teaching.classroom.grade_submission import Graded
from labkit.teaching.classroom.results import ClassResults

ROOT = Path(__file__).resolve().parents[3]
HINT = "The gradients were summed, not averaged"
RIGHT = Graded("average_gradients", True, "passed", "Right.", seconds=1.4, score=12.5)
WRONG = Graded("average_gradients", False, "wrong", HINT, ("on 3 ranks",))
STUB = Graded("bubble", False, "not written yet", "Return the idle share.")
ABSENT = Graded("bubble", False, "no answer", "There is no answer in the notebook.")
POINTS = {"average_gradients": 2.0, "bubble": 1.0}
CLASS = ClassResults(
    {
        "anna": {"average_gradients": RIGHT, "bubble": STUB},
        "ben": {"average_gradients": WRONG, "bubble": ABSENT},
        "cem": {"average_gradients": WRONG},
    },
    POINTS,
)
TABLE = f"""
| student | average_gradients | bubble | points |
|---------|-------------------|--------|--------|
| anna    | ✓                 | ○      | 2      |
| ben     | ✗                 | –      | 0      |
| cem     | ✗                 |        | 0      |
| passed  | 1                 | 0      | of 3   |

✓ right, ✗ wrong, ○ not written, – no answer

The commonest mistakes, with the number of students:
  2  average_gradients: {HINT}

average_gradients:
  1        12.5  anna"""
FEEDBACK = f"""
✗ average_gradients: 0 of 2
  {HINT}
  on 3 ranks
– bubble: 0 of 1
  {ABSENT.message}
0 of 3 points"""


def only(student: str) -> ClassResults:
    return ClassResults({student: CLASS.by_student[student]}, POINTS)


def test_the_table() -> None:
    assert CLASS.as_table().splitlines() == TABLE.splitlines()[1:]


def test_what_could_not_be_read_and_one_mistake_in_two_cells() -> None:
    broken = Graded("bubble", False, "no answer", "There is no answer in the notebook.", ("cell 3: SyntaxError",))
    stuck = [Graded("bubble", False, "wrong", f"Deadlock (cell {cell}, line 4): rank 0 waits") for cell in (33, 34)]
    given = {"anna": {"bubble": broken}, "ben": {"bubble": stuck[0]}, "cem": {"bubble": stuck[1]}}
    table = ClassResults(given, {"bubble": 1.0}).as_table()
    assert "  2  bubble: Deadlock: rank 0 waits\n" in table
    assert table.endswith("Not read:\n  anna: cell 3: SyntaxError")


def test_one_student_gets_whole_verdicts() -> None:
    lines = FEEDBACK.splitlines()[1:]
    assert CLASS.feedback("ben").splitlines() == lines
    assert only("ben").as_table().splitlines()[-len(lines) :] == lines


def test_points_as_csv() -> None:
    rows = [["student", "average_gradients", "bubble", "points"], ["anna", "2", "0", "2"], ["ben", "0", "0", "0"]]
    assert [*csv.reader(CLASS.as_csv().splitlines())] == [*rows, ["cem", "0", "", "0"]]


@pytest.mark.parametrize("name", ["=1+1", "+1", "-h38 --json x", "@a", "\t=1", " =1", "\uff1d1"])
def test_no_name_in_the_csv_file_is_a_formula(name: str) -> None:
    given = ClassResults({name: {name: RIGHT}, "a;=1": {}}, {name: 1.0})
    rows = [*csv.reader(given.as_csv().splitlines())]
    shown = "'" + name.replace("\t", " ")
    assert rows == [["student", shown, "points"], [shown, "1", "1"], ["a,=1", "", "0"]]


def test_names_neither_break_nor_widen_the_table() -> None:
    long = "a" * 240 + ".its_end"
    rows = ClassResults({"x|y": {}, long: {}, long + "|": {}}, {"e|" * 100: 1.0}).as_table().splitlines()[:6]
    assert {(len(row), row.count("|")) for row in rows} == {(len(rows[0]), 4)}
    assert len(rows[0]) < 110
    assert rows[2].startswith("| x¦y ")
    assert "…aa.its_end |" in rows[3]


def test_everything_as_json() -> None:
    written = json.loads(CLASS.as_json())
    assert written["students"]["anna"]["points"] == 2
    assert written["students"]["ben"]["exercises"]["average_gradients"]["details"] == ["on 3 ranks"]
    assert written["mistakes"] == [{"exercise": "average_gradients", "message": HINT, "students": 2}]


def test_the_figure_of_mistakes_shows_hints_by_how_many_got_them() -> None:
    ax = CLASS.draw_mistakes()
    assert [bar.get_width() for bar in ax.patches] == [2]
    [label] = ax.get_yticklabels()
    assert label.get_text().replace("\n", " ") == f"average_gradients: {HINT}"
    assert HINT in ax.figure.alt_text
    empty = ClassResults({"anna": {}, "ben": {}}, {}).draw_mistakes()
    assert empty.get_title(loc="left") == "The commonest mistakes of 2 students"


def converted(heading: str, begin: str, folder: Path) -> None:
    """Run the Python of a section of docs/handing_out.md in a folder."""
    section = (ROOT / "docs" / "handing_out.md").read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    subprocess.run([sys.executable, "-c", begin + code], cwd=folder, env={"CLASSROOM": "systems"}, check=True, timeout=60)


@pytest.mark.processes
def test_the_python_of_the_docs_writes_what_gradescope_and_classroom50_read(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "graded.json").write_text(ClassResults({"anna": CLASS.by_student["anna"]}, POINTS).as_json())
    converted("Gradescope", "", tmp_path)
    (right, _) = json.loads((tmp_path / "results" / "results.json").read_text())["tests"]
    assert right == {
        "name": "average_gradients", "score": 2, "max_score": 2, "output": "Right.", "output_format": "text",
    }  # fmt: skip
    begin = """
import json, os
from datetime import UTC, datetime
from pathlib import Path
graded = json.loads(Path("graded.json").read_text())
(student,) = graded["students"].values()
"""
    converted("Classroom 50", begin, tmp_path)
    written = json.loads((tmp_path / "result.json").read_text())
    assert (written["schema"], written["classroom"]) == ("classroom50/result/v1", "systems")
    assert (written["score"], written["max-score"]) == (2, 3)
    assert [(t["test-name"], t["passed"], t["score"], t["max-score"]) for t in written["tests"]] == [
        ("average_gradients", True, 2, 2), ("bubble", False, 0, 1),
    ]  # fmt: skip
