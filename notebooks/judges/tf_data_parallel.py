"""The exercises of lesson 10: a replica's loss, global batches, clipped gradients, and waiting times."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.teaching.exercises.calculations import Expected, calculation
from labkit.teaching.exercises.comparisons import equal
from labkit.teaching.exercises.judging import AnswerError, Hint, OnRanks, exercise, explaining, judge_result, reject, showing

LESSON = "10_tf_data_parallel"
REPLICAS = 2
MORE_REPLICAS = 3  # because an answer may be right for two replicas only
PENALTY = 10.0
EXAMPLES, PER_REPLICA = 10, 2  # two full batches for two replicas, and a rest of two examples
EXAMPLES_OF_RANKS = 24  # two ranks that shuffle differently split them correctly by chance once in 2.7 million times
# Two gradients on each of two ranks. Their sums are (6, 0) and (8), with norm 10; each mistake gives other numbers.
GRADIENTS = (((3.0, 0.0), (0.0,)), ((3.0, 0.0), (8.0,)))
LIMIT, HIGH_LIMIT = 6.0, 20.0
NONE = "None values not supported"  # TensorFlow's message
ITERATOR = "this is an iterator, not a dataset"
# TensorFlow's messages after common mistakes, and what they mean here.
EXPLAINED: dict[str, Hint] = {
    "name 'tf' is not defined": "`tf` is not defined in the ranks: begin with `import tensorflow as tf`",
    NONE: "it returns nothing: end the function with `return` and the result",
    ITERATOR: "it returns an iterator, which can be read only once: return the distributed dataset",
    "OperatorNotAllowedInGraphError": "use tf.reduce_sum: in a graph Python cannot loop over a tensor, as its own sum does",
    "has no attribute '_variant_tensor'": (
        "a strategy distributes a tf.data.Dataset: make one with tf.data.Dataset.from_tensor_slices(examples), and batch it"
    ),
    "requires being in cross-replica context": (
        'the function already runs in a replica: use tf.distribute.get_replica_context().all_reduce("SUM", ...) there'
    ),
    "`merge_call` called while defining": (
        "no all-reduce inside an `if` on a tensor's value: another replica might skip it. Sum first, then decide"
    ),
    "Dimension 0 in both shapes must be equal": (
        "the gradients are a list of tensors of different shapes: tf.clip_by_global_norm takes the list as it is"
    ),
}


def _loss_on_rank(answer: Callable[..., Any], uneven: bool) -> tuple[Any, float, bool]:
    """Return the student's result, summed over replicas; the mean over the batch; and whether it has a gradient.

    Args:
        answer: replica_loss.
        uneven: whether one replica has more examples than the other.
    """
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy(_devices(tf, REPLICAS))
    losses = [[1.0, 2.0, 6.0], [7.0]] if uneven else [[1.0, 2.0], [3.0, 6.0]]
    count = sum(map(len, losses))
    values = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(losses[context.replica_id_in_sync_group])
    )

    differentiable = []

    def on_replica(own: object) -> object:
        with tf.GradientTape() as tape:
            tape.watch(own)
            part = tf.convert_to_tensor(answer(own, count, tf.constant(PENALTY)))
        differentiable.append(tape.gradient(part, own) is not None)
        return part

    @tf.function  # type: ignore[untyped-decorator]  # TensorFlow ships no types
    def summed() -> object:
        return strategy.reduce("SUM", strategy.run(on_replica, args=(values,)), axis=None)

    return summed().numpy().tolist(), sum(sum(part) for part in losses) / count, all(differentiable)


def _devices(tf: Any, replicas: int) -> list[str]:
    """Return one of this rank's devices for each replica."""
    kind = "GPU" if len(tf.config.list_logical_devices("GPU")) >= replicas else "CPU"
    return [f"{kind}:{i}" for i in range(replicas)]


@exercise(
    LESSON,
    "replica_loss(losses, global_batch, penalty) gets the losses of this replica's examples, one each, and a penalty that is "
    "the same on all replicas. Return what, summed over replicas, is the mean loss of the whole batch plus the penalty.",
    "Summed over the replicas it is the mean over the global batch and the penalty once, also when their shares differ.",
)
def _replica_loss(answer: Any, on: OnRanks) -> None:
    for uneven in (False, True):
        with showing(f"replica_loss(losses, 4, {PENALTY:g}) on {REPLICAS} replicas"), explaining(EXPLAINED):
            (seen,) = on(1, _loss_on_rank, answer, uneven, runtime="tensorflow", devices_per_rank=REPLICAS)
            _judge_loss(*seen, uneven=uneven)


def _judge_loss(got: Any, mean: float, differentiable: bool, *, uneven: bool) -> None:
    if isinstance(got, list):
        raise AnswerError(
            "it returns several numbers: return one, for the whole share of this replica",
            f"summed over {REPLICAS} replicas: {got}",
        )
    if not differentiable:
        raise AnswerError(
            "it has no gradient: numpy, and values read out of a tensor, are outside the graph",
            cure="compute with TensorFlow's functions, such as tf.reduce_sum",
        )
    details = (
        f"summed over {REPLICAS} replicas: {got:.4g}",
        f"mean over the whole batch: {mean:.4g}, penalty: {PENALTY:g}, expected {mean + PENALTY:.4g}",
    )
    if uneven and not _equal(got, mean + PENALTY):
        raise AnswerError(
            "right for equal shares, wrong when one replica has 3 examples and the other 1",
            *details,
            cure="divide the sum by the global batch, not a mean by the number of replicas",
        )
    if not uneven:
        _judge_scaling(got, mean, *details)


def _judge_scaling(got: float, mean: float, *details: str) -> None:
    """Judge a sum over two replicas that should be `mean` of four losses, plus the penalty."""
    penalties = (PENALTY, REPLICAS * PENALTY, REPLICAS * PENALTY / 4)  # once, by each replica, divided by the global batch
    too_large = (
        f"the loss is {REPLICAS} times too large on {REPLICAS} replicas: the means of the replicas are added up afterwards",
        "divide the sum by the global batch",
    )
    mistakes = {
        ("the losses are right and the penalty is missing", "add this replica's share of it"): [mean],
        f"the losses are right, but every replica adds the whole penalty: it is added {REPLICAS} times": [
            mean + REPLICAS * PENALTY
        ],
        "the penalty is divided by the global batch, but every replica adds it once, however many examples it has: divide it by "
        "the number of replicas": [mean + REPLICAS * PENALTY / 4],
        too_large: [mean * REPLICAS + penalty for penalty in penalties],
        ("the loss is a sum, not a mean", "divide by the global batch"): [mean * 4 + penalty for penalty in penalties],
    }
    otherwise = "the losses of the replicas do not add up to the mean over the whole batch and one penalty"
    for penalty in penalties:
        divisor = mean * 4 / (got - penalty) if got > penalty else 0.0
        if divisor > 4.5 and _equal(divisor, round(divisor)):
            otherwise = (
                f"the sum is divided by {divisor:.0f}, and the global batch is 4 here: divide by the argument global_batch"
            )
            break
    judge_result(
        [got], [mean + PENALTY], mistakes, otherwise, *details, same=lambda a, b: any(_equal(x, y) for x in a for y in b)
    )


def _equal(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-4)


Steps = list[list[list[int]]]  # for each step and replica, the numbers of its examples


def _batches(answer: Callable[..., Any], strategy: Any, examples: int) -> Steps:
    data = answer(strategy, np.arange(examples, dtype=np.int64), PER_REPLICA)
    if data is None:
        raise ValueError(NONE)
    if isinstance(data, Iterator):
        raise ValueError(ITERATOR)
    some = itertools.islice(data, examples + 1)  # an infinite dataset has more steps than examples
    return [[part.numpy().tolist() for part in strategy.experimental_local_results(batch)] for batch in some]


def _batches_on_devices(answer: Callable[..., Any], replicas: int) -> Steps:
    import tensorflow as tf

    return _batches(answer, tf.distribute.MirroredStrategy(_devices(tf, replicas)), EXAMPLES)


def _batches_on_ranks(answer: Callable[..., Any]) -> Steps:
    import tensorflow as tf

    return _batches(answer, tf.distribute.MultiWorkerMirroredStrategy(), EXAMPLES_OF_RANKS)


@exercise(
    LESSON,
    "global_batches(strategy, examples, per_replica) returns a distributed dataset: one pass in which every step gives every "
    "replica `per_replica` of the examples, each to one replica only, for any number of replicas and ranks.",
    "Every step gives every replica the batch that was asked for, and no example is read twice, also on two ranks.",
)
def _global_batches(answer: Any, on: OnRanks) -> None:
    call = f"global_batches(strategy, examples, {PER_REPLICA})"
    with showing(f"{call} with {EXAMPLES} examples, {REPLICAS} replicas"), explaining(EXPLAINED):
        (steps,) = on(1, _batches_on_devices, answer, REPLICAS, runtime="tensorflow", devices_per_rank=REPLICAS)
        _judge_steps(steps)
    with showing(f"{call} with {EXAMPLES} examples, {MORE_REPLICAS} replicas"), explaining(EXPLAINED):
        (steps,) = on(1, _batches_on_devices, answer, MORE_REPLICAS, runtime="tensorflow", devices_per_rank=MORE_REPLICAS)
        if [[len(part) for part in step] for step in steps] != [[PER_REPLICA] * MORE_REPLICAS]:
            raise AnswerError(
                f"right for {REPLICAS} replicas, wrong for {MORE_REPLICAS}",
                *_listed(steps),
                cure="ask the strategy, strategy.num_replicas_in_sync",
            )
    with showing(f"{call} with {EXAMPLES_OF_RANKS} examples, on {REPLICAS} ranks"), explaining(EXPLAINED):
        _judge_ranks(on(REPLICAS, _batches_on_ranks, answer, runtime="tensorflow"))


def _listed(steps: Steps) -> tuple[str, ...]:
    return tuple(f"step {i}: {parts}" for i, parts in enumerate(steps))


GLOBAL_BATCH = "a strategy splits the global batch, per_replica × strategy.num_replicas_in_sync"


def _judge_steps(steps: Steps) -> None:
    """Judge the batches of two devices in one process."""
    details = _listed(steps)
    if not steps:
        raise AnswerError(
            f"there are no steps: {EXAMPLES} examples do not fill one batch, and drop_remainder drops it",
            f"given {EXAMPLES} examples, per_replica = {PER_REPLICA}, {REPLICAS} replicas",
            cure=GLOBAL_BATCH,
        )
    if len(steps) > EXAMPLES:
        raise AnswerError("it does not end: one pass through the examples is asked for, without repeat", *details[:3])
    whole = [sorted(x for part in step for x in part) for step in steps]
    sizes = {len(part) for step in steps for part in step}
    every, full = [x for w in whole for x in w], EXAMPLES // (PER_REPLICA * REPLICAS)
    faults = {
        (
            f"a step has one batch for all {REPLICAS} replicas, which should divide it",
            "pass the dataset to strategy.experimental_distribute_dataset",
        ): any(len(step) != REPLICAS for step in steps),
        (
            "the last batch is smaller, and a replica may get nothing",
            "batch with drop_remainder=True, so that all steps are equal",
        ): 0 in sizes or len({len(w) for w in whole}) > 1,
        (
            f"each replica gets {max(sizes)} example, {PER_REPLICA} were asked for: which batch does a strategy split?",
            GLOBAL_BATCH,
        ): max(sizes) < PER_REPLICA,
        "some examples occur twice: do the replicas share one dataset?": len(set(every)) < len(every),
        f"expected {full} steps with {PER_REPLICA} examples per replica": sizes != {PER_REPLICA} or len(steps) != full,
    }
    reject(faults, *details)


def _judge_ranks(ranks: list[Steps]) -> None:
    """Judge the batches of two ranks with one device each: together they read each example once."""
    read = [[x for step in steps for part in step for x in part] for steps in ranks]
    together = [x for numbers in read for x in numbers]
    once, sizes = len(set(together)), {len(part) for steps in ranks for step in steps for part in step}
    faults = {
        (
            "on two ranks each reads all examples",
            "let the strategy shard them, with AutoShardPolicy.DATA or its default policy",
        ): all(len(set(numbers)) == EXAMPLES_OF_RANKS for numbers in read),
        (
            (
                f"the ranks shuffle differently: of the {EXAMPLES_OF_RANKS} examples {len(together) - once} are read twice, and "
                f"{EXAMPLES_OF_RANKS - once} never"
            ),
            "give the shuffle a seed",
        ): once < len(together),
        f"right on one rank, wrong on two: expected {PER_REPLICA} examples per rank and step": (
            len(together) != EXAMPLES_OF_RANKS or sizes != {PER_REPLICA}
        ),
    }
    reject(faults, *(f"rank {rank} read {numbers}" for rank, numbers in enumerate(read)))


def _clip_on_rank(answer: Callable[..., Any], limit: float) -> list[list[float]] | str:
    """Return the student's result for this rank's gradients; as text, if it is no list of the same shapes."""
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    own = [tf.constant(gradient) for gradient in GRADIENTS[int(os.environ["RANK"])]]

    def step() -> object:
        return strategy.run(answer, args=(own, limit))

    clipped = tf.function(step)()
    if clipped is None:
        raise ValueError(NONE)
    if not isinstance(clipped, (list, tuple)) or [getattr(c, "shape", None) for c in clipped] != [g.shape for g in own]:
        return str(tf.nest.map_structure(lambda value: f"shape {tuple(np.shape(value))}", clipped))
    return [gradient.numpy().tolist() for gradient in clipped]


@exercise(
    LESSON,
    "clipped_sum(gradients, limit) runs in a replica, gets the gradients of this rank's share, and returns those of the "
    "whole batch, shortened where their norm, all of them together, is above the limit.",
    "The gradients of all replicas are first summed and then clipped, as one device would do with the whole batch.",
)
def _clipped_sum(answer: Any, on: OnRanks) -> None:
    for limit in (LIMIT, HIGH_LIMIT):
        with showing(f"clipped_sum(gradients, {limit:g}) on {len(GRADIENTS)} ranks"), explaining(EXPLAINED):
            _judge_clipped(on(len(GRADIENTS), _clip_on_rank, answer, limit, runtime="tensorflow"), limit)


def _judge_clipped(ranks: list[Any], limit: float) -> None:
    for rank, got in enumerate(ranks):
        if isinstance(got, str):
            raise AnswerError(
                "expected a list like the one that was given. tf.clip_by_global_norm returns two things: the list, "
                "and its norm before clipping",
                f"rank {rank} returned {got}",
            )
    given = [[np.array(gradient) for gradient in own] for own in GRADIENTS]
    total = _sum(given)
    expected = _clip(total, limit)
    mistakes: dict[Hint, Any] = {
        ("each rank clipped its own gradients before the sum", "sum first, and clip what the whole batch gives"): (
            [_sum([_clip(own, limit) for own in given])] * 2
        ),
        "the gradients are summed, but not clipped: their norm together is above the limit": [total] * 2,
        ("these come from the mean over the ranks", "the losses are divided by the global batch already, so sum"): (
            [_clip([gradient / len(given) for gradient in total], limit)] * 2
        ),
        ("each gradient was clipped by itself", "the limit is for the norm of all of them together"): (
            [[_clip([gradient], limit)[0] for gradient in total]] * 2
        ),
        "each rank has its own gradients only: nothing was exchanged": given,
        "each rank has its own gradients only, clipped: nothing was exchanged": [_clip(own, limit) for own in given],
    }
    otherwise: Hint = "these are not the gradients of the whole batch, clipped"
    if limit == HIGH_LIMIT:
        otherwise = "right if the norm is above the limit, wrong below it", "clipping never lengthens a gradient"
    details = (*(f"rank {i} got {got}" for i, got in enumerate(ranks)), f"expected {_lists(expected)}")
    judge_result(ranks, [expected] * 2, mistakes, otherwise, *details, same=partial(equal, within=1e-4))


def _sum(ranks: list[list[NDArray[Any]]]) -> list[NDArray[Any]]:
    return [np.sum(parts, axis=0) for parts in zip(*ranks, strict=True)]


def _clip(gradients: list[NDArray[Any]], limit: float) -> list[NDArray[Any]]:
    norm = math.sqrt(sum(float((gradient**2).sum()) for gradient in gradients))
    return [gradient * min(1.0, limit / norm) for gradient in gradients] if norm else gradients


def _lists(arrays: list[NDArray[Any]]) -> list[list[float]]:
    return [array.round(4).tolist() for array in arrays]


TimedSpan = tuple[int, int, float, float]
# All-reduces (rank, step, start, end). In the second case there are three ranks, another is last in each step, and the
# spans are in no order; in the third, ranks end at different times, and the earliest step is not numbered 0; in the
# fourth, rank 1 never waits.
TIMELINES: tuple[list[TimedSpan], ...] = (
    [(0, 0, 1.0, 6.0), (1, 0, 4.0, 6.0), (0, 1, 11.0, 13.0), (1, 1, 10.0, 13.0)],
    [(2, 1, 9.0, 12.0), (0, 0, 2.0, 5.0), (1, 0, 1.0, 5.0), (0, 1, 8.0, 12.0), (2, 0, 4.0, 5.0), (1, 1, 10.0, 12.0)],
    [(1, 7, 20.0, 29.0), (0, 7, 26.0, 27.0), (0, 8, 30.0, 36.5), (1, 8, 33.5, 36.0)],
    [(0, 0, 1.0, 6.0), (1, 0, 4.0, 6.0), (0, 1, 9.0, 13.0), (1, 1, 10.0, 13.0)],
)


def _other_timeline(random: Random) -> tuple[list[TimedSpan]]:
    spans: list[TimedSpan] = []
    ranks, end = random.randint(2, 4), 0.0
    for step in range(random.randint(2, 3)):
        starts = [end + random.uniform(1, 9) for _ in range(ranks)]
        end = max(starts) + random.uniform(1, 3)
        spans += [(rank, step, start, end) for rank, start in enumerate(starts)]
    random.shuffle(spans)
    return (spans,)


@calculation(
    LESSON,
    "waited_ms(spans): spans are all-reduces (rank, step, start_ms, end_ms), one per rank and step. Return a dictionary with "
    "the ms that each rank waited for the others, summed over the steps.",
    "A rank waits from its own start until the last rank of the same step has started.",
    [(spans,) for spans in TIMELINES],
    other=_other_timeline,
)
def _waited_ms(spans: list[TimedSpan]) -> Expected:
    right = _waits(spans, "others")
    steps = len({step for _, step, _, _ in spans})
    mistakes: dict[Hint, dict[int, float]] = {
        "those are whole all-reduces; once the last rank has come, a rank no longer waits": _waits(spans, "length"),
        "that is how late each rank came; the rank that comes first is the one that waits": _waits(spans, "late"),
        "that is the time after the last rank came, in which the numbers are summed": _waits(spans, "end"),
        "that is the mean of the steps: add them up": {rank: ms / steps for rank, ms in right.items()},
        "that is one step only: add up all steps": _waits(spans, "last step"),
        (
            "here all ranks wait until the last start of all steps, but they meet in every step",
            "look for the last start among the spans of the same step",
        ): _waits(spans, "one moment"),
    }
    otherwise = (
        "that is not the time in which a rank waits: from when, and for whom, does it wait in a step?",
        "in each step, a rank waits from its own start to the latest start of any rank in that step",
    )
    return Expected(
        right, mistakes, otherwise, f"a dictionary with a number for each rank: the keys are the ranks, here {[*right]}"
    )


def _waits(spans: list[TimedSpan], mistake: str) -> dict[int, float]:
    """Return for each rank the sum over its spans of what an answer, or a usual mistake, takes for waiting."""
    total = dict.fromkeys(sorted({rank for rank, *_ in spans}), 0.0)
    final = max(step for _, step, _, _ in spans)
    for rank, step, start, end in spans:
        starts = [s for _, other, s, _ in spans if other == step]
        total[rank] += {
            "others": max(starts) - start,
            "length": end - start,
            "late": start - min(starts),
            "end": end - max(starts),
            "last step": (max(starts) - start) * (step == final),
            "one moment": max(s for _, _, s, _ in spans) - start,
        }[mistake]
    return total
