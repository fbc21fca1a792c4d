"""The interactive timeline's widget: the kernel's half, which answers the page's queries.

The browser's half are the scripts in this folder. The notebook stores the image, and the run for static pages. The
widget's state contains no spans, and the output does not reference the widget, because JupyterLab would show an error
instead of the image once the kernel is gone. The widget starts with its model (anywidget's `initialize`), finds its
image by a class, and covers it while the kernel is alive. In front ends that only show widgets referenced by an output,
the output references it.

What to open for which change (tests plots/test_explore.py):
- what a page gets: window.py (bars and details of a time window), read by layer.js; what is drawn: picture.js; keys,
  wheel, when a tooltip is shown: input.js; the words of a tooltip: texts.js, of the hint and the label that list the
  keys: picture.js; the widget: explorer.js, explorer.css; `lab.explore`: plots/timeline.py
- a flag of a bar: `_details` in window.py, and the constants at the head of texts.js
- in a browser: notebook/test_browser.py (slow)
"""

from __future__ import annotations

import os
import sys
import uuid
from pathlib import Path
from typing import Any, Final

import anywidget
import traitlets

from labkit.plots.explorer.window import MIME, Windows, about, saved
from labkit.plots.figure import LabFigure
from labkit.plots.image import HTML_CLASS, as_image
from labkit.plots.view import View

_HERE: Final = Path(__file__).parent
STYLE: Final = _HERE / "explorer.css"
_SCRIPTS: Final = ("texts", "layer", "picture", "input", "explorer")


def script() -> str:
    """The scripts, concatenated into the single module that a widget may have."""
    return "\n".join((_HERE / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS)


class Explorer(anywidget.AnyWidget):
    """An interactive timeline of `view`, of which `figure` is the image; see `plots.timeline.explore`."""

    _esm = script()
    _css = STYLE
    _ipython_display_ = None  # that of ipywidgets 7, which Colab has, shows no image: `_repr_mimebundle_` shows both
    about = traitlets.Dict().tag(sync=True)

    def __init__(self, view: View, figure: LabFigure) -> None:
        own_class = f"labkit-{uuid.uuid4().hex[:12]}"
        self._image, self._metadata = as_image(figure, figure.alt_text)
        self._image["text/html"] = self._image["text/html"].replace(HTML_CLASS, f"{HTML_CLASS} {own_class}", 1)
        self._alt_text = f"timeline of {view.in_words()}"
        self._windows = Windows(view.whole)
        super().__init__(about=about(view, own_class))
        self._saved = saved(self.about, self._windows)
        self.on_msg(self._answer)

    def __repr__(self) -> str:
        return f"<{self._alt_text}>"

    def _answer(self, _: Any, query: dict[str, Any], __: Any) -> None:
        """Answer a page's query for a time window; the answer repeats the query, since all pages receive it."""
        header, buffers = self._windows.look(query["start"], query["end"], query["columns"], query["rank"])
        self.send(query | header, buffers)

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        data: dict[str, Any] = self._image | {"text/plain": self._alt_text}
        if self._saved is not None:
            data[MIME] = self._saved
        if not needs_a_view():
            return data, self._metadata
        reference = super()._repr_mimebundle_(**kwargs)
        assert reference is not None, "a widget without a view"
        return reference[0] | data, reference[1] | self._metadata  # anywidget's metadata names Colab's widget manager


def needs_a_view() -> bool:
    """Whether the front end loads a widget only if an output references it, as VS Code and Colab do."""
    return "VSCODE_PID" in os.environ or "google.colab" in sys.modules
