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

from labkit.teaching.exercises.comparisons import TOLERANCE, equal, expect, expect_numbers, wrong_if
from labkit.teaching.exercises.exercise import Results, exercise

LESSON = "10_tf_data_parallel"
REPLICAS = 2
MORE_REPLICAS = 3  # because an answer may be right for two replicas only
PENALTY = 10.0
EXAMPLES, PER_REPLICA = 10, 2  # two full batches for two replicas, and a rest of two examples
# Two ranks that shuffle differently split them correctly by chance once in 2.7 million times.
EXAMPLES_OF_RANKS = 24
# Two gradients on each of two ranks. Their sums are (6, 0) and (8), with norm 10; each mistake gives others.
GRADIENTS = (((3.0, 0.0), (0.0,)), ((3.0, 0.0), (8.0,)))
LIMIT, HIGH_LIMIT = 6.0, 20.0
NONE = "None values not supported"  # TensorFlow's message
ITERATOR = "this is an iterator, not a dataset"
# TensorFlow's messages after common mistakes, and what they mean here.
EXPLAINED = {
    "name 'tf' is not defined": "`tf` is not defined in the ranks: begin with `import tensorflow as tf`",
    NONE: "it returns nothing: end the function with `return` and the result",
    ITERATOR: "it returns an iterator, which can be read only once: return the distributed dataset",
    "OperatorNotAllowedInGraphError":
        "use tf.reduce_sum: in a graph Python cannot loop over a tensor, as its own sum does",
    "has no attribute '_variant_tensor'":
        "a strategy distributes a tf.data.Dataset: make one with "
        "tf.data.Dataset.from_tensor_slices(examples), and batch it",
    "requires being in cross-replica context": "the function already runs in a replica: use "
        'tf.distribute.get_replica_context().all_reduce("SUM", ...) there',
    "`merge_call` called while defining":
        "no all-reduce inside an `if` on a tensor's value: another replica might skip it. Sum first, then "
        "decide",
    "Dimension 0 in both shapes must be equal": "the gradients are a list of tensors of different shapes: "
        "tf.clip_by_global_norm takes the list as it is",
}


def _loss_on_rank(answer: Callable[..., Any], uneven: bool) -> tuple[Any, float, bool]:
    """Return the result summed over replicas, the mean over the batch, and whether it has a gradient.

    If `uneven`, one replica has more examples than the other.
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
    "Summed over the replicas it is the mean over the global batch and the penalty once, also when their "
    "shares differ.",
    [(False,), (True,)], on_ranks=_loss_on_rank, ranks=1, runtime="tensorflow", devices_per_rank=REPLICAS,
    errors=EXPLAINED, call=f"replica_loss(losses, 4, {PENALTY:g}) on {REPLICAS} replicas",
)
def replica_loss(results: Results, uneven: bool) -> None:
    """replica_loss(losses, global_batch, penalty) gets the losses of this replica's examples, one each, and a
    penalty that is the same on all replicas. Return what, summed over replicas, is the mean loss of the whole
    batch plus the penalty."""
    got, mean, differentiable = results[0]
    wrong_if(isinstance(got, list),
             "it returns several numbers: return one, for the whole share of this replica",
             "", f"summed over {REPLICAS} replicas: {got}")
    wrong_if(not differentiable,
             "it has no gradient: numpy, and values read out of a tensor, are outside the graph",
             "compute with TensorFlow's functions, such as tf.reduce_sum")
    right = mean + PENALTY
    shown = (
        f"summed over {REPLICAS} replicas: {got:.4g}",
        f"mean over the whole batch: {mean:.4g}, penalty: {PENALTY:g}, expected {right:.4g}",
    )
    wrong_if(uneven and not equal(got, right, TOLERANCE),
             "right for equal shares, wrong when one replica has 3 examples and the other 1",
             "divide the sum by the global batch, not a mean by the number of replicas", *shown)
    if uneven:
        return
    # Once, by each replica, divided by the global batch.
    penalties = (PENALTY, REPLICAS * PENALTY, REPLICAS * PENALTY / 4)
    otherwise = "the losses of the replicas do not add up to the mean over the whole batch and one penalty"
    for penalty in penalties:
        divisor = mean * 4 / (got - penalty) if got > penalty else 0.0
        if divisor > 4.5 and equal(divisor, round(divisor), TOLERANCE):
            otherwise = (f"the sum is divided by {divisor:.0f}, and the global batch is 4 here: divide by "
                         "the argument global_batch")
            break
    expect([got], [right], [
        ([mean], "the losses are right and the penalty is missing", "add this replica's share of it"),
        ([mean + REPLICAS * PENALTY],
         f"the losses are right, but every replica adds the whole penalty: it is added {REPLICAS} times"),
        ([mean + REPLICAS * PENALTY / 4],
         "the penalty is divided by the global batch, but every replica adds it once, however many examples "
         "it has: divide it by the number of replicas"),
        ([mean * REPLICAS + penalty for penalty in penalties],
         f"the loss is {REPLICAS} times too large on {REPLICAS} replicas: the means of the replicas are "
         "added up afterwards", "divide the sum by the global batch"),
        ([mean * 4 + penalty for penalty in penalties], "the loss is a sum, not a mean",
         "divide by the global batch"),
    ], otherwise, "", *shown, same=lambda a, b: any(equal(x, y, TOLERANCE) for x in a for y in b))


Steps = list[list[list[int]]]  # for each step and replica, the numbers of its examples


def _batches_on_rank(answer: Callable[..., Any], examples: int, replicas: int, ranks: int) -> Steps:
    import tensorflow as tf

    if ranks > 1:
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    else:
        strategy = tf.distribute.MirroredStrategy(_devices(tf, replicas))
    data = answer(strategy, np.arange(examples, dtype=np.int64), PER_REPLICA)
    if data is None:
        raise ValueError(NONE)
    if isinstance(data, Iterator):
        raise ValueError(ITERATOR)
    some = itertools.islice(data, examples + 1)  # an infinite dataset has more steps than examples
    return [[part.numpy().tolist() for part in strategy.experimental_local_results(batch)] for batch in some]


def _batches_in_words(examples: int, replicas: int, ranks: int) -> str:
    where = f"on {ranks} ranks" if ranks > 1 else f"{replicas} replicas"
    return f"global_batches(strategy, examples, {PER_REPLICA}) with {examples} examples, {where}"


@exercise(
    LESSON,
    "Every step gives every replica the batch that was asked for, and no example is read twice, also on two "
    "ranks.",
    [(EXAMPLES, REPLICAS, 1), (EXAMPLES, MORE_REPLICAS, 1), (EXAMPLES_OF_RANKS, 1, REPLICAS)],
    on_ranks=_batches_on_rank, ranks=lambda *case: case[2], runtime="tensorflow",
    devices_per_rank=lambda *case: case[1], errors=EXPLAINED, call=_batches_in_words,
)
def global_batches(results: Results, _: int, replicas: int, ranks: int) -> None:
    """global_batches(strategy, examples, per_replica) returns a distributed dataset: one pass in which every
    step gives every replica `per_replica` of the examples, each to one replica only, for any number of
    replicas and ranks."""
    if ranks > 1:
        _judge_ranks(results)
        return
    steps = results[0]
    shown = [f"step {i}: {parts}" for i, parts in enumerate(steps)]
    if replicas == REPLICAS:
        _judge_steps(steps, shown)
        return
    wrong_if([[len(part) for part in step] for step in steps] != [[PER_REPLICA] * replicas],
             f"right for {REPLICAS} replicas, wrong for {replicas}",
             "ask the strategy, strategy.num_replicas_in_sync", *shown)


GLOBAL_BATCH = "a strategy splits the global batch, per_replica × strategy.num_replicas_in_sync"


def _judge_steps(steps: Steps, shown: list[str]) -> None:
    """Judge the batches of two devices in one process."""
    wrong_if(not steps,
             f"there are no steps: {EXAMPLES} examples do not fill one batch, and drop_remainder drops it",
             GLOBAL_BATCH, f"given {EXAMPLES} examples, per_replica = {PER_REPLICA}, {REPLICAS} replicas")
    wrong_if(len(steps) > EXAMPLES,
             "it does not end: one pass through the examples is asked for, without repeat",
             "", *shown[:3])
    whole = [sorted(x for part in step for x in part) for step in steps]
    sizes = {len(part) for step in steps for part in step}
    every, full = [x for w in whole for x in w], EXAMPLES // (PER_REPLICA * REPLICAS)
    wrong_if(any(len(step) != REPLICAS for step in steps),
             f"a step has one batch for all {REPLICAS} replicas, which should divide it",
             "pass the dataset to strategy.experimental_distribute_dataset", *shown)
    wrong_if(0 in sizes or len({len(w) for w in whole}) > 1,
             "the last batch is smaller, and a replica may get nothing",
             "batch with drop_remainder=True, so that all steps are equal", *shown)
    wrong_if(max(sizes) < PER_REPLICA,
             f"each replica gets {max(sizes)} example, {PER_REPLICA} were asked for: which batch does a "
             "strategy split?", GLOBAL_BATCH, *shown)
    wrong_if(len(set(every)) < len(every), "some examples occur twice: do the replicas share one dataset?",
             "",
             *shown)
    wrong_if(sizes != {PER_REPLICA} or len(steps) != full,
             f"expected {full} steps with {PER_REPLICA} examples per replica", "", *shown)


def _judge_ranks(ranks: list[Steps]) -> None:
    """Judge the batches of two ranks with one device each: together they read each example once."""
    read = [[x for step in steps for part in step for x in part] for steps in ranks]
    together = [x for numbers in read for x in numbers]
    once, sizes = len(set(together)), {len(part) for steps in ranks for step in steps for part in step}
    shown = [f"rank {rank} read {numbers}" for rank, numbers in enumerate(read)]
    wrong_if(all(len(set(numbers)) == EXAMPLES_OF_RANKS for numbers in read),
             "on two ranks each reads all examples",
             "let the strategy shard them, with AutoShardPolicy.DATA or its default policy", *shown)
    wrong_if(once < len(together), f"the ranks shuffle differently: of the {EXAMPLES_OF_RANKS} examples "
             f"{len(together) - once} are read twice, and {EXAMPLES_OF_RANKS - once} never",
             "give the shuffle a seed", *shown)
    wrong_if(len(together) != EXAMPLES_OF_RANKS or sizes != {PER_REPLICA},
             f"right on one rank, wrong on two: expected {PER_REPLICA} examples per rank and step",
             "", *shown)


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
    shapes = [getattr(c, "shape", None) for c in clipped] if isinstance(clipped, (list, tuple)) else None
    if shapes != [gradient.shape for gradient in own]:
        return str(tf.nest.map_structure(lambda value: f"shape {tuple(np.shape(value))}", clipped))
    return [gradient.numpy().tolist() for gradient in clipped]


@exercise(
    LESSON,
    "The gradients of all replicas are first summed and then clipped, as one device would do with the whole "
    "batch.",
    [(LIMIT,), (HIGH_LIMIT,)], on_ranks=_clip_on_rank, ranks=len(GRADIENTS), runtime="tensorflow",
    errors=EXPLAINED, call=f"clipped_sum(gradients, {{limit:g}}) on {len(GRADIENTS)} ranks",
)
def clipped_sum(results: Results, limit: float) -> None:
    """clipped_sum(gradients, limit) runs in a replica, gets the gradients of this rank's share, and returns
    those of the whole batch, shortened where their norm, all of them together, is above the limit."""
    for rank, got in enumerate(results):
        wrong_if(isinstance(got, str),
                 "expected a list like the one that was given. tf.clip_by_global_norm returns two things: "
                 "the list, and its norm before clipping", "", f"rank {rank} returned {got}")
    own = [[np.array(gradient) for gradient in of_rank] for of_rank in GRADIENTS]
    total = _sum(own)
    right, clipped = _clip(total, limit), [_clip(of_rank, limit) for of_rank in own]
    otherwise = ["these are not the gradients of the whole batch, clipped", ""]
    if limit == HIGH_LIMIT:
        otherwise = ["right if the norm is above the limit, wrong below it",
                     "clipping never lengthens a gradient"]
    shown = [array.round(4).tolist() for array in right]
    expect(list(results), [right] * 2, [
        ([_sum(clipped)] * 2, "each rank clipped its own gradients before the sum",
         "sum first, and clip what the whole batch gives"),
        ([total] * 2, "the gradients are summed, but not clipped: their norm together is above the limit"),
        ([_clip([gradient / len(own) for gradient in total], limit)] * 2,
         "these come from the mean over the ranks",
         "the losses are divided by the global batch already, so sum"),
        ([[_clip([gradient], limit)[0] for gradient in total]] * 2, "each gradient was clipped by itself",
         "the limit is for the norm of all of them together"),
        (own, "each rank has its own gradients only: nothing was exchanged"),
        (clipped, "each rank has its own gradients only, clipped: nothing was exchanged"),
    ], *otherwise, *(f"rank {i} got {got}" for i, got in enumerate(results)), f"expected {shown}",
       same=partial(equal, within=1e-4))


def _sum(ranks: list[list[NDArray[Any]]]) -> list[NDArray[Any]]:
    return [np.sum(parts, axis=0) for parts in zip(*ranks, strict=True)]


def _clip(gradients: list[NDArray[Any]], limit: float) -> list[NDArray[Any]]:
    norm = math.sqrt(sum(float((gradient**2).sum()) for gradient in gradients))
    return [gradient * min(1.0, limit / norm) for gradient in gradients] if norm else gradients


TimedSpan = tuple[int, int, float, float]
# All-reduces (rank, step, start, end). In the second case there are three ranks, another is last in each
# step, and the spans are in no order; in the third, ranks end at different times, and the earliest step is
# not numbered 0; in the fourth, rank 1 never waits.
TIMELINES: tuple[list[TimedSpan], ...] = (
    [(0, 0, 1.0, 6.0), (1, 0, 4.0, 6.0), (0, 1, 11.0, 13.0), (1, 1, 10.0, 13.0)],
    [(2, 1, 9.0, 12.0), (0, 0, 2.0, 5.0), (1, 0, 1.0, 5.0), (0, 1, 8.0, 12.0), (2, 0, 4.0, 5.0),
     (1, 1, 10.0, 12.0)],
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


@exercise(
    LESSON, "A rank waits from its own start until the last rank of the same step has started.",
    [(spans,) for spans in TIMELINES], other=_other_timeline,
)
def waited_ms(answer: Any, spans: list[TimedSpan]) -> None:
    """waited_ms(spans): spans are all-reduces (rank, step, start_ms, end_ms), one per rank and step. Return a
    dictionary with the ms that each rank waited for the others, summed over the steps."""
    right = _waits(spans, "others")
    steps = len({step for _, step, _, _ in spans})
    expect_numbers(answer(spans), right, [
        (_waits(spans, "length"),
         "those are whole all-reduces; once the last rank has come, a rank no longer waits"),
        (_waits(spans, "late"),
         "that is how late each rank came; the rank that comes first is the one that waits"),
        (_waits(spans, "end"), "that is the time after the last rank came, in which the numbers are summed"),
        ({rank: ms / steps for rank, ms in right.items()}, "that is the mean of the steps: add them up"),
        (_waits(spans, "last step"), "that is one step only: add up all steps"),
        (_waits(spans, "one moment"),
         "here all ranks wait until the last start of all steps, but they meet in every step",
         "look for the last start among the spans of the same step"),
    ], "that is not the time in which a rank waits: from when, and for whom, does it wait in a step?",
       "in each step, a rank waits from its own start to the latest start of any rank in that step",
       form=f"a dictionary with a number for each rank: the keys are the ranks, here {[*right]}")


def _waits(spans: list[TimedSpan], mistake: str) -> dict[int, float]:
    """Return for each rank the sum over its spans of what an answer or a mistake takes for waiting."""
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
