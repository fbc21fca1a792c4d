"""The links to Colab follow from the repository's address in pyproject.toml, and can be written again."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import nbformat
import pytest

from tools import colab_links
from tools.colab_links import LINK

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copy2(ROOT / "README.md", tmp_path)
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks", ignore=shutil.ignore_patterns("images", "solutions"))
    monkeypatch.setattr(colab_links, "ROOT", tmp_path)
    return tmp_path


def write(tree: Path, urls: str) -> int:
    (tree / "pyproject.toml").write_text(f"[project]\nname = 'labkit'\n{urls}")
    return colab_links.main()


def test_each_lesson_has_one_link_in_its_first_cell_and_in_the_readme(tree: Path) -> None:
    for address in ("https://github.com/someone/old", "https://github.com/teacher/course.git"):
        assert write(tree, f"[project.urls]\nSource = '{address}'") == 0
    folder = "https://colab.research.google.com/github/teacher/course/blob/main/colab"
    readme = (tree / "README.md").read_text()
    lessons = list(tree.glob("notebooks/*.ipynb"))
    for path in lessons:
        link = f"[Open in Colab]({folder}/{path.stem}.ipynb)"
        assert re.search(rf"^\| \[[^]]*\]\(notebooks/{path.name}\) .* {re.escape(link)} \|$", readme, re.MULTILINE)
        lesson, before = (nbformat.read(file, as_version=4) for file in (path, ROOT / "notebooks" / path.name))
        before.cells[0].source = f"{LINK.sub('', before.cells[0].source)}\n\n{link}"
        assert lesson == before
    assert readme.count("Open in Colab") == len(lessons)
    assert LINK.sub("", readme) == LINK.sub("", (ROOT / "README.md").read_text())


@pytest.mark.parametrize("urls", ["", "[project.urls]\nSource = 'https://example.org/labkit'"])
def test_without_an_address_on_github_nothing_is_written(tree: Path, urls: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = (tree / "README.md").read_text()
    assert write(tree, urls) == 1
    assert "Colab opens notebooks from GitHub" in capsys.readouterr().err
    assert (tree / "README.md").read_text() == before
