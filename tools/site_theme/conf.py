"""Sphinx's settings for the site; tools/site.py prepares what it reads."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from latex2mathml.converter import convert

project = "labkit"
extensions = ["myst_nb"]
html_theme = "sphinx_book_theme"
html_title = "labkit"
exclude_patterns = ["_static"]
html_css_files = ["explorer.css", "site.css"]
html_js_files = [("explorer.js", {"defer": "defer"}), ("site.js", {"defer": "defer"})]
html_copy_source = False
html_theme_options = {
    "show_toc_level": 2,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "navigation_with_keys": False,
    "navbar_start": [],
    "navbar_center": [],
    "navbar_end": [],
    "navbar_persistent": [],  # the sidebar has it all
}
html_math_renderer = "mathml"
nb_execution_mode = "off"
nb_merge_streams = True
myst_enable_extensions = ["amsmath", "dollarmath"]
myst_heading_anchors = 4
suppress_warnings = [
    "mystnb.unknown_mime_type",  # labkit's own data beside a picture
    "misc.highlighting_failure",  # cells with magics, and cells that are meant to fail
    "myst.header",  # a lesson's part may begin with a heading of the third level
]


def _formula(self: Any, node: Any) -> None:
    """Write a formula as MathML, which browsers draw without a library."""
    display = "block" if isinstance(node, nodes.math_block) else "inline"
    self.body.append(convert(node.astext(), display=display))
    raise nodes.SkipNode


def setup(app: Any) -> None:
    """Register the renderer of formulas."""
    app.add_html_math_renderer("mathml", (_formula, None), (_formula, None))
