"""`lab.Group`: a group of ranks whose runs can be watched in the notebook."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from labkit.group import group
from labkit.group.picture import Picture

__all__ = ["Group"]


def _live() -> Picture:
    from labkit.plots.live.view import Live  # not above: a group whose runs nobody watches starts without it

    return Live()


class Group(group.Group):
    """A group with the live picture. What students read of it is the documentation of its base."""

    __doc__ = group.Group.__doc__
    picture: ClassVar[Callable[[], Picture] | None] = staticmethod(_live)
