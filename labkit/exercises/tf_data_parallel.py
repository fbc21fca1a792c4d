"""The exercises of lesson 10: the loss of a replica, batches for all replicas, and gradients clipped over several processes."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.exercises.judging import AnswerError, Exercise, OnRanks

__all__ = ["EXERCISES"]

LESSON = "10_tf_data_parallel"
REPLICAS = 2
EXAMPLES, PER_REPLICA = 10, 2
# Two gradients of two ranks. Together they are (6, 0) and (8), with norm 10; each mistake gives other numbers.
GRADIENTS = (((3.0, 0.0), (0.0,)), ((3.0, 0.0), (8.0,)))
LIMIT, HIGH_LIMIT = 6.0, 20.0


def _loss_on_rank(answer: Callable[..., Any], uneven: bool) -> tuple[float, float]:
    """The sum over replicas of what the student's function returns, and the mean over the whole batch."""
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy(_devices(tf))
    losses = [[1.0, 2.0, 6.0], [7.0]] if uneven else [[1.0, 2.0], [3.0, 6.0]]
    count = sum(map(len, losses))
    values = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(losses[context.replica_id_in_sync_group])
    )

    @tf.function  # type: ignore[untyped-decorator]  # TensorFlow ships no types
    def summed() -> Any:
        parts = strategy.run(lambda own: tf.convert_to_tensor(answer(own, count)), args=(values,))
        return strategy.reduce("SUM", parts, axis=None)

    return float(summed()), sum(sum(part) for part in losses) / count


def _devices(tf: Any) -> list[str]:
    """As many of this rank's devices as there are replicas."""
    kind = "GPU" if len(tf.config.list_logical_devices("GPU")) >= REPLICAS else "CPU"
    return [f"{kind}:{i}" for i in range(REPLICAS)]


def _replica_loss(answer: Any, on: OnRanks) -> str:
    for uneven in (False, True):
        ((got, mean),) = on(1, _loss_on_rank, answer, uneven, runtime="tensorflow", devices_per_rank=REPLICAS)
        if math.isclose(got, mean, rel_tol=1e-4):
            continue
        details = (f"summed over {REPLICAS} replicas: {got:.4g}", f"mean over the whole batch: {mean:.4g}")
        if not uneven and math.isclose(got, mean * REPLICAS, rel_tol=1e-4):
            raise AnswerError(
                f"the loss is {REPLICAS} times too large on {REPLICAS} replicas: a mean over the replica's own examples is "
                "summed over replicas afterwards. Divide by the global batch",
                *details,
            )
        if not uneven and math.isclose(got, mean * 4, rel_tol=1e-4):
            raise AnswerError("the loss is a sum, not a mean: divide by the global batch", *details)
        if uneven:
            raise AnswerError(
                "right for equal shares, wrong when one replica has 3 examples and the other 1: divide the sum by the global "
                "batch, not a mean by the number of replicas",
                *details,
            )
        raise AnswerError("the losses of the replicas do not add up to the mean over the whole batch", *details)
    return "Summed over the replicas it is the mean over the global batch, also when their shares differ."


def _batches_on_rank(answer: Callable[..., Any]) -> list[list[list[int]]]:
    """For every step, the numbers of the examples that each replica gets."""
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy(_devices(tf))
    data = answer(strategy, np.arange(EXAMPLES, dtype=np.int64), PER_REPLICA)
    return [[part.numpy().tolist() for part in strategy.experimental_local_results(batch)] for batch in data]


def _global_batches(answer: Any, on: OnRanks) -> str:
    (steps,) = on(1, _batches_on_rank, answer, runtime="tensorflow", devices_per_rank=REPLICAS)
    details = tuple(f"step {i}: {listed}" for i, listed in enumerate(steps))
    whole = [sorted(x for part in step for x in part) for step in steps]
    sizes = {len(part) for step in steps for part in step}
    if any(len(step) != REPLICAS for step in steps):
        raise AnswerError(
            f"a step has one batch for all {REPLICAS} replicas: hand the dataset to strategy.experimental_distribute_dataset",
            *details,
        )
    if 0 in sizes or len({len(w) for w in whole}) > 1:
        raise AnswerError(
            "the last batch is smaller, and a replica may get nothing: batch with drop_remainder=True, so that all steps are "
            "alike",
            *details,
        )
    if max(sizes) < PER_REPLICA:
        raise AnswerError(
            f"each replica gets {max(sizes)} example, {PER_REPLICA} were asked for: the batch that a strategy splits is the "
            "global one, per replica × strategy.num_replicas_in_sync",
            *details,
        )
    if len({x for w in whole for x in w}) < len([x for w in whole for x in w]):
        raise AnswerError("some examples are there twice: do the replicas share one dataset?", *details)
    if sizes != {PER_REPLICA} or len(steps) != EXAMPLES // (PER_REPLICA * REPLICAS):
        raise AnswerError(
            f"expected {EXAMPLES // (PER_REPLICA * REPLICAS)} steps with {PER_REPLICA} examples per replica", *details
        )
    return "Every step gives every replica the batch that was asked for."


def _clip_on_rank(answer: Callable[..., Any], limit: float) -> list[list[float]] | str:
    """What the student's function makes of this rank's gradients; in words, where that is no list like theirs."""
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    own = [tf.constant(gradient) for gradient in GRADIENTS[int(os.environ["RANK"])]]

    def step() -> Any:
        return strategy.run(answer, args=(own, limit))

    clipped = tf.function(step)()
    if not isinstance(clipped, (list, tuple)) or [getattr(c, "shape", None) for c in clipped] != [g.shape for g in own]:
        return str(tf.nest.map_structure(lambda value: f"shape {tuple(np.shape(value))}", clipped))
    return [gradient.numpy().tolist() for gradient in clipped]


def _clipped_sum(answer: Any, on: OnRanks) -> str:
    for limit in (LIMIT, HIGH_LIMIT):
        ranks = on(len(GRADIENTS), _clip_on_rank, answer, limit, runtime="tensorflow")
        for rank, got in enumerate(ranks):
            if isinstance(got, str):
                raise AnswerError(
                    "expected a list like the one that was given. tf.clip_by_global_norm returns two things: the list, "
                    "and the norm that it had",
                    f"rank {rank} returned {got}",
                )
        given = [[np.array(gradient) for gradient in own] for own in GRADIENTS]
        total = _sum(given)
        expected = _clip(total, limit)
        if all(_same(got, expected) for got in ranks):
            continue
        details = (f"limit {limit:g}", *(f"rank {i} got {got}" for i, got in enumerate(ranks)), f"expected {_lists(expected)}")
        early = _sum([_clip(own, limit) for own in given])
        mean = _clip([gradient / len(given) for gradient in total], limit)
        alone = [_clip([gradient], limit)[0] for gradient in total]
        causes: tuple[tuple[list[list[NDArray[Any]]], str], ...] = (
            (
                [early] * 2,
                "each rank clipped its own gradients before the sum: sum first, and clip what the whole batch gives",
            ),
            ([total] * 2, "the gradients are summed, but not clipped: their norm together is above the limit"),
            ([mean] * 2, "these come from the mean over the ranks: the losses are divided by the global batch already, so sum"),
            ([alone] * 2, "each gradient was clipped by itself: the limit is for the norm of all of them together"),
            (given, "each rank has its own gradients only: nothing was exchanged"),
            ([_clip(own, limit) for own in given], "each rank has its own gradients only, clipped: nothing was exchanged"),
        )
        for mistaken, words in causes:
            if all(_same(got, wrong) for got, wrong in zip(ranks, mistaken, strict=True)):
                raise AnswerError(words, *details)
        if limit == HIGH_LIMIT:
            raise AnswerError("right where the norm is above the limit, wrong below it: clipping never makes longer", *details)
        raise AnswerError("these are not the gradients of the whole batch, clipped", *details)
    return "The gradients of all ranks are summed first and clipped then, as one device with the whole batch would."


def _sum(ranks: list[list[NDArray[Any]]]) -> list[NDArray[Any]]:
    return [np.sum(parts, axis=0) for parts in zip(*ranks, strict=True)]


def _clip(gradients: list[NDArray[Any]], limit: float) -> list[NDArray[Any]]:
    norm = math.sqrt(sum(float((gradient**2).sum()) for gradient in gradients))
    return [gradient * min(1.0, limit / norm) for gradient in gradients] if norm else gradients


def _same(got: list[list[float]], expected: list[NDArray[Any]]) -> bool:
    return all(np.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(got, expected, strict=True))


def _lists(arrays: list[NDArray[Any]]) -> list[list[float]]:
    return [array.round(4).tolist() for array in arrays]


EXERCISES = (
    Exercise(
        "replica_loss",
        LESSON,
        "replica_loss(losses, global_batch) gets the losses of this replica's examples, one each, and returns what, summed over "
        "replicas, is the mean loss of the whole batch.",
        _replica_loss,
    ),
    Exercise(
        "global_batches",
        LESSON,
        "global_batches(strategy, examples, per_replica) returns a distributed dataset in which every step gives every replica "
        "`per_replica` of the examples.",
        _global_batches,
    ),
    Exercise(
        "clipped_sum",
        LESSON,
        "clipped_sum(gradients, limit) runs in a replica, gets the gradients of this rank's share, and returns those of the "
        "whole batch, shortened where their norm, all of them together, is above the limit.",
        _clipped_sum,
    ),
)
