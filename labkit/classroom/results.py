"""The results of a class, and the forms in which they are written: tables, and the files that other systems read."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Final

from labkit.classroom.grading import Graded
from labkit.classroom.submissions import printable
from labkit.errors.exceptions import LabError

MOST_MISTAKES: Final = 10  # in the table
MOST_OF_NAME: Final = 40  # characters of a student's or an exercise's name in the table
_PLACE: Final = re.compile(r" \(cell \d+, line \d+\)")  # differs between notebooks with the same mistake
_FORMULA: Final = re.compile(r"\s*[=+\-@\uff1d\uff0b\uff0d\uff20]")  # also in full width
MARKS: Final = {"passed": "✓", "wrong": "✗", "not written yet": "○", "no answer": "–"}


@dataclass(frozen=True)
class Results:
    """The verdicts on all submissions of a class.

    Args:
        by_student: the verdicts of each student, by exercise.
        points: the points for each exercise.
    """

    by_student: Mapping[str, Mapping[str, Graded]]
    points: Mapping[str, float]

    def points_of(self, student: str) -> float:
        """Return the sum of a student's points."""
        return sum(self.points[name] for name, one in self.by_student[student].items() if one.passed)

    def mistakes(self) -> list[tuple[str, str, int]]:
        """Return the hints that were given, as exercise, hint and number of students, most frequent first."""
        found = Counter(
            (one.exercise, _PLACE.sub("", one.message))
            for verdicts in self.by_student.values()
            for one in verdicts.values()
            if one.state == "wrong"
        )
        return [(*hint, count) for hint, count in found.most_common()]

    def rows(self) -> Iterator[list[str]]:
        """Yield the rows of the table: a heading, then a row for each student."""
        yield ["student", *map(_short, self.points), "points"]
        for student, verdicts in self.by_student.items():
            marks = [MARKS[verdicts[name].state] if name in verdicts else "" for name in self.points]
            yield [_short(student), *marks, f"{self.points_of(student):g}"]
        passed = [str(sum(name in v and v[name].passed for v in self.by_student.values())) for name in self.points]
        yield ["passed", *passed, f"of {sum(self.points.values()):g}"]

    def as_table(self) -> str:
        """Return the table in Markdown, the commonest mistakes, and the leaderboards."""
        rows = list(self.rows())
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows]
        lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
        lines += ["", "✓ right, ✗ wrong, ○ not written, – no answer"]
        if len(self.by_student) == 1:
            lines += ["", *map(self.feedback, self.by_student)]
        elif mistakes := self.mistakes():
            lines += ["", "The commonest mistakes, with the number of students:"]
            lines += [f"{count:3}  {name}: {hint}" for name, hint, count in mistakes[:MOST_MISTAKES]]
            lines += [f"and {len(mistakes) - MOST_MISTAKES} more"] if len(mistakes) > MOST_MISTAKES else []
        if len(self.by_student) > 1 and (unread := self._unread()):
            lines += ["", "Not read:", *(f"  {student}: {why}" for student, why in unread)]
        for name in self.points:
            if board := self.leaderboard(name):
                lines += [
                    "",
                    f"{name}:",
                    *(f"{place:3}  {score:10.4g}  {student}" for place, (score, student) in enumerate(board, 1)),
                ]
        return "\n".join(lines)

    def _unread(self) -> list[tuple[str, str]]:
        """Return students with the reasons why answers are missing, but for those who gave none."""
        none = ["no answer", "There is no answer in the notebook.", ()]
        reasons = (
            (student, "; ".join(one.details or [one.message]))
            for student, verdicts in self.by_student.items()
            for one in verdicts.values()
            if one.state == "no answer" and [one.state, one.message, one.details] != none
        )
        return list(dict.fromkeys(reasons))

    def feedback(self, student: str) -> str:
        """Return the verdicts on a student's answers."""
        lines = []
        for name, one in self.by_student[student].items():
            lines.append(f"{MARKS[one.state]} {name}: {self.points[name] * one.passed:g} of {self.points[name]:g}")
            lines += [f"  {line}" for text in (one.message, *one.details) for line in text.splitlines()]
        return "\n".join([*lines, f"{self.points_of(student):g} of {sum(self.points.values()):g} points", ""])

    def leaderboard(self, exercise: str) -> list[tuple[float, str]]:
        """Return the scores of the right answers to an exercise with their students, the best first."""
        verdicts = {student: found[exercise] for student, found in self.by_student.items() if exercise in found}
        return sorted((one.score, student) for student, one in verdicts.items() if one.passed and one.score is not None)

    def as_csv(self) -> str:
        """Return a row for each student: the points for each exercise, and their sum."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["student", *map(_literal, self.points), "points"])
        for student, verdicts in self.by_student.items():
            earned = [f"{self.points[name] * verdicts[name].passed:g}" if name in verdicts else "" for name in self.points]
            writer.writerow([_literal(student), *earned, f"{self.points_of(student):g}"])
        return text.getvalue()

    def as_json(self) -> dict[str, Any]:
        """Return everything."""
        students = {
            student: {
                "points": self.points_of(student),
                "exercises": {name: asdict(one) | {"points": self.points[name] * one.passed} for name, one in verdicts.items()},
            }
            for student, verdicts in self.by_student.items()
        }
        mistakes = [{"exercise": name, "message": hint, "students": count} for name, hint, count in self.mistakes()]
        return {"points": dict(self.points), "students": students, "mistakes": mistakes}

    def for_gradescope(self) -> dict[str, Any]:
        """Return the content of Gradescope's results.json for the one student of these results.

        Source: Autograder Specifications, Gradescope, https://gradescope-autograders.readthedocs.io/en/latest/specs/.
        """
        tests = [
            {
                "name": one.exercise,
                "score": self.points[one.exercise] * one.passed,
                "max_score": self.points[one.exercise],
                "status": "passed" if one.passed else "failed",
                "output": "\n".join([one.message, *one.details]),
                "output_format": "text",
            }
            for one in self._only()
        ]
        boards = [{"name": one.exercise, "value": one.score, "order": "asc"} for one in self._only() if one.score is not None]
        return {"tests": tests, "execution_time": round(sum(one.seconds for one in self._only()))} | (
            {"leaderboard": boards} if boards else {}
        )

    def for_classroom50(self, environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
        """Return the content of Classroom 50's result.json for the one student of these results.

        Args:
            environment: the variables in which its runner tells what is graded.

        Raises:
            LabError: a number of points is not whole; Classroom 50 refuses those.

        Source: Advanced Autograding, https://github.com/foundation50/classroom50/wiki/Advanced-Autograding, and
        `validate_result` in collect_scores.py of that repository.
        """
        points = whole(self.points)
        tests = [
            {
                "test-name": one.exercise,
                "passed": one.passed,
                "score": points[one.exercise] * one.passed,
                "max-score": points[one.exercise],
                "details": "\n".join([one.message, *one.details]),
            }
            for one in self._only()
        ]
        variables = {
            "classroom": "CLASSROOM", "assignment": "ASSIGNMENT", "assignment_type": "ASSIGNMENT_TYPE", "owner": "OWNER",
            "submission": "SUBMISSION_TAG", "commit": "COMMIT_URL", "release": "RELEASE_URL", "review": "REVIEW_URL",
        }  # fmt: skip
        context = {key: environment.get(variable, "") for key, variable in variables.items()}
        return {
            "schema": "classroom50/result/v1",
            **context,
            "review": context["review"] or context["commit"],  # older runners do not set REVIEW_URL
            "datetime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "score": sum(test["score"] for test in tests),
            "max-score": sum(points.values()),
            "tests": tests,
        }

    def _only(self) -> Sequence[Graded]:
        (verdicts,) = self.by_student.values()
        return list(verdicts.values())

    def written(self, kind: str) -> str:
        """Return the text of a file: "json", "csv", "gradescope" or "classroom50"."""
        if kind == "csv":
            return self.as_csv()
        content = {"json": self.as_json, "gradescope": self.for_gradescope, "classroom50": self.for_classroom50}[kind]()
        return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _short(name: str) -> str:
    """Return a name for a cell of a Markdown table: its beginning and its end, without the separator of cells."""
    return (name if len(name) <= MOST_OF_NAME else f"{name[: MOST_OF_NAME - 11]}…{name[-10:]}").replace("|", "¦")


def _literal(name: str) -> str:
    """Return a name that no spreadsheet takes for a formula.

    Source: CSV Injection, OWASP, https://owasp.org/www-community/attacks/CSV_Injection.
    """
    name = printable(name).replace(";", ",")  # which separates cells in some countries, even if the name is not in quotes
    return f"'{name}" if _FORMULA.match(name) else name


def whole(points: Mapping[str, float]) -> dict[str, int]:
    """Return points as whole numbers.

    Raises:
        LabError: some are not; Classroom 50 refuses those.
    """
    if broken := [name for name, number in points.items() if number != int(number)]:
        raise LabError(f"{points[broken[0]]} points for {broken[0]}: Classroom 50 accepts whole numbers of points only")
    return {name: int(number) for name, number in points.items()}
