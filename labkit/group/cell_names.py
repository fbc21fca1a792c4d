"""The names of a `%%ranks` cell: sent from the notebook, assigned in the ranks, and lost when ranks end."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from labkit.errors.lists import listed
from labkit.group.pool_state import Member
from labkit.ipc import pickling

MOST_NAMES: Final = 8  # in the message about lost names


class CellNames:
    """The names sent with one cell.

    A name is sent if the notebook assigned it after it was last sent, and after the ranks last assigned it themselves.

    Args:
        home: the notebook's namespace.
        read: the names that the cell reads.
        written: the names that the cell certainly assigns.
        label: the cell's name for the student: "cell 5".
        members: the ranks that run it, if they have been started.

    Attributes:
        to_send: the values that at least one of the ranks lacks, by name.
    """

    def __init__(
        self, home: Mapping[str, Any], read: Collection[str], written: Collection[str], label: str, members: Sequence[Member]
    ) -> None:
        self._home, self._written, self._label = home, written, label
        known = [m.notebook_values for m in members] or [{}]
        self.to_send = {n: home[n] for n in read if any(n not in b or b[n] is not home[n] for b in known)}

    def remove_unsendable(self) -> None:
        """Leave out names that cannot be sent and that the cell assigns, probably before it reads them."""
        for name in self.to_send.keys() & set(self._written):
            if not pickling.can_be_sent(self.to_send[name]):
                del self.to_send[name]

    def send_to(self, member: Member) -> set[str]:
        """Note that the cell is sent to a rank, and return the names in `to_send` that the rank has already."""
        known = member.notebook_values
        present = {n for n, value in self.to_send.items() if n in known and known[n] is value}
        known.update(self.to_send)
        known.update({n: self._home.get(n) for n in self._written})  # until the rank reports what it has assigned
        return present

    def learn(self, members: Iterable[Member]) -> None:
        """Note which names the cell, now finished, has assigned in the ranks."""
        for member in members:
            member.notebook_values.update({n: self._home.get(n) for n in member.assigned})
            member.made.update(dict.fromkeys(member.assigned, self._label))
            member.assigned = []


def lost_names(members: Iterable[Member]) -> str:
    """A sentence about the names that cells have assigned in ranks that have ended; "" if there are none."""
    made = {name: label for m in members for name, label in m.made.items()}
    if not made:
        return ""
    by_cell: dict[str, list[str]] = {}
    for name in list(made)[:MOST_NAMES]:
        by_cell.setdefault(made[name], []).append(name)
    names = "; ".join(f"{', '.join(names)} ({label})" for label, names in by_cell.items())
    more = f"; and {len(made) - MOST_NAMES} more" if len(made) > MOST_NAMES else ""
    cells = list(dict.fromkeys(made.values()))
    lost = f"these names of %%ranks cells are lost: {names}{more}. Run {listed(cells)} again."
    return f"the ranks have ended, so {lost}"
