"""`explore`: the interactive timeline."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from labkit.errors.wrong_calls import public_api
from labkit.plots.view import view_of
from labkit.tracing.step_times import HasTrace, trace_of
from labkit.tracing.trace import Trace

if TYPE_CHECKING:
    from labkit.plots.explorer import Explorer
    from labkit.plots.figure import LabFigure


@public_api
def explore(run: HasTrace | Trace, *, step: int | range | str | None = None) -> Explorer | LabFigure:
    """Draw an interactive timeline of a run: hover over a bar to read its details, zoom, and isolate a rank.

    The cell's output is the image that `timeline` draws. While the kernel is alive, the page covers the image with the
    interactive timeline and requests data from the kernel as you zoom. The notebook file stores the image,
    and the run for `make site`, whose pages have no kernel.

    Args:
        run: a run or a trace.
        step: the steps to show first: a step number (negative: from the end), a range, "median" or "all". Default: as
            in `timeline`.

    Returns:
        a widget, shown when it is a cell's last expression. It keeps the trace in memory until its `close()`; the image
        remains after that. Without anywidget: the figure of `timeline`.

    Raises:
        LabError: the trace is empty, has no such step, or matplotlib is not installed.
        TypeError: `run` is neither a run nor a trace.
    """
    view = view_of(trace_of(run, "explore"), step, "")
    try:
        from labkit.plots.explorer import Explorer
    except ModuleNotFoundError as error:
        if error.name not in ("anywidget", "ipywidgets", "traitlets"):
            raise
        from labkit.plots.timeline import figure_of

        print(f"{error.name} is not installed, so this is a picture only: %pip install anywidget", file=sys.stderr)
        return figure_of(view.whole, "", step)
    return Explorer(view, step)
