"""The exercises of lesson 02b: the bandwidth that data parallelism needs, and gradients accumulated over batches."""

# No `from __future__ import annotations`: DDP reads the annotations of a communication hook, and needs types there.
import math
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from labkit.errors.lists import counted
from labkit.exercises.calculations import Expected, judge_calculation
from labkit.exercises.comparisons import compare, differ, equal, listing, number_of
from labkit.exercises.judging import AnswerError, OnRanks, Results, exercise, explaining, judge_result, showing
from labkit.exercises.random_state import other_cases
from labkit.recording.operations import type_of

from .data_parallel import Experts, Gradients, gradients_of, keeps, random_batch

LESSON = "02b_what_it_costs"

# Milliseconds of a step of one process, and of the computing of a rank; bytes of gradients; ranks; latency in µs.
CASES = ((40.0, 15.0, 4_000_000, 4, 100.0), (14.0, 7.5, 1_724_320, 2, 50.0), (100.0, 20.0, 100_000_000, 8, 5.0))
ROUNDS = "a ring all-reduce has 2(p−1) rounds, one after another, each with α"
SENT = "each rank sends 2(p−1)/p times the gradients: a p-th of them in each of 2(p−1) rounds"
SAVED = "the all-reduce may take what is saved, alone_ms − shared_ms"
HOPELESS = (14.0, 13.95, 1_724_320, 2, 50.0)  # the latencies alone take longer than what is saved


def _other_case(random: Random) -> tuple[float, float, int, int, float]:
    alone_ms = random.uniform(20, 90)
    return (
        alone_ms,
        alone_ms * random.uniform(0.2, 0.6),
        random.randint(10**6, 10**8),
        random.randint(2, 8),
        random.uniform(5, 90),
    )


@exercise(
    LESSON,
    "break_even(alone_ms, shared_ms, nbytes, ranks, latency_us) returns the bandwidth in Gbit/s above which data "
    "parallelism is faster than one process: a step of one process takes alone_ms; a rank computes for shared_ms, then "
    "follows a ring all-reduce of nbytes. float('inf') where no bandwidth is enough.",
    "Above this bandwidth the ranks are faster than one process; where latency alone costs more, no bandwidth is enough.",
)
def _break_even(answer: Any, _: OnRanks) -> None:
    for case in (*CASES, *other_cases(_other_case)):
        judge_calculation(answer, "break_even", case, _even(*case), same=partial(equal, within=1e-3))
    _judge_hopeless(answer)


def _even(alone_ms: float, shared_ms: float, nbytes: int, ranks: int, latency_us: float) -> Expected:
    saved_s, rounds = (alone_ms - shared_ms) / 1e3, 2 * (ranks - 1)
    bits, latency_s = 8 * nbytes, latency_us * 1e-6
    share, left_s = rounds / ranks, saved_s - rounds * latency_s
    right = share * bits / left_s / 1e9
    mistakes = {
        "that is in gigabytes per second; a byte has 8 bits": right / 8,
        ("the latency is missing, and every round of a ring costs it", ROUNDS): share * bits / saved_s / 1e9,
        ("α was counted once, and every round of a ring costs it", ROUNDS): share * bits / (saved_s - latency_s) / 1e9,
        ("here each rank sends the gradients once; only for two ranks is that so", SENT): bits / left_s / 1e9,
        ("here each rank sends the gradients twice; it sends fewer bytes in a ring", SENT): 2 * bits / left_s / 1e9,
        ("here each round carries all gradients; it carries a part of them in a ring", SENT): rounds * bits / left_s / 1e9,
        ("here the all-reduce takes as long as the step of one process, and the ranks compute, too", SAVED): (
            share * bits / (alone_ms / 1e3 - rounds * latency_s) / 1e9
        ),
        ("here the all-reduce takes as long as a rank computes, whatever the step of one process takes", SAVED): (
            share * bits / (shared_ms / 1e3 - rounds * latency_s) / 1e9
        ),
        "that is in bit/s; 1 Gbit/s is 10⁹ of them": right * 1e9,
        "milliseconds are not seconds: 1 ms is 0.001 s": right * 1e-3,
        "that is upside down: bandwidth is bits divided by seconds": 1 / right,
    }
    otherwise = (
        "at the bandwidth in question, the all-reduce takes exactly what the ranks save by computing less",
        "set the all-reduce's time, 2(p−1)·α + 2(p−1)/p · 8n/B, equal to what is saved, and solve for B",
    )
    return Expected(right, mistakes, otherwise)


def _judge_hopeless(answer: Any) -> None:
    details = (f"break_even{HOPELESS}: 0.05 ms are saved, and two latencies of 50 µs cost 0.1 ms",)
    by_zero = "division by zero where latency alone takes all that is saved: return float('inf') then"
    with showing(*details), explaining({"ZeroDivisionError": by_zero}):
        given = number_of(answer(*HOPELESS))
    if given < 0:
        raise AnswerError(
            f"{given:.3g} Gbit/s: a negative bandwidth means that no bandwidth is enough; return float('inf') there", *details
        )
    if not math.isinf(given):
        raise AnswerError("no bandwidth is enough where latency alone costs more than is saved: return float('inf')", *details)


class _Counter:
    """Counts the buckets that DDP sends, and the losses that are computed after the last of them."""

    def __init__(self) -> None:
        self.buckets = 0
        self.late = 0

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the loss; passed to the student's function as its loss function."""
        self.late += 1
        return nn.functional.mse_loss(outputs, targets)

    def hook(self, _: object, bucket: dist.GradBucket) -> Future[Tensor]:
        """DDP's communication hook; DDP calls it for each bucket, once its gradients are complete."""
        self.buckets += 1
        self.late = 0
        assert dist.group.WORLD is not None
        return allreduce_hook(dist.group.WORLD, bucket)


SIZES = ((5, 1, 2), (2, 4, 6), (1, 1, 2))  # examples in each micro-batch of each rank; no mistake cancels out


def _micro_batches() -> list[list[tuple[Tensor, Tensor]]]:
    """Return the micro-batches of each rank."""
    inputs, targets = (iter(part.split([n for sizes in SIZES for n in sizes])) for part in random_batch(sum(map(sum, SIZES))))
    return [[(next(inputs), next(targets)) for _ in sizes] for sizes in SIZES]


def _serial_accumulation(weights: Sequence[Sequence[float]]) -> Gradients:
    """Return the gradients of one process that multiplies each micro-batch's mean loss by its weight."""
    model = Experts(1)
    for of_rank, batches in zip(weights, _micro_batches(), strict=True):
        for weight, (inputs, targets) in zip(of_rank, batches, strict=True):
            (weight * nn.functional.mse_loss(model(inputs), targets)).backward()
    return gradients_of(model)


def _accumulate_on_rank(answer: Callable[..., object]) -> tuple[Gradients, int, int]:
    """Return the gradients after the student's function, and the numbers of buckets sent and losses computed later."""
    model = DistributedDataParallel(Experts(1))
    counter = _Counter()
    model.register_comm_hook(None, counter.hook)
    answer(model, _micro_batches()[dist.get_rank()], counter.loss)
    return gradients_of(model.module), counter.buckets, counter.late


@exercise(
    LESSON,
    "accumulate(model, batches, loss_function) gives a DDP model the gradients of the mean loss over all examples of all "
    "ranks, and sends them only once. Batches and ranks have different numbers of examples.",
    f"{len(SIZES)} ranks, batches of 1 to {max(map(max, SIZES))} examples, sent once: the gradients of "
    f"one process with all the examples.",
)
def _accumulate(answer: Any, on: OnRanks) -> None:
    with showing(f"accumulate(model, batches, loss_function) on {len(SIZES)} ranks"):
        _judge_accumulated(on(len(SIZES), _accumulate_on_rank, answer))


def _judge_accumulated(results: Results) -> None:
    ranks, examples = len(SIZES), sum(map(sum, SIZES))
    mistakes = {  # with the weights of the micro-batches' mean losses that result, after DDP has divided by the ranks
        ("every batch counts the same, however few examples it has", "weight each loss by the number of its examples"): [
            [1 / len(sizes) / ranks for _ in sizes] for sizes in SIZES
        ],
        (
            "every rank counts the same, however few examples it has",
            "divide by the examples of all ranks together (an all_reduce of the number), not by this rank's own",
        ): [[size / sum(sizes) / ranks for size in sizes] for sizes in SIZES],
        ("the mean losses of the batches were added up", "weight each by its share of the examples"): [
            [1 / ranks for _ in sizes] for sizes in SIZES
        ],
        "the gradients were divided by the number of ranks once too often (DDP averages over the ranks: it divides already)": [
            [size / examples / ranks for size in sizes] for sizes in SIZES
        ],
        "the gradients were weighted by the number of examples, but not divided by that of all ranks": [
            [size / ranks for size in sizes] for sizes in SIZES
        ],
    }
    after, buckets, late = zip(*results, strict=True)
    if not any(after):
        raise AnswerError("no parameter has a gradient afterwards: backward() adds to .grad, and nothing may clear it at the end")
    if buckets[0] == 0 and not all(keeps(gradients, after[0]) for gradients in after):
        raise AnswerError(
            "no rank sent its gradients: no_sync() was active for every batch",
            cure="the last batch must run outside it, and sends the sum of all",
        )
    right = _serial_accumulation([[size / examples for size in sizes] for sizes in SIZES])
    if buckets[0] and late[0] and differ(after, right):
        raise AnswerError(
            "gradients computed after the backward that sends stay on their rank",
            f"computed after it: {late[0]} of {len(SIZES[0])} losses",
            cure="the batch outside no_sync() must be the last",
        )
    each = "; ".join(f"rank {rank}: {listing(sizes)}" for rank, sizes in enumerate(SIZES))
    serial = {mistake: [_serial_accumulation(weights)] for mistake, weights in mistakes.items()}
    judge_result(after, [right], serial, "", f"examples in the batches: {each}", same=lambda a, b: not differ(a, b[0]))
    compare(after, right, subject="the gradients")
    _judge_sent(results, buckets[0], sum(array.nbytes for array in right.values()))


def _judge_sent(results: Results, buckets: int, nbytes: int) -> None:
    """Check that each rank sent all gradients once, by DDP or by an operation of the answer's own."""
    spans = results.trace.filter(rank=0, kind="communication").spans
    sent = sum(span.nbytes for span in spans if type_of(span.name).reduces)
    if sent < nbytes:
        raise AnswerError(
            "the gradients are right, but the ranks have not exchanged them: how can a rank know those of the others?",
            f"rank 0 took part in all-reduces of {sent} bytes; the gradients have {nbytes}",
        )
    if sent >= 2 * nbytes:
        raise AnswerError(
            f"the gradients are right, but were sent {counted(max(buckets, sent // nbytes), 'time')}; once is enough",
            "DDP decides in the forward pass whether the backward will send",
            cure="forward and backward of all batches but the last belong inside `with model.no_sync():`",
        )
