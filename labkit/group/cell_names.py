"""The names of a `%%ranks` cell: what it takes from the notebook, what it leaves in the ranks, and what is gone with them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from labkit.errors.lists import listed
from labkit.group.member import Member

__all__ = ["CellNames", "lost_names"]

MOST_NAMES: Final = 8  # in the line that says which are gone


class CellNames:
    """What travels with one cell.

    A name travels if the notebook assigned it after it last travelled, and after the ranks last assigned it themselves.

    Args:
        home: the notebook's namespace.
        read: the names that the cell takes from it.
        written: the names that the cell surely assigns.
        label: what the student calls the cell.
        members: the ranks that run it, if they are there already.
    """

    def __init__(
        self, home: Mapping[str, Any], read: Collection[str], written: Collection[str], label: str, members: Sequence[Member]
    ) -> None:
        self._home, self._written, self._label = home, written, label
        known = [m.notebook_values for m in members] or [{}]
        self.due = {n: home[n] for n in read if any(n not in b or b[n] is not home[n] for b in known)}

    def send_to(self, member: Member) -> set[str]:
        """The cell goes to a rank: which of the names that are due it has already."""
        known = member.notebook_values
        there = {n for n, value in self.due.items() if n in known and known[n] is value}
        known.update(self.due)
        known.update({n: self._home.get(n) for n in self._written})  # as long as the rank has not told what it has assigned
        return there

    def learn(self, members: Iterable[Member]) -> None:
        """The cell is over: what it has assigned there is the ranks' own."""
        for member in members:
            member.notebook_values.update({n: self._home.get(n) for n in member.assigned})
            member.made.update(dict.fromkeys(member.assigned, self._label))
            member.assigned = []


def lost_names(members: Iterable[Member]) -> str:
    """What is gone with these ranks of what cells have made in them, in a sentence; "" where that is nothing."""
    made = {name: label for m in members for name, label in m.made.items()}
    if not made:
        return ""
    by_cell: dict[str, list[str]] = {}
    for name in list(made)[:MOST_NAMES]:
        by_cell.setdefault(made[name], []).append(name)
    names = "; ".join(f"{', '.join(names)} ({label})" for label, names in by_cell.items())
    more = f"; and {len(made) - MOST_NAMES} more" if len(made) > MOST_NAMES else ""
    cells = list(dict.fromkeys(made.values()))
    lost = f"what %%ranks cells had made there is gone: {names}{more}. Run {listed(cells)} again."
    return f"fresh ranks take the place of the old ones, and {lost}"
