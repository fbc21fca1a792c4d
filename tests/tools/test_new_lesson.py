"""`make lesson`: what it writes has the form of a lesson but for the words that a person must write."""

from __future__ import annotations

import importlib.util
import inspect
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from labkit import check
from tools import new_lesson
from tools.new_lesson import make_lesson

ROOT = Path(__file__).resolve().parents[2]
LESSON = "19_my_topic"


def module_of(path: Path) -> ModuleType:
    """Import a file of tests, whose folder is not on `sys.path`."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


test_course = module_of(ROOT / "tests" / "test_course.py")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repository")
    for folder in ("notebooks/solutions", "notebooks/judges", "tests/teaching/exercises"):
        (root / folder).mkdir(parents=True)
    shutil.copytree(ROOT / "notebooks" / "images", root / "notebooks" / "images")
    shutil.copy(ROOT / "notebooks" / "01_messages_and_collectives.ipynb", root / "notebooks")
    shutil.copy(ROOT / "README.md", root)
    make_lesson(LESSON, root)
    return root


@pytest.fixture
def exercises(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(repository / "notebooks" / "judges")
    importlib.import_module("my_topic")
    yield
    del sys.modules["my_topic"]


FORM = [
    test for name, test in vars(test_course).items() if name.startswith("test_") and "path" in inspect.signature(test).parameters
]
TO_WRITE = {"test_nothing_is_left_to_write": "WRITE: ", "test_a_lesson_is_short_and_begins_soon": " words: expected 1,200"}


@pytest.mark.parametrize("test", FORM, ids=lambda test: test.__name__)
def test_it_has_the_form_of_a_lesson_or_the_failing_test_says_what_to_write(
    test, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_course, "NOTEBOOKS", repository / "notebooks")
    path = repository / "notebooks" / f"{LESSON}.ipynb"
    if test.__name__ not in TO_WRITE:
        test(path)
        return
    with pytest.raises(AssertionError) as failed:
        test(path)
    assert TO_WRITE[test.__name__] in str(failed.value)


def test_the_table_has_its_row(repository: Path) -> None:
    rows = (repository / "README.md").read_text().splitlines()
    place = rows.index(f"| [19 My topic](notebooks/{LESSON}.ipynb) | 45 + 15 | WRITE: what you will be able to do |")
    assert "| [14 " < rows[place - 1] < rows[place]
    assert not rows[place + 1].startswith("| [")


def test_a_lesson_between_two_gets_its_row_there(tmp_path: Path, repository: Path) -> None:
    root = tmp_path / "repository"
    shutil.copytree(repository, root)
    make_lesson("02c_buckets", root)
    rows = (root / "README.md").read_text().splitlines()
    place = next(i for i, row in enumerate(rows) if row.startswith("| [02c Buckets]"))
    assert rows[place - 1].startswith("| [02b ")


@pytest.mark.processes
@pytest.mark.usefixtures("exercises")
def test_its_solution_passes_its_exercise(repository: Path) -> None:
    path = repository / "notebooks" / "solutions" / f"{LESSON}.ipynb"
    cells = [cell.source for cell in test_course.cells_of(path, "code")]
    names: dict[str, object] = {}
    exec("\n".join(cell for cell in cells).replace("\nlab.check(", "\nverdict = lab.check("), names)
    assert bool(names["verdict"]), names["verdict"]
    assert not check("my_topic_mean", lambda own: sum(own) / len(own))


def test_its_tests_are_complete(repository: Path) -> None:
    module = module_of(repository / "tests" / "teaching" / "exercises" / "test_exercises_my_topic.py")
    assert {answer.exercise for answer in module.answers.all} == {"my_topic_mean"}


@pytest.mark.parametrize("name", ["", "my_topic", "15", "15_My_Topic", "15_my topic", "../15_x"])
def test_another_name_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert new_lesson.main([name]) == 2
    assert "expected two digits and a topic" in capsys.readouterr().err


def test_a_topic_that_exists_is_refused(repository: Path) -> None:
    with pytest.raises(ValueError, match=r"notebooks/judges/my_topic\.py exists"):
        make_lesson("16_my_topic", repository)
