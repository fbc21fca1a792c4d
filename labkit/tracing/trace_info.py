"""What is known of a trace besides its events. A new fact is an attribute here, and an argument of `Trace`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["TraceFileError", "TraceInfo", "is_list"]


class TraceFileError(ValueError):
    """An invalid trace file; the message is the rest of a sentence: "it ends in the middle"."""


@dataclass(frozen=True, slots=True)
class TraceInfo:
    """Facts about a trace; their meaning is that of `Trace`'s arguments."""

    ranks: tuple[str, ...]
    dropped: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    nodes: tuple[int, ...] = ()

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
        return cls(tuple(ranks), tuple(dropped), tuple(notes), tuple(nodes))


def is_list(value: Any, kind: type) -> bool:
    """Whether a value read from JSON is a list of strings or of whole numbers."""
    return isinstance(value, list) and all(isinstance(item, kind) and not isinstance(item, bool) for item in value)
