"""The exercises of lesson 02b: right answers pass, and wrong ones get an explanation."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from answers import Answers
from store_exchange import through_the_store

import labkit

answers = Answers()

right, wrong, mutant = answers.of("break_even")


@right
def break_even_by_bisection(alone_ms, shared_ms, nbytes, ranks, latency_us):
    def pays(gbit_per_s):
        link = labkit.Link(gbit_per_s=gbit_per_s, latency_us=latency_us)
        return shared_ms + 1e3 * labkit.predict.all_reduce(nbytes, ranks, link) < alone_ms

    low, high = 1e-3, 1e6
    if not pays(high):
        return math.inf
    while high / low > 1.0001:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high


BANDWIDTH, SAVED = "rounds / ranks * 8 * nbytes / left_s / 1e9", "(alone_ms - shared_ms) / 1e3"
ALPHA, SHARE = "rounds * latency_us / 1e6", "rounds / ranks * 8"
mutant(BANDWIDTH, "rounds / ranks * nbytes / left_s / 1e9", "a byte has 8 bits")
mutant(f" - {ALPHA}", "", "the latency is missing", cure="2(p−1) rounds")
mutant(ALPHA, "latency_us / 1e6", "α was counted once", cure="2(p−1) rounds")
TWO = "sends the gradients once; only for two ranks"
mutant(SHARE, "8", TWO, cure="2(p−1)/p times the gradients")
mutant(SHARE, "2 * 8", "sends the gradients twice", cure="2(p−1)/p times the gradients")
EACH = "a p-th of them in each of 2(p−1) rounds"
mutant(SHARE, "rounds * 8", "each round carries all gradients", cure=EACH)
STEP = "as long as the step of one process"
mutant(SAVED, "alone_ms / 1e3", STEP, cure="alone_ms − shared_ms")
mutant(SAVED, "shared_ms / 1e3", "as long as a rank computes", cure="alone_ms − shared_ms")
mutant(BANDWIDTH, f"1 / ({BANDWIDTH})", "upside down")
mutant(BANDWIDTH, f"{BANDWIDTH} * 1e9", "that is in bit/s")
mutant(BANDWIDTH, f"{BANDWIDTH} / 1e3", "milliseconds are not seconds")
mutant(' if left_s > 0 else float("inf")', "", "a negative bandwidth")
mutant('float("inf")', "1e4", "return float('inf')")
GUESS = "what the ranks save by computing less"
mutant(BANDWIDTH, "2.0", GUESS, cure="equal to what is saved, and solve for B")


right, wrong, mutant = answers.of("accumulate")


def examples_of_all_ranks(batches):
    examples = torch.tensor(sum(len(inputs) for inputs, _ in batches))
    dist.all_reduce(examples)
    return examples


@right
def accumulate_with_sums(model, batches, loss_function):
    """The losses of all examples are summed, and the gradients divided at the end."""
    examples = examples_of_all_ranks(batches)
    with model.no_sync():
        for inputs, targets in batches[:-1]:
            (loss_function(model(inputs), targets) * len(inputs)).backward()
    inputs, targets = batches[-1]
    (loss_function(model(inputs), targets) * len(inputs)).backward()
    for p in model.parameters():
        if p.grad is not None:
            p.grad *= dist.get_world_size() / examples


def accumulate_locally(model, batches, loss_function):
    examples = examples_of_all_ranks(batches)
    with model.no_sync():
        for inputs, targets in batches:
            (loss_function(model(inputs), targets) * len(inputs) / examples).backward()
    return [p for p in model.parameters() if p.grad is not None]


@right
def accumulate_without_ddp(model, batches, loss_function):
    """One all_reduce of all gradients, as one tensor."""
    trained = accumulate_locally(model, batches, loss_function)
    flat = torch.cat([p.grad.flatten() for p in trained])
    dist.all_reduce(flat)
    for p, part in zip(trained, flat.split([p.numel() for p in trained]), strict=True):
        p.grad.copy_(part.view_as(p))


@wrong("the ranks have not exchanged them")
def accumulate_through_the_store(model, batches, loss_function):
    trained = accumulate_locally(model, batches, loss_function)
    for p, *parts in zip(trained, *through_the_store([p.grad for p in trained]), strict=True):
        p.grad = sum(parts)


WEIGHT = "len(inputs) * dist.get_world_size() / examples"
LESSON, OWN = "1 / len(batches)", "len(inputs) / sum(len(part) for part, _ in batches)"
BATCHES = "every batch counts the same, however few examples it has"
mutant(WEIGHT, LESSON, BATCHES, cure="weight each loss")
RANKS = "every rank counts the same, however few examples it has"
mutant(WEIGHT, OWN, RANKS, cure="of all ranks together")
mutant(WEIGHT, "len(inputs) / examples", "DDP averages over the ranks: it divides already")
mutant(WEIGHT, "len(inputs)", "but not divided by that of all ranks")
SUM = "the mean losses of the batches were added up"
mutant(WEIGHT, "1", SUM, cure="by its share of the examples")
SYNC = "contextlib.nullcontext() if number == len(batches) else model.no_sync()"
ALWAYS = "were sent 3 times; once is enough"
mutant(SYNC, "contextlib.nullcontext()", ALWAYS, cure="inside `with model.no_sync():`")
mutant(SYNC, "model.no_sync()", "No rank sent its gradients", cure="must run outside it")
FIRST = "the batch outside no_sync() must be the last"
mutant("number == len(batches)", "number == 1", "stay on their rank", cure=FIRST)
LOSS = "weight * loss_function(model(inputs), targets)"
mutant(
    f"with {SYNC}:\n            ({LOSS})",
    f"loss = {LOSS}\n        with {SYNC}:\n            loss",
    "DDP decides in the forward pass",
    cure="forward and backward of all batches but the last",
)
BACKWARD = f"({LOSS}).backward()"
mutant(BACKWARD, f"{BACKWARD}\n    model.zero_grad()", "no parameter has a gradient afterwards")
OTHERS = "not those of one process with the whole batch"
mutant(BACKWARD, f"model.zero_grad()\n            {BACKWARD}", OTHERS)


test_the_verdict_fits_the_answer = answers.test_of_verdicts()
test_every_exercise_has_right_and_wrong_answers_here = answers.test_of_completeness("what_it_costs")
