"""A frame of the live picture as HTML: for wide and narrow pages, and for notebooks that are not trusted.

JupyterLab removes styles, scripts and drawings from the outputs of a notebook that is not trusted, and keeps the texts
of the drawings. So the drawings are hidden unless the style is there, and instead a sentence says what happened.
"""

from __future__ import annotations

from typing import Final

from labkit.plots.image import STAYS
from labkit.plots.live.drawing import NARROW, STILL, WIDE, svg
from labkit.plots.live.frame import LiveFrame

LIMIT_PX: Final = 800  # of the width, from which on the wide layout is used
_STYLE: Final = (
    f"{STAYS}<style>.labkit-live{{display:block!important;container-type:inline-size;"
    # The theme's text colour in JupyterLab and in VS Code, otherwise the page's.
    "color:var(--jp-ui-font-color1,var(--vscode-editor-foreground,inherit));"
    "font-family:var(--jp-ui-font-family,system-ui,sans-serif);font-size:11px}"
    ".labkit-live~.labkit-not-live{display:none}"
    f"@container (max-width:{LIMIT_PX - 0.02}px){{.labkit-wide{{display:none}}}}"
    f"@container (min-width:{LIMIT_PX}px){{.labkit-narrow{{display:none}}}}</style>"
)
# Shift+Enter may leave the picture below the window; a picture far away from the window does not call the reader back.
_COME: Final = (
    "<script>{const shown=document.currentScript.parentElement,{top,bottom}=shown.getBoundingClientRect();"
    "if(top<2*innerHeight&&bottom>-innerHeight)shown.scrollIntoView({block:'nearest'})}</script>"
)


def page(frame: LiveFrame, name: str, *, first: bool = False) -> str:
    """Return a frame as HTML.

    Args:
        frame: the frame.
        name: a prefix that makes the ids unique in the page.
        first: whether it is the first frame of its run, which comes into the window.
    """
    drawings = (
        f'<div class="labkit-wide">{svg(frame, f"{name}-w", WIDE)}</div>'
        f'<div class="labkit-narrow">{svg(frame, f"{name}-n", NARROW)}</div>'
    )
    return (
        f'{_STYLE}<div class="labkit-live" hidden="hidden">{drawings}</div>'
        f'<p class="labkit-not-live">{" ".join(STILL)}</p>{_COME if first else ""}'
    )
