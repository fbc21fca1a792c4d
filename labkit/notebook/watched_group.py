"""`lab.Group`: a group of ranks with a live picture for the notebook."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from labkit.group import group
from labkit.group.collector import Picture


def _live() -> Picture:
    from labkit.plots.live.live import Live  # imported here, so that groups that are not watched start without it

    return Live()


class Group(group.Group):
    """A group with the live picture. `help(lab.Group)` shows the base class's documentation."""

    __doc__ = group.Group.__doc__
    picture: ClassVar[Callable[[], Picture] | None] = staticmethod(_live)
