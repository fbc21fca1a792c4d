"""What tools share that start four new processes for each task."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch

from bench.peers.work import ARRAY_BYTES, RANKS

__all__ = ["FreshProcesses"]


class FreshProcesses(ABC):
    """A `work.Tool` whose processes start and end with each task."""

    def __init__(self) -> None:
        self._array = torch.from_numpy(np.ones(ARRAY_BYTES, np.uint8))  # torch would fill it by OpenMP, and no fork would work
        self._results = [torch.empty(ARRAY_BYTES, dtype=torch.uint8).share_memory_() for _ in range(RANKS)]

    def ready(self) -> float:
        """See `work.Tool`; the rest likewise."""
        return self._measure("ready")[0]

    def call(self) -> float:
        """See `work.Tool`."""
        return self._measure("call")[0]

    def move(self) -> float:
        """See `work.Tool`."""
        return self._measure("move")[0]

    def memory(self) -> float:
        """See `work.Tool`."""
        return self._measure("memory")[1]

    def close(self) -> None:  # noqa: B027  # no process outlives its task
        """See `work.Tool`."""

    @abstractmethod
    def _measure(self, task: str) -> tuple[float, float]:
        """Seconds until all have answered, and what the processes then hold in memory."""
