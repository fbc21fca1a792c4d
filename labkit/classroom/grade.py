"""`python -m labkit grade` judges submitted notebooks; `docs/teaching.md` describes it."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from labkit.classroom.confinement import new_namespaces
from labkit.classroom.grading import Graded, Settings, grade, hidden_for, judges_in
from labkit.classroom.results import Results, whole
from labkit.classroom.submissions import Submission, exercises_of, submissions
from labkit.errors.exceptions import LabError
from labkit.exercises import LESSONS
from labkit.launch.descendants import end_children
from labkit.notebook.lessons import lessons_named

__all__ = ["main", "points_given"]

FORMS = {
    "json": "everything: verdicts, points, hints",
    "csv": "the points of each student",
    "gradescope": "Gradescope's results.json, for one student",
    "classroom50": "Classroom 50's result.json, for one student",
}


def main(arguments: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        points = points_given(options.points)
        lessons = lessons_named(options.lessons) if options.lessons else []
        required = [name for lesson in lessons for name in exercises_of(lesson)]
        given = submissions(options.files, list(dict.fromkeys([*required, *points])) if required else [])
        judges = judges_in(options.modules)
        _check_outputs(options, {name: points.get(name, 1.0) for one in given for name in one.exercises})
    except LabError as error:
        parser.error(str(error))
    single = options.gradescope or options.classroom50
    if single and len({one.student for one in given}) > 1:
        parser.error(f"--gradescope and --classroom50 are for one student; there are {len({s.student for s in given})}")
    settings = Settings(
        options.execute, options.seed, options.limit_s, options.memory_mb, hidden_for([one.path for one in given]), judges,
        tuple(options.modules),
    )  # fmt: skip
    results = _results(given, settings, options.jobs, points)
    _write(results, options)
    print(results.as_table())
    if why := _no_namespaces():
        print(
            f"This system allows no namespaces ({why}): only Python's audit hooks have kept submissions from files and network."
        )
    return 0


def _write(results: Results, options: argparse.Namespace) -> None:
    for form in FORMS:
        if path := getattr(options, form):
            path.write_text(results.written(form), encoding="utf-8")
    if options.feedback:
        options.feedback.mkdir(parents=True, exist_ok=True)
        for student in results.by_student:
            name = re.sub(r"[^\w .()-]", "_", student)
            (options.feedback / f"{name}.txt").write_text(results.feedback(student), encoding="utf-8")
    if options.figure:
        from labkit.classroom.mistakes import draw_mistakes

        figure = draw_mistakes(results.mistakes(), len(results.by_student)).get_figure(root=True)
        assert figure is not None
        figure.savefig(options.figure, dpi=160)


def _check_outputs(options: argparse.Namespace, points: dict[str, float]) -> None:
    """Find out before submissions are graded, which takes minutes, whether the results can be written.

    Raises:
        LabError: they cannot.
    """
    for form in (*FORMS, "figure"):
        if (path := getattr(options, form)) is not None and not path.resolve().parent.is_dir():
            raise LabError(f"--{form} {path}: there is no folder {path.resolve().parent}")
    if options.classroom50:
        whole(points)
    known = {*points} & {name for names in LESSONS.values() for name in names}
    if not options.modules and (unknown := [name for name in points_given(options.points) if name not in known]):
        raise LabError(f"--points {unknown[0]}: no submission should answer it; there are {', '.join(sorted(known))}")


def points_given(texts: Sequence[str]) -> dict[str, float]:
    """Return the points of options such as "average_gradients=2", by exercise.

    Raises:
        LabError: an option has another form.
    """
    points = {}
    for text in texts:
        name, _, number = text.partition("=")
        try:
            points[name] = float(number)
        except ValueError:
            raise LabError(f"--points {text}: expected an exercise and a number, as in average_gradients=2") from None
    return points


def _no_namespaces() -> str:
    """Return why submissions cannot have namespaces of their own; "" if they can. Another process tries."""
    module = new_namespaces.__module__
    program = f"import sys; sys.path[:] = {sys.path!r}; from {module} import new_namespaces; print(new_namespaces())"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m labkit grade",
        description="Judges the answers in submitted notebooks, each in processes of its own, without network and with limits.",
        epilog="A student's name is that of the notebook, or of its folder if the notebook is named after a lesson.",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="notebooks, and folders that contain them")
    parser.add_argument(
        "--lessons",
        nargs="+",
        default=[],
        help="lessons whose exercises count, such as 02 04; "
        "default: the lesson that a notebook is named after, else the exercises that it checks",
    )
    parser.add_argument("--points", nargs="+", default=[], metavar="NAME=N", help="points for an exercise; default: 1 for each")
    parser.add_argument("--modules", nargs="+", default=[], help="modules that have exercises of your own, as in `import`")
    parser.add_argument("--execute", action="store_true", help="run the whole notebook, not only what the answers need")
    parser.add_argument("--seed", type=int, default=1, help="other inputs for the judges; 0: those of the lessons (default: 1)")
    parser.add_argument("--jobs", type=int, default=2, help="submissions at a time (default: 2)")
    parser.add_argument("--limit-s", type=float, default=60.0, help="seconds for one run of an answer (default: 60)")
    parser.add_argument("--memory-mb", type=float, default=4000.0, help="megabytes for one submission (default: 4000)")
    for form, content in FORMS.items():
        parser.add_argument(f"--{form}", type=Path, metavar="FILE", help=f"writes {content}")
    parser.add_argument("--feedback", type=Path, metavar="FOLDER", help="writes the verdicts of each student into a text file")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draws the commonest mistakes, as PNG, SVG or PDF")
    return parser


def _results(given: Sequence[Submission], settings: Settings, jobs: int, points: dict[str, float]) -> Results:
    by_student: dict[str, dict[str, Graded]] = {}
    with ThreadPoolExecutor(jobs) as pool:
        for submission, verdicts in zip(given, pool.map(lambda one: grade(one, settings), given), strict=True):
            by_student.setdefault(submission.student, {}).update({one.exercise: one for one in verdicts})
            right = sum(one.passed for one in verdicts)
            print(f"{submission.student}: {right} of {len(verdicts)}", file=sys.stderr, flush=True)
    end_children()  # what submissions have left behind
    names = dict.fromkeys(name for submission in given for name in submission.exercises)
    return Results(by_student, {name: points.get(name, 1.0) for name in names})
