"""The exercises of the course: `lab.check`, and the judges, a file per lesson, which stand beside the lessons.

The file of a lesson is imported as a module of this package when one of its exercises is checked.

What to open for which change:
- another exercise: a function with `@exercise` (exercise.py) in notebooks/judges/, its stub, its solution; another
  argument of `exercise`: exercise.py. Tests: test_exercises_*.py, with right and wrong answers, judged by
  helpers/answers.py
- a mistake that an exercise knows: in its judge, one more result in the list for `expect` or `expect_numbers`, or
  `wrong_if` (comparisons.py); a second hint after another wrong answer: `cure=`; a leaderboard: the check returns a
  score, as in notebooks/judges/fast_step.py
- where an answer runs, and how long: answer_ranks.py. Its `RUN_LIMIT_S` is one limit for all exercises: a limit per
  exercise would be an argument in exercise.py, for both of the places that set `timeout_s` in answer_ranks.py. Which
  answers are not run: `refused` in check.py; tests test_check.py
- where a course's own exercises are found: `find`, `own_exercises` below; tests test_own_exercises.py
- random inputs, graders' other inputs: random_state.py; tests test_seeds.py. Waits of exercises on RPC: rpc_waits.py
"""

from __future__ import annotations

import difflib
import functools
import importlib
import re
import sys
from typing import Final

from labkit.errors.exceptions import LabError
from labkit.errors.lists import listed
from labkit.teaching.exercises.exercise import Exercise
from labkit.teaching.lessons import JUDGES

MOST_NAMED: Final = 12  # exercises in an error: all of them would fill half a page


@functools.cache
def exercise_names() -> dict[str, tuple[str, ...]]:
    """Return the names of the exercises in each file, in the order of the lessons; no file is imported for it.

    Ranks import this package, too: they do not call this.
    """
    texts = {path.stem: path.read_text("utf-8") for path in sorted(JUDGES.glob("*.py"))}
    lessons = {file: re.findall(r'^LESSON.* = "(.*)"', text, re.MULTILINE) for file, text in texts.items()}
    exercise = re.compile(r"^@exercise\(.*?^def (\w+)", re.DOTALL | re.MULTILINE)
    return {file: tuple(exercise.findall(texts[file])) for file in sorted(texts, key=lessons.__getitem__)}


def find(name: str) -> Exercise:
    """Return the exercise with this name: one of labkit's, or one of a course's own.

    A course's own exercises are in the notebook, or in a module that has been imported.

    Raises:
        LabError: there is none; the message lists similar names, or the first of all names.
    """
    for file, names in exercise_names().items():
        if name in names:
            module = importlib.import_module(f"labkit.teaching.exercises.{file}")
            return next(e for e in vars(module).values() if isinstance(e, Exercise) and e.name == name)
    own = {exercise.name: exercise for exercises in own_exercises().values() for exercise in exercises}
    if name in own:
        return own[name]
    every = [*own, *(n for names in exercise_names().values() for n in names)]
    folded = {n.casefold(): n for n in every}
    close = [folded[n] for n in difflib.get_close_matches(str(name).casefold(), folded, n=3)]
    hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"there are: {listed(every, most=MOST_NAMED)}"
    raise LabError(f"no exercise is called {name!r}; {hint}")


def own_exercises() -> dict[str, list[Exercise]]:
    """Return the exercises of imported modules outside of this package, by module: a course's, and `__main__`'s."""
    found = {
        name: [value for value in list(getattr(module, "__dict__", {}).values()) if type(value) is Exercise]
        for name, module in list(sys.modules.items())
        if not name.startswith(f"{__name__}.")
    }
    return {name: exercises for name, exercises in found.items() if exercises}


__path__.append(str(JUDGES))  # the judges are modules of this package
