"""The student's copies of the lessons: complete, without outputs, and never overwritten once they are changed."""

import json
import re
from pathlib import Path

import nbformat
import pytest

import labkit as lab
from labkit.teaching import lessons as module
from labkit.teaching.lessons import ORIGINALS, Copies, reset_lesson


@pytest.fixture
def originals(tmp_path, monkeypatch):
    folder = tmp_path / "notebooks"
    (folder / "solutions").mkdir(parents=True)
    (folder / "images").mkdir()
    (folder / "images" / "00_a.svg").write_text("<svg/>")
    write(folder / "solutions" / "01_b.ipynb", "Solution.", "print(3)")
    write(folder / "00_a.ipynb", "See [the next](01_b.ipynb) and [a solution](solutions/01_b.ipynb).", "print(1)")
    write(folder / "01_b.ipynb", "Text.", "print(2)")
    monkeypatch.setattr(module, "ORIGINALS", folder)
    return folder


@pytest.fixture
def mine(tmp_path, originals, monkeypatch):
    folder = tmp_path / "my_lessons"
    lab.lessons(folder)
    monkeypatch.chdir(folder)
    return folder


def copies(folder, **done):
    return Copies(folder, "00_a.ipynb", **{kind: tuple(names) for kind, names in done.items()})


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


def test_a_copy_has_no_outputs_and_the_folder_is_complete(originals, tmp_path):
    folder = tmp_path / "elsewhere" / "mine"
    assert lab.lessons(folder) == copies(folder, new=["00_a.ipynb", "01_b.ipynb"])
    for name, text in (("00_a.ipynb", sources(originals / "00_a.ipynb")[0]), ("solutions/01_b.ipynb", "Solution.")):
        copy = nbformat.read(folder / name, as_version=4)
        nbformat.validate(copy)
        assert copy.cells[0].source == text
        assert copy.cells[1].outputs == []
        assert copy.cells[1].execution_count is None
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files == {"00_a.ipynb", "01_b.ipynb", "images/00_a.svg", "solutions/01_b.ipynb"}


def test_images_solutions_and_instructions_are_renewed(originals, mine):
    (originals / "images" / "00_a.svg").write_text("<svg>new</svg>")
    (originals / "AGENTS.md").write_text("Help without solving.")
    write(originals / "solutions" / "01_b.ipynb", "Better.", "print(4)")
    assert lab.lessons(mine) == copies(mine)
    assert (mine / "images" / "00_a.svg").read_text() == "<svg>new</svg>"
    assert (mine / "AGENTS.md").read_text() == "Help without solving."
    assert sources(mine / "solutions" / "01_b.ipynb") == ["Better.", "print(4)"]


def test_only_some_lessons(originals, tmp_path):
    for number, only in enumerate(["01", ["01"], ["01_b"]]):
        folder = tmp_path / str(number)
        assert lab.lessons(folder, only=only) == Copies(folder, "01_b.ipynb", new=("01_b.ipynb",))
        assert [path.name for path in folder.glob("*.ipynb")] == ["01_b.ipynb"]
        assert (folder / "images" / "00_a.svg").exists()
    with pytest.raises(lab.LabError, match="'7' is not the beginning of one lesson's name; expected 00_a or 01_b"):
        lab.lessons(tmp_path / "none", only=["7"])
    assert not (tmp_path / "none").exists()


def test_what_was_done_is_said():
    folder = Path("mine")
    opening = "Open mine/00_a.ipynb. An update never overwrites what you write there."
    assert repr(copies(folder)) == f"The lessons in mine are up to date.\n{opening}"
    said = repr(copies(folder, new=["00_a.ipynb", "02b_b.ipynb"], updated=["01_c.ipynb"], outdated=["03_d.ipynb"]))
    assert said.splitlines() == [
        "New in mine: lessons 00 and 02b, with their pictures and solutions.",
        "Updated, because you had not changed your copy: lesson 01.",
        '03_d.ipynb has a newer version; your copy is kept. lab.reset_lesson("03") gives you the new one.',
        opening,
    ]


def test_an_installation_without_lessons(originals, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ORIGINALS", tmp_path / "nothing")
    with pytest.raises(lab.LabError, match=r"this installation of labkit has no lessons in .*nothing: install its wheel"):
        lab.lessons(tmp_path / "mine")


def test_a_second_time_nothing_is_copied(originals, mine):
    before = (mine / "00_a.ipynb").read_bytes()
    assert lab.lessons(mine) == copies(mine)
    assert (mine / "00_a.ipynb").read_bytes() == before


def test_running_a_copy_is_no_change(originals, mine):
    content = json.loads((mine / "00_a.ipynb").read_text())
    content["cells"][1]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": ["1\n"]}]
    (mine / "00_a.ipynb").write_text(json.dumps(content))
    edit(originals / "00_a.ipynb", 1, "print(3)")
    assert lab.lessons(mine) == copies(mine, updated=["00_a.ipynb"])
    assert sources(mine / "00_a.ipynb")[1] == "print(3)"


def test_a_copy_that_the_student_has_changed_is_left_alone(originals, mine):
    edit(mine / "00_a.ipynb", 1, "my answer")
    assert lab.lessons(mine) == copies(mine)
    edit(originals / "00_a.ipynb", 1, "print(3)")
    assert lab.lessons(mine) == copies(mine, outdated=["00_a.ipynb"])
    assert sources(mine / "00_a.ipynb")[1] == "my answer"


@pytest.mark.parametrize("content", ['{"cells": [], "metadata": {}}', "not a notebook", "[]"])
def test_a_file_of_the_students_own_is_left_alone(originals, mine, content):
    (mine / "00_a.ipynb").write_text(content)
    edit(originals / "00_a.ipynb", 1, "print(3)")
    assert lab.lessons(mine) == copies(mine)
    assert (mine / "00_a.ipynb").read_text() == content


def test_reset_gives_a_fresh_copy_and_keeps_the_old_one(mine):
    fresh = sources(mine / "01_b.ipynb")
    for number in (1, 2):
        edit(mine / "01_b.ipynb", 1, f"answer {number}")
        assert f"your work is in 01_b.old{number}.ipynb" in reset_lesson("01")
        assert sources(mine / "01_b.ipynb") == fresh
        assert sources(mine / f"01_b.old{number}.ipynb")[1] == f"answer {number}"


def test_reset_takes_the_lesson_as_it_is_now(originals, mine):
    edit(mine / "00_a.ipynb", 1, "my answer")
    edit(originals / "00_a.ipynb", 1, "print(3)")
    reset_lesson("00")
    assert sources(mine / "00_a.ipynb")[1] == "print(3)"
    assert lab.lessons(mine) == copies(mine)


def test_reset_of_a_lesson_whose_number_begins_another_ones(originals, mine):
    write(originals / "01b_c.ipynb", "Text.", "print(3)")
    lab.lessons(mine)
    for number, name in (("01", "01_b"), ("01b", "01b_c")):
        edit(mine / f"{name}.ipynb", 1, "my answer")
        assert f"your work is in {name}.old1.ipynb" in reset_lesson(number)


@pytest.mark.parametrize("lesson", ["", "0", "7"])
def test_reset_names_the_lessons_that_there_are(mine, lesson):
    with pytest.raises(lab.LabError, match="is not the beginning of one lesson's name; expected 00_a or 01_b"):
        reset_lesson(lesson)


def test_reset_elsewhere(originals, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(lab.LabError, match=r"has no copies of lessons; lab\.lessons\(folder\) makes them"):
        reset_lesson("00")
    assert not (tmp_path / "00_a.ipynb").exists()


def test_reset_wants_a_text(mine):
    with pytest.raises(TypeError, match=r"reset_lesson.*lesson"):
        reset_lesson(2)


def test_the_lessons_of_the_course_can_be_copied(tmp_path):
    found = lab.lessons(tmp_path)
    assert found.first == "00_start_here.ipynb"
    assert found.new == tuple(sorted(path.name for path in ORIGINALS.glob("*.ipynb")))
    for folder in (tmp_path, tmp_path / "solutions"):
        for name in found.new:
            copy = nbformat.read(folder / name, as_version=4)
            nbformat.validate(copy)
            assert not any(cell.get("outputs") for cell in copy.cells)


def test_links_in_copies_lead_to_files_in_the_folder(tmp_path):
    lab.lessons(tmp_path)
    for path in [*tmp_path.glob("*.ipynb"), *tmp_path.glob("solutions/*.ipynb")]:
        text = "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown")
        for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", text):
            file = (path.parent / target).resolve()
            assert file.is_relative_to(tmp_path), f"{path.name}: {target} leads out of the student's folder"
            assert file.exists(), f"{path.name}: {target} does not exist"


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


def test_a_reset_that_fails_leaves_the_copy_where_it_was(originals, mine, monkeypatch):
    edit(mine / "00_a.ipynb", 1, "my work")

    def full(*_, **__):
        raise OSError(28, "No space left on device", "00_a.ipynb")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(lab.LabError, match=r"reset_lesson\('00'\): 00_a\.ipynb: No space left on device"):
        reset_lesson("00")
    assert sources(mine / "00_a.ipynb")[1] == "my work"
    assert sorted(path.name for path in mine.glob("*.ipynb")) == ["00_a.ipynb", "01_b.ipynb"]
    write(originals / "02_c.ipynb", "Text.", "print(5)")
    with pytest.raises(lab.LabError, match=r"lessons\('.*my_lessons'\): 00_a\.ipynb: No space left on device"):
        lab.lessons(mine)
    assert not list(mine.glob(".*.new"))
