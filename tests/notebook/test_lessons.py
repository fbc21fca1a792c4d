"""The student's copies of the lessons: complete, without outputs, and never overwritten once they are changed."""

import json
from pathlib import Path

import nbformat
import pytest

import labkit as lab
from labkit.notebook.lessons import Copies, copy_lessons, reset_lesson

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def lessons(tmp_path):
    folder = tmp_path / "notebooks"
    (folder / "solutions").mkdir(parents=True)
    (folder / "solutions" / "01_b.ipynb").write_text("{}")
    write(folder / "00_a.ipynb", "See [the next](01_b.ipynb) and [a solution](solutions/01_b.ipynb).", "print(1)")
    write(folder / "01_b.ipynb", "Text.", "print(2)")
    return folder


@pytest.fixture
def mine(tmp_path, lessons, monkeypatch):
    folder = tmp_path / "my_lessons"
    copy_lessons(lessons, folder)
    monkeypatch.chdir(folder)
    return folder


def write(path, text, code):
    output = nbformat.v4.new_output("stream", text="1\n")
    cells = [nbformat.v4.new_markdown_cell(text), nbformat.v4.new_code_cell(code, outputs=[output], execution_count=1)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)


def edit(path, cell, source):
    content = nbformat.read(path, as_version=4)
    content.cells[cell].source = source
    nbformat.write(content, path)


def sources(path):
    return [cell.source for cell in nbformat.read(path, as_version=4).cells]


def test_a_copy_has_no_outputs_and_links_that_work(lessons, tmp_path):
    folder = tmp_path / "elsewhere" / "mine"
    assert copy_lessons(lessons, folder) == Copies(new=("00_a.ipynb", "01_b.ipynb"))
    copy = nbformat.read(folder / "00_a.ipynb", as_version=4)
    nbformat.validate(copy)
    assert copy.cells[0].source == "See [the next](01_b.ipynb) and [a solution](../../notebooks/solutions/01_b.ipynb)."
    assert copy.cells[1].outputs == []
    assert copy.cells[1].execution_count is None
    assert (folder / "../../notebooks/solutions/01_b.ipynb").exists()


def test_a_second_time_nothing_is_copied(lessons, mine):
    before = (mine / "00_a.ipynb").read_bytes()
    assert copy_lessons(lessons, mine) == Copies()
    assert (mine / "00_a.ipynb").read_bytes() == before


def test_running_a_copy_is_no_change(lessons, mine):
    content = json.loads((mine / "00_a.ipynb").read_text())
    content["cells"][1]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": ["1\n"]}]
    (mine / "00_a.ipynb").write_text(json.dumps(content))
    edit(lessons / "00_a.ipynb", 1, "print(3)")
    assert copy_lessons(lessons, mine) == Copies(updated=("00_a.ipynb",))
    assert sources(mine / "00_a.ipynb")[1] == "print(3)"


def test_a_copy_that_the_student_has_changed_is_left_alone(lessons, mine):
    edit(mine / "00_a.ipynb", 1, "my answer")
    assert copy_lessons(lessons, mine) == Copies()
    edit(lessons / "00_a.ipynb", 1, "print(3)")
    assert copy_lessons(lessons, mine) == Copies(outdated=("00_a.ipynb",))
    assert sources(mine / "00_a.ipynb")[1] == "my answer"


@pytest.mark.parametrize("content", ['{"cells": [], "metadata": {}}', "not a notebook", "[]"])
def test_a_file_of_the_students_own_is_left_alone(lessons, mine, content):
    (mine / "00_a.ipynb").write_text(content)
    edit(lessons / "00_a.ipynb", 1, "print(3)")
    assert copy_lessons(lessons, mine) == Copies()
    assert (mine / "00_a.ipynb").read_text() == content


def test_reset_gives_a_fresh_copy_and_keeps_the_old_one(mine):
    fresh = sources(mine / "01_b.ipynb")
    for number in (1, 2):
        edit(mine / "01_b.ipynb", 1, f"answer {number}")
        assert f"your work is in 01_b.old{number}.ipynb" in reset_lesson("01")
        assert sources(mine / "01_b.ipynb") == fresh
        assert sources(mine / f"01_b.old{number}.ipynb")[1] == f"answer {number}"


def test_reset_takes_the_lesson_as_it_is_now(lessons, mine):
    edit(mine / "00_a.ipynb", 1, "my answer")
    edit(lessons / "00_a.ipynb", 1, "print(3)")
    reset_lesson("00")
    assert sources(mine / "00_a.ipynb")[1] == "print(3)"
    assert copy_lessons(lessons, mine) == Copies()


def test_reset_of_a_lesson_whose_number_begins_another_ones(lessons, mine):
    write(lessons / "01b_c.ipynb", "Text.", "print(3)")
    copy_lessons(lessons, mine)
    for number, name in (("01", "01_b"), ("01b", "01b_c")):
        edit(mine / f"{name}.ipynb", 1, "my answer")
        assert f"your work is in {name}.old1.ipynb" in reset_lesson(number)


@pytest.mark.parametrize("lesson", ["", "0", "7"])
def test_reset_names_the_copies_that_there_are(mine, lesson):
    with pytest.raises(lab.LabError, match="expected the beginning of one lesson's name; this folder has 00_a, 01_b"):
        reset_lesson(lesson)


def test_reset_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(lab.LabError, match="this folder has no copies of lessons"):
        reset_lesson("00")


def test_reset_without_the_original(lessons, mine):
    (lessons / "01_b.ipynb").unlink()
    with pytest.raises(lab.LabError, match=r"the original, .*01_b\.ipynb, no longer exists"):
        reset_lesson("01")
    assert (mine / "01_b.ipynb").exists()


def test_reset_wants_a_text(mine):
    with pytest.raises(TypeError, match="expected the beginning of a lesson's name"):
        reset_lesson(2)


def test_the_lessons_of_the_course_can_be_copied(tmp_path):
    found = copy_lessons(ROOT / "notebooks", tmp_path)
    assert len(found.new) == len(list((ROOT / "notebooks").glob("*.ipynb")))
    for name in found.new:
        copy = nbformat.read(tmp_path / name, as_version=4)
        nbformat.validate(copy)
        assert not any(cell.get("outputs") for cell in copy.cells)


@pytest.mark.parametrize("broken", ["", "{", None])
def test_reset_replaces_a_copy_that_is_broken_or_gone(mine, broken):
    copy, whole = mine / "00_a.ipynb", (mine / "00_a.ipynb").read_text()
    copy.unlink() if broken is None else copy.write_text(broken)
    said = reset_lesson("00")
    assert copy.read_text() == whole
    assert ("your work is in 00_a.old1.ipynb" in said) is (broken is not None)


def test_reset_of_a_lesson_that_was_duplicated(mine):
    (mine / "00_a-Copy1.ipynb").write_text((mine / "00_a.ipynb").read_text())
    edit(mine / "00_a.ipynb", 1, "print(3)")
    for name in ("00", "00_a", "00_a.ipynb"):
        reset_lesson(name)
    assert sources(mine / "00_a.ipynb")[1] == "print(1)"
    assert sorted(path.name for path in mine.glob("*.old*")) == [f"00_a.old{i}.ipynb" for i in (1, 2, 3)]


def test_a_reset_that_fails_leaves_the_copy_where_it_was(lessons, mine, monkeypatch):
    edit(mine / "00_a.ipynb", 1, "my work")
    (lessons / "00_a.ipynb").write_text("{}")
    with pytest.raises(lab.LabError, match=r"reset_lesson\('00'\): the original, .*00_a\.ipynb, is not a notebook"):
        reset_lesson("00")
    write(lessons / "00_a.ipynb", "Text.", "print(1)")

    def full(*_, **__):
        raise OSError(28, "No space left on device", "00_a.ipynb")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(lab.LabError, match=r"reset_lesson\('00'\): 00_a\.ipynb: No space left on device"):
        reset_lesson("00")
    assert sources(mine / "00_a.ipynb")[1] == "my work"
    assert sorted(path.name for path in mine.iterdir()) == ["00_a.ipynb", "01_b.ipynb"]
