"""What is known of a trace besides its events. A new fact is an attribute here, and an argument of `Trace`."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Final

from labkit.costs.link import Link
from labkit.costs.network import Network

LARGEST: Final = 1 << 62  # nanoseconds, bytes, and any other whole number
MOST_RANKS: Final = 1 << 31


class TraceFileError(ValueError):
    """An invalid trace file; the message is the rest of a sentence: "it ends in the middle"."""


@dataclass(frozen=True, slots=True)
class TraceInfo:
    """Facts about a trace; their meaning is that of `Trace`'s arguments."""

    ranks: tuple[str, ...]
    dropped: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    nodes: tuple[int, ...] = ()
    link: Link | Network | None = None
    replayed: bool = False
    simulated: int = 0
    cores: float = 0.0
    clock_error_ns: int = 0

    def arguments(self) -> dict[str, Any]:
        """Return the facts by name, as arguments of `Trace`."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_file(cls, entries: dict[str, Any]) -> TraceInfo:
        """Read the entries of a trace file.

        Raises:
            KeyError: an entry is missing.
            TraceFileError: an entry is invalid.
        """
        ranks, dropped, notes, nodes = entries["ranks"], entries["dropped"], entries.get("notes", []), entries.get("nodes", [])
        if not is_list(ranks, str) or not is_list(notes, str):
            raise TraceFileError("the names of its ranks, or its notes, are not strings")
        if not is_list(dropped, int) or len(dropped) not in (0, len(ranks)) or any(d < 0 for d in dropped):
            raise TraceFileError("its numbers of lost records do not match its ranks")
        if not is_list(nodes, int) or len(nodes) not in (0, len(ranks)):
            raise TraceFileError("its numbers of nodes do not match its ranks")
        replayed = entries.get("replayed", False)
        if not isinstance(replayed, bool):
            raise TraceFileError("it does not say whether it was replayed")
        simulated = entries.get("simulated", 0)
        if not is_list([simulated], int) or (simulated and not len(ranks) <= simulated < MOST_RANKS):
            raise TraceFileError("it does not say how many ranks were simulated")
        cores = entries.get("cores", 0.0)
        if not isinstance(cores, int | float) or isinstance(cores, bool) or not 0 <= cores < math.inf:
            raise TraceFileError("its number of cores is not a number")
        clock_error_ns = entries.get("clock_error_ns", 0)
        if not is_list([clock_error_ns], int) or clock_error_ns < 0:
            raise TraceFileError("it does not say by how much the clocks of its machines may differ")
        link = None if entries.get("link") is None else _link(entries["link"], simulated or len(ranks))
        facts = (tuple(ranks), tuple(dropped), tuple(notes), tuple(nodes), link)
        return cls(*facts, replayed=replayed, simulated=simulated, cores=float(cores), clock_error_ns=clock_error_ns)


def _link(entries: dict[str, Any], ranks: int) -> Link | Network:
    """Read a link or a network, as `dataclasses.asdict` writes it."""
    try:
        if "nodes" not in entries:
            return Link(**entries)
        return Network(**entries | {level: Link(**entries[level]) for level in ("inside", "between")}).of(ranks)
    except (TypeError, ValueError, KeyError):
        raise TraceFileError("its link is invalid") from None


def is_list(value: Any, kind: type) -> bool:
    """Whether a value read from JSON is a list of strings or of whole numbers, none of them too large for a trace."""
    return isinstance(value, list) and all(
        isinstance(item, kind) and not isinstance(item, bool) and (not isinstance(item, int) or abs(item) <= LARGEST)
        for item in value
    )
