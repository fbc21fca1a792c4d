"""The static site: figures keep their alternative texts, timelines their data, links their targets; nothing is loaded
from elsewhere."""

from __future__ import annotations

import functools
import http.server
import json
import re
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import nbformat
import pytest

from tools import site
from tools.moving_picture import chromium

ROOT = Path(__file__).resolve().parents[2]
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


class Page(HTMLParser):
    """The links, targets and pictures of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.ids: set[str] = set()
        self.pictures: list[dict[str, str | None]] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        given = dict(attributes)
        self.ids.update(filter(None, (given.get("id"), given.get("name"))))
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        if tag == "img":
            self.pictures.append(given)
        if tag in ("img", "script") and given.get("src"):
            self.loaded.append(given["src"])
        if tag == "link" and given.get("href") and given.get("rel") in ("stylesheet", "preload", "icon"):
            self.loaded.append(given["href"])


def test_a_figure_becomes_a_file_with_its_alternative_text_and_a_timeline_keeps_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site, "SOURCE", tmp_path)
    (tmp_path / site.FIGURES).mkdir(parents=True)
    saved = {"about": {"title": "</script>"}}
    data = {"image/png": PNG, "text/plain": "timeline", site.MIME: saved}
    metadata = {"image/png": {"width": 900, "alt": 'Two "ranks": one waits'}}
    output = nbformat.v4.new_output("display_data", data=data, metadata=metadata)
    site._rewrite_output(output, "02-7-0", "../")
    assert list(output["data"]) == ["text/html"]
    html = output["data"]["text/html"]
    assert 'alt="Two &quot;ranks&quot;: one waits"' in html
    assert 'src="../_static/figures/02-7-0.png"' in html
    assert (tmp_path / site.FIGURES / "02-7-0.png").read_bytes().startswith(b"\x89PNG")
    [text] = re.findall(r'<script type="application/json">(.*?)</script>', html)
    assert json.loads(text) == saved


def test_other_outputs_stay() -> None:
    output = nbformat.v4.new_output("display_data", data={"text/html": "<b>1</b>", "text/plain": "1"})
    site._rewrite_output(output, "02-7-0", "../")
    assert output["data"] == {"text/html": "<b>1</b>", "text/plain": "1"}


def test_the_explorers_scripts_are_no_module_since_a_folder_serves_none() -> None:
    text = site._classic("export class Layer {}\nexport default { Layer };\n")
    assert text == "const labkitExplorer = (() => {\nclass Layer {}\nreturn { Layer };\n\n})();\n"
    assert not re.search(r"^(import|export) ", site._classic(site.script()), re.MULTILINE)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(site, "SOURCE", folder / "site-source")
        patch.setattr(site, "SITE", folder / "site")
        assert site.main() == 0
    return folder / "site"


@pytest.mark.slow
@pytest.mark.processes
def test_every_link_leads_somewhere_and_every_picture_has_a_text(built: Path) -> None:
    pages = {path: Page(path) for path in built.rglob("*.html") if "_static" not in path.parts}
    faults = []
    for path, page in pages.items():
        for link in [*page.links, *page.loaded]:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https", "mailto", "data"):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists():
                faults.append(f"{path.relative_to(built)}: {link}")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids:
                faults.append(f"{path.relative_to(built)}: {link} has no such part")
        faults += [f"{path.relative_to(built)}: {p['src'][:80]} has no text" for p in page.pictures if not p.get("alt")]  # type: ignore[index]
        faults += [f"{path.relative_to(built)}: loads {src}" for src in page.loaded if src.startswith(("http", "//"))]
    assert faults == []
    for lesson in (ROOT / "notebooks").glob("*.ipynb"):
        assert built / "notebooks" / f"{lesson.stem}.html" in pages


@pytest.mark.slow
@pytest.mark.processes
def test_each_figure_of_a_lesson_has_the_text_of_its_notebook(built: Path) -> None:
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        outputs = [o for c in nbformat.read(path, 4).cells for o in c.get("outputs", ()) if "image/png" in o.get("data", {})]
        texts = [o["metadata"].get("image/png", {}).get("alt") or o["data"]["text/plain"] for o in outputs]
        page = Page(built / "notebooks" / f"{path.stem}.html")
        assert [p["alt"] for p in page.pictures if p.get("class") == "labkit-figure"] == texts, path.name


@pytest.fixture
def served(built: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(built))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.browser
@pytest.mark.skipif(chromium() is None, reason="no Chromium on this machine; .ci/run installs one where it can")
def test_a_page_fits_a_phone_asks_nobody_else_and_its_timeline_can_be_explored(served: str) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox", "--disable-gpu"])
        _visit(browser.new_page(viewport={"width": 400, "height": 800}), served)
        browser.close()


def _visit(page: Any, served: str) -> None:
    others: list[str] = []
    page.on("request", lambda request: others.append(request.url) if not request.url.startswith((served, "data:")) else None)
    for name in ("index", "notebooks/00_start_here", "notebooks/02b_what_it_costs", "docs/glossary"):
        page.goto(f"{served}{name}.html")
        assert page.evaluate("document.documentElement.scrollWidth") <= 400, name
    assert others == []
    page.goto(f"{served}notebooks/00_start_here.html")
    explorer = page.locator(".labkit-explorable .labkit-explorer")
    explorer.wait_for()
    before = explorer.inner_text()
    explorer.locator("canvas").first.scroll_into_view_if_needed()
    explorer.locator(".labkit-plot").press("+")
    page.wait_for_function("([e, before]) => e.innerText != before", arg=[explorer.element_handle(), before])
