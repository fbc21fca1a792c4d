"""Lessons for Colab and Kaggle: notebooks that install labkit in their first cell and contain their diagrams.

Colab shows neither SVG images inside a notebook (https://github.com/googlecolab/colabtools/issues/2092) nor attachments
(https://github.com/googlecolab/colabtools/issues/3836). So the diagrams become PNG images in data URIs, which is how
Colab itself inserts images.
"""

from __future__ import annotations

import base64
import copy
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from labkit.errors.exceptions import LabError
from labkit.teaching.classroom.handout import Handout, Order, code_cell, markdown_cell, write_notebook

KAGGLE_FOLDER: Final = "/kaggle/input/labkit"  # where Kaggle puts the files of a data set called "labkit"
BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome")
DRAWING_LIMIT_S: Final = 60.0  # for the browser to draw a diagram
_SIZE: Final = re.compile(r'<svg[^>]* width="(\d+)" height="(\d+)"')


def write_colab(order: Order) -> list[str]:
    """Write the notebooks for Colab; return what to do with them."""
    badge = ""
    if order.repository:
        address = f"https://colab.research.google.com/github/{order.repository}/blob/{order.branch}/{order.folder.name}"
        badge = f"[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({address}/NAME.ipynb)\n\n"
    text = "On Colab, this cell installs labkit. Run it first."
    _write(order, f"{badge}{text}", f'%pip install -q "{_requirement(order)}"')
    if not order.repository:
        return ["Upload the notebooks to Colab or to Google Drive; --repository adds links that open them from GitHub."]
    return [f"Commit {order.folder} to the top of {order.repository}, branch {order.branch}: the links lead to it."]


def write_kaggle(order: Order) -> list[str]:
    """Write the notebooks for Kaggle, which install without internet; return what to do with them."""
    text = f"On Kaggle, this cell installs labkit from the data set in `{KAGGLE_FOLDER}`, which needs no internet. Run it first."
    command = f'%pip install -q --no-index --find-links {KAGGLE_FOLDER} "{order.install or "labkit[hosted]"}"'
    _write(order, text, command)
    return [f"Upload the notebooks, and labkit's wheel with the wheels that it needs as a data set: {KAGGLE_FOLDER}."]


def data_uri(diagram: Path) -> str:
    """Return an SVG file as a PNG image in a data URI, drawn by Chromium.

    Raises:
        LabError: there is no Chromium, or it draws nothing.
    """
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    size = _SIZE.search(diagram.read_text(encoding="utf-8"))
    if browser is None or size is None:
        raise LabError(f"{diagram}: no Chromium that could draw it; install Chromium or Chrome, which Colab's diagrams need")
    with tempfile.TemporaryDirectory(prefix="labkit-diagram-") as folder:
        target = Path(folder, "diagram.png")
        subprocess.run(
            [
                browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder}",
                "--force-device-scale-factor=1.5", f"--window-size={size[1]},{size[2]}", f"--screenshot={target}",
                diagram.resolve().as_uri(),
            ],
            capture_output=True, timeout=DRAWING_LIMIT_S, check=False,
        )  # fmt: skip
        if not target.exists():
            raise LabError(f"{diagram}: {browser} drew nothing")
        return f"data:image/png;base64,{base64.b64encode(target.read_bytes()).decode()}"


def _hosted_notebook(handout: Handout, introduction: str, command: str, pictures: dict[str, str]) -> dict[str, Any]:
    """Return the content of a notebook that installs labkit by its first cell, and contains its diagrams.

    NAME in the introduction becomes the lesson's name; `pictures` has the address of each diagram.
    """
    cells = [markdown_cell("install-text", introduction.replace("NAME", handout.name)), code_cell("install", command)]
    for cell in copy.deepcopy(handout.notebook["cells"]):
        if cell["cell_type"] == "markdown":
            for name, address in pictures.items():
                cell["source"] = cell["source"].replace(f"]({name})", f"]({address})")
        cells.append(cell)
    title, *rest = cells[2:]
    return handout.with_cells([title, *cells[:2], *rest])


def _requirement(order: Order) -> str:
    source = f" @ git+https://github.com/{order.repository}@{order.branch}" if order.repository else ""
    return order.install or f"labkit[hosted]{source}"


def _write(order: Order, introduction: str, command: str) -> None:
    for one in order.handouts:
        names = one.pictures()
        with ThreadPoolExecutor(2) as pool:
            drawn = pool.map(data_uri, [one.lesson.parent / name for name in names])
            notebook = _hosted_notebook(one, introduction, command, dict(zip(names, drawn, strict=True)))
        write_notebook(order.folder / one.lesson.name, notebook)
