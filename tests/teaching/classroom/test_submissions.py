"""Whose a submitted notebook is, which exercises it should answer, and what is read of a folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from submitted import AVERAGE, LESSON, RATE, RIGHT_RATE, notebook

from labkit.errors.exceptions import LabError
from labkit.teaching.classroom.grade import main
from labkit.teaching.classroom.grade_submission import GradeSettings
from labkit.teaching.classroom.submissions import exercises_of, submissions
from labkit.teaching.lessons import lessons_named

ROOT = Path(__file__).resolve().parents[3]


def test_students_are_named_by_their_notebooks_or_by_the_folders_of_notebooks_named_after_a_lesson(tmp_path: Path) -> None:
    notebook(tmp_path / "anna" / f"{LESSON}.ipynb")
    notebook(tmp_path / "hand_in" / "ben.ipynb", "lab.check('bubble', bubble)")
    notebook(tmp_path / "hand_in" / ".ipynb_checkpoints" / "ben.ipynb")
    found = submissions([tmp_path], [])
    assert [(one.student, one.exercises) for one in found] == [
        ("anna", exercises_of(ROOT / "notebooks" / f"{LESSON}.ipynb")), ("ben", ("bubble",)),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "student"),
    [
        (f"Kim/{LESSON}-Copy1.ipynb", "Kim"),
        (f"Kim/{LESSON} (1).ipynb", "Kim"),
        (f"Kim/{LESSON} my own.ipynb", f"{LESSON} my own"),
        (f"Kim Lee_12_assignsubmission_file/course/{LESSON}.ipynb", "Kim Lee"),
        ("Kim Lee_12_assignsubmission_file/homework.ipynb", "Kim Lee"),
        (f"kimlee_late_12_345_{LESSON}-2.ipynb", "kimlee"),
        (f"kimlee_12_345_{LESSON}.ipynb", "kimlee"),
        ("week_3_4_reductions.ipynb", "week_3_4_reductions"),
    ],
)
def test_names_of_students_in_what_jupyter_moodle_and_canvas_write(path: str, student: str, tmp_path: Path) -> None:
    (found,) = submissions([notebook(tmp_path / path)], ["bubble"])
    assert found.student == student


def test_a_zip_file_is_not_passed_over(tmp_path: Path) -> None:
    notebook(tmp_path / "anna.ipynb")
    (tmp_path / "ben").mkdir()
    (tmp_path / "ben" / "homework.zip").touch()
    for given in (tmp_path, tmp_path / "ben" / "homework.zip"):
        with pytest.raises(LabError, match=r"homework.zip: unpack zip files into folders first"):
            submissions([given], [])


def test_the_exercises_of_lessons_in_their_order() -> None:
    (lesson,) = lessons_named(["02"])
    assert exercises_of(lesson) == (AVERAGE, "average_in_buckets", "draw_indices", RATE)
    with pytest.raises(LabError, match="'99' is not the beginning of one lesson's name; expected 00_start_here, "):
        lessons_named(["99"])


def test_two_students_of_one_name_are_told_apart(tmp_path: Path) -> None:
    same = [notebook(tmp_path / folder / "anna.ipynb", "lab.check('bubble', 1)") for folder in ("one", "two")]
    assert [one.student for one in submissions(same, [])] == ["one/anna", "two/anna"]
    deeper = [notebook(tmp_path / year / "one" / "anna.ipynb", "lab.check('bubble', 1)") for year in ("old", "new")]
    assert [one.student for one in submissions(deeper, [])] == [*map(str, deeper)]
    notebook(same[1], "lab.check('introduce', 1)")
    assert [one.student for one in submissions(same, [])] == ["anna", "anna"], "two lessons of one student"


def test_a_notebook_with_a_byte_order_mark(tmp_path: Path) -> None:
    content = {"cells": [{"cell_type": "code", "source": ["lab.check('bubble',\n", "1)"]}]}
    (tmp_path / "a.ipynb").write_text(json.dumps(content), encoding="utf-8-sig")
    (one,) = submissions([tmp_path], [])
    assert (one.exercises, one.error) == (("bubble",), "")


def put_a_file_of_a_terabyte(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


IRREGULAR = {
    "the_solutions": lambda path: path.symlink_to(ROOT / "notebooks" / "solutions" / f"{LESSON}.ipynb"),
    "another_student": lambda path: path.symlink_to("honest.ipynb"),
    "a_library": lambda path: path.symlink_to(torch.version.__file__),
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "loop": lambda path: path.symlink_to(path.name),
    "nothing": lambda path: path.symlink_to("nowhere"),
    "pipe": os.mkfifo,
    "folder": lambda path: path.mkdir(),
    "huge": put_a_file_of_a_terabyte,
}


@pytest.mark.parametrize("required", [[RATE], []])
def test_of_a_folder_only_regular_files_are_read(required: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook(tmp_path / "class" / "honest.ipynb", RIGHT_RATE)
    for name, put in IRREGULAR.items():
        put(tmp_path / "class" / f"{name}.ipynb")
    notebook(tmp_path / "elsewhere" / "foreign.ipynb", RIGHT_RATE)
    (tmp_path / "class" / "linked").symlink_to(tmp_path / "elsewhere")
    given = {one.student: one for one in submissions([tmp_path / "class"], required)}
    assert given.keys() == {"honest", *IRREGULAR}
    assert {student for student, one in given.items() if not one.error} == {"honest"}
    assert {one.exercises for one in given.values()} == {(RATE,)}, "each has a verdict, which says why"
    assert given["a_library"].error == "a_library.ipynb is no notebook: it is a link, and links in a folder are not followed"
    assert given["pipe"].error == "pipe.ipynb is no notebook: it is no regular file of at most 64 MiB"

    seen: list[GradeSettings] = []
    monkeypatch.setattr("labkit.teaching.classroom.grade.grade", lambda _, settings: seen.append(settings) or [])
    assert main([str(tmp_path / "class"), "--unconfined"]) == 0
    hidden = {str(tmp_path / "class"), str(ROOT / "notebooks" / "solutions")}
    assert {settings.hidden for settings in seen} == {tuple(sorted(hidden))}, "libraries stay visible"


def test_what_the_teacher_names_may_be_a_link_but_no_pipe(tmp_path: Path) -> None:
    notebook(tmp_path / "class" / "anna.ipynb", RIGHT_RATE)
    (tmp_path / "ben.ipynb").symlink_to(tmp_path / "class" / "anna.ipynb")
    (tmp_path / "this_year").symlink_to(tmp_path / "class")
    os.mkfifo(tmp_path / "pipe.ipynb")
    given = submissions([tmp_path / "ben.ipynb", tmp_path / "this_year", tmp_path / "pipe.ipynb"], [])
    assert {one.student: bool(one.error) for one in given} == {"ben": False, "anna": False, "pipe": True}


@pytest.mark.parametrize("put", [lambda path: path.symlink_to("/dev/zero"), os.mkfifo, lambda path: notebook(path, RIGHT_RATE)])
def test_a_file_that_is_replaced_while_it_is_read(put: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, lstat = notebook(tmp_path / "a.ipynb", RIGHT_RATE), Path.lstat

    def look(one: Path) -> os.stat_result:
        found = lstat(one)
        if one == path and not (tmp_path / "before").exists():
            one.rename(tmp_path / "before")
            put(one)
        return found

    monkeypatch.setattr(Path, "lstat", look)
    (one,) = submissions([tmp_path], [RATE])
    assert one.error


def test_a_class_without_any_notebook_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe.ipynb")
    with pytest.raises(SystemExit):
        main([str(tmp_path)])
    assert "; pipe.ipynb is no notebook: it is no regular file" in capsys.readouterr().err
