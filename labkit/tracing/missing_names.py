"""Notes about names that a run's records lack, because its program used more different names than there is room for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from labkit.recording.ring_buffer import OTHER_SCALARS, OTHER_SPANS

_LOST: Final = {
    "spans": f"spans have more different names than can be kept; further ones are called '{OTHER_SPANS}'. Let a span's name say "
    "what is done, not which repetition it is: span('forward'), not span(f'forward {i}').",
    "values": f"`record` was given more different names than can be kept; further ones are called '{OTHER_SCALARS}'.",
    "sizes": "tensors of more different shapes were sent than can be kept; whether further ones fit on all ranks is not checked.",
    "groups": "there were more process groups, tags and lines of code than can be kept; who waits for whom may not be found.",
}


def about_names(kinds: Iterable[str]) -> list[str]:
    """A line for each kind of name (see `recording.ring_buffer.NO_ROOM`) for which a rank had no room."""
    found = set(kinds)
    return [words for kind, words in _LOST.items() if kind in found]
