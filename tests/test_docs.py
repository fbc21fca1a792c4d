"""The documentation agrees with the tree: links, files and make targets exist, and lines are not too wide.

The docstrings of packages belong to it: each is a map that says which file to open for which change.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = {str(path.relative_to(ROOT)): path for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])}
LIMIT = 120  # characters in a line of prose
# Where a path in a page may begin.
FOLDERS = (".", "labkit", "tests", "bench")
ELSEWHERE = {
    "train.py",
    "script.py",
    "build/gpu",
    "build/site",
    ".github/workflows/site.yml",
    "dist",
    "labkit/course",
    "my_lessons",
    "images",
    "solutions",
}  # examples, and what tools write
LABKIT = ROOT / "labkit"
MAPS = {str(path.parent.relative_to(LABKIT)): path for path in sorted(LABKIT.glob("*/**/__init__.py"))}


def prose(page: str) -> list[tuple[int, str]]:
    """The lines of a page, numbered from 1, without blocks of code."""
    lines, in_code = [], False
    for number, line in enumerate(PAGES[page].read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code:
            lines.append((number, line))
    return lines


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def file_exists(name: str) -> bool:
    return name in ELSEWHERE or any(bool(list((ROOT / folder).glob(name))) for folder in FOLDERS)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = "\n".join(line for _, line in prose(page))
    text += "\n".join(re.findall(r"!?\[[^]]*\]\([^)]*\)", PAGES[page].read_text()))  # links whose text is several lines long
    broken = []
    for target in set(re.findall(r"\]\(([^)\s]+)\)", text)):
        if re.match(r"https?:|mailto:", target):
            continue
        name, _, anchor = target.partition("#")
        path = PAGES[page].parent / name if name else PAGES[page]
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("page", PAGES)
def test_named_files_exist(page: str) -> None:
    text = PAGES[page].read_text()
    quoted = re.findall(r"`([\w./*-]+(?:\.py|\.md|\.ipynb|\.toml|\.txt|\.yml|/))`", text)
    in_drawings = [
        name for block in re.findall(r"```mermaid.*?```", text, re.DOTALL) for name in re.findall(r"\w+/[\w/]+\.py", block)
    ]
    in_commands = re.findall(r"(?:python|pytest)\b[^`\n]* ((?:bench|tools|tests|notebooks)/[\w/]+\.(?:py|ipynb))", text)
    missing = {name for name in [*quoted, *in_drawings, *in_commands] if not file_exists(name.rstrip("/"))}
    assert missing == set()


def files_named_by(package: str) -> dict[str, set[Path]]:
    """The files that the map of a package names; each name with the files that it may mean (CONTRIBUTING.md)."""
    text = ast.get_docstring(ast.parse(MAPS[package].read_text())) or ""
    folders = [LABKIT / package, LABKIT, ROOT / "tests" / package, ROOT / "tests", ROOT]
    if package == "worker/runtimes/tensorflow":
        folders.append(ROOT / "tests/worker/tensorflow")
    names = set(re.findall(r"[\w./*-]+\.(?:pyi|py|js|css|md|mplstyle|toml)\b", text))
    return {name: {path for folder in folders for path in folder.glob(name)} for name in names}


@pytest.mark.parametrize("package", MAPS)
def test_files_in_the_map_of_a_package_exist(package: str) -> None:
    assert [name for name, found in files_named_by(package).items() if not found] == []


def test_each_file_is_in_the_map_of_a_package() -> None:
    named = {path for package in MAPS for found in files_named_by(package).values() for path in found}
    parts = {path for path in LABKIT.rglob("*") if path.suffix in {".py", ".js", ".css"} and path.name != "__init__.py"}
    assert {str(path.relative_to(LABKIT)) for path in parts - named} == set()


def test_named_tests_exist() -> None:
    defined = {name for path in ROOT.glob("tests/**/*.py") for name in re.findall(r"def (test_\w+)", path.read_text())}
    named = {name: path for path in LABKIT.glob("**/*.py") for name in re.findall(r"`(test_\w+)`", path.read_text())}
    assert {name: str(path) for name, path in named.items() if name not in defined} == {}


@pytest.mark.parametrize("page", PAGES)
def test_named_make_targets_exist(page: str) -> None:
    targets = set(re.findall(r"^([\w.-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = PAGES[page].read_text()
    named = set(re.findall(r"`make ([a-z][\w-]*(?:\.\d+)?)", text)) | set(
        re.findall(r"^make ([a-z][\w-]*(?:\.\d+)?)", text, re.MULTILINE)
    )
    assert named - targets == set()


@pytest.mark.parametrize("page", PAGES)
def test_lines_of_prose_are_not_too_wide(page: str) -> None:
    wide = [number for number, line in prose(page) if len(line) > LIMIT and not line.lstrip().startswith("|")]
    assert wide == []


def test_the_readme_gives_each_lesson_the_time_that_the_lesson_gives_itself() -> None:
    table = dict(re.findall(r"\((notebooks/\w+\.ipynb)\) \| (\d+ \+ \d+) \|", PAGES["README.md"].read_text()))
    own = {}
    for path in sorted(ROOT.glob("notebooks/*.ipynb")):
        found = re.search(r"\*\*Time:\*\* about (\d+) minutes, and (\d+) (?:more )?for the exercises", path.read_text())
        assert found is not None, path
        own[f"notebooks/{path.name}"] = f"{found[1]} + {found[2]}"
    assert table == own
