"""The exercises of lesson 13: right answers pass, and each typical mistake gets its own hint."""

from __future__ import annotations

import statistics

import pytest
import torch
import torch.distributed as dist
from answers import Answers, judge

from labkit.teaching.exercises.find_the_bottleneck import NUMBERS, PAYS_LINK, SIX

answers = Answers()
right, wrong = answers.right, answers.wrong


# longest_path


def ends_of(tasks):
    ends = []
    for ms, needs in tasks:
        ends.append(ms + max([ends[need] for need in needs], default=0))
    return ends


@right("longest_path")
def longest_path(tasks):
    ends = ends_of(tasks)
    path = [ends.index(max(ends))]
    while needs := tasks[path[0]][1]:
        path.insert(0, max(needs, key=lambda need: ends[need]))
    return path


@right("longest_path")
def longest_path_by_paths(tasks):
    paths = []
    for i, (ms, needs) in enumerate(tasks):
        before = max((paths[need] for need in needs), default=(0, ()))
        paths.append((before[0] + ms, (*before[1], i)))
    return max(paths)[1]


@wrong("longest_path", "the last one first", cure="turn the list around")
def path_backwards(tasks):
    return longest_path(tasks)[::-1]


@wrong("longest_path", "ends at the longest task", cure="compute when each task ends")
def path_to_the_longest_task(tasks):
    path = [max(range(len(tasks)), key=lambda task: tasks[task][0])]
    while needs := tasks[path[0]][1]:
        path.insert(0, needs[0])
    return path


@wrong("longest_path", "ends at the last task of the list", cure="compute when each task ends")
def path_to_the_last_task_of_the_list(tasks):
    ends = ends_of(tasks)
    path = [len(tasks) - 1]
    while needs := tasks[path[0]][1]:
        path.insert(0, max(needs, key=lambda need: ends[need]))
    return path


@wrong("longest_path", "follows the longest of them", cure="whatever its own duration")
def path_by_durations(tasks):
    ends = ends_of(tasks)
    path = [ends.index(max(ends))]
    while needs := tasks[path[0]][1]:
        path.insert(0, max(needs, key=lambda need: tasks[need][0]))
    return path


@wrong("longest_path", "follows the first of them", cure="the one that ended last")
def path_by_the_first_need(tasks):
    ends = ends_of(tasks)
    path = [ends.index(max(ends))]
    while needs := tasks[path[0]][1]:
        path.insert(0, needs[0])
    return path


@wrong("longest_path", "those are all tasks", cure="go back from the task that ends last")
def path_of_all_tasks(tasks):
    return list(range(len(tasks)))


@wrong("longest_path", "leaves out the task that ends last", cure="the path ends with it")
def path_without_its_end(tasks):
    return longest_path(tasks)[:-1]


@wrong("longest_path", "leaves out the task that begins it", cure="until a task needs nothing")
def path_without_its_beginning(tasks):
    return longest_path(tasks)[1:]


@wrong("longest_path", "so it never waited for it")
def path_with_a_leap(tasks):
    return [0, len(tasks) - 1]


@wrong("longest_path", "another path is longer", cure="go back from the last one")
def path_of_one_task(tasks):
    return [0]


@wrong("longest_path", "expected a list with the numbers of tasks")
def length_of_the_path(tasks):
    return max(ends_of(tasks))


# straggler


@right("straggler")
def straggler(spans):
    ranks = sorted({rank for rank, *_ in spans})
    arrived = [[start for one, name, start, _ in spans if one == rank and name == "all_reduce"] for rank in ranks]
    return statistics.mode(max(ranks, key=lambda rank: at[rank]) for at in zip(*arrived, strict=True))


@right("straggler")
def straggler_by_the_end_of_work(spans):
    last = {}
    for rank, name, _, end in spans:
        if name == "backward":
            last.setdefault(rank, []).append(end)
    wins = [max(last, key=lambda rank: last[rank][k]) for k in range(len(last[0]))]
    return max(last, key=wins.count)


def time_in(spans, rank, names):
    return sum(end - start for one, name, start, end in spans if one == rank and name in names)


@wrong("straggler", "it waits there. For whom?", cure="who arrives last does not wait")
def longest_in_all_reduces(spans):
    return max(range(4), key=lambda rank: time_in(spans, rank, ["all_reduce"]))


@wrong("straggler", "computes longest in total", cure="for each all-reduce who arrives last")
def longest_in_compute(spans):
    return max(range(4), key=lambda rank: time_in(spans, rank, ["backward", "optimizer"]))


@wrong("straggler", "in the last all-reduce", cure="count over all of them")
def last_of_the_last(spans):
    return max((start, rank) for rank, name, start, _ in spans if name == "all_reduce")[1]


@wrong("straggler", "the function returns nothing")
def straggler_printed(spans):
    print(straggler(spans))


# virtual_speedup


@right("virtual_speedup")
def virtual_speedup(step_ms, phases, name, factor):
    return step_ms({}) - step_ms({phase: factor for phase in phases if phase != name}) / factor


@wrong("virtual_speedup", "not what the change saves", cure="subtract it from the step")
def step_after(step_ms, phases, name, factor):
    return step_ms({phase: factor for phase in phases if phase != name}) / factor


@wrong("virtual_speedup", "runs too slowly", cure="divide the slowed step by the factor first")
def without_the_clock(step_ms, phases, name, factor):
    return step_ms({}) - step_ms({phase: factor for phase in phases if phase != name})


@wrong("virtual_speedup", "the wrong sign", cure="step now minus step after")
def negative_speedup(step_ms, phases, name, factor):
    return -virtual_speedup(step_ms, phases, name, factor)


@wrong("virtual_speedup", "the phase itself is slower", cure="slow all phases but this one")
def slowed_phase(step_ms, phases, name, factor):
    return step_ms({name: factor}) - step_ms({})


@wrong("virtual_speedup", "how much the slowed program lost", cure="divide the slowed step by the factor, and")
def loss_of_the_others(step_ms, phases, name, factor):
    return -without_the_clock(step_ms, phases, name, factor)


@wrong("virtual_speedup", "only the clock has changed", cure="leave out the phase")
def everything_slower(step_ms, phases, name, factor):
    return step_ms({}) - step_ms(dict.fromkeys(phases, factor)) / factor


@wrong("virtual_speedup", "step_ms can only slow phases down")
def really_faster(step_ms, phases, name, factor):
    return step_ms({}) - step_ms({name: 1 / factor})


@wrong("virtual_speedup", "By which clock?", cure="slow all other phases by the factor")
def always_a_tenth(step_ms, phases, name, factor):
    return step_ms({}) / 10


# which_pays

right("which_pays", "half the bytes")
wrong("which_pays", "how long do their bytes take", "one message", cure="16 ms")
wrong("which_pays", "for the rest of a step", "half the compute", cure="1.2 MB")
wrong("which_pays", "expected 'one message', 'half the bytes' or 'half the compute'", "a faster network")


def test_on_this_link_half_the_bytes_save_far_more_than_one_message():
    def cost_ms(messages, nbytes):
        return 1e3 * messages * PAYS_LINK.seconds("all_reduce", nbytes, 2)

    saved = {nbytes: cost_ms(SIX, 4 * NUMBERS) - cost_ms(SIX, nbytes * NUMBERS) for nbytes in (4, 2)}
    saved_latency = cost_ms(SIX, 4 * NUMBERS) - cost_ms(1, 4 * SIX * NUMBERS)
    assert 1 < saved_latency < saved[2] / 10


# exchange


def flat_mean(parts):
    flat = torch.cat([part.flatten() for part in parts])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for part, mean in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
        part.copy_(mean.view_as(part))


@right("exchange")
def exchange(gradients, loss):
    flat_mean([*gradients, loss])


@right("exchange")
def exchange_coalesced(gradients, loss):
    from torch.nn.utils import parameters_to_vector, vector_to_parameters

    parts = [*gradients, loss.view(1)]
    flat = parameters_to_vector(parts)
    dist.all_reduce(flat, op=dist.ReduceOp.SUM)
    averaged = [torch.empty_like(part) for part in parts]
    vector_to_parameters(flat / dist.get_world_size(), averaged)
    for part, mean in zip(parts, averaged, strict=True):
        part.copy_(mean)


@wrong("exchange", "each operation pays the latency again", cure="copy all tensors into one")
def exchange_one_by_one(gradients, loss):
    for part in [*gradients, loss]:
        dist.all_reduce(part)
        part /= dist.get_world_size()


@wrong("exchange", "what can travel together", cure="one more number")
def exchange_loss_apart(gradients, loss):
    flat_mean(gradients)
    flat_mean([loss])


@wrong("exchange", "more bytes than needed", cure="one all_reduce of the numbers themselves")
def exchange_in_float64(gradients, loss):
    doubled = [part.double() for part in [*gradients, loss]]
    flat_mean(doubled)
    for part, mean in zip([*gradients, loss], doubled, strict=True):
        part.copy_(mean)


@wrong("exchange", "unchanged", cure="with copy_")
def exchange_nothing(gradients, loss):
    flat = torch.cat([part.flatten() for part in [*gradients, loss]])
    dist.all_reduce(flat)


@wrong("exchange", "the sums over the ranks", cure="divide by the number of ranks")
def exchange_sums(gradients, loss):
    for part in [*gradients, loss]:
        dist.all_reduce(part)


@wrong("exchange", "the loss is that of this rank", cure="the loss travels with them")
def exchange_gradients_alone(gradients, loss):
    flat_mean(gradients)


@wrong("exchange", "the gradients are those of this rank", cure="copy the means back")
def exchange_loss_alone(gradients, loss):
    flat_mean([loss])


@wrong("exchange", "not the means over the ranks", cure="into its tensor")
def exchange_halves(gradients, loss):
    flat_mean([*gradients, loss])
    for part in gradients:
        part /= 2


@wrong("exchange", "other ranks do not")
def exchange_to_one_rank(gradients, loss):
    parts = [*gradients, loss]
    flat = torch.cat([part.flatten() for part in parts])
    dist.reduce(flat, 0)
    if dist.get_rank() == 0:
        for part, mean in zip(parts, (flat / 3).split([part.numel() for part in parts]), strict=True):
            part.copy_(mean.view_as(part))


@pytest.mark.parametrize("answer", answers.parameters())
@pytest.mark.processes
def test_the_verdict_names_the_mistake(answer):
    judge(answer)


def test_every_exercise_has_answers():
    answers.complete("find_the_bottleneck")
