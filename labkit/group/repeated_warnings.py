"""The warnings of all ranks in one run: each is shown once, with the ranks that raised it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from labkit.errors.lists import listed, numbers_in_words

MOST_NAMES: Final = 4  # in a label, where ranks have names of their own


class GroupedWarnings:
    """Collects the warnings of ranks.

    Args:
        names: names of the ranks, in rank order.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._counts: dict[str, dict[int, int]] = {}  # by text and rank, how many times it was raised
        self._order: dict[tuple[int, str], int] = {}  # of arrival, by rank and text

    def __bool__(self) -> bool:
        return bool(self._counts)

    def take(self, rank: int, text: str, count: int) -> None:
        """Add a warning that a rank has raised `count` times."""
        ranks = self._counts.setdefault(text, {})
        ranks[rank] = ranks.get(rank, 0) + count
        self._order.setdefault((rank, text), len(self._order))

    def lines(self) -> list[str]:
        """All warnings with labels, those of the lowest ranks first."""
        ordered = sorted(self._counts.items(), key=lambda item: (min(item[1]), self._order[min(item[1]), item[0]]))
        return [line for text, ranks in ordered for line in self._labelled(text, ranks)]

    def _labelled(self, text: str, ranks: dict[int, int]) -> list[str]:
        first, *more = text.rstrip("\n").split("\n")
        often = max(ranks.values())
        if often > 1:
            first += f" ({'up to ' * (min(ranks.values()) < often)}{often:,} times)"
        label = self._label(sorted(ranks))
        return [f"[{label}] {line}" for line in (first, *more)]

    def _label(self, ranks: list[int]) -> str:
        names = [self._names[rank] for rank in ranks]
        if len(ranks) == 1:
            return names[0]
        if names == [f"rank {rank}" for rank in ranks]:
            return f"ranks {numbers_in_words(ranks)}"
        if len(names) == len(self._names) > MOST_NAMES:
            return f"all {len(names)} ranks"
        return listed(names, most=MOST_NAMES)
