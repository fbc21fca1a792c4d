"""The results of a class, and the forms in which they are shown: table, files, and a figure of the mistakes."""

from __future__ import annotations

import csv
import io
import json
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

from labkit.teaching.classroom.grade_submission import Graded
from labkit.teaching.classroom.submissions import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_MISTAKES: Final = 10  # in the table
MOST_OF_NAME: Final = 40  # characters of a student's or an exercise's name in the table
_PLACE: Final = re.compile(r" \(cell \d+, line \d+\)")  # differs between notebooks with the same mistake
_FORMULA: Final = re.compile(r"\s*[=+\-@\uff1d\uff0b\uff0d\uff20]")  # also in full width
COLOUR: Final = "#d55e00"  # of a wrong answer, as in its verdict
MOST_DRAWN: Final = 12  # mistakes in the figure
CHARACTERS, MOST_LINES = 58, 3  # of a hint: in one line, and lines
MARKS: Final = {"passed": "✓", "wrong": "✗", "not written yet": "○", "no answer": "–"}


@dataclass(frozen=True)
class ClassResults:
    """The verdicts on all submissions of a class."""

    by_student: Mapping[str, Mapping[str, Graded]]  # by student and exercise
    points: Mapping[str, float]  # for each exercise

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

    def as_json(self) -> str:
        """Return everything."""
        students = {
            student: {
                "points": self.points_of(student),
                "exercises": {name: asdict(one) | {"points": self.points[name] * one.passed} for name, one in verdicts.items()},
            }
            for student, verdicts in self.by_student.items()
        }
        mistakes = [{"exercise": name, "message": hint, "students": count} for name, hint, count in self.mistakes()]
        content = {"points": dict(self.points), "students": students, "mistakes": mistakes}
        return json.dumps(content, indent=1, ensure_ascii=False) + "\n"

    def draw_mistakes(self) -> Axes:
        """Draw the commonest mistakes as bars."""
        from matplotlib.ticker import MaxNLocator

        from labkit.plots.image import WIDTH_IN
        from labkit.plots.style import INK, describe, labkit_style, new_figure

        shown = self.mistakes()[:MOST_DRAWN]
        labels = [
            "\n".join(textwrap.wrap(f"{exercise}: {hint}", CHARACTERS, max_lines=MOST_LINES, placeholder=" …"))
            for exercise, hint, _ in shown
        ]
        lines = [label.count("\n") + 1.6 for label in labels]  # with the space below
        places = [sum(lines[:i]) + n / 2 for i, n in enumerate(lines)]
        counts = [count for *_, count in shown]
        with labkit_style():
            ax = new_figure(figsize=(WIDTH_IN, 0.8 + 0.155 * sum(lines)), layout="constrained").subplots()
            ax.barh(places, counts, height=1.0, color=COLOUR)
            for place, count in zip(places, counts, strict=True):
                ax.annotate(str(count), (count, place), (4, 0), textcoords="offset points", va="center")
            ax.set_yticks(places, labels, fontsize=8)
            ax.tick_params(axis="y", length=0)
            ax.set_ylim(sum(lines) or 1, 0)
            ax.set_xlim(0, max([*counts, 1]) * 1.12)
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
            ax.set_xlabel("students", color=INK)
            ax.set_title(f"The commonest mistakes of {len(self.by_student)} students")
        each = "; ".join(f"{exercise}, {count}: {hint}" for exercise, hint, count in shown)
        return describe(ax, f"Mistakes by the number of students that made them. {each}.")


# What is written into files: by the name of the option, what it is, and its text.
FORMS: Final[dict[str, tuple[str, Callable[[ClassResults], str]]]] = {
    "json": ("everything: verdicts, points, hints", lambda results: results.as_json()),
    "csv": ("the points of each student", lambda results: results.as_csv()),
}


def _short(name: str) -> str:
    """Return a name for a cell of a Markdown table: its beginning and its end, without the separator of cells."""
    return (name if len(name) <= MOST_OF_NAME else f"{name[: MOST_OF_NAME - 11]}…{name[-10:]}").replace("|", "¦")


def _literal(name: str) -> str:
    """Return a name that no spreadsheet takes for a formula.

    Source: CSV Injection, OWASP, https://owasp.org/www-community/attacks/CSV_Injection.
    """
    name = printable(name).replace(";", ",")  # which separates cells in some countries, even if the name is not in quotes
    return f"'{name}" if _FORMULA.match(name) else name
