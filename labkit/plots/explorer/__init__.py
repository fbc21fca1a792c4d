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
- a control, its stops, what is said after a move: controls.py, controls.js; the path and the recorded run behind:
  picture.js; tests plots/test_controls.py
- a flag of a bar: `_details` in window.py, and the constants at the head of texts.js
- in a browser: notebook/test_browser.py (slow)
"""

from __future__ import annotations

import os
import sys
import uuid
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import anywidget
import traitlets

from labkit.errors.exceptions import LabError
from labkit.plots.explorer.controls import Replays, Schedules
from labkit.plots.explorer.window import MIME, SAVED_COLUMNS, Windows, about, saved
from labkit.plots.figure import LabFigure
from labkit.plots.image import HTML_CLASS, as_image
from labkit.plots.view import View
from labkit.tracing.ideal_pipeline import IdealPipeline

_HERE: Final = Path(__file__).parent
STYLE: Final = _HERE / "explorer.css"
_SCRIPTS: Final = ("texts", "layer", "picture", "input", "controls", "explorer")


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
        self._view, self._recorded = view, Windows(view.whole)
        self._windows = self._recorded  # those of the run after the last change
        self._stops: dict[str, int] = {}
        super().__init__(about=about(view, own_class))
        self._saved = saved(self.about, self._recorded)
        self.on_msg(self._answer)

    def __repr__(self) -> str:
        return f"<{self._alt_text}>"

    def _answer(self, _: Any, query: dict[str, Any], __: Any) -> None:
        """Answer a query or a move to all pages; a new page asks for the whole run, and gets the changed run, too."""
        if "stops" not in query:
            windows = self._recorded if query["whole"] else self._windows
            header, buffers = windows.look(query["start"], query["end"], query["columns"], query["rank"])
            self.send(query | header, buffers)
        if query.get("whole") or "stops" in query:
            self._stops |= query.get("stops", {})
            self.send(*self._changed())

    @cached_property
    def _controls(self) -> Replays | Schedules | str:
        """The controls, or why there are none. A page asks for them: the graph of a long run takes a while."""
        run = self._view.whole
        try:
            controls = Schedules(run) if isinstance(run, IdealPipeline) else Replays(self._view)
            controls.ask(controls.as_given)  # records may contradict one another
        except LabError as error:
            return f"No controls: {str(error).partition(': ')[2]}."
        return controls

    def _changed(self) -> tuple[dict[str, Any], list[bytes]]:
        """The run with the present stops of the controls: a header, and the buffers of the whole run."""
        controls = self._controls
        if isinstance(controls, str):
            return {"stops": {}, "controls": [], "note": controls}, []
        stops = controls.as_given | self._stops
        header = {"stops": stops, "controls": controls.all, "given": controls.given}
        view, said, pieces = controls.ask(stops)
        changed, zero = view.whole is not self._view.whole, view.whole.start_ns
        self._windows = Windows(view.whole) if changed else self._recorded
        path = [(p.rank, p.kind == "communication", p.start_ns - zero, p.end_ns - zero) for p in pieces]
        whole = about(view, self.about["image"]) | {"path": path, "changed": changed, "zoomed": view.zoomed}
        window, buffers = self._windows.look(0, view.whole.duration_ns, SAVED_COLUMNS)
        return header | window | {"said": said, "about": whole}, buffers

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
