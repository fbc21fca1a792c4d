"""Pictures in a real JupyterLab and Notebook in headless Chromium: updated while ranks work, kept, and explored."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
import numpy as np
import pytest
from doings import waiting
from synthetic import MS, data_parallel

from labkit.costs.link import Link
from labkit.errors.units import time_in_words
from labkit.plots.bars import STYLES
from labkit.plots.explorer.window import MIME
from labkit.plots.image import as_image
from labkit.plots.live.drawing import STILL, LiveFrame, LiveRow, Past
from labkit.plots.live.drawing import page as live_page
from labkit.plots.timeline import timeline
from labkit.tracing.load import load_trace
from labkit.tracing.replaying.replay import replay
from labkit.tracing.step_times import step_ms
from labkit.tracing.trace import Trace

pytest.importorskip("playwright", reason="playwright is not installed: the extra 'test' brings it")
from playwright.sync_api import Browser, Page, sync_playwright

from tools.moving_picture import chromium

CHROMIUM = chromium()
EMPTY = (np.zeros((len(STYLES), 256)), np.zeros((len(STYLES), 256)))
pytestmark = [
    pytest.mark.processes,
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine; .ci/run installs one where it can"),
]

ROOT = Path(__file__).resolve().parents[2]
LIMIT_MS = 150_000  # for a lesson's cells up to the picture, on a busy machine

KEYS_EVERY = 25  # attempts of 0.2 s: keys that a busy page has not handled yet are not lost, and would run the cell twice

# The kernel, as the status bar says it, and in Jupyter Notebook, which has none; cells run before it is connected are
# lost.
IDLE = {"lab": "#jp-main-statusbar >> text=/\\| Idle$/", "notebook": ".jp-Notebook-ExecutionIndicator[data-status=idle]"}

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


class Server(NamedTuple):
    """A Jupyter server; it serves JupyterLab and Jupyter Notebook."""

    address: str
    token: str
    folder: Path

    def page(self, kind: str, notebook: str) -> str:
        """The address of a notebook in "lab", in a workspace of its own, or in "notebook"."""
        where = f"lab/workspaces/{Path(notebook).stem}/tree" if kind == "lab" else "notebooks"
        return f"{self.address}/{where}/{notebook}?token={self.token}"

    def write(self, name: str, cells: list[str], **last: Any) -> None:
        """Upload a notebook, whose last cell may have outputs."""
        made = [*map(nbformat.v4.new_code_cell, cells[:-1]), nbformat.v4.new_code_cell(cells[-1], **last)]
        kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3 (ipykernel)"}}  # otherwise JupyterLab asks for one
        nbformat.write(nbformat.v4.new_notebook(cells=made, metadata=kernel), self.folder / name)

    def end_kernels(self) -> None:
        """All of them."""
        for kernel in json.load(self._ask("GET", "")):
            self._ask("DELETE", f"/{kernel['id']}").close()

    def until_connected(self, page: Page) -> None:
        """Wait until the page is connected to a kernel: if closed before, it leaves a kernel that starts later."""
        for _ in range(LIMIT_MS // 50):
            with contextlib.suppress(urllib.error.HTTPError):  # the server cannot describe a kernel that is about to start
                if any(kernel["connections"] for kernel in json.load(self._ask("GET", ""))):
                    return
            page.wait_for_timeout(50)
        raise AssertionError("the page has not connected to a kernel")

    def _ask(self, method: str, path: str) -> Any:
        headers = {"Authorization": f"token {self.token}"}
        return urllib.request.urlopen(
            urllib.request.Request(f"{self.address}/api/kernels{path}", headers=headers, method=method), timeout=200
        )


@pytest.fixture(scope="module")
def jupyter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server, on a folder of its own. It also stops by itself when nobody uses it."""
    own, folder = tmp_path_factory.mktemp("jupyter"), tmp_path_factory.mktemp("notebooks")
    settings = own / "settings" / "@jupyterlab" / "notebook-extension"
    settings.mkdir(parents=True)
    (settings / "tracker.jupyterlab-settings").write_text(json.dumps({"windowingMode": "none"}))  # every cell is in the page
    token = secrets.token_hex(16)
    environment = os.environ | {
        "JUPYTER_CONFIG_DIR": str(own / "config"),
        "JUPYTER_DATA_DIR": str(own / "data"),
        "JUPYTER_RUNTIME_DIR": str(own / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(own / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(own / "workspaces"),
        "IPYTHONDIR": str(own / "ipython"),
        "PYTHONPATH": str(ROOT),
    }
    arguments = [
        "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1", "--ServerApp.port=0", f"--IdentityProvider.token={token}",
        f"--ServerApp.root_dir={folder}", "--ServerApp.shutdown_no_activity_timeout=300",
        f"--LabApp.app_settings_dir={ROOT / 'labkit' / 'teaching' / 'lab_settings'}",
    ]  # fmt: skip
    log = own / "server.log"
    with log.open("w") as stream:
        server = subprocess.Popen([sys.executable, "-m", "jupyterlab", *arguments], env=environment, stdout=stream, stderr=stream)
    try:
        yield Server(_address(server, log).removesuffix("/lab"), token, folder)
    finally:
        server.terminate()
        try:
            server.wait(100)
        except subprocess.TimeoutExpired:  # it waits for something that is no part of a test
            server.kill()
            server.wait()


@pytest.fixture
def lab_server(jupyter: Server) -> Iterator[Server]:
    """The server for one test, whose kernels end with it."""
    yield jupyter
    jupyter.end_kernels()


def _address(server: subprocess.Popen[bytes], log: Path) -> str:
    """The server's address, which it prints once it serves."""
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


def _open(browser: Browser, server: Server, notebook: str, kind: str = "lab") -> Page:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(LIMIT_MS)
    page.goto(server.page(kind, notebook))
    page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=LIMIT_MS)
    server.until_connected(page)  # Jupyter Notebook says "idle" before
    page.wait_for_selector(IDLE[kind], timeout=LIMIT_MS)
    return page


def _run_cells(page: Page, *numbers: int) -> None:
    """Run cells by their numbers. A page that has just been opened may lose keys."""
    for number in numbers:
        prompt = page.locator(f".jp-Notebook .jp-CodeCell:nth-child({number + 1}) .jp-InputArea-prompt")
        before = prompt.inner_text()
        for look in range(LIMIT_MS // 200):
            if look % KEYS_EVERY == 0:
                prompt.click()
                page.keyboard.press("Control+Enter")
            page.wait_for_timeout(200)
            if prompt.inner_text() != before:
                break


def _run_all(page: Page) -> None:
    page.click('.lm-MenuBar-itemLabel:text-is("Run")')
    page.click('.lm-Menu-itemLabel:text-is("Run All Cells")')


def test_the_picture_of_lesson_02_is_updated_and_stays(lab_server: Server, browser: Browser) -> None:
    nbformat.write(_until_watch("02_data_parallel"), lab_server.folder / "lesson.ipynb")
    page = _open(browser, lab_server, "lesson.ipynb")
    frames = 0
    for _ in range(4):  # a page that gets no core shows only a few of the frames
        page.evaluate(COLLECT)
        _run_all(page)
        page.wait_for_function("() => window.frames_seen.size >= 1", timeout=LIMIT_MS)
        _picture(page, "while")
        page.wait_for_function(FINISHED, timeout=LIMIT_MS)
        frames = page.evaluate("() => { clearInterval(window.collector); return window.frames_seen.size; }")
        page.wait_for_selector(IDLE["lab"], timeout=LIMIT_MS)
        if frames >= 3:
            break
    assert frames >= 3, "the picture did not change while the ranks worked"
    _picture(page, "after")
    _save(page)
    page.reload()
    page.wait_for_function(FINISHED, timeout=LIMIT_MS)
    page.close()
    saved = nbformat.read(lab_server.folder / "lesson.ipynb", as_version=4).cells[-1].outputs
    assert ["image/png" in output.get("data", {}) for output in saved] == [True], "one image, and nothing else, is kept"


def test_stop_button_gives_the_prompt_back(lab_server: Server, browser: Browser) -> None:
    hang = """def hang():
    print('about to hang')
    dist.get_rank() == 0 and dist.barrier()
    while dist.get_rank():
        pass"""
    cells = ["import torch.distributed as dist\nimport labkit as lab\ngroup = lab.Group(2)", hang, "group.watch(hang)"]
    lab_server.write("stop.ipynb", cells)
    page = _open(browser, lab_server, "stop.ipynb")
    page.evaluate(COLLECT)
    _run_all(page)
    page.wait_for_selector("text=[rank 0] about to hang", timeout=LIMIT_MS)
    page.evaluate("() => window.frames_seen.clear()")  # by the third picture from now on, it waits
    page.wait_for_function("() => window.frames_seen.size >= 3", timeout=LIMIT_MS)
    _picture(page, "hanging")
    page.click('[data-command="notebook:interrupt-kernel"] >> visible=true')
    page.wait_for_selector("text=The next run starts fresh ranks.", timeout=LIMIT_MS)
    page.wait_for_selector(IDLE["lab"], timeout=LIMIT_MS)
    _picture(page, "stopped")
    assert waiting("rank 0", "barrier", "cell 2, line 3", signature="").search(page.inner_text(".jp-Notebook"))
    page.close()


@pytest.mark.parametrize("kind", ["lab", "notebook"])
def test_a_page_reloaded_during_a_run_is_not_misleading(kind: str, lab_server: Server, browser: Browser) -> None:
    """The front end drops the outputs of a cell that it did not run itself: a frame remains, and it says so."""
    if kind == "notebook":
        pytest.importorskip("notebook", reason="Jupyter Notebook is not installed: the extra 'test' brings it")
    work = """def work(folder):
    for step in lab.steps(range(10**6)):
        with lab.span('forward'):
            threading.Event().wait(0.25)  # so long that its bar is wide, however long the run lasts
        if os.path.exists(folder + '/over'):
            return print('worked')"""
    name, over = f"reload-{kind}.ipynb", lab_server.folder / kind / "over"
    over.parent.mkdir()
    cells = ["import os, threading\nimport labkit as lab\ngroup = lab.Group(2, runtime='bare')", work]
    cells += [f"run = group.watch(work, {str(over.parent)!r})", "print(run.output)\nlab.explore(run)"]
    lab_server.write(name, cells)
    page = _open(browser, lab_server, name, kind)
    _run_cells(page, 0, 1, 2)
    drawing, stale = ".jp-CodeCell:nth-child(3) .jp-OutputArea-output svg", f".labkit-live >> text={STILL[0]}"
    page.wait_for_selector(f"{drawing} >> text=steps/s", timeout=LIMIT_MS)
    _picture(page, f"reload-{kind}-before")
    _save(page)
    page.reload()
    page.wait_for_selector(stale, timeout=LIMIT_MS)
    _picture(page, f"reload-{kind}-during")

    over.touch()
    page.wait_for_selector(IDLE[kind], timeout=LIMIT_MS)
    _run_cells(page, 3)
    page.wait_for_selector("text=[rank 1] worked", timeout=LIMIT_MS)
    page.wait_for_selector(EXPLORER, timeout=LIMIT_MS)
    _hover(page, 1, 0, 0.5)  # a text is shown
    assert ("forward", "first used at cell 2, line 3") in _all_tips(page, 1)
    assert page.locator(stale).is_visible()
    _picture(page, f"reload-{kind}-after")
    _save(page)
    saved = nbformat.read(lab_server.folder / name, as_version=4)
    assert [STILL[1] in output.data["text/html"] for output in saved.cells[2].outputs] == [True]
    assert "image/png" in saved.cells[3].outputs[-1].data
    assert "widgets" not in saved.metadata

    _run_cells(page, 2)  # again, and the page sees its end
    page.wait_for_selector(".jp-CodeCell:nth-child(3) .jp-OutputArea-output img", timeout=LIMIT_MS)
    assert page.locator(drawing).count() == 0
    _save(page)
    page.reload()
    page.wait_for_selector(EXPLORER, timeout=LIMIT_MS)
    _hover(page, 0, 0, 0.5)
    assert "forward" in {first for first, _ in _all_tips(page, 0)}, "as long as its kernel lives"
    page.close()
    lab_server.end_kernels()
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(lab_server.page(kind, name))
    page.wait_for_function(FINISHED, timeout=LIMIT_MS)  # the file's image
    lab_server.until_connected(page)
    assert page.locator(".labkit-explorer").count() == 0
    page.close()


LONG_RUN = """def work(folder):
    for step in lab.steps(range(10**6)):
        with lab.span('forward'):
            threading.Event().wait(0.05)
        if os.path.exists(folder + '/over'):
            return"""
# How much of the live picture's height is inside the notebook's panel.
SEEN = """() => {
    const { top, bottom } = document.querySelector('.labkit-live').getBoundingClientRect();
    const panel = document.querySelector('.jp-WindowedPanel-outer').getBoundingClientRect();
    return (Math.min(bottom, panel.bottom) - Math.max(top, panel.top)) / (bottom - top);
}"""


def test_shift_enter_leaves_the_whole_picture_in_the_window(lab_server: Server, browser: Browser) -> None:
    """In a plain JupyterLab: the settings of `make lab` play no part.

    The picture of a cell at the window's lower edge would be below the window.
    """
    folder = lab_server.folder / "scroll"
    folder.mkdir()
    cells = ["import os, threading\nimport labkit as lab\ngroup = lab.Group(4, runtime='bare')", LONG_RUN]
    cells += ["#\n" * 28, f"group.watch(work, {str(folder)!r});", *["#\n" * 12] * 5]
    lab_server.write("scroll.ipynb", cells)
    page = _open(browser, lab_server, "scroll.ipynb")
    _run_cells(page, 0, 1)
    page.locator(".jp-CodeCell:nth-child(4) .jp-InputArea-prompt").click()
    page.keyboard.press("Shift+Enter")
    page.wait_for_selector(".labkit-live svg >> text=steps/s >> visible=true", timeout=LIMIT_MS)
    page.wait_for_timeout(500)
    _picture(page, "scroll")
    assert page.evaluate(SEEN) > 0.99
    (folder / "over").touch()
    page.wait_for_selector("img.labkit-figure", timeout=LIMIT_MS)
    page.wait_for_selector(IDLE["lab"], timeout=LIMIT_MS)
    assert "Timeline: work on 4 ranks" in (page.locator("img.labkit-figure").get_attribute("alt") or "")
    page.close()


def test_a_notebook_that_is_not_trusted_shows_a_sentence_instead_of_the_live_picture(
    lab_server: Server, browser: Browser
) -> None:
    frame = LiveFrame("train on 2 ranks", 0, None, (), [LiveRow("rank 0", "recv", blocked=True)] * 2, Past([EMPTY] * 2, 10), None)
    figure = as_image(timeline(data_parallel()).figure, "Timeline: two steps")[0]
    shown = (live_page(frame, "a"), figure["text/html"])
    outputs = [nbformat.v4.new_output("display_data", {"text/html": html}) for html in shown]
    lab_server.write("other.ipynb", ["group.watch(train)"], outputs=outputs)
    page = _open(browser, lab_server, "other.ipynb")
    page.wait_for_selector(".labkit-not-live", timeout=LIMIT_MS)
    _picture(page, "not-trusted")
    assert page.inner_text(".jp-OutputArea").split() == " ".join(STILL).split()
    page.wait_for_function("() => document.querySelector('img.labkit-figure').naturalWidth > 400", timeout=LIMIT_MS)
    assert page.locator("img.labkit-figure").get_attribute("alt") == "Timeline: two steps"
    page.close()


def test_prints_appear_while_ranks_work_and_end_as_text_in_rank_order(lab_server: Server, browser: Browser) -> None:
    work = """def work(folder):
    rank = os.environ['RANK']
    print('rank', rank, 'began')
    print('and waits', end='')
    while not os.path.exists(folder + '/go on'):
        os.sched_yield()
    print(' no more')"""
    cells = ["import os\nimport labkit as lab\ngroup = lab.Group(2, runtime='bare')", work]
    cells.append(f"run = group.run(work, {str(lab_server.folder)!r})")
    lab_server.write("prints.ipynb", cells)
    page = _open(browser, lab_server, "prints.ipynb")
    _run_all(page)
    outputs = ".jp-Notebook .jp-CodeCell:last-child .jp-OutputArea-child"
    for rank in (0, 1):
        page.wait_for_selector(f"text=[rank {rank}] and waits", timeout=LIMIT_MS)
    _picture(page, "printing")
    assert page.inner_text(outputs).splitlines() == [
        "[rank 0] rank 0 began", "[rank 0] and waits", "[rank 1] rank 1 began", "[rank 1] and waits",
    ]  # fmt: skip
    (lab_server.folder / "go on").touch()
    for rank in (0, 1):
        page.wait_for_selector(f"text=[rank {rank}] and waits no more", timeout=LIMIT_MS)
    page.wait_for_selector(IDLE["lab"], timeout=LIMIT_MS)
    _picture(page, "printed")
    expected = ["[rank 0] rank 0 began", "[rank 0] and waits no more", "[rank 1] rank 1 began", "[rank 1] and waits no more"]
    assert [text.splitlines() for text in page.locator(outputs).all_inner_texts()] == [expected], "the live text has given way"
    page.close()


# The timeline that can be explored

EXPLORER = ".labkit-explorer:not(.labkit-unseen)"
# The texts of the explorer whose contrast with their background is less than WCAG 2 requires for small text.
PALE = """() => {
    const parse = (colour) => { const [r, g, b, a = 1] = colour.match(/[\\d.]+/g).map(Number); return [r, g, b, a]; };
    const over = (top, below) => [0, 1, 2].map((i) => top[3] * top[i] + (1 - top[3]) * below[i]);
    const own = (node) => parse(getComputedStyle(node).backgroundColor);
    const behind = (node) => node ? over(own(node), behind(node.parentElement)) : [255, 255, 255];
    const light = (rgb) => rgb.map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const texts = [...document.querySelectorAll('.labkit-explorer *')].filter(
        (node) => node.checkVisibility() && [...node.childNodes].some((child) => child.nodeType == 3 && child.data.trim()));
    const pale = texts.map((node) => {
        const page = behind(node);
        const both = [light(over(parse(getComputedStyle(node).color), page)), light(page)].sort((a, b) => b - a);
        return [node.textContent, (both[0] + 0.05) / (both[1] + 0.05)];
    }).filter(([, contrast]) => contrast < 4.5);
    return { count: texts.length, pale };
}"""
# Whether the canvas has bright pixels between the strip and the rows, where the step numbers are.
BRIGHT = """() => {
    const canvas = document.querySelector('.labkit-plot canvas');
    const { data } = canvas.getContext('2d').getImageData(0, 24 * devicePixelRatio, canvas.width, 12 * devicePixelRatio);
    return data.some((value, i) => i % 4 == 0 && value > 200 && data[i + 3] > 200);
}"""


def _share(at_ms: float) -> float:
    """The position of a moment of `data_parallel` in the whole run."""
    return at_ms * MS / data_parallel().duration_ns


def _place(page: Page, rank: int, lane: int, share: float) -> tuple[float, float]:
    """Where a moment of a rank's lane is on the page: as a share of what is shown."""
    plot = None
    for _ in range(50):  # JupyterLab may be about to render a cell of a page that was loaded again
        page.locator(".labkit-plot").scroll_into_view_if_needed()
        if (plot := page.locator(".labkit-plot").bounding_box()) is not None:
            break
        page.wait_for_timeout(100)
    first, second = (page.locator(".labkit-rank").nth(i).bounding_box() for i in (0, 1))
    assert plot is not None
    assert first is not None
    assert second is not None
    high = second["y"] - first["y"]
    middle = first["y"] + first["height"] / 2 + rank * high
    return plot["x"] + plot["width"] * share, middle + (-0.15, 0.25)[lane] * high


def _tip(page: Page, rank: int, lane: int, share: float) -> list[str]:
    """The text beside the pointer there, if any."""
    x, y = _place(page, rank, lane, share)
    page.mouse.move(x - 1, y)
    page.mouse.move(x, y)
    return page.inner_text(".labkit-tip").splitlines()


def _all_tips(page: Page, rank: int) -> set[tuple[str, str]]:
    """First and last line of the texts along a rank's row: the position of a span depends on how busy the machine
    is."""
    reported = [_tip(page, rank, 0, share / 40) for share in range(1, 40)]
    return {(one[0], one[-1]) for one in reported if one}


def _hover(page: Page, rank: int, lane: int, share: float, first: str = "") -> list[str]:
    """The text beside the pointer there, once it begins with `first`: the page may still be changing its layout or
    theme."""
    reported: list[str] = []
    for _ in range(LIMIT_MS // 50):
        reported = _tip(page, rank, lane, share)
        if reported and reported[0].startswith(first):
            return reported
        page.wait_for_timeout(50)
    raise AssertionError(f"the picture says {reported}")


def _save(page: Page) -> None:
    is_saving = lambda response: response.request.method == "PUT" and "/api/contents/" in response.url  # noqa: E731
    with page.expect_response(is_saving, timeout=LIMIT_MS):
        page.click('[data-command="docmanager:save"] >> visible=true')


def test_the_timeline_is_explored(lab_server: Server, browser: Browser) -> None:
    data_parallel().save(lab_server.folder / "run.json")
    lab_server.write("explore.ipynb", ["import labkit as lab", "lab.explore(lab.load_trace('run.json'))"])
    page = _open(browser, lab_server, "explore.ipynb")
    _run_all(page)
    page.wait_for_selector(EXPLORER, timeout=LIMIT_MS)

    reported = _hover(page, 1, 0, _share(3), "forward")
    assert reported == ["forward", "rank 1  ·  6.25 ms", "from 1.20 ms to 7.45 ms"]
    reported = _hover(page, 0, 1, _share(19.5), "all_reduce")
    details = ("all_reduce  1.05 MB", "exposed communication", "among all 4 ranks  ·  cell 5, line 12")
    assert (reported[0], reported[2], reported[-1]) == details
    _picture(page, "explore-light")
    assert page.evaluate(PALE)["pale"] == []
    assert not page.evaluate(BRIGHT)

    where = page.locator(".labkit-where")
    page.mouse.wheel(0, -300)  # not clicked into: the page would scroll
    assert where.inner_text() == ""
    page.mouse.click(*_place(page, 0, 1, _share(19.5)))
    page.mouse.wheel(0, -600)
    page.wait_for_function("() => document.querySelector('.labkit-where').textContent.includes('of it, from')", timeout=LIMIT_MS)
    page.keyboard.press("ArrowRight")
    assert page.locator(".labkit-tip").is_hidden()
    page.keyboard.press("a")  # to JupyterLab: a new cell above
    _picture(page, "explore-zoom")
    page.keyboard.press("Escape")
    assert where.inner_text() == ""
    assert page.locator(".jp-Notebook .jp-CodeCell").count() == 2, "no key reached JupyterLab"

    names = page.locator(".labkit-rank")
    names.nth(2).click()
    assert [names.nth(i).is_visible() for i in range(4)] == [False, False, True, False]
    _picture(page, "explore-alone")
    names.nth(2).click()
    assert [names.nth(i).is_visible() for i in range(4)] == [True] * 4

    page.click('.lm-MenuBar-itemLabel:text-is("Settings")')
    page.hover('.lm-Menu-itemLabel:text-is("Theme")')
    page.click('.lm-Menu-itemLabel:text-is("JupyterLab Dark")')
    page.wait_for_selector("body[data-jp-theme-light=false]", state="attached", timeout=LIMIT_MS)
    page.wait_for_function(BRIGHT, timeout=LIMIT_MS)
    assert _hover(page, 0, 1, _share(19.5), "all_reduce") == reported
    _picture(page, "explore-dark")
    contrast = page.evaluate(PALE)
    assert contrast["pale"] == []
    assert contrast["count"] > 20

    _save(page)
    saved = nbformat.read(lab_server.folder / "explore.ipynb", as_version=4)
    assert [sorted(output.data) for output in saved.cells[-1].outputs] == [[MIME, "image/png", "text/html", "text/plain"]]
    assert "widgets" not in saved.metadata
    page.close()


SLIDERS = ".labkit-controls input[type=range]"
SAID = ".labkit-said"
# Moves a slider through all of its stops before the first answer can arrive, and collects the pictures that follow.
SWEEP = """(slider) => {
    window.pictures = new Set();
    new MutationObserver((changes) => {
        for (const { addedNodes } of changes)
            for (const node of addedNodes) if (node.classList?.contains('labkit-explorer')) window.pictures.add(node);
    }).observe(document.querySelector('.labkit-controls').parentElement, { childList: true });
    for (let stop = 0; stop <= slider.max; stop++) {
        slider.value = stop;
        slider.dispatchEvent(new Event('input', { bubbles: true }));
    }
}"""


def _until_said(page: Page, words: str) -> str:
    page.wait_for_selector(f"{SAID} >> text=/{re.escape(words)}/", timeout=LIMIT_MS)
    return page.inner_text(SAID)


def test_a_slider_replays_the_run(lab_server: Server, browser: Browser) -> None:
    trace = data_parallel()
    Trace(trace.columns, ranks=trace.ranks, link=Link(gbit_per_s=1, latency_us=50)).save(lab_server.folder / "run.json")
    lab_server.write("sliders.ipynb", ["import labkit as lab", "lab.explore(lab.load_trace('run.json'), step=1)"])
    page = _open(browser, lab_server, "sliders.ipynb")
    _run_all(page)
    recorded = _until_said(page, "The median step took 22.6 ms.")
    slider = page.get_by_label("latency")
    assert slider.get_attribute("aria-valuetext") == "50 µs"

    box = slider.bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] / 2, middle)
    page.mouse.down()
    for place in range(50, 81):
        page.mouse.move(box["x"] + box["width"] * place / 100, middle)
    page.mouse.up()
    last = slider.input_value()
    _until_said(page, "predicted by replay")
    page.wait_for_selector(".labkit-controls:not(.labkit-querying)", timeout=LIMIT_MS)
    assert slider.input_value() == last, "the last move counts"
    text = slider.get_attribute("aria-valuetext") or ""
    assert text.endswith(" ms")
    link = Link(gbit_per_s=1, latency_us=1000 * float(text.removesuffix(" ms")))
    run = load_trace(lab_server.folder / "run.json")
    assert time_in_words(1e6 * step_ms(replay(run, link=link))) in page.inner_text(SAID)
    assert "replayed" in page.inner_text(".labkit-title")
    for explained in ("line: critical path", "pale: before the change"):
        assert explained in page.inner_text(".labkit-legend")
    _picture(page, "sliders-mouse")

    slider.evaluate(SWEEP)
    slowest = time_in_words(1e6 * step_ms(replay(run, link=Link(gbit_per_s=1, latency_us=100_000))))
    _until_said(page, f"The median step takes {slowest}, predicted by replay.")
    assert page.evaluate("() => window.pictures.size") == 2, "of the first and of the last move"

    where = page.inner_text(".labkit-where")
    page.locator(".labkit-plot").focus()
    page.keyboard.press("+")
    zoomed = page.inner_text(".labkit-where")
    assert zoomed != where
    slider.focus()
    before = int(slider.input_value())
    page.keyboard.press("ArrowLeft")  # still focused, and JupyterLab does not take the key
    page.wait_for_function("([s, value]) => document.querySelector(s).value == value", arg=[SLIDERS, str(before - 1)])
    page.wait_for_selector(".labkit-controls:not(.labkit-querying)", timeout=LIMIT_MS)
    assert page.inner_text(".labkit-where").split(",")[0] == zoomed.split(",")[0], "a move keeps the zoom"
    page.keyboard.press("Tab")
    page.keyboard.press("End")  # of the bandwidth
    assert page.get_by_label("bandwidth").get_attribute("aria-valuetext") == "1000 Gbit/s"
    page.get_by_label("communication takes no time").focus()
    page.keyboard.press("Space")
    assert slider.is_disabled(), "of no effect"
    free = time_in_words(1e6 * step_ms(replay(run, free=["all_reduce"])))
    _until_said(page, f"The median step takes {free}, predicted by replay.")
    assert page.locator(".jp-Notebook .jp-CodeCell").count() == 2, "no key reached JupyterLab"
    _save(page)
    page.reload()
    _until_said(page, f"The median step takes {free}, predicted by replay.")  # the kernel remembers
    page.click(".labkit-controls button")
    assert _until_said(page, "The median step took 22.6 ms.") == recorded
    page.wait_for_function("() => document.querySelectorAll('.labkit-explorer').length == 1", timeout=LIMIT_MS)
    assert page.evaluate(PALE)["pale"] == []
    _save(page)
    saved = nbformat.read(lab_server.folder / "sliders.ipynb", as_version=4)
    assert [sorted(output.data) for output in saved.cells[-1].outputs] == [[MIME, "image/png", "text/html", "text/plain"]]
    page.close()

    lab_server.end_kernels()
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(lab_server.page("lab", "sliders.ipynb"))
    page.wait_for_function(FINISHED, timeout=LIMIT_MS)  # the file's image
    lab_server.until_connected(page)
    assert page.locator(SLIDERS).count() == 0
    page.close()


def test_a_schedule_has_sliders(lab_server: Server, browser: Browser) -> None:
    lab_server.write("schedule.ipynb", ["import labkit as lab", "lab.explore(lab.schedule('gpipe', stages=4, micro_batches=8))"])
    page = _open(browser, lab_server, "schedule.ipynb")
    _run_all(page)
    _until_said(page, "A step takes 33.0 s, bubble 27 %.")
    page.get_by_label("micro-batches").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    _until_said(page, "A step takes 30.0 s, bubble 20 %.")  # 12 of them
    page.locator(".labkit-controls select").select_option("1F1B")
    _until_said(page, "of at most 4 of 12 micro-batches")
    page.get_by_role("slider", name="ranks").focus()
    page.keyboard.press("ArrowLeft")
    page.wait_for_function("() => document.querySelectorAll('.labkit-rank').length == 3", timeout=LIMIT_MS)
    _picture(page, "sliders-schedule")
    page.click(".jp-NotebookPanel-toolbar [title^='Restart the kernel']")
    page.click(".jp-Dialog .jp-mod-accept")
    page.wait_for_function(f"() => !document.querySelector('{SLIDERS}')", timeout=LIMIT_MS)
    page.wait_for_function(FINISHED, timeout=LIMIT_MS)  # the image is back: no control that would do nothing
    page.wait_for_selector(IDLE["lab"], timeout=LIMIT_MS)
    page.close()


def _picture(page: Page, name: str) -> None:
    """A screenshot for whoever wants to look: LABKIT_SCREENSHOTS names the folder."""
    folder = os.environ.get("LABKIT_SCREENSHOTS")
    if folder:
        page.screenshot(path=Path(folder) / f"{name}.png")
