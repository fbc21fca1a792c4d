"""The widget in which a timeline is explored: it answers what the page asks, and takes the place of its own image there.

The page's half are the scripts beside this file. What the notebook keeps is the image alone: the widget's own state holds no
span, and the output names no widget, since JupyterLab shows an error where a widget's kernel is gone, and not the image beside
it. So the widget begins with its model (anywidget's `initialize`), finds the image by the end of its data, and lies over it as
long as the kernel lives. In a front end that shows widgets only where an output names them, the output does.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Final

import anywidget
import traitlets

from labkit.plots.explorer.window import Windows, about
from labkit.plots.image import as_image
from labkit.plots.timeline import View, figure_of

__all__ = ["Explorer"]

END: Final = 40  # characters of base64 that tell one PNG from another: they hold its check sum
_HERE: Final = Path(__file__).parent
_SCRIPTS: Final = ("words", "layer", "picture", "hands", "explorer", "place")


def script() -> str:
    """The scripts as the one module that a widget may bring: each file has one idea, and they stand behind one another."""
    return "\n".join((_HERE / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS)


class Explorer(anywidget.AnyWidget):
    """A timeline to be explored; see `plots.explore.explore`.

    Args:
        view: what to show first.
        step: that, as `timeline` takes it.
    """

    _esm = script()
    _css = _HERE / "explorer.css"
    about = traitlets.Dict().tag(sync=True)

    def __init__(self, view: View, step: int | range | str | None) -> None:
        self._image, self._metadata = as_image(figure_of(view.whole, "", step))
        self._said = f"timeline of {view.in_words()}"
        self._windows = Windows(view.whole)
        super().__init__(about=about(view, self._image["image/png"][-END:]))
        self.on_msg(self._asked)

    def __repr__(self) -> str:
        return f"<{self._said}>"

    def _asked(self, _: Any, question: dict[str, Any], __: Any) -> None:
        """The page asks for a stretch of time; it numbers its questions, since several pages may ask."""
        seen, buffers = self._windows.look(question["start"], question["end"], question["columns"], question["rank"])
        self.send({"asked": question["asked"], **seen}, buffers)

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        data: dict[str, Any] = self._image | {"text/plain": self._said}
        if needs_a_view():
            named = super()._repr_mimebundle_(**kwargs)
            assert named is not None, "a widget without a view"
            data = named[0] | data
        return data, self._metadata


def needs_a_view() -> bool:
    """Whether the front end loads a widget only where an output names it: VS Code and Colab do."""
    return "VSCODE_PID" in os.environ or "google.colab" in sys.modules
