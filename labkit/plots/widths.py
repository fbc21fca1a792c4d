"""How wide texts are in a drawing that does not know its font, and how a status is cut to the room there is."""

from __future__ import annotations

from typing import Final

__all__ = ["status_in", "wide"]

# Widths as shares of the font's size: those of the bold type of DejaVu Sans, the widest that systems use for their menus.
NARROW: Final = frozenset("ijlIft.,:;'|![]() -")
WIDEST: Final = frozenset("mwMW@%…")


def wide(text: str) -> float:
    """How wide a text is at most, in units of its font's size."""
    return sum(0.46 if c in NARROW else 1.13 if c in WIDEST else 0.86 if c.isupper() else 0.72 for c in text)


def status_in(room: float, status: str) -> str:
    """A rank's status in so much room, in units of its font's size: the operation's name is cut, not how long it lasts."""
    name, dots, since = status.rpartition("…")
    if not dots:
        name, since = since, ""
    while name and wide(name + dots + since) > room:
        name, dots = name[:-1], "…"
    return name.rstrip() + dots + since
