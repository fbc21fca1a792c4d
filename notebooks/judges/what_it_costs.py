"""The exercises of lesson 02b: the bandwidth that data parallelism needs, and accumulated gradients."""

# No `from __future__ import annotations`: DDP reads the annotations of a communication hook, and needs types.
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
from labkit.recording.operations import type_of
from labkit.teaching.exercises.comparisons import (
    compare,
    differ,
    equal,
    expect,
    expect_numbers,
    listing,
    number_of,
    wrong_if,
)
from labkit.teaching.exercises.exercise import Results, exercise

from .data_parallel import Experts, Gradients, gradients_of, keeps, random_batch

LESSON = "02b_what_it_costs"

# Milliseconds of a step of one process, and of a rank's computing; bytes of gradients; ranks; latency in µs.
CASES = (40.0, 15.0, 4_000_000, 4, 100.0), (14.0, 7.5, 1_724_320, 2, 50.0), (100.0, 20.0, 100_000_000, 8, 5.0)
ROUNDS = "a ring all-reduce has 2(p−1) rounds, one after another, each with α"
SENT = "each rank sends 2(p−1)/p times the gradients: a p-th of them in each of 2(p−1) rounds"
SAVED = "the all-reduce may take what is saved, alone_ms − shared_ms"
HOPELESS = (14.0, 13.95, 1_724_320, 2, 50.0)  # the latencies alone take longer than what is saved


BY_ZERO = "division by zero where latency alone takes all that is saved: return float('inf') then"


def _other_case(random: Random) -> tuple[float, float, int, int, float]:
    alone_ms = random.uniform(20, 90)
    shared_ms = alone_ms * random.uniform(0.2, 0.6)
    return alone_ms, shared_ms, random.randint(10**6, 10**8), random.randint(2, 8), random.uniform(5, 90)


@exercise(
    LESSON,
    "Above this bandwidth the ranks are faster than one process; where latency alone costs more, no "
    "bandwidth is enough.",
    [*CASES, HOPELESS], other=_other_case,
    errors=lambda *case: {"ZeroDivisionError": BY_ZERO} if case == HOPELESS else {},
)
def break_even(
    answer: Any, alone_ms: float, shared_ms: float, nbytes: int, ranks: int, latency_us: float
) -> None:
    """break_even(alone_ms, shared_ms, nbytes, ranks, latency_us) returns the bandwidth in Gbit/s above which
    data parallelism is faster than one process: a step of one process takes alone_ms; a rank computes for
    shared_ms, then follows a ring all-reduce of nbytes. float('inf') where no bandwidth is enough."""
    given = answer(alone_ms, shared_ms, nbytes, ranks, latency_us)
    saved_s, rounds = (alone_ms - shared_ms) / 1e3, 2 * (ranks - 1)
    bits, latency_s = 8 * nbytes, latency_us * 1e-6
    share, left_s = rounds / ranks, saved_s - rounds * latency_s
    if left_s <= 0:
        number = number_of(given)
        shown = "0.05 ms are saved, and two latencies of 50 µs cost 0.1 ms"
        wrong_if(number < 0, f"{number:.3g} Gbit/s: a negative bandwidth means that no bandwidth is enough; "
                 "return float('inf') there", "", shown)
        wrong_if(not math.isinf(number),
                 "no bandwidth is enough where latency alone costs more than is saved: return float('inf')",
                 "", shown)
        return
    right = share * bits / left_s / 1e9
    expect_numbers(given, right, [
        (right / 8, "that is in gigabytes per second; a byte has 8 bits"),
        (share * bits / saved_s / 1e9, "the latency is missing, and every round of a ring costs it", ROUNDS),
        (share * bits / (saved_s - latency_s) / 1e9,
         "α was counted once, and every round of a ring costs it", ROUNDS),
        (bits / left_s / 1e9, "here each rank sends the gradients once; only for two ranks is that so", SENT),
        (2 * bits / left_s / 1e9,
         "here each rank sends the gradients twice; it sends fewer bytes in a ring", SENT),
        (rounds * bits / left_s / 1e9,
         "here each round carries all gradients; it carries a part of them in a ring", SENT),
        (share * bits / (alone_ms / 1e3 - rounds * latency_s) / 1e9,
         "here the all-reduce takes as long as the step of one process, and the ranks compute, too", SAVED),
        (share * bits / (shared_ms / 1e3 - rounds * latency_s) / 1e9,
         "here the all-reduce takes as long as a rank computes, whatever the step of one process "
         "takes", SAVED),
        (right * 1e9, "that is in bit/s; 1 Gbit/s is 10⁹ of them"),
        (right * 1e-3, "milliseconds are not seconds: 1 ms is 0.001 s"),
        (1 / right, "that is upside down: bandwidth is bits divided by seconds"),
    ], "at the bandwidth in question, the all-reduce takes exactly what the ranks save by computing less",
       "set the all-reduce's time, 2(p−1)·α + 2(p−1)/p · 8n/B, equal to what is saved, and solve for B",
       same=partial(equal, within=1e-3))


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
    sizes = [size for of_rank in SIZES for size in of_rank]
    inputs, targets = (iter(part.split(sizes)) for part in random_batch(sum(sizes)))
    return [[(next(inputs), next(targets)) for _ in of_rank] for of_rank in SIZES]


def _serial_accumulation(weights: Sequence[Sequence[float]]) -> Gradients:
    """Return the gradients of one process that multiplies each micro-batch's mean loss by its weight."""
    model = Experts(1)
    for of_rank, batches in zip(weights, _micro_batches(), strict=True):
        for weight, (inputs, targets) in zip(of_rank, batches, strict=True):
            (weight * nn.functional.mse_loss(model(inputs), targets)).backward()
    return gradients_of(model)


def _accumulate_on_rank(answer: Callable[..., object]) -> tuple[Gradients, int, int]:
    """Return the gradients after the student's function, the buckets sent, and the losses computed later."""
    model = DistributedDataParallel(Experts(1))
    counter = _Counter()
    model.register_comm_hook(None, counter.hook)
    answer(model, _micro_batches()[dist.get_rank()], counter.loss)
    return gradients_of(model.module), counter.buckets, counter.late


@exercise(
    LESSON,
    f"{len(SIZES)} ranks, batches of 1 to {max(map(max, SIZES))} examples, sent once: the gradients of "
    f"one process with all the examples.",
    ranks=len(SIZES), on_ranks=_accumulate_on_rank,
    call=f"accumulate(model, batches, loss_function) on {len(SIZES)} ranks",
)
def accumulate(results: Results) -> None:
    """accumulate(model, batches, loss_function) gives a DDP model the gradients of the mean loss over all
    examples of all ranks, and sends them only once. Batches and ranks have different numbers of examples."""
    after, buckets, late = zip(*results, strict=True)
    wrong_if(not any(after),
             "no parameter has a gradient afterwards: backward() adds to .grad, and nothing may "
             "clear it at the end")
    wrong_if(buckets[0] == 0 and not all(keeps(gradients, after[0]) for gradients in after),
             "no rank sent its gradients: no_sync() was active for every batch",
             "the last batch must run outside it, and sends the sum of all")
    ranks, examples = len(SIZES), sum(map(sum, SIZES))
    right = _serial_accumulation([[size / examples for size in sizes] for sizes in SIZES])
    wrong_if(buckets[0] and late[0] and differ(after, right),
             "gradients computed after the backward that sends stay on their rank",
             "the batch outside no_sync() must be the last",
             f"computed after it: {late[0]} of {len(SIZES[0])} losses")
    # The weights of the micro-batches' mean losses that result, after DDP has divided by the ranks.
    known: list[tuple[Any, ...]] = [
        ([[1 / len(sizes) / ranks for _ in sizes] for sizes in SIZES],
         "every batch counts the same, however few examples it has",
         "weight each loss by the number of its examples"),
        ([[size / sum(sizes) / ranks for size in sizes] for sizes in SIZES],
         "every rank counts the same, however few examples it has",
         "divide by the examples of all ranks together (an all_reduce of the number), not by this rank's "
         "own"),
        ([[1 / ranks for _ in sizes] for sizes in SIZES],
         "the mean losses of the batches were added up", "weight each by its share of the examples"),
        ([[size / examples / ranks for size in sizes] for sizes in SIZES],
         "the gradients were divided by the number of ranks once too often (DDP averages over the ranks: it "
         "divides already)"),
        ([[size / ranks for size in sizes] for sizes in SIZES],
         "the gradients were weighted by the number of examples, but not divided by that of all ranks"),
    ]
    mistakes = [([_serial_accumulation(weights)], *hint) for weights, *hint in known]
    each = "; ".join(f"rank {rank}: {listing(sizes)}" for rank, sizes in enumerate(SIZES))
    expect(after, [right], mistakes, "", "", f"examples in the batches: {each}",
           same=lambda a, b: not differ(a, b[0]))
    compare(after, right, subject="the gradients")
    _judge_sent(results, buckets[0], sum(array.nbytes for array in right.values()))


def _judge_sent(results: Results, buckets: int, nbytes: int) -> None:
    """Check that each rank sent all gradients once, by DDP or by an operation of the answer's own."""
    spans = results.trace.filter(rank=0, kind="communication").spans
    sent = sum(span.nbytes for span in spans if type_of(span.name).reduces)
    wrong_if(sent < nbytes,
             "the gradients are right, but the ranks have not exchanged them: how can a rank know those of "
             "the others?",
             "", f"rank 0 took part in all-reduces of {sent} bytes; the gradients have {nbytes}")
    wrong_if(sent >= 2 * nbytes, "the gradients are right, but were sent "
             f"{counted(max(buckets, sent // nbytes), 'time')}; once is enough",
             "forward and backward of all batches but the last belong inside `with model.no_sync():`",
             "DDP decides in the forward pass whether the backward will send")
