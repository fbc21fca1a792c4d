"""Notes the batches of a distributed dataset in which a replica has no samples: a mean over them is nan.

Only batches that the program itself takes are seen, not those of a loop over the dataset inside a tf.function.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from labkit.recording.rank_facts import Fact, FactKind
from labkit.recording.record import student_line
from labkit.worker.runtimes.tensorflow.tensorflow_internals import DISTRIBUTED_BATCHES


class EmptyReplicas:
    """The facts of one rank, in the place of `TrainingFacts` of a rank of torch."""

    def __init__(self) -> None:
        self._batches: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # taken so far, by iterator
        self.begin_run(check=False)

    def begin_run(self, *, check: bool) -> None:  # noqa: ARG002  # nothing is compared
        """Forget the previous run."""
        self._facts: list[Fact] = []

    def take(self) -> list[Fact]:
        """Return the facts of the run."""
        return self._facts

    def install(self) -> None:
        """Look from now on at each batch."""

        def take_next(original: Callable[..., Any], iterator: Any) -> Any:
            batch = original(iterator)
            with contextlib.suppress(Exception):  # what goes wrong here never reaches the program
                self._look(iterator, batch)
            return batch

        DISTRIBUTED_BATCHES.apply(__next__=take_next)

    def _look(self, iterator: Any, batch: Any) -> None:
        import tensorflow as tf

        number = self._batches[iterator] = self._batches.get(iterator, 0) + 1
        for part in tf.nest.flatten(batch):
            parts = part.values if isinstance(part, tf.distribute.DistributedValues) else (part,)
            empty = [replica for replica, value in enumerate(parts) if value.shape[0] == 0]
            if empty:
                self._facts.append(Fact(FactKind.EMPTY_REPLICAS, number - 1, student_line(), values={"replicas": empty}))
                return
