"""The picture in a real JupyterLab in a headless Chromium: it moves while the ranks work, and stays when they have ended."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

pytest.importorskip("playwright", reason="playwright is not installed: the extra 'test' brings it")
from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine; .ci/run installs one where it can"),
]

ROOT = Path(__file__).resolve().parent.parent
LIMIT_MS = 90_000  # for a lesson's cells up to the picture, on a machine with other things to do

IDLE = (
    "#jp-main-statusbar >> text=/\\| Idle$/"  # the kernel, as the status bar says it; cells run before it is connected are lost
)

# Collects every picture that the output of the last cell shows, from the moment it is installed.
COLLECT = """() => {
    window.frames_seen = new Set();
    window.collector = setInterval(() => {
        const cells = document.querySelectorAll('.jp-Notebook .jp-CodeCell');
        const drawing = cells.length && cells[cells.length - 1].querySelector('.jp-OutputArea-output svg');
        if (drawing) window.frames_seen.add(drawing.outerHTML);
    }, 20);
}"""
# Whether the last cell's output is one loaded image and no drawing.
FINISHED = """() => {
    const cells = document.querySelectorAll('.jp-Notebook .jp-CodeCell');
    const output = cells.length && cells[cells.length - 1].querySelector('.jp-OutputArea');
    const images = output ? output.querySelectorAll('img') : [];
    return images.length == 1 && images[0].naturalWidth > 400 && !output.querySelector('.jp-OutputArea-output svg');
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    quiet = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update"]
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=quiet)
        yield chromium
        chromium.close()


@pytest.fixture
def lab_server(tmp_path: Path) -> Iterator[str]:
    """JupyterLab on a folder of its own; gives its address, token included. It also stops by itself when nobody uses it."""
    settings = tmp_path / "settings" / "@jupyterlab" / "notebook-extension"
    settings.mkdir(parents=True)
    (settings / "tracker.jupyterlab-settings").write_text(json.dumps({"windowingMode": "none"}))  # every cell is in the page
    token = secrets.token_hex(16)
    environment = os.environ | {
        "JUPYTER_CONFIG_DIR": str(tmp_path / "config"),
        "JUPYTER_DATA_DIR": str(tmp_path / "data"),
        "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(tmp_path / "settings"),
        "IPYTHONDIR": str(tmp_path / "ipython"),
        "PYTHONPATH": str(ROOT),
    }
    arguments = [
        "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1", "--ServerApp.port=0", f"--IdentityProvider.token={token}",
        f"--ServerApp.root_dir={tmp_path}", "--ServerApp.shutdown_no_activity_timeout=300",
        f"--LabApp.app_settings_dir={ROOT / 'tools' / 'lab_settings'}",
    ]  # fmt: skip
    log = tmp_path / "server.log"
    with log.open("w") as stream:
        server = subprocess.Popen([sys.executable, "-m", "jupyterlab", *arguments], env=environment, stdout=stream, stderr=stream)
    try:
        yield _address(server, log) + f"?token={token}"
    finally:
        server.terminate()
        server.wait(30)


def _address(server: subprocess.Popen[bytes], log: Path) -> str:
    """The server's address, which it says once it serves."""
    with log.open() as lines:
        while server.poll() is None:
            found = re.search(r"http://127\.0\.0\.1:\d+/lab", lines.readline())
            if found:
                return found.group()
    pytest.fail(f"JupyterLab ended: {log.read_text()[-2000:]}")


def _until_watch(lesson: str) -> Any:
    """A lesson's cells up to the first that calls `watch`, without outputs."""
    notebook = nbformat.read(ROOT / "notebooks" / f"{lesson}.ipynb", as_version=4)
    last = next(i for i, cell in enumerate(notebook.cells) if cell.cell_type == "code" and ".watch(" in cell.source)
    notebook.cells = notebook.cells[: last + 1]
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return notebook


def _open(page: Page, address: str, notebook: str) -> None:
    page.goto(address.replace("/lab?", f"/lab/tree/{notebook}?"))
    page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=LIMIT_MS)
    page.wait_for_selector(IDLE, timeout=LIMIT_MS)


def _run_all(page: Page) -> None:
    page.click('.lm-MenuBar-itemLabel:text-is("Run")')
    page.click('.lm-Menu-itemLabel:text-is("Run All Cells")')


def test_picture_of_lesson_02_moves_and_stays(lab_server: str, browser: Browser, tmp_path: Path) -> None:
    nbformat.write(_until_watch("02_data_parallel"), tmp_path / "lesson.ipynb")
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    _open(page, lab_server, "lesson.ipynb")
    page.evaluate(COLLECT)
    _run_all(page)
    page.wait_for_function("() => window.frames_seen.size >= 1", timeout=LIMIT_MS)
    _picture(page, "while")
    page.wait_for_function(FINISHED, timeout=LIMIT_MS)
    frames = page.evaluate("() => { clearInterval(window.collector); return window.frames_seen.size; }")
    assert frames >= 3, "the picture did not change while the ranks worked"
    page.wait_for_selector(IDLE, timeout=LIMIT_MS)
    _picture(page, "after")
    page.click('[data-command="docmanager:save"] >> visible=true')
    page.wait_for_selector(".jp-mod-dirty", state="detached", timeout=LIMIT_MS)
    page.reload()
    page.wait_for_function(FINISHED, timeout=LIMIT_MS)
    page.close()
    saved = nbformat.read(tmp_path / "lesson.ipynb", as_version=4).cells[-1].outputs
    assert ["image/png" in output.get("data", {}) for output in saved] == [True], "one image, and nothing else, is kept"


def test_stop_button_gives_the_prompt_back(lab_server: str, browser: Browser, tmp_path: Path) -> None:
    hang = """def hang():
    print('about to hang')
    dist.get_rank() == 0 and dist.barrier()
    while dist.get_rank():
        pass"""
    cells = ["import torch.distributed as dist\nimport labkit as lab\ngroup = lab.Group(2)", hang, "group.watch(hang)"]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3 (ipykernel)"}}  # else JupyterLab asks for one
    notebook = nbformat.v4.new_notebook(cells=list(map(nbformat.v4.new_code_cell, cells)), metadata=kernel)
    nbformat.write(notebook, tmp_path / "stop.ipynb")
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    _open(page, lab_server, "stop.ipynb")
    page.evaluate(COLLECT)
    _run_all(page)
    page.wait_for_selector("text=about to hang >> nth=1", timeout=LIMIT_MS)  # beside the word in the cell's source
    page.wait_for_function("() => window.frames_seen.size >= 2", timeout=LIMIT_MS)
    _picture(page, "hanging")
    page.click('[data-command="notebook:interrupt-kernel"] >> visible=true')
    page.wait_for_selector("text=The next run starts fresh ranks.", timeout=LIMIT_MS)
    page.wait_for_selector(IDLE, timeout=LIMIT_MS)
    _picture(page, "stopped")
    assert "rank 0 was waiting in barrier" in page.inner_text(".jp-Notebook")
    page.close()


def test_prints_appear_while_ranks_work_and_end_as_text_in_rank_order(lab_server: str, browser: Browser, tmp_path: Path) -> None:
    work = """def work(folder):
    rank = os.environ['RANK']
    print('rank', rank, 'began')
    print('and waits', end='')
    while not os.path.exists(folder + '/go on'):
        os.sched_yield()
    print(' no more')"""
    cells = [
        "import os\nimport labkit as lab\ngroup = lab.Group(2, runtime='bare')",
        work,
        f"run = group.run(work, {str(tmp_path)!r})",
    ]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3 (ipykernel)"}}
    notebook = nbformat.v4.new_notebook(cells=list(map(nbformat.v4.new_code_cell, cells)), metadata=kernel)
    nbformat.write(notebook, tmp_path / "prints.ipynb")
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    _open(page, lab_server, "prints.ipynb")
    _run_all(page)
    outputs = ".jp-Notebook .jp-CodeCell:last-child .jp-OutputArea-child"
    page.wait_for_selector("text=[rank 1] and waits", timeout=LIMIT_MS)
    _picture(page, "printing")
    assert page.inner_text(outputs).splitlines() == [
        "[rank 0] rank 0 began", "[rank 0] and waits", "[rank 1] rank 1 began", "[rank 1] and waits",
    ]  # fmt: skip
    (tmp_path / "go on").touch()
    page.wait_for_selector("text=[rank 1] and waits no more", timeout=LIMIT_MS)
    page.wait_for_selector(IDLE, timeout=LIMIT_MS)
    _picture(page, "printed")
    expected = ["[rank 0] rank 0 began", "[rank 0] and waits no more", "[rank 1] rank 1 began", "[rank 1] and waits no more"]
    assert [text.splitlines() for text in page.locator(outputs).all_inner_texts()] == [expected], "the live text has given way"
    page.close()


def _picture(page: Page, name: str) -> None:
    """A screenshot for whoever wants to look: LABKIT_SCREENSHOTS names the folder."""
    folder = os.environ.get("LABKIT_SCREENSHOTS")
    if folder:
        page.screenshot(path=Path(folder) / f"{name}.png")
