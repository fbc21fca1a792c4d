"""The timeline under the pointer: `explore`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.errors.exceptions import missing
from labkit.errors.wrong_calls import public_api
from labkit.plots.style import HasTrace, trace_of
from labkit.plots.timeline import view_of
from labkit.tracing.trace import Trace

if TYPE_CHECKING:
    from labkit.plots.explorer import Explorer

__all__ = ["explore"]


@public_api
def explore(run: HasTrace | Trace, *, step: int | range | str | None = None) -> Explorer:
    """The timeline of a run, to look into: point at a bar to read what it was, zoom, and look at one rank alone.

    The cell's output is the image that `timeline` draws. While the notebook's kernel lives, the page lays over it what can be
    explored, and asks the kernel for what a zoom needs; the notebook's file holds the image only.

    Args:
        run: a run or a trace.
        step: where to begin: a number of a step (negative: from the end), a range, or "all", as in `timeline`. Default: as there.

    Returns:
        A widget, which a cell's last line shows. It holds the trace until its `close()`, after which the image stays.

    Raises:
        LabError: there is nothing to draw, no such step, or a library is not installed.
        TypeError: something else than a run or a trace was given.
    """
    view = view_of(trace_of(run, "explore"), step, "")
    try:
        from labkit.plots.explorer import Explorer
    except ModuleNotFoundError as error:
        if error.name not in ("anywidget", "ipywidgets", "traitlets"):
            raise
        raise missing("anywidget", "course") from None
    return Explorer(view, step)
