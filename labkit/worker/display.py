"""Output of a rank besides prints: `display`, figures, values of last expressions and warnings, for the run's cell.

It follows IPython's protocol (`_repr_html_` etc., `_repr_mimebundle_`) without importing IPython, which takes longer
than most runs. Without a notebook, as in a plain script, the text form is printed.

Source: "Integrating your objects with IPython", IPython's documentation.
"""

from __future__ import annotations

import base64
import builtins
import importlib
import io
import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Final, TextIO

from labkit.errors.exceptions import LabError
from labkit.ipc.protocol import Displayed, Warned
from labkit.ipc.tracebacks import students_traceback, warning
from labkit.recording.import_hook import when_imported
from labkit.recording.torch_internals import in_place_of

MOST_DISPLAYS: Final = 48  # in a run, divided among the ranks; a saved notebook contains all of them
MOST_BYTES: Final = 12 << 20  # in a run, divided among the ranks
MOST_WARNINGS: Final = 20  # different ones, that a rank sends in a run
MOST_CHARACTERS: Final = 2_000  # of a warning
# In a warning of each DistributedOptimizer on each worker, which no program can avoid: torch sets the filter "always".
HIDDEN: Final = "`TorchScript` support for functional optimizers"
LEAST_DISPLAYS: Final = 4  # for each rank, even if there are many
LEAST_BYTES: Final = 1 << 20  # for each rank, even if there are many
METHODS: Final = {
    "_repr_html_": "text/html", "_repr_markdown_": "text/markdown", "_repr_svg_": "image/svg+xml", "_repr_png_": "image/png",
    "_repr_jpeg_": "image/jpeg", "_repr_latex_": "text/latex", "_repr_json_": "application/json",
    "_repr_javascript_": "application/javascript",
}  # fmt: skip
WIDGET: Final = "application/vnd.jupyter.widget-view+json"  # a reference to an object in the notebook's process
IPYTHONS: Final = ("IPython.core.display_functions", "IPython.core.display")  # from IPython 8 on; in IPython 7
NO_UPDATES: Final = (
    "what ranks display appears when the run is over, so no display can be updated: display the final state instead, without "
    "display_id, or print each step"
)
FILE_BACKENDS: Final = ("agg", "cairo", "pdf", "pgf", "ps", "svg", "template")  # matplotlib's backends that open no windows


class RankDisplay:
    """Displays objects below the cell, from inside a rank."""

    def __init__(self, send: Callable[[Displayed], None], *, rich: bool, size: int) -> None:
        self._send, self._rich, self._rank_pid = send, rich, os.getpid()
        self._most = max(LEAST_DISPLAYS, MOST_DISPLAYS // size)
        self._most_bytes = max(LEAST_BYTES, MOST_BYTES // size)
        self.begin()

    def begin(self) -> None:
        """Reset the limits at the beginning of a run."""
        self._sizes: list[int] = []  # of the displays, in bytes
        self._left_out = 0

    def end(self) -> None:
        """Display open figures at the end of a run, as a notebook does, and report how many displays were left out."""
        self.figures()
        if self._left_out:
            self._send(Displayed({}, left_out=self._left_out))

    def install(self) -> None:
        """Make `display` a builtin in this process, and replace IPython's display functions and matplotlib's `show`."""
        builtins.display = self.display  # type: ignore[attr-defined]  # as IPython does
        if os.environ.get("MPLBACKEND", "").lower() not in FILE_BACKENDS:
            os.environ["MPLBACKEND"] = "agg"
            if "matplotlib" in sys.modules:
                sys.modules["matplotlib"].use("agg")
        when_imported("matplotlib.pyplot", self._patch_pyplot)
        for name in IPYTHONS:
            when_imported(name, self._patch)
        when_imported("tqdm.notebook", _show_bars_as_text)

    def display(
        self,
        *objects: Any,
        metadata: Mapping[str, Any] | None = None,
        raw: bool = False,  # whether the objects are dicts of content by MIME type
        clear: bool = False,
        **options: Any,
    ) -> None:
        """Display objects below the cell, labelled with this rank; it replaces IPython's `display`."""
        if options.get("display_id") or options.get("update"):
            raise LabError(NO_UPDATES)
        if clear:
            self.clear_output()
        for thing in objects:
            bundle = (thing, {}) if raw else _bundle(thing)
            if bundle is not None:  # otherwise the object has displayed itself
                self._show(bundle[0], {**bundle[1], **(metadata or {})})

    def value(self, value: Any) -> None:
        """Display the value of a cell's last expression."""
        if self._rich and _is_rich(value):
            self.display(value)
        elif value is not None:
            print(_text(value))

    def figures(self) -> None:
        """Display pyplot's open figures, and close them."""
        pyplot: Any = sys.modules.get("matplotlib.pyplot")
        for number in pyplot.get_fignums() if pyplot is not None else ():
            figure = pyplot.figure(number)
            pyplot.close(figure)  # before displaying it: otherwise a figure in a result would also open in the notebook
            self.display(figure)

    def clear_output(self, wait: bool = False) -> None:  # noqa: ARG002  # IPython's signature
        """Remove all that this rank has displayed and printed."""
        sys.stdout.write("\x1b[2J")
        self.begin()
        if self._rich and os.getpid() == self._rank_pid:
            self._send(Displayed(None))

    def _show(self, data: Mapping[str, Any], metadata: dict[str, Any]) -> None:
        data = {kind: value for kind, value in data.items() if kind != WIDGET}
        text = data.get("text/plain", "")
        if not self._rich or os.getpid() != self._rank_pid or data.keys() <= {"text/plain"}:
            print(text)
            return
        data = {kind: _plain(kind, value) for kind, value in data.items()}
        nbytes = sum(len(value) if isinstance(value, str) else len(json.dumps(value)) for value in data.values())
        if len(self._sizes) >= self._most or sum(self._sizes) + nbytes > self._most_bytes:
            self._left_out += 1
            return
        self._sizes.append(nbytes)
        self._send(Displayed(data, metadata))

    def _patch(self, module: ModuleType) -> None:
        """Replace IPython's functions, which only print if there is no shell."""

        def publish(data: dict[str, Any], metadata: dict[str, Any] | None = None, **options: Any) -> None:
            self.display(data, raw=True, metadata=metadata, **options)

        def update(*_: Any, **__: Any) -> None:
            raise LabError(NO_UPDATES)

        ours = {
            "display": self.display, "clear_output": self.clear_output, "publish_display_data": publish, "update_display": update
        }  # fmt: skip
        vars(module).update({name: function for name, function in ours.items() if name in vars(module)})

    def _patch_pyplot(self, pyplot: Any) -> None:
        """Replace what would open windows: `plt.show()` and `figure.show()`."""
        pyplot.show = in_place_of(pyplot.show, lambda *_, **__: self.figures())
        pyplot.Figure.show = in_place_of(pyplot.Figure.show, lambda _, figure, *__, **___: self.display(figure))


def _show_bars_as_text(module: ModuleType) -> None:
    """Replace tqdm's bars for notebooks, which are widgets of the rank's own process, by those for terminals."""
    std = importlib.import_module("tqdm.std")
    vars(module).update(tqdm=std.tqdm, trange=std.trange, tqdm_notebook=std.tqdm, tnrange=std.trange)


class RankWarnings:
    """Sends each warning to the notebook when it is first issued in a run, and at the end the number of repetitions."""

    def __init__(self, send: Callable[[Warned], None]) -> None:
        self._send, self._rank_pid = send, os.getpid()
        self._repetitions: dict[str, int] = {}
        self._left_out = 0

    def install(self) -> None:
        """Replace the function with which this process shows warnings."""
        warnings.formatwarning = warning
        warnings.showwarning = self._show

    def end(self) -> None:
        """Send the numbers of repetitions at the end of a run."""
        repetitions, self._repetitions = self._repetitions, {}
        for text, count in repetitions.items():
            if count:
                self._send(Warned(text, count))
        if self._left_out:
            self._send(Warned(f"... {self._left_out:,} other warnings left out ...", 1))
            self._left_out = 0

    def _show(
        self, message: Warning | str, category: type[Warning], filename: str, lineno: int,
        file: TextIO | None = None, line: str | None = None,
    ) -> Any:  # fmt: skip
        if HIDDEN in str(message):
            return
        text = warnings.formatwarning(message, category, filename, lineno, line)[:MOST_CHARACTERS]
        if file is not None or os.getpid() != self._rank_pid:  # processes that the rank has forked are no ranks
            (file or sys.stderr or io.StringIO()).write(text)
        elif text in self._repetitions:
            self._repetitions[text] += 1
        elif len(self._repetitions) >= MOST_WARNINGS:
            self._left_out += 1
        else:
            self._repetitions[text] = 0
            self._send(Warned(text, 1))


def _is_figure(thing: Any) -> bool:
    module = sys.modules.get("matplotlib.figure")
    return module is not None and isinstance(thing, module.Figure)


def _is_rich(thing: Any) -> bool:
    """Whether an object has a rich form. Checks its class, because some objects appear to have every attribute."""
    return _is_figure(thing) or any(hasattr(type(thing), name) for name in (*METHODS, "_repr_mimebundle_", "_ipython_display_"))


def _bundle(thing: Any) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return an object's content and metadata by MIME type; None if the object has displayed itself."""
    data: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    if _is_figure(thing):
        stream = io.BytesIO()
        _, drawn = _attempt(thing.savefig, stream, format="png", bbox_inches="tight", dpi="figure")
        if drawn:
            data["image/png"] = stream.getvalue()
    elif callable(getattr(type(thing), "_ipython_display_", None)) and _attempt(thing._ipython_display_)[1]:
        return None
    elif not isinstance(thing, type):
        for name, kind in METHODS.items():
            method = getattr(type(thing), name, None)
            made, _ = _attempt(method, thing) if callable(method) else (None, False)
            if isinstance(made, tuple):
                made, metadata[kind] = made
            if made is not None:
                data[kind] = made
        bundle = getattr(type(thing), "_repr_mimebundle_", None)
        made, _ = _attempt(bundle, thing, include=None, exclude=None) if bundle else (None, False)
        made, how = made if isinstance(made, tuple) else (made, {})
        data |= made or {}
        metadata |= how or {}
    return {"text/plain": _text(thing)} | data, metadata


def _text(thing: Any) -> str:
    text, made = _attempt(repr, thing)
    return text if made else object.__repr__(thing)


def _attempt(method: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, bool]:
    """Call a method of the student's object; return its result and whether it succeeded.

    As in IPython, an error does not end the cell: the traceback is printed, and a simpler form is displayed instead.
    """
    try:
        return method(*args, **kwargs), True
    except NotImplementedError:  # the object does not support this form
        return None, False
    except Exception as error:  # noqa: BLE001  # the student's code may raise anything
        sys.stderr.write(students_traceback(error))
        return None, False


def _plain(kind: str, value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value if isinstance(value, str) else json.loads(json.dumps(value, default=repr)) if "json" in kind else str(value)
