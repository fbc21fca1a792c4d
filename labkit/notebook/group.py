"""`lab.Group`: a group of ranks whose runs can be watched in the notebook."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from labkit.group import group
from labkit.group.picture import Picture
from labkit.plots.live.view import Live

__all__ = ["Group"]


class Group(group.Group):  # noqa: D101  # its documentation is the base's
    __doc__ = group.Group.__doc__
    picture: ClassVar[Callable[[], Picture] | None] = Live
