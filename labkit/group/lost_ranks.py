"""Ranks without which a run goes on after their process has ended: workers of a chief with parameter servers."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.errors.exceptions import RankFailure
from labkit.errors.units import time_in_words
from labkit.ipc.options import Options
from labkit.worker.runtimes.base import Runtime


class LostRanks(dict[int, RankFailure]):
    """How these ranks ended, by their numbers.

    Args:
        options: the group's options.
        kind: the class of its runtime.
    """

    def __init__(self, options: Options, kind: type[Runtime]) -> None:
        super().__init__()
        self._replaceable = {r for r in range(len(options.names)) if kind.replaceable(options.jobs, r)}

    def take(self, failure: RankFailure, on: Sequence[int]) -> bool:
        """Add a rank, if the run goes on without it: a rank that uses it was called, and another one like it is left.

        Args:
            failure: the end of its process.
            on: the ranks that were called.

        Returns:
            whether the run goes on.
        """
        left = self._replaceable - self.keys() - {failure.rank}
        if failure.rank not in self._replaceable or not left or self._replaceable.issuperset(on):
            return False
        self[failure.rank] = failure
        return True

    def notes(self, start_ns: int) -> list[str]:
        """Return a line for each of these ranks, after a successful run.

        Args:
            start_ns: start of the run.
        """
        ends = [(f, time_in_words(f.at_ns - start_ns)) for f in self.values()]
        return [f"{f.name} ended {after} after the start: {f.headline}. The others went on without it." for f, after in ends]

    def doings(self) -> dict[int, str]:
        """Return a line for each of these ranks, for the report of another one's failure."""
        return {rank: f"{f.name} had ended before: {f.headline}" for rank, f in self.items()}
