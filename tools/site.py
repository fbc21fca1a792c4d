"""Builds the executed lessons and the docs as static pages in build/site, which any static host can serve.

    python -m tools.site

The notebooks are rewritten first: each figure becomes a file beside the pages, with its alternative text, and a
timeline that can be explored gets its data and its scripts, which need no kernel. Sphinx makes the pages.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import sys
import time
from html import escape
from pathlib import Path
from typing import Any, Final

import nbformat

from labkit.plots.explorer import STYLE, script
from labkit.plots.explorer.window import MIME
from labkit.teaching.lessons import lessons

ROOT: Final = Path(__file__).resolve().parent.parent
SOURCE: Final = ROOT / "build" / "site-source"
SITE: Final = ROOT / "build" / "site"
THEME: Final = ROOT / "tools" / "site_theme"
PAGES: Final = ("docs", "CHANGES.md", "CONTRIBUTING.md", "LICENSE", "CITATION.cff", "constraints.txt")
FIGURES: Final = "_static/figures"
COPIES: Final = "my_lessons"  # the students' copies, for download
# Docs in the order of the table of contents: the others follow in alphabetical order.
FIRST_DOCS: Final = ("installing", "places", "working", "programs", "figures", "glossary", "teaching")
SOLUTIONS: Final = "notebooks/solutions"


def main() -> int:
    """Build the site; return the exit code."""
    begin = time.monotonic()
    for folder in (SOURCE, SITE):
        shutil.rmtree(folder, ignore_errors=True)
    _prepare()
    strict = ["-q", "-W", "--keep-going"]
    static = f"html_static_path={THEME / 'static'},{SOURCE / '_static'}"
    command = ["-m", "sphinx", "-b", "html", *strict, "-c", str(THEME), "-D", static, str(SOURCE), str(SITE)]
    code = subprocess.run([sys.executable, *command], check=False).returncode
    if code == 0:
        lessons(SITE / COPIES)
        shutil.make_archive(str(SITE / COPIES), "zip", SITE, COPIES)
        size_mb = sum(path.stat().st_size for path in SITE.rglob("*") if path.is_file()) / 1e6
        print(f"{SITE / 'index.html'}: {size_mb:.0f} MB in {time.monotonic() - begin:.0f} s")
    return code


def _prepare() -> None:
    """Make the folder that Sphinx reads."""
    SOURCE.mkdir(parents=True)
    for name in PAGES:
        copy: Any = shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile
        copy(ROOT / name, SOURCE / name)
    shutil.copytree(ROOT / "notebooks", SOURCE / "notebooks", ignore=shutil.ignore_patterns(".*"))
    (SOURCE / FIGURES).mkdir(parents=True)
    (SOURCE / "_static" / "explorer.js").write_text(_classic(script()), encoding="utf-8")
    (SOURCE / "_static" / "explorer.css").write_text(STYLE.read_text(encoding="utf-8"), encoding="utf-8")
    for path in sorted((SOURCE / "notebooks").rglob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        _rewrite(notebook, path.relative_to(SOURCE))
        nbformat.write(notebook, path)
    for path in SOURCE.glob("docs/*.md"):
        path.write_text(path.read_text(encoding="utf-8").replace("](../README.md", "](../index.md"), encoding="utf-8")
    (SOURCE / "index.md").write_text(_front_page(), encoding="utf-8")


def _classic(module: str) -> str:
    """Return a module as a script that sets `labkitExplorer`: without a server, browsers load no modules."""
    body = re.sub(r"^export (default )?", lambda export: "return " if export[1] else "", module, flags=re.MULTILINE)
    return f"const labkitExplorer = (() => {{\n{body}\n}})();\n"


def _front_page() -> str:
    """Return the README with a table of contents, whose groups are the lessons, the docs and the solutions."""
    named = [path.stem for path in sorted((SOURCE / "docs").glob("*.md"))]
    docs = [f"docs/{name}" for name in sorted(named, key=lambda name: (*(name != first for first in FIRST_DOCS), name))]
    groups = {
        "Lessons": [f"notebooks/{path.stem}" for path in sorted((SOURCE / "notebooks").glob("*.ipynb"))],
        "Docs": [*docs, "notebooks/AGENTS", "CHANGES", "CONTRIBUTING"],
        "Solutions": [f"{SOLUTIONS}/{path.stem}" for path in sorted((SOURCE / SOLUTIONS).glob("*.ipynb"))],
    }
    tables = [
        "\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```"]) for caption, pages in groups.items()
    ]
    return "\n\n".join([(ROOT / "README.md").read_text(encoding="utf-8"), *tables]) + "\n"


def _rewrite(notebook: Any, page: Path) -> None:
    """Turn the figures in a notebook's outputs into HTML, and add a link to the student's copy, beside the page."""
    up = "../" * (len(page.parts) - 1)
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "code":
            for place, output in enumerate(cell.outputs):
                _rewrite_output(output, f"{page.parent.name}-{page.stem}-{number}-{place}", up)
        elif number == 0 and page.parent.name == "notebooks":
            cell.source += f'\n\n<a class="labkit-copy" href="{up}{COPIES}/{page.name}" download>Your copy, without outputs</a>'


def _rewrite_output(output: Any, name: str, up: str) -> None:
    data = output.get("data", {})
    png = data.pop("image/png", None)
    if png is None:
        return
    file = SOURCE / FIGURES / f"{name}.png"
    file.write_bytes(base64.b64decode(png))
    metadata = output.get("metadata", {}).get("image/png", {})
    alt = escape(metadata.get("alt", "") or data.get("text/plain", ""), quote=True)
    width = f' style="max-width:min(100%,{metadata["width"]}px)"' if "width" in metadata else ""
    html = f'<img class="labkit-figure" alt="{alt}"{width} src="{up}{FIGURES}/{file.name}">'
    if (saved := data.pop(MIME, None)) is not None:
        text = json.dumps(saved).replace("<", "\\u003c")
        html = f'<div class="labkit-explorable">{html}<script type="application/json">{text}</script></div>'
    data.clear()
    data["text/html"] = html


if __name__ == "__main__":
    raise SystemExit(main())
