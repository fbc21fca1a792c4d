"""Estimated widths of texts in a drawing whose font is unknown, and statuses shortened to fit."""

from __future__ import annotations

from typing import Final

# Widths relative to the font size, those of DejaVu Sans Bold: the widest font that systems use for their interfaces.
NARROW: Final = frozenset("ijlIft.,:;'|![]() -")
WIDEST: Final = frozenset("mwMW@%…")
SINCE: Final = " · "  # between a rank's operation and how long it has lasted


def text_width(text: str) -> float:
    """The maximum width of a text, in units of its font size."""
    return sum(0.46 if c in NARROW else 1.13 if c in WIDEST else 0.86 if c.isupper() else 0.72 for c in text)


def fitting_status(room: float, status: str) -> str:
    """A rank's status, shortened to `room` units of its font size: the operation's name is cut, never the duration."""
    name, dot, since = status.rpartition(SINCE)
    if not dot:
        name, since = since, ""
    cut = ""
    while name and text_width(name + cut + dot + since) > room:
        name, cut = name[:-1], "…"
    return name.rstrip() + cut + dot + since
