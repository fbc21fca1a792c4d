"""ipyparallel: a controller, its schedulers and four engines, each a fresh interpreter."""

from __future__ import annotations

import logging
import statistics
import time
from typing import Any

import ipyparallel
import numpy as np

from bench.peers import work
from bench.peers.work import ARRAY_BYTES, RANKS, children_pss, seconds


def add_up(rank: int, port: int) -> float:
    """Return the sum of a one from each rank."""
    from bench.peers.work import RANKS, summed

    return summed(rank, RANKS, port)


def nothing() -> None:
    """Do nothing."""


def same(array: Any) -> Any:
    """Return the argument."""
    return array


class Ipyparallel:
    """`ipyparallel.Cluster`."""

    def __init__(self) -> None:
        self._cluster: Any = None
        self._client: Any = None
        self._store: Any = None
        self._array = np.ones(ARRAY_BYTES, np.uint8)

    def ready(self) -> float:
        """See `work.Tool`; the rest likewise."""
        self.close()
        start = time.perf_counter()
        self._cluster = ipyparallel.Cluster(n=RANKS, log_level=logging.ERROR)
        self._client = self._cluster.start_and_connect_sync(activate=False)
        self._store = work.own_store()
        pending = [self._client[rank].apply_async(add_up, rank, self._store.port) for rank in range(RANKS)]
        results = [p.get() for p in pending]
        took_s = time.perf_counter() - start
        assert results == [RANKS] * RANKS
        return took_s

    def call(self) -> float:
        """See `work.Tool`."""
        view = self._view()
        return statistics.median(seconds(lambda: view.apply_sync(nothing)) for _ in range(50))

    def move(self) -> float:
        """See `work.Tool`."""
        view = self._view()
        return seconds(lambda: view.apply_sync(same, self._array))

    def memory(self) -> float:
        """See `work.Tool`."""
        self._view()
        return children_pss()

    def close(self) -> None:
        """See `work.Tool`."""
        if self._cluster is not None:
            self._client.close()
            self._cluster.stop_cluster_sync()
            self._cluster = None

    def _view(self) -> Any:
        if self._cluster is None:
            self.ready()
        return self._client[:]
