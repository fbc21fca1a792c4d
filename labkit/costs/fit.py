"""Latency and bandwidth from times that were measured: a robust fit of `costs.link`'s model, and how good it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from labkit.costs.link import Link, rounds_and_share
from labkit.errors.exceptions import LabError
from labkit.errors.units import in_words

__all__ = ["Fit", "fit"]

ITERATIONS: Final = 60
SMALLEST_RESIDUAL: Final = 1e-4  # relative: a point that is hit exactly does not count for ever more


@dataclass(frozen=True, slots=True)
class Fit:
    """One operation: the times measured, and the latency and bandwidth that explain them best.

    Args:
        operation: as torch.distributed calls it; "send" is one way of a message there and back, "rpc" of a remote call.
        ranks: how many took part.
        nbytes: the sizes, as `costs.link.rounds_and_share` counts them.
        seconds: the median time for each.
        latency_us: α of the model, microseconds for each of its rounds.
        gbit_per_s: B of the model; infinite where larger messages took no longer.
    """

    operation: str
    ranks: int
    nbytes: tuple[int, ...]
    seconds: tuple[float, ...]
    latency_us: float
    gbit_per_s: float

    def predicted_s(self, nbytes: float) -> float:
        """What the fit says for a size, in seconds."""
        rounds, share = rounds_and_share(self.operation, self.ranks)
        return rounds * self.latency_us * 1e-6 + share * nbytes * 8e-9 / self.gbit_per_s

    @property
    def residuals(self) -> tuple[float, ...]:
        """Measured over fitted, less 1, for each size."""
        return tuple(s / self.predicted_s(n) - 1 for n, s in zip(self.nbytes, self.seconds, strict=True))

    @property
    def error(self) -> float:
        """How far a point lies from the fit in the median, as a share of the fit: 0.05 is good, 0.5 is no link of this kind."""
        return float(np.median(np.abs(self.residuals)))

    @property
    def worst(self) -> float:
        """The same for the point that lies farthest."""
        return max(map(abs, self.residuals))

    @property
    def in_short(self) -> tuple[str, str]:
        """Latency and bandwidth with their units."""
        bandwidth = in_words(self.gbit_per_s * 1e9, "bit/s") if math.isfinite(self.gbit_per_s) else "not seen"
        return in_words(self.latency_us * 1e-6, "s"), bandwidth

    @property
    def link(self) -> Link:
        """The fit as a link.

        Raises:
            LabError: larger messages took no longer than small ones, so that nothing is known of the bandwidth.
        """
        if not math.isfinite(self.gbit_per_s):
            raise LabError(
                f"{self.operation}: {in_words(max(self.nbytes), 'B')} took no longer than {in_words(min(self.nbytes), 'B')}, "
                "which tells nothing of the bandwidth. Measure again, with larger messages or while less else runs."
            )
        return Link(gbit_per_s=self.gbit_per_s, latency_us=self.latency_us, name=f"measured by {self.operation}")


def fit(operation: str, ranks: int, nbytes: Sequence[int], seconds: Sequence[float]) -> Fit:
    """Find the latency and the bandwidth, neither negative, for which the sum of all relative errors is least.

    Relative, so that microseconds count as much as seconds; their sum and not that of their squares, so that a single time which
    the system has spoilt does not move the rest. Found by least squares with weights that are adapted again and again.

    Args:
        operation: as torch.distributed calls it.
        ranks: how many took part.
        nbytes: sizes, at least two different ones.
        seconds: how long each took.

    Source: P. W. Holland, R. E. Welsch, "Robust regression using iteratively reweighted least-squares", 1977.
    """
    rounds, share = rounds_and_share(operation, ranks)
    times = np.array(seconds, np.float64)
    terms = np.stack([np.full(len(times), float(rounds)), share * np.array(nbytes, np.float64)], 1) / times[:, None]
    weights = np.ones(len(times))
    found = np.zeros(2)
    for _ in range(ITERATIONS):
        found = _not_negative(terms * weights[:, None], weights)
        weights = 1 / np.sqrt(np.maximum(np.abs(terms @ found - 1), SMALLEST_RESIDUAL))
    latency_s, s_per_byte = found.tolist()
    gbit_per_s = 8e-9 / s_per_byte if s_per_byte > 0 else math.inf
    return Fit(operation, ranks, tuple(nbytes), tuple(seconds), latency_s * 1e6, gbit_per_s)


def _not_negative(terms: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Least squares for two unknowns of which none is negative: the free solution, or that with one of them 0."""
    free: np.ndarray = np.linalg.lstsq(terms, wanted, rcond=None)[0]
    if (free >= 0).all():
        return free
    alone = [np.maximum(0, terms[:, i] @ wanted / (terms[:, i] @ terms[:, i])) * np.eye(2)[i] for i in (0, 1)]
    return min(alone, key=lambda x: float(np.sum((terms @ x - wanted) ** 2)))
