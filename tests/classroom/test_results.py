"""The forms in which the results of a class are written."""

from __future__ import annotations

import csv
import json

import pytest

from labkit.classroom.grading import Graded
from labkit.classroom.mistakes import draw_mistakes
from labkit.classroom.results import Results
from labkit.errors.exceptions import LabError

HINT = "The gradients were summed, not averaged"
RIGHT = Graded("average_gradients", True, "passed", "Right.", seconds=1.4, score=12.5)
WRONG = Graded("average_gradients", False, "wrong", HINT, ("on 3 ranks",))
STUB = Graded("bubble", False, "not written yet", "Return the idle share.")
ABSENT = Graded("bubble", False, "no answer", "There is no answer in the notebook.")
POINTS = {"average_gradients": 2.0, "bubble": 1.0}
CLASS = Results(
    {
        "anna": {"average_gradients": RIGHT, "bubble": STUB},
        "ben": {"average_gradients": WRONG, "bubble": ABSENT},
        "cem": {"average_gradients": WRONG},
    },
    POINTS,
)


def test_the_table() -> None:
    assert CLASS.as_table().splitlines() == [
        "| student | average_gradients | bubble | points |",
        "|---------|-------------------|--------|--------|",
        "| anna    | ✓                 | ○      | 2      |",
        "| ben     | ✗                 | –      | 0      |",
        "| cem     | ✗                 |        | 0      |",
        "| passed  | 1                 | 0      | of 3   |",
        "",
        "✓ right, ✗ wrong, ○ not written, – no answer",
        "",
        "The commonest mistakes, with the number of students:",
        f"  2  average_gradients: {HINT}",
        "",
        "average_gradients:",
        "  1        12.5  anna",
    ]


def test_what_could_not_be_read_and_one_mistake_in_two_cells() -> None:
    broken = Graded("bubble", False, "no answer", "There is no answer in the notebook.", ("cell 3: SyntaxError",))
    stuck = [Graded("bubble", False, "wrong", f"Deadlock (cell {cell}, line 4): rank 0 waits") for cell in (33, 34)]
    given = {"anna": {"bubble": broken}, "ben": {"bubble": stuck[0]}, "cem": {"bubble": stuck[1]}}
    table = Results(given, {"bubble": 1.0}).as_table()
    assert "  2  bubble: Deadlock: rank 0 waits\n" in table
    assert table.endswith("Not read:\n  anna: cell 3: SyntaxError")


def test_one_student_gets_whole_verdicts() -> None:
    lines = [
        "✗ average_gradients: 0 of 2",
        f"  {HINT}",
        "  on 3 ranks",
        "– bubble: 0 of 1",
        f"  {ABSENT.message}",
        "0 of 3 points",
    ]
    assert CLASS.feedback("ben").splitlines() == lines
    assert only("ben").as_table().splitlines()[-len(lines) :] == lines


def test_points_as_csv() -> None:
    assert [*csv.reader(CLASS.written("csv").splitlines())] == [
        ["student", "average_gradients", "bubble", "points"], ["anna", "2", "0", "2"], ["ben", "0", "0", "0"],
        ["cem", "0", "", "0"],
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["=1+1", "+1", "-h38 --json x", "@a", "\t=1", " =1", "\uff1d1"])
def test_no_name_in_the_csv_file_is_a_formula(name: str) -> None:
    given = Results({name: {name: RIGHT}, "a;=1": {}}, {name: 1.0})
    rows = [*csv.reader(given.written("csv").splitlines())]
    shown = "'" + name.replace("\t", " ")
    assert rows == [["student", shown, "points"], [shown, "1", "1"], ["a,=1", "", "0"]]


def test_names_neither_break_nor_widen_the_table() -> None:
    long = "a" * 240 + ".its_end"
    rows = Results({"x|y": {}, long: {}, long + "|": {}}, {"e|" * 100: 1.0}).as_table().splitlines()[:6]
    assert {(len(row), row.count("|")) for row in rows} == {(len(rows[0]), 4)}
    assert len(rows[0]) < 110
    assert rows[2].startswith("| x¦y ")
    assert "…aa.its_end |" in rows[3]


def test_everything_as_json() -> None:
    written = json.loads(CLASS.written("json"))
    assert written["students"]["anna"]["points"] == 2
    assert written["students"]["ben"]["exercises"]["average_gradients"]["details"] == ["on 3 ranks"]
    assert written["mistakes"] == [{"exercise": "average_gradients", "message": HINT, "students": 2}]


def only(student: str) -> Results:
    return Results({student: CLASS.by_student[student]}, POINTS)


def test_gradescope() -> None:
    written = json.loads(only("anna").written("gradescope"))
    assert [(t["name"], t["score"], t["max_score"], t["status"]) for t in written["tests"]] == [
        ("average_gradients", 2, 2, "passed"), ("bubble", 0, 1, "failed"),
    ]  # fmt: skip
    assert written["leaderboard"] == [{"name": "average_gradients", "value": 12.5, "order": "asc"}]
    assert json.loads(only("ben").written("gradescope"))["tests"][0]["output"] == f"{HINT}\non 3 ranks"


def test_classroom50() -> None:
    written = only("ben").for_classroom50({"CLASSROOM": "systems", "ASSIGNMENT": "lesson-02", "OWNER": "ben"})
    assert (written["schema"], written["classroom"], written["assignment"]) == ("classroom50/result/v1", "systems", "lesson-02")
    assert (written["score"], written["max-score"]) == (0, 3)
    assert [(t["test-name"], t["passed"], t["score"], t["max-score"]) for t in written["tests"]] == [
        ("average_gradients", False, 0, 2), ("bubble", False, 0, 1),
    ]  # fmt: skip


def test_classroom50_collects_only_whole_points_and_filled_fields() -> None:
    """As `validate_result` of its collect_scores.py demands."""
    written = only("anna").for_classroom50({"COMMIT_URL": "https://example.org/commit"})
    numbers = [written["score"], written["max-score"], *(t[key] for t in written["tests"] for key in ("score", "max-score"))]
    assert {type(number) for number in numbers} == {int}
    assert written["review"] == "https://example.org/commit"
    with pytest.raises(LabError, match=r"2\.5 points for average_gradients: Classroom 50 accepts whole"):
        Results(only("anna").by_student, {"average_gradients": 2.5, "bubble": 1.0}).for_classroom50({})


def test_the_figure_of_mistakes_shows_hints_by_how_many_got_them() -> None:
    ax = draw_mistakes(CLASS.mistakes(), 3)
    assert [bar.get_width() for bar in ax.patches] == [2]
    [label] = ax.get_yticklabels()
    assert label.get_text().replace("\n", " ") == f"average_gradients: {HINT}"
    assert HINT in ax.figure.alt_text


def test_a_class_without_mistakes_has_an_empty_figure() -> None:
    assert draw_mistakes([], 3).get_title(loc="left") == "The commonest mistakes of 3 students"
