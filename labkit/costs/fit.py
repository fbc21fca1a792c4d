"""Latency and bandwidth from measured times: a robust fit of the model in `costs.link`, and its errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from labkit.costs.link import Link, rounds_and_share
from labkit.errors.exceptions import LabError
from labkit.errors.units import in_words

ITERATIONS: Final = 60
SMALLEST_RESIDUAL: Final = 1e-4  # relative; bounds the weight of a point that the fit hits exactly


@dataclass(frozen=True, slots=True)
class Fit:
    """The measured times of one operation, and the latency and bandwidth that fit them best."""

    operation: str  # its name in torch.distributed; "send" is one way of a message and its reply, "rpc" of a remote call
    ranks: int  # the number of participating ranks
    nbytes: tuple[int, ...]  # the sizes, as `costs.link.rounds_and_share` counts them
    seconds: tuple[float, ...]  # the median time of each size
    latency_us: float  # α of the model
    gbit_per_s: float  # B of the model; infinite if larger messages took no longer

    def predicted_s(self, nbytes: float) -> float:
        """The fitted time of a size, in seconds."""
        rounds, share = rounds_and_share(self.operation, self.ranks)
        return rounds * self.latency_us * 1e-6 + share * nbytes * 8e-9 / self.gbit_per_s

    @property
    def residuals(self) -> tuple[float, ...]:
        """Measured time divided by fitted time, minus 1, for each size."""
        return tuple(s / self.predicted_s(n) - 1 for n, s in zip(self.nbytes, self.seconds, strict=True))

    @property
    def error(self) -> float:
        """The median relative error: 0.05 is a good fit; with 0.5, the model does not describe this link."""
        return float(np.median(np.abs(self.residuals)))

    @property
    def worst(self) -> float:
        """The largest relative error."""
        return max(map(abs, self.residuals))

    @property
    def in_short(self) -> tuple[str, str]:
        """Latency and bandwidth with their units."""
        bandwidth = in_words(self.gbit_per_s * 1e9, "bit/s") if math.isfinite(self.gbit_per_s) else "not seen"
        return in_words(self.latency_us * 1e-6, "s"), bandwidth

    @property
    def link(self) -> Link:
        """The fit as a link; a LabError if larger messages took no longer than small ones: the bandwidth is unknown."""
        if not math.isfinite(self.gbit_per_s):
            raise LabError(
                f"{self.operation}: {in_words(max(self.nbytes), 'B')} took no longer than {in_words(min(self.nbytes), 'B')}, "
                "so the bandwidth is unknown. Measure again, with larger messages or while the machine is less busy."
            )
        return Link(gbit_per_s=self.gbit_per_s, latency_us=self.latency_us, name=f"measured by {self.operation}")


def fit(operation: str, ranks: int, nbytes: Sequence[int], seconds: Sequence[float]) -> Fit:
    """Find the non-negative latency and bandwidth that minimize the sum of the absolute relative errors.

    Errors are relative, so that microseconds count as much as seconds; and not squared, so that an outlier does not
    affect the fit. The method is iteratively reweighted least squares. It needs at least two different sizes.

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
    """Non-negative least squares for two unknowns: the unconstrained solution, or the best one with an unknown of 0."""
    free: np.ndarray = np.linalg.lstsq(terms, wanted, rcond=None)[0]
    if (free >= 0).all():
        return free
    alone = [np.maximum(0, terms[:, i] @ wanted / (terms[:, i] @ terms[:, i])) * np.eye(2)[i] for i in (0, 1)]
    return min(alone, key=lambda x: float(np.sum((terms @ x - wanted) ** 2)))
