"""The rich output (figures, HTML) of ranks in one run, shown below the cell at its end: labelled, in rank order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from labkit.ipc.protocol import Displayed

MOST: Final = 64  # of all ranks together; each rank bounds its own


class Displays:
    """The displays of all ranks in one run.

    Args:
        names: names of the ranks, in rank order.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._shown: dict[int, list[Displayed]] = {}  # by rank
        self._left_out: dict[int, int] = {}

    def take(self, rank: int, shown: Displayed) -> None:
        """Add a display of a rank, its update or removal, or a count of displays that the rank left out."""
        mine = self._shown.setdefault(rank, [])
        if shown.data is None:
            mine.clear()
        elif shown.left_out:
            self._left_out[rank] = self._left_out.get(rank, 0) + shown.left_out
        elif not shown.update:
            mine.append(shown)
        else:
            mine[:] = [shown if shown.key == old.key else old for old in mine]

    def finish(self, write: Callable[[str], None]) -> None:
        """Show all displays below the cell; call it on the thread that runs the cell.

        Args:
            write: prints the labels.
        """
        room = MOST
        for rank in sorted(self._shown):
            name, mine = self._names[rank], self._shown[rank]
            kept, left_out = mine[:room], self._left_out.get(rank, 0) + len(mine[room:])
            room -= len(kept)
            for number, shown in enumerate(kept):
                if number == 0:
                    write(f"[{name}]\n")
                _display(shown)
            if left_out:
                write(f"[{name}] ... {left_out:,} more left out ...\n")


def _display(shown: Displayed) -> None:
    from IPython.display import display

    data: Any = shown.data
    display(data, raw=True, metadata=shown.metadata)
