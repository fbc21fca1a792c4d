"""Writes the "Open in Colab" links of README and lessons, once pyproject.toml names the repository's address.

The links lead to the copies for Colab, in the repository's folder `colab`; docs/handing_out.md says how they are made.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Final

import nbformat

ROOT: Final = Path(__file__).resolve().parent.parent
COLAB: Final = "https://colab.research.google.com/github"
BRANCH: Final = "main"
LINK: Final = re.compile(r"\s*\[Open in Colab\]\(\S+\)")


def main() -> int:
    """Write the links; return the exit code: 1 where no address is known."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    address = project.get("urls", {}).get("Source", "")
    found = re.fullmatch(r"https://github\.com/([\w.-]+/[\w.-]+?)(?:\.git|/)?", address)
    if found is None:
        print(
            f"The address of the repository is {address!r}; Colab opens notebooks from GitHub. Write it into pyproject.toml:\n"
            '[project.urls]\nSource = "https://github.com/OWNER/REPOSITORY"',
            file=sys.stderr,
        )
        return 1
    folder = f"{COLAB}/{found[1]}/blob/{BRANCH}/colab"
    readme = ROOT / "README.md"
    readme.write_text(linked_table(readme.read_text(encoding="utf-8"), folder), encoding="utf-8")
    for path in sorted(ROOT.glob("notebooks/*.ipynb")):
        lesson = nbformat.read(path, as_version=4)
        lesson.cells[0].source = f"{LINK.sub('', lesson.cells[0].source)}\n\n{link(folder, path.stem)}"
        nbformat.write(lesson, path)
    return 0


def link(folder: str, stem: str) -> str:
    """Return a link to the copy of a lesson, in the folder with that address, in Markdown."""
    return f"[Open in Colab]({folder}/{stem}.ipynb)"


def linked_table(text: str, folder: str) -> str:
    """Return a page whose table of lessons has a link at the end of each row, in place of an older one."""
    return re.sub(
        r"^(\| \[[^]]*\]\(notebooks/(\w+)\.ipynb\) \|.*) \|$",
        lambda row: f"{LINK.sub('', row[1])} {link(folder, row[2])} |",
        text,
        flags=re.MULTILINE,
    )


if __name__ == "__main__":
    raise SystemExit(main())
