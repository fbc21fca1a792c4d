"""Makes a lesson from the template: its notebook and solutions, an exercise with its tests, and its row in README.md.

    python -m tools.new_lesson 19_my_topic

What a person must write is marked WRITE; tests/test_course.py names each place.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, Final

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

ROOT: Final = Path(__file__).resolve().parent.parent
TEMPLATE: Final = Path(__file__).resolve().parent / "lesson_template"
MINUTES, EXERCISES = 45, 15  # a lesson's own guess of its time, until a reader has measured it
_CODE: Final = re.compile(r"^```python ?(?P<tags>.*)\n(?P<code>(?s:.*?))^```$", re.MULTILINE)


def make_lesson(lesson: str, root: Path = ROOT) -> list[Path]:
    """Write the files of a lesson, such as "19_my_topic", in a repository; returns those that are new or changed.

    Raises:
        ValueError: not a name of a lesson, or the lesson or its topic exists.
    """
    if not re.fullmatch(r"\d\d[a-z]?_[a-z][a-z0-9_]*", lesson):
        raise ValueError(f"NAME={lesson}: expected two digits and a topic, as in NAME=19_my_topic")
    number, _, topic = lesson.partition("_")
    title = topic.replace("_", " ").capitalize()
    words = {"lesson": lesson, "number": number, "topic": topic, "title": title}
    words |= {"minutes": str(MINUTES), "exercises": str(EXERCISES)}
    new = {
        root / "notebooks" / f"{lesson}.ipynb": "lesson.md",
        root / "notebooks" / "solutions" / f"{lesson}.ipynb": "solutions.md",
        root / "notebooks" / "judges" / f"{topic}.py": "judges.txt",
        root / "tests" / "teaching" / "exercises" / f"test_exercises_{topic}.py": "test.txt",
    }
    if taken := [path for path in new if path.exists()]:
        raise ValueError(f"NAME={lesson}: {taken[0].relative_to(root)} exists; choose another number or topic")
    for path, name in new.items():
        text = re.sub(r"\{\{(\w+)\}\}", lambda match: words[match[1]], (TEMPLATE / name).read_text(encoding="utf-8"))
        if path.suffix == ".ipynb":
            nbformat.write(_notebook(text), path)
        else:
            path.write_text(text, encoding="utf-8")
    row = f"| [{number} {title}](notebooks/{lesson}.ipynb) | {MINUTES} + {EXERCISES} | WRITE: what you will be able to do |"
    return [*new, _add_row(root / "README.md", row, f"| [{number} ")]


def _notebook(text: str) -> Any:
    """Return a notebook: fenced code, with the cell's tags after "python", and the text between."""
    cells, end = [], 0
    for block in [*_CODE.finditer(text), None]:
        between = text[end : block.start() if block else len(text)].strip()
        cells += [new_markdown_cell(part.strip()) for part in re.split(r"^(?=## )", between, flags=re.MULTILINE) if part]
        if block:
            cells.append(new_code_cell(block["code"].rstrip()))
            cells[-1].metadata["tags"] = block["tags"].split()
            end = block.end()
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
        if not cell.metadata.get("tags"):
            cell.metadata.pop("tags", None)
    return new_notebook(cells=cells)


def _add_row(path: Path, new: str, before: str) -> Path:
    """Insert a row into the table of lessons, behind the last one that sorts before a text, and return the path."""
    text = path.read_text(encoding="utf-8")
    rows = re.finditer(r"^\| \[\d\d[a-z]? .*\n", text, re.MULTILINE)
    end = max(match.end() for match in rows if match.group() < before)
    path.write_text(f"{text[:end]}{new}\n{text[end:]}", encoding="utf-8")
    return path


def main(arguments: list[str]) -> int:
    """Make the lesson that the command line names."""
    try:
        written = make_lesson(arguments[0] if arguments else "")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    for path in written:
        print(path.relative_to(ROOT))
    number = arguments[0].partition("_")[0]
    print(f"\nWrite what is marked WRITE, then: make notebooks ONLY={number}, and pytest tests/test_course.py")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
