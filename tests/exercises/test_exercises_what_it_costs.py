"""The exercises of lesson 02b: right answers pass, and wrong ones get an explanation."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
import torch.distributed as dist
from answers import Answers, judge
from store_exchange import through_the_store

import labkit

answers = Answers()
right, wrong = answers.right, answers.wrong


# The bandwidth that is needed: break_even


def solved(saved_ms, nbytes, ranks, rounds, latency_us, share=None):
    share = 2 * (ranks - 1) / ranks if share is None else share
    left_s = saved_ms / 1e3 - rounds * latency_us * 1e-6
    return share * 8 * nbytes / left_s / 1e9 if left_s > 0 else math.inf


@right("break_even")
def break_even(alone_ms, shared_ms, nbytes, ranks, latency_us):
    return solved(alone_ms - shared_ms, nbytes, ranks, 2 * (ranks - 1), latency_us)


@right("break_even")
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


@wrong("break_even", "a byte has 8 bits")
def break_even_in_bytes(alone_ms, shared_ms, nbytes, ranks, latency_us):
    return break_even(alone_ms, shared_ms, nbytes, ranks, latency_us) / 8


@wrong("break_even", "the latency is missing", cure="2(p−1) rounds")
def break_even_without_latency(alone_ms, shared_ms, nbytes, ranks, latency_us):
    return break_even(alone_ms, shared_ms, nbytes, ranks, 0)


@wrong("break_even", "α was counted once", cure="2(p−1) rounds")
def break_even_with_one_latency(alone_ms, shared_ms, nbytes, ranks, latency_us):
    return solved(alone_ms - shared_ms, nbytes, ranks, 1, latency_us)


@wrong("break_even", "sends the gradients once; only for two ranks", cure="2(p−1)/p times the gradients")
def break_even_for_two(alone_ms, shared_ms, nbytes, ranks, latency_us):
    return solved(alone_ms - shared_ms, nbytes, ranks, 2 * (ranks - 1), latency_us, share=1)


@wrong("break_even", "sends the gradients twice", cure="2(p−1)/p times the gradients")
def break_even_for_many(alone_ms, shared_ms, nbytes, ranks, latency_us):
    return solved(alone_ms - shared_ms, nbytes, ranks, 2 * (ranks - 1), latency_us, share=2)


@wrong("break_even", "each round carries all gradients", cure="a p-th of them in each of 2(p−1) rounds")
def break_even_with_all_in_each_round(alone_ms, shared_ms, nbytes, ranks, latency_us):
    return solved(alone_ms - shared_ms, nbytes, ranks, 2 * (ranks - 1), latency_us, share=2 * (ranks - 1))


@wrong("break_even", "as long as the step of one process", cure="alone_ms − shared_ms")
def break_even_of_the_step(alone_ms, shared_ms, nbytes, ranks, latency_us):
    return break_even(alone_ms, 0, nbytes, ranks, latency_us)


@wrong("break_even", "as long as a rank computes", cure="alone_ms − shared_ms")
def break_even_of_the_computing(alone_ms, shared_ms, nbytes, ranks, latency_us):
    return break_even(shared_ms, 0, nbytes, ranks, latency_us)


@wrong("break_even", "upside down")
def break_even_upside_down(alone_ms, shared_ms, nbytes, ranks, latency_us):
    return 1 / break_even(alone_ms, shared_ms, nbytes, ranks, latency_us)


@wrong("break_even", "that is in bit/s")
def break_even_in_bits(alone_ms, shared_ms, nbytes, ranks, latency_us):
    return break_even(alone_ms, shared_ms, nbytes, ranks, latency_us) * 1e9


@wrong("break_even", "milliseconds are not seconds")
def break_even_without_units(alone_ms, shared_ms, nbytes, ranks, latency_us):
    return break_even(alone_ms, shared_ms, nbytes, ranks, latency_us) / 1e3


@wrong("break_even", "a negative bandwidth")
def break_even_of_a_loss(alone_ms, shared_ms, nbytes, ranks, latency_us):
    left_s = (alone_ms - shared_ms) / 1e3 - 2 * (ranks - 1) * latency_us * 1e-6
    return 2 * (ranks - 1) / ranks * 8 * nbytes / left_s / 1e9


@wrong("break_even", "return float('inf')")
def break_even_at_least(alone_ms, shared_ms, nbytes, ranks, latency_us):
    return min(1e4, break_even(alone_ms, shared_ms, nbytes, ranks, latency_us))


@wrong("break_even", "what the ranks save by computing less", cure="equal to what is saved, and solve for B")
def break_even_by_guessing(alone_ms, shared_ms, nbytes, ranks, latency_us):
    return 2.0


# accumulate


def examples_of_all_ranks(batches):
    examples = torch.tensor(sum(len(inputs) for inputs, _ in batches))
    dist.all_reduce(examples)
    return examples


def accumulate_with(weight, model, batches, loss_function):
    """All micro-batches, sent once; `weight(size)` is what each one's mean loss is multiplied by."""
    for i, (inputs, targets) in enumerate(batches):
        with contextlib.nullcontext() if i == len(batches) - 1 else model.no_sync():
            (weight(len(inputs)) * loss_function(model(inputs), targets)).backward()


@right("accumulate")
def accumulate(model, batches, loss_function):
    share = dist.get_world_size() / examples_of_all_ranks(batches)
    accumulate_with(lambda size: share * size, model, batches, loss_function)


@right("accumulate")
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


@wrong("accumulate", "every batch counts the same, however few examples it has", cure="weight each loss")
def accumulate_as_in_the_lesson(model, batches, loss_function):
    accumulate_with(lambda _: 1 / len(batches), model, batches, loss_function)


@wrong("accumulate", "every rank counts the same, however few examples it has", cure="of all ranks together")
def accumulate_by_own_examples(model, batches, loss_function):
    own = sum(len(inputs) for inputs, _ in batches)
    accumulate_with(lambda size: size / own, model, batches, loss_function)


@wrong("accumulate", "DDP averages over the ranks: it divides already")
def accumulate_and_forget_that_ddp_divides(model, batches, loss_function):
    examples = examples_of_all_ranks(batches)
    accumulate_with(lambda size: size / examples, model, batches, loss_function)


@wrong("accumulate", "but not divided by that of all ranks")
def accumulate_undivided(model, batches, loss_function):
    accumulate_with(lambda size: size, model, batches, loss_function)


@wrong("accumulate", "the mean losses of the batches were added up", cure="by its share of the examples")
def accumulate_the_sum(model, batches, loss_function):
    accumulate_with(lambda _: 1, model, batches, loss_function)


@wrong("accumulate", "were sent 3 times; once is enough", cure="inside `with model.no_sync():`")
def accumulate_and_send_always(model, batches, loss_function):
    share = dist.get_world_size() / examples_of_all_ranks(batches)
    for inputs, targets in batches:
        (share * len(inputs) * loss_function(model(inputs), targets)).backward()


@wrong("accumulate", "DDP decides in the forward pass", cure="forward and backward of all batches but the last")
def accumulate_with_the_forward_outside(model, batches, loss_function):
    share = dist.get_world_size() / examples_of_all_ranks(batches)
    for i, (inputs, targets) in enumerate(batches):
        loss = share * len(inputs) * loss_function(model(inputs), targets)
        with contextlib.nullcontext() if i == len(batches) - 1 else model.no_sync():
            loss.backward()


@wrong("accumulate", "No rank sent its gradients", cure="must run outside it")
def accumulate_and_send_never(model, batches, loss_function):
    with model.no_sync():
        for inputs, targets in batches:
            (loss_function(model(inputs), targets) / len(batches)).backward()


@wrong("accumulate", "stay on their rank", cure="the batch outside no_sync() must be the last")
def accumulate_and_send_the_first(model, batches, loss_function):
    share = dist.get_world_size() / examples_of_all_ranks(batches)
    for number, (inputs, targets) in enumerate(batches):
        with model.no_sync() if number % len(batches) else contextlib.nullcontext():
            (share * len(inputs) * loss_function(model(inputs), targets)).backward()


@wrong("accumulate", "no parameter has a gradient afterwards")
def accumulate_and_clear(model, batches, loss_function):
    accumulate(model, batches, loss_function)
    model.zero_grad()


@wrong("accumulate", "not those of one process with the whole batch")
def accumulate_the_last(model, batches, loss_function):
    for inputs, targets in batches:
        model.zero_grad()
        loss_function(model(inputs), targets).backward()


def accumulate_locally(model, batches, loss_function):
    examples = examples_of_all_ranks(batches)
    with model.no_sync():
        for inputs, targets in batches:
            (loss_function(model(inputs), targets) * len(inputs) / examples).backward()
    return [p for p in model.parameters() if p.grad is not None]


@right("accumulate")
def accumulate_without_ddp(model, batches, loss_function):
    """One all_reduce of all gradients, as one tensor."""
    trained = accumulate_locally(model, batches, loss_function)
    flat = torch.cat([p.grad.flatten() for p in trained])
    dist.all_reduce(flat)
    for p, part in zip(trained, flat.split([p.numel() for p in trained]), strict=True):
        p.grad.copy_(part.view_as(p))


@wrong("accumulate", "the ranks have not exchanged them")
def accumulate_through_the_store(model, batches, loss_function):
    trained = accumulate_locally(model, batches, loss_function)
    for p, *parts in zip(trained, *through_the_store([p.grad for p in trained]), strict=True):
        p.grad = sum(parts)


@pytest.mark.parametrize("answer", answers.parameters())
@pytest.mark.processes
def test_the_verdict_fits_the_answer(answer) -> None:
    judge(answer)


def test_every_exercise_has_right_and_wrong_answers_here() -> None:
    answers.complete("what_it_costs")
