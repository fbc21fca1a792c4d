"""`python -m labkit assign`: what students and graders get, read as JSON; nbgrader and Otter run where they are."""

from __future__ import annotations

import ast
import copy
import csv
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from labkit.teaching.classroom.assign import FORMS, main
from labkit.teaching.classroom.grader_plugins import OtterPlugin, check_afresh, only_answers
from labkit.teaching.lessons import ORIGINALS

ROOT = Path(__file__).resolve().parent.parent.parent
LESSON = "02_data_parallel"
NAMES = ["average_gradients", "average_in_buckets", "draw_indices", "scaled_learning_rate"]


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def source(cell):
    return "".join(cell["source"])


@pytest.fixture
def assigned(tmp_path, capsys, monkeypatch):
    """Hands out lesson 02, or others; returns the folder."""
    monkeypatch.setattr("labkit.teaching.classroom.for_hosted.data_uri", lambda diagram: f"data:image/png;base64,{diagram.stem}")

    def hand_out(form, *options, lessons=("02",)):
        folder = tmp_path / form
        given = ["--lessons", *lessons, "--to", str(folder), "--for", form, *options]
        assert main(given) == 0
        assert capsys.readouterr().out
        return folder

    return hand_out


def student_notebooks(form, folder):
    """What students get; of nbgrader: the notebook from which it makes the release."""
    return sorted(path for path in folder.rglob("*.ipynb") if "submitted" not in path.parts)


def solution_lines(lesson):
    """Lines of the reference solutions that the lesson itself does not have."""
    lines = {line.strip() for cell in read(ORIGINALS / "solutions" / lesson)["cells"] for line in source(cell).splitlines()}
    known = "\n".join(map(source, read(ORIGINALS / lesson)["cells"]))
    return {line for line in lines if len(line) > 12 and line not in known}


@pytest.mark.parametrize("form", FORMS)
def test_students_get_the_lesson_without_outputs_and_solutions_and_all_diagrams(form, assigned) -> None:
    folder = assigned(form)
    (path,) = student_notebooks(form, folder)
    notebook = read(path)
    nbformat.validate(notebook)
    text = "\n".join(map(source, notebook["cells"]))
    assert not [cell for cell in notebook["cells"] if cell.get("outputs") or cell.get("execution_count")]
    assert not [line for line in solution_lines(f"{LESSON}.ipynb") if line in text]
    assert "solutions/" not in text
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)
    assert len(pictures) == 4
    assert (path.parent / "AGENTS.md").exists() == (form not in ("colab", "kaggle"))
    for picture in pictures:
        assert picture.startswith("data:image/png") or (path.parent / picture).read_bytes() == (ORIGINALS / picture).read_bytes()
    given = {cell["id"]: source(cell) for cell in notebook["cells"]}  # unchanged but for links
    for cell in read(ORIGINALS / f"{LESSON}.ipynb")["cells"]:
        if cell["cell_type"] == "code" or "](" not in source(cell):
            assert given[cell["id"]] == source(cell)


def test_no_lesson_points_to_solutions(assigned) -> None:
    folder = assigned("plain", lessons=[p.stem for p in ORIGINALS.glob("*.ipynb")])
    for path in folder.glob("*.ipynb"):
        for cell in read(path)["cells"]:
            if cell["cell_type"] == "markdown":
                assert "solutions/" not in source(cell)
    text = source(next(c for c in read(folder / "12_tf_hybrid.ipynb")["cells"] if "Four exercises" in source(c)))
    assert "Four exercises. Begin a function" in text


def test_links_lead_only_to_lessons_that_are_handed_out(assigned) -> None:
    alone = "".join(source(cell) for cell in read(assigned("plain") / f"{LESSON}.ipynb")["cells"])
    assert "**Next:** 02b What it costs:" in alone
    both = assigned("plain", lessons=("02", "02b"))
    assert "[02b What it costs](02b_what_it_costs.ipynb)" in "".join(
        source(cell) for cell in read(both / f"{LESSON}.ipynb")["cells"]
    )


def test_every_lesson_can_be_handed_out_with_its_reference(assigned) -> None:
    lessons = [path.stem for path in ORIGINALS.glob("*.ipynb")]
    folder = assigned("nbgrader", lessons=lessons)
    for lesson in lessons:
        nbformat.validate(read(folder / "submitted" / "reference" / lesson / f"{lesson}.ipynb"))
        cells = nbgrader_cells(folder / "source" / lesson / f"{lesson}.ipynb")
        assert sum(cell["metadata"]["nbgrader"]["grade"] for cell in cells) >= 2


def test_with_a_seed_a_second_call_writes_the_same_and_without_other_hidden_inputs(assigned) -> None:
    first = {p: p.read_bytes() for p in assigned("nbgrader", "--seed", "7").rglob("*") if p.is_file()}
    assert {p: p.read_bytes() for p in assigned("nbgrader", "--seed", "7").rglob("*") if p.is_file()} == first
    seeds = set()
    for _ in range(3):
        text = (assigned("nbgrader") / "source" / LESSON / f"{LESSON}.ipynb").read_text(encoding="utf-8")
        seeds |= set(re.findall(r"seed=(\d+)", text))
    assert len(seeds) == 3
    assert "0" not in seeds


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--points", "average=2"], "average: these lessons have no such exercise"),
        (["--points", "average_gradients"], "expected an exercise and a number"),
        (["--points", "average_gradients=-1"], "--points average_gradients=-1: expected a number from 0 on"),
        (["--points", "average_gradients=nan"], "--points average_gradients=nan: expected a number from 0 on"),
        (["--points", "average_gradients=inf"], "--points average_gradients=inf: expected a number from 0 on"),
        (["--lessons", "77"], "77"),
    ],
)
def test_what_cannot_be_done_is_said(options, words, tmp_path, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--to", str(tmp_path), "--lessons", "02", *options])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


# nbgrader

# The fields of schema 3, as nbgrader's MetadataValidatorV3 requires them.
FIELDS = {"schema_version": int, "grade": bool, "solution": bool, "locked": bool, "task": bool, "grade_id": str, "cell_type": str}


def nbgrader_cells(path):
    return [cell for cell in read(path)["cells"] if "nbgrader" in cell["metadata"]]


def test_nbgrader_cells_follow_its_schema(assigned) -> None:
    cells = nbgrader_cells(assigned("nbgrader") / "source" / LESSON / f"{LESSON}.ipynb")
    ids = [cell["metadata"]["nbgrader"]["grade_id"] for cell in cells]
    assert ids == [part for name in NAMES for part in (name, f"test_{name}")]
    for cell in cells:
        about = cell["metadata"]["nbgrader"]
        assert {key: type(about[key]) for key in FIELDS} == FIELDS
        assert about["schema_version"] == 3
        assert set(about) - set(FIELDS) == ({"points"} if about["grade"] else set())
        assert about["grade"] == about["locked"] != about["solution"]


def test_a_test_asserts_the_verdict_also_on_hidden_inputs(assigned) -> None:
    folder = assigned("nbgrader", "--seed", "4711", "--points", "draw_indices=2.5")
    cells = {c["metadata"]["nbgrader"]["grade_id"]: c for c in nbgrader_cells(folder / "source" / LESSON / f"{LESSON}.ipynb")}
    test = cells["test_draw_indices"]
    assert test["metadata"]["nbgrader"]["points"] == 2.5
    assert cells["test_average_gradients"]["metadata"]["nbgrader"]["points"] == 1
    visible, hidden = source(test).split("### BEGIN HIDDEN TESTS\n")
    ast.parse(source(test))
    assert "seed" not in visible
    assert 'check_afresh("draw_indices", draw_indices)\nassert verdict, verdict\n' in visible
    assert hidden.endswith("### END HIDDEN TESTS")
    assert "seed=4711)\nassert verdict, verdict\n" in hidden


def test_the_reference_submission_has_the_solutions(assigned) -> None:
    cells = nbgrader_cells(assigned("nbgrader") / "submitted" / "reference" / LESSON / f"{LESSON}.ipynb")
    text = "\n".join(map(source, cells))
    assert "def buckets_of(" in text
    for name in NAMES:
        assert text.count(f'lab.check("{name}", {name})') == 1
        assert f"def {name}(" in text


def test_an_existing_configuration_is_kept(tmp_path, capsys) -> None:
    (tmp_path / "nbgrader_config.py").write_text("mine")
    assert main(["--lessons", "02", "--to", str(tmp_path), "--for", "nbgrader"]) == 0
    assert (tmp_path / "nbgrader_config.py").read_text() == "mine"
    assert "c.Execute.timeout = 240" in capsys.readouterr().out


# which cells run


def code(text, **metadata):
    return {"cell_type": "code", "metadata": metadata, "source": text, "outputs": [], "execution_count": None}


def notebook(*cells):
    return {"cells": list(cells), "metadata": {}}


def run_cells(given):
    return [cell["source"] for cell in given["cells"] if "skip-execution" not in cell["metadata"].get("tags", [])]


@pytest.mark.parametrize(
    ("cells", "run"),
    [
        (
            [
                "import labkit as lab",  # of which only the check makes use
                "lab.guess(x=...)",
                "def helper():\n    return unit",
                "unit = 1",
                "while True:\n    pass",
                "def f():\n    return helper()\nlab.check('draw_indices', f)",
            ],
            ["def helper():\n    return unit", "unit = 1", "def f():\n    return helper()\n# lab.check('draw_indices', f)"],
        ),
        (  # an answer counts without its check
            ["unit = 1", "def draw_indices():\n    return unit", "1 / 0"], ["unit = 1", "def draw_indices():\n    return unit"],
        ),
        (["def broken(:", "f = 1\nlab.check('draw_indices', f)"], ["f = 1\n# lab.check('draw_indices', f)"]),
    ],
)  # fmt: skip
def test_only_cells_that_answers_need_run(cells, run) -> None:
    given = notebook(*map(code, cells))
    only_answers(given)
    assert run_cells(given) == run
    assert run_cells(OtterPlugin("a path", {}, {}).before_execution(notebook(*map(code, cells)))) == run


def test_a_second_pass_changes_nothing() -> None:
    """Nbgrader reads its configuration more than once, so the preprocessor is there more than once."""
    given = notebook(code("x = 1\nlab.check('draw_indices', x)"))
    once = copy.deepcopy(only_answers(given)[0])
    assert only_answers(given)[0] == once
    assert run_cells(given) == ["x = 1\n# lab.check('draw_indices', x)"]


def test_a_student_cannot_have_a_test_passed_over() -> None:
    """A graded cell without output earns all points."""
    graded = {"grade": True, "grade_id": "test"}
    for done in ({}, {"labkit_only_answers": True}):
        given = notebook(code("assert False", tags=["skip-execution"], nbgrader=graded))
        given["metadata"] |= done
        only_answers(given)
        assert run_cells(given) == ["assert False"]


# Otter


def test_otter_gets_a_file_of_tests_for_each_exercise(assigned) -> None:
    folder = assigned("otter", "--seed", "4711", "--points", "draw_indices=3") / LESSON
    assert sorted(path.stem for path in folder.glob("tests/*.py")) == NAMES
    text = (folder / "tests" / "draw_indices.py").read_text()
    settings = {node.targets[0].id: ast.literal_eval(node.value) for node in ast.parse(text).body if isinstance(node, ast.Assign)}
    assert settings == {"OK_FORMAT": False, "name": "draw_indices", "points": 3, "all_or_nothing": True}
    assert "@test_case(hidden=True)\ndef test_other_inputs(env):\n    judge(env, seed=4711)" in text
    assert "otter" not in (folder / "student" / f"{LESSON}.ipynb").read_text()
    assert (folder / "requirements.txt").read_text().startswith("labkit[torch,hosted]\n")
    (plugin,) = read(folder / "otter_config.json")["plugins"]
    module, _, name = next(iter(plugin)).rpartition(".")
    assert getattr(importlib.import_module(module), name) is OtterPlugin


def test_tensorflow_lessons_install_tensorflow(assigned) -> None:
    folder = assigned("otter", lessons=("10",)) / "10_tf_data_parallel"
    assert (folder / "requirements.txt").read_text().startswith("labkit[torch,hosted,tf]\n")


@pytest.mark.processes
def test_judges_are_imported_afresh(monkeypatch) -> None:
    import labkit.teaching.exercises.check

    monkeypatch.setattr(labkit.teaching.exercises.check, "check", lambda *_, **__: True)
    kept = {name: module for name, module in sys.modules.items() if name.startswith("labkit.teaching.exercises")}
    try:
        verdict = check_afresh("scaled_learning_rate", lambda base, base_batch, per_rank, ranks: 0.0)  # noqa: ARG005
        right = check_afresh("scaled_learning_rate", lambda base, batch, per_rank, ranks: base * per_rank * ranks / batch)
    finally:
        sys.modules.update(kept)
        labkit.teaching.exercises = kept["labkit.teaching.exercises"]
    assert not verdict
    assert "scaled_learning_rate: wrong" in str(verdict)
    assert right


# Colab and Kaggle


@pytest.mark.parametrize(
    ("form", "options", "command"),
    [
        ("colab", [], '%pip install -q "labkit[hosted]"'),
        ("colab", ["--install", "labkit==1.0"], '%pip install -q "labkit==1.0"'),
        ("colab", ["--repository", "a/b"], '%pip install -q "labkit[hosted] @ git+https://github.com/a/b@main"'),
        ("kaggle", [], '%pip install -q --no-index --find-links /kaggle/input/labkit "labkit[hosted]"'),
    ],
)
def test_hosted_notebooks_install_labkit_first(form, options, command, assigned) -> None:
    title, text, install, *_ = read(assigned(form, *options) / f"{LESSON}.ipynb")["cells"]
    assert source(title).startswith("# 02")
    assert text["cell_type"] == "markdown"
    assert source(install) == command
    badge = "https://colab.research.google.com/github/a/b/blob/main/colab/02_data_parallel.ipynb"
    assert (badge in source(text)) == (options[:1] == ["--repository"])


@pytest.mark.browser
@pytest.mark.processes
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium")
def test_diagrams_become_png() -> None:
    from labkit.teaching.classroom.for_hosted import data_uri

    assert data_uri(ORIGINALS / "images" / "02_average.svg").startswith("data:image/png;base64,iVBOR")


# with nbgrader and Otter themselves


def python_with(module):
    """A Python that has the module: this one, or that which LABKIT_NBGRADER_PYTHON or LABKIT_OTTER_PYTHON names."""
    named = os.environ.get(f"LABKIT_{module.upper()}_PYTHON")
    python = named or (sys.executable if importlib.util.find_spec(module) else None)
    if python is None:
        pytest.skip(f"{module} is not installed, and LABKIT_{module.upper()}_PYTHON names no Python that has it")
    return python


def run(python, *arguments, folder):
    path = os.pathsep.join([str(Path(python).parent), os.environ["PATH"]])
    ended = subprocess.run(
        [python, "-m", *arguments], cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT), "PATH": path},
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.processes
def test_nbgrader_releases_the_lessons_stubs_and_grades_the_reference(assigned) -> None:
    python = python_with("nbgrader")
    folder = assigned("nbgrader", "--seed", "7", "--points", "draw_indices=2")
    run(python, "nbgrader", "generate_assignment", LESSON, folder=folder)
    released = read(folder / "release" / LESSON / f"{LESSON}.ipynb")
    given = {cell["id"]: source(cell) for cell in released["cells"]}
    for cell in read(ORIGINALS / f"{LESSON}.ipynb")["cells"]:
        if cell["cell_type"] == "code":
            assert given[cell["id"]] == source(cell)
    assert not any("seed" in text and "check_afresh" in text for text in given.values())
    run(python, "nbgrader", "autograde", LESSON, "--student", "reference", folder=folder)
    run(python, "nbgrader", "export", folder=folder)
    with (folder / "grades.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert (float(row["score"]), float(row["max_score"])) == (5, 5)


@pytest.mark.slow
@pytest.mark.processes
def test_otter_grades_a_stub_and_the_reference(assigned) -> None:
    python = python_with("otter")
    reference = assigned("nbgrader") / "submitted" / "reference" / LESSON / f"{LESSON}.ipynb"
    folder = assigned("otter", "--points", "draw_indices=2") / LESSON
    run(python, "otter", "generate", folder=folder)
    for submission, points in ((reference, 5), (folder / "student" / f"{LESSON}.ipynb", 0)):
        run(python, "otter", "run", "-a", "autograder.zip", str(submission), folder=folder)
        assert sum(test.get("score", 0) for test in read(folder / "results.json")["tests"]) == points
