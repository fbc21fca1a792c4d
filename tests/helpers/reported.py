"""What runs report about deadlocks and mismatches, as typed values, before it becomes words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from labkit.group import deadlock_words, run
from labkit.group.deadlock import Deadlock, Reason, first_mismatch
from labkit.recording.schema import Pending


@dataclass
class Reported:
    """What has been reported so far.

    Attributes:
        deadlocks: the deadlocks.
        mismatches: of each mismatch, its two sides: a rank's name, or its number, and its operation.
    """

    deadlocks: list[Deadlock] = field(default_factory=list)
    mismatches: list[Sequence[tuple[Any, Pending]]] = field(default_factory=list)

    def deadlock(self) -> tuple[Reason, list[tuple[int, str]]]:
        """The last deadlock's reason, and the ranks and operations that show it."""
        last = self.deadlocks[-1]
        return last.reason, [(rank, operation.name) for rank, operation in last.waits]

    def lines(self) -> list[str]:
        """Where the student's program issued the last deadlock's operations."""
        return [operation.line for _, operation in self.deadlocks[-1].waits]


def collect(monkeypatch: pytest.MonkeyPatch) -> Reported:
    """Collect what later runs report."""
    reported, in_words = Reported(), deadlock_words.deadlock_in_words

    def deadlock_in_words(deadlock: Deadlock, names: Sequence[str]) -> tuple[str, str]:
        reported.deadlocks.append(deadlock)
        return in_words(deadlock, names)

    def first(operations: Sequence[tuple[Any, Pending]]) -> Any:
        sides = first_mismatch(operations)
        if sides:
            reported.mismatches.append(sides)
        return sides

    monkeypatch.setattr(run, "deadlock_in_words", deadlock_in_words)
    monkeypatch.setattr(deadlock_words, "first_mismatch", first)
    return reported
