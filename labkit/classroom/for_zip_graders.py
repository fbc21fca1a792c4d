"""Lessons for Gradescope and Classroom 50: what runs `python -m labkit grade` on their machines, with labkit's wheel.

Sources: Autograder Specifications, https://gradescope-autograders.readthedocs.io/en/latest/specs/, and Advanced
Autograding, https://github.com/foundation50/classroom50/wiki/Advanced-Autograding.
"""

from __future__ import annotations

import shutil
import zipfile
from typing import Final

from labkit.classroom.handout import Handout
from labkit.classroom.order import Order
from labkit.errors.exceptions import LabError

SETUP: Final = """#!/usr/bin/env bash
# Gradescope runs this once, when it builds the image. AUTOGRADER is another folder only where this is tried elsewhere.
set -euo pipefail
AUTOGRADER=${{AUTOGRADER:-/autograder}}
if ! command -v "${{PYTHON:=python3}}" > /dev/null; then
    apt-get update && apt-get install -y python3 python3-venv
fi
"$PYTHON" -m venv ${{VENV_OPTIONS:-}} "$AUTOGRADER/venv"
"$AUTOGRADER/venv/bin/python" -m pip install ${{PIP_OPTIONS:-}} "$AUTOGRADER/source/{wheel}[{extras}]"
"""
RUN: Final = """#!/usr/bin/env bash
# Gradescope runs this for each submission. What it prints is shown to instructors.
AUTOGRADER=${{AUTOGRADER:-/autograder}}
"$AUTOGRADER/venv/bin/python" -m labkit grade "$AUTOGRADER/submission" \\
    --lessons {lessons}{points} --seed {seed} --gradescope "$AUTOGRADER/results/results.json"
"""
CLASSROOM50: Final = '''"""Grades {name}: Classroom 50 runs this in the student's repository, and reads result.json there."""

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
NOTEBOOK = "{name}.ipynb"

with tempfile.TemporaryDirectory() as folder:
    venv.create(folder, with_pip=True, system_site_packages=True)
    python = str(Path(folder, "bin", "python"))
    wheel = next(HERE.glob("labkit-*.whl"))
    subprocess.run([python, "-m", "pip", "install", "-q", f"{{wheel}}[{extras}]"], check=True)
    found = sorted(path for path in Path.cwd().rglob(NOTEBOOK) if not path.is_symlink())
    if not found:
        sys.exit(f"there is no {{NOTEBOOK}} in this repository")
    command = [python, "-m", "labkit", "grade", str(found[0]), "--lessons", "{number}", {points}"--seed", "{seed}"]
    sys.exit(subprocess.run([*command, "--classroom50", "result.json"], check=False).returncode)
'''


def write_gradescope(order: Order) -> list[str]:
    """Write the students' notebooks and autograder.zip; return what to do with them."""
    wheel = order.wheel_for("gradescope")
    for one in order.handouts:
        one.write(order.folder / "student")
    points = "".join(f" {exercise.name}={exercise.points:g}" for exercise in order.exercises() if exercise.points != 1)
    lessons = " ".join(map(_number, order.handouts))
    setup = SETUP.format(wheel=wheel.name, extras=order.extras())
    run = RUN.format(lessons=lessons, points=f" --points{points}" if points else "", seed=order.seed)
    with zipfile.ZipFile(order.folder / "autograder.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in {"setup.sh": setup, "run_autograder": run}.items():
            entry = zipfile.ZipInfo(name)
            entry.external_attr = 0o100755 << 16  # an executable file
            archive.writestr(entry, text)
        archive.write(wheel, wheel.name)
    return [f"Hand out {order.folder / 'student'}; upload {order.folder / 'autograder.zip'} under Configure Autograder."]


def write_classroom50(order: Order) -> list[str]:
    """Write a template of the students' repository and an autograder for each lesson; return what to do with them."""
    wheel = order.wheel_for("classroom50")
    for exercise in order.exercises():
        if exercise.points != int(exercise.points):
            raise LabError(f"--points {exercise.name}={exercise.points:g}: Classroom 50 accepts whole numbers of points only")
    for one in order.handouts:
        slug = one.name.replace("_", "-")
        one.write(order.folder / "templates" / slug)
        folder = order.folder / "autograders" / slug
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(wheel, folder / wheel.name)
        given = [f"{exercise.name}={exercise.points:g}" for exercise in one.exercises if exercise.points != 1]
        points = "".join(f'"{part}", ' for part in (["--points", *given] if given else []))
        script = CLASSROOM50.format(name=one.name, number=_number(one), extras=order.extras(), points=points, seed=order.seed)
        (folder / "autograder.py").write_text(script, encoding="utf-8")
    return [
        f"Make a template repository of each folder in {order.folder / 'templates'}.",
        f"Copy {order.folder / 'autograders'} into the classroom's folder of your classroom50 repository.",
    ]


def _number(handout: Handout) -> str:
    return handout.name.partition("_")[0]
