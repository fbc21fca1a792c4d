"""The look of all figures: the style sheet, colours of texts, and how a figure is made and described."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from labkit.errors.exceptions import missing
from labkit.errors.wrong_calls import WrongValueError
from labkit.plots.image import WIDTH_IN

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK: Final = "#787878"  # text and lines on the page: its contrast is 4.4 : 1 on white and on JupyterLab's dark page
INKS: Final = {"light": "white", "dark": "#16191F", "page": INK}  # text on bars
# Behind a text on stripes: the text is dark, since the page behind the stripes may be light or dark.
CHIP: Final = {"facecolor": "#D9C3B2", "edgecolor": "none", "pad": 0.8}
# For characters that matplotlib's own font lacks: of each line the first font that is installed.
_MORE_FONTS: Final = (
    ("Noto Sans CJK SC", "Noto Sans CJK JP", "Source Han Sans SC", "Microsoft YaHei", "PingFang SC", "Hiragino Sans GB",
     "WenQuanYi Micro Hei", "WenQuanYi Zen Hei", "Droid Sans Fallback", "Arial Unicode MS"),
    ("Noto Emoji", "Segoe UI Emoji", "Symbola"),  # in outlines: matplotlib does not draw fonts of coloured bitmaps
)  # fmt: skip
_STYLE_SHEET: Final = Path(__file__).with_name("labkit.mplstyle")


def pyplot() -> Any:
    """Import matplotlib.pyplot, which is only needed to draw; a LabError if it is not installed."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise missing("matplotlib", "plot") from None
    # Initializes the backend. Jupyter's turns interactive mode on at that moment; inside `labkit_style`, leaving the
    # context would turn it off again, and the notebook would show only its first figure.
    plt.draw_if_interactive()
    return plt


def new_figure(**options: Any) -> Figure:
    """Make a figure that shows itself in a notebook; `options` are those of `matplotlib.pyplot.figure`."""
    from labkit.plots.figure import LabFigure

    made: Figure = pyplot().figure(FigureClass=LabFigure, **options)
    return made


@contextmanager
def axes_for(ax: Axes | None, height_in: float, gridspec_kw: dict[str, Any] | None = None) -> Iterator[Axes]:
    """A context in labkit's style, with the axes to draw into: `ax`, or those of a new figure as wide as the page."""
    pyplot()
    with labkit_style(ax):
        if ax is None:
            figure = new_figure(figsize=(WIDTH_IN, height_in), layout=None if gridspec_kw else "constrained")
            ax = figure.subplots(gridspec_kw=gridspec_kw)
        yield ax


def describe(ax: Axes, alt_text: str, numbers: Mapping[str, Any] | None = None) -> Axes:
    """Give the figure of these axes its alternative text, unless the figure is the student's own; return the axes.

    `numbers` are what it shows, by MIME type, for programs that read the notebook.
    """
    from labkit.plots.figure import LabFigure

    figure = ax.get_figure(root=True)
    if isinstance(figure, LabFigure):
        figure.alt_text = alt_text
        figure.numbers = numbers or {}
    return ax


def labkit_style(ax: Axes | None = None) -> AbstractContextManager[None]:
    """A context in which figures have labkit's style; a WrongValueError if the student's axes are polar, say."""
    import matplotlib as mpl
    import matplotlib.style
    from matplotlib.font_manager import fontManager

    kind = getattr(ax, "name", "rectilinear")
    if kind != "rectilinear":
        raise WrongValueError(f"ax: these axes are {kind}; expected plain ones, as plt.subplots() makes them")
    installed = {font.name for font in fontManager.ttflist}
    more = (next((name for name in names if name in installed), None) for names in _MORE_FONTS)
    own = {
        # `savefig` outside this context writes the figure's own colour, and a file has no theme; notebooks drop it.
        "figure.facecolor": "white",
        "text.parse_math": False,  # texts hold the student's names, in which "$" is a character like any other
        "font.family": [*mpl.rcParams["font.family"], *filter(None, more)],
    }
    return matplotlib.style.context([_STYLE_SHEET, own])


def shortened(text: str, most: int) -> str:
    """Shorten a text in its middle to at most `most` characters: names of methods often differ in their last words."""
    if len(text) <= most:
        return text
    end = (most - 1) // 2
    return f"{text[: most - 1 - end]}…{text[-end:]}"
