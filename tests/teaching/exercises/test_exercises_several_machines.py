"""The exercises of lesson 09b: right answers pass, and each typical mistake gets its own hint."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from answers import Answers, judge

answers = Answers()
right, wrong = answers.right, answers.wrong


# crossing_bytes


@right("crossing_bytes")
def crossing_bytes(nbytes, machines, per_machine, two_level):
    if machines == 1:
        return 0
    ranks = machines if two_level else machines * per_machine
    return 2 * (ranks - 1) / ranks * nbytes


@right("crossing_bytes")
def crossing_bytes_by_pieces(nbytes, machines, per_machine, two_level):
    if two_level:
        return sum(2 * (machines - 1) * (nbytes / per_machine / machines) for _ in range(per_machine))
    ranks = machines * per_machine
    crossing = sum(rank // per_machine != (rank + 1) % ranks // per_machine for rank in range(per_machine))
    return crossing * 2 * (ranks - 1) * nbytes / ranks


@wrong("crossing_bytes", "what all ranks of a machine send together", cure="one rank of each machine")
def crossing_of_all_ranks(nbytes, machines, per_machine, two_level):
    return crossing_bytes(nbytes, machines, per_machine, two_level) * (1 if two_level else per_machine)


@wrong("crossing_bytes", "the whole of x to the other machine", cure="1/k of it")
def crossing_of_whole_tensors(nbytes, machines, per_machine, two_level):
    return crossing_bytes(nbytes, machines, per_machine, two_level) * (per_machine if two_level else 1)


@wrong("crossing_bytes", "the others share the cable with it", cure="all-reduces 1/k")
def crossing_of_one_rank(nbytes, machines, per_machine, two_level):
    return crossing_bytes(nbytes, machines, per_machine, two_level) / (per_machine if two_level else 1)


@wrong("crossing_bytes", "half is missing", cure="not p − 1")
def crossing_of_half(nbytes, machines, per_machine, two_level):
    return crossing_bytes(nbytes, machines, per_machine, two_level) / 2


@wrong("crossing_bytes", "the other kind of all-reduce", cure="look at `two_level`")
def crossing_of_the_other(nbytes, machines, per_machine, two_level):
    return crossing_bytes(nbytes, machines, per_machine, not two_level)


@wrong("crossing_bytes", "that is 2n, however many take part", cure="the last piece")
def crossing_twice(nbytes, machines, per_machine, two_level):
    return 2 * nbytes


@wrong("crossing_bytes", "a single machine sends nothing")
def crossing_of_one_machine(nbytes, machines, per_machine, two_level):
    ranks = machines if two_level else machines * per_machine
    return 2 * (ranks - 1) / ranks * nbytes


@wrong("crossing_bytes", "how many of a machine's ranks have theirs elsewhere", cure="only one")
def crossing_nothing(nbytes, machines, per_machine, two_level):
    return crossing_bytes(nbytes, machines, per_machine, two_level) if two_level else nbytes / 7


@wrong("crossing_bytes", "inside the machines nothing crosses", cure="share the cable")
def crossing_little(nbytes, machines, per_machine, two_level):
    return nbytes / 7 if two_level else crossing_bytes(nbytes, machines, per_machine, two_level)


# once_per_machine


@right("once_per_machine")
def once_per_machine(make):
    if os.environ["LOCAL_RANK"] == "0":
        make()
    dist.barrier()


@right("once_per_machine")
def once_by_the_last(make):
    if int(os.environ["LOCAL_RANK"]) == int(os.environ["LOCAL_WORLD_SIZE"]) - 1:
        make()
    dist.all_reduce(torch.ones(1))


@wrong("once_per_machine", "a machine has nobody", cure="LOCAL_RANK is 0 on each")
def once_by_rank(make):
    if dist.get_rank() == 0:
        make()
    dist.barrier()


@wrong("once_per_machine", "nobody called make()")
def once_with_text(make):
    if os.environ["LOCAL_RANK"] == 0:
        make()
    dist.barrier()


@wrong("once_per_machine", "every rank called make()", cure="ask for LOCAL_RANK")
def once_per_rank(make):
    make()
    dist.barrier()


@wrong("once_per_machine", "more than once on a machine", cure="ask for LOCAL_RANK")
def once_by_two(make):
    if os.environ["LOCAL_RANK"] == "0" or dist.get_rank() == 1:
        make()
    dist.barrier()


@wrong("once_per_machine", "returned before the file was there", cure="dist.barrier()")
def once_without_waiting(make):
    if os.environ["LOCAL_RANK"] == "0":
        make()


@wrong("once_per_machine", "returned before the file was there", cure="after make()")
def once_waiting_before(make):
    dist.barrier()
    if os.environ["LOCAL_RANK"] == "0":
        make()


# hierarchical_all_reduce


def groups_of(counts):
    starts = [sum(counts[:machine]) for machine in range(len(counts))]
    machines = [list(range(start, start + count)) for start, count in zip(starts, counts, strict=True)]
    inside = [dist.new_group(ranks) for ranks in machines]
    mine = next(i for i, ranks in enumerate(machines) if dist.get_rank() in ranks)
    return inside[mine], starts[mine], dist.new_group(starts), dist.get_rank() in starts


@right("hierarchical_all_reduce")
def hierarchical_all_reduce(x, counts):
    inside, first, leaders, leading = groups_of(counts)
    dist.reduce(x, first, group=inside)
    if leading:
        dist.all_reduce(x, group=leaders)
    dist.broadcast(x, first, group=inside)


@right("hierarchical_all_reduce")
def hierarchical_by_all_reduces(x, counts):
    inside, first, leaders, leading = groups_of(counts)
    dist.all_reduce(x, group=inside)
    if leading:
        dist.all_reduce(x, group=leaders)
    dist.broadcast(x, first, group=inside)


@right("hierarchical_all_reduce")
def hierarchical_by_messages(x, counts):
    inside, first, _, leading = groups_of(counts)
    dist.reduce(x, first, group=inside)
    firsts = [sum(counts[:machine]) for machine in range(len(counts))]
    if dist.get_rank() == 0:
        parts = [torch.empty_like(x) for _ in firsts[1:]]
        for part, rank in zip(parts, firsts[1:], strict=True):
            dist.recv(part, rank)
            x += part
        for rank in firsts[1:]:
            dist.send(x, rank)
    elif leading:
        dist.send(x, 0)
        dist.recv(x, 0)
    dist.broadcast(x, first, group=inside)


@wrong("hierarchical_all_reduce", "not the first of its machine", cure="dist.new_group")
def flat_all_reduce(x, counts):
    dist.all_reduce(x)


@wrong("hierarchical_all_reduce", "x is unchanged", cure="on a copy")
def reduce_of_a_copy(x, counts):
    hierarchical_all_reduce(x.clone(), counts)


@wrong("hierarchical_all_reduce", "the sums within each machine", cure="the first ranks")
def reduce_inside(x, counts):
    inside, *_ = groups_of(counts)
    dist.all_reduce(x, group=inside)


@wrong("hierarchical_all_reduce", "the others still have the sum of their machine", cure="broadcast it")
def reduce_without_broadcast(x, counts):
    inside, _, leaders, leading = groups_of(counts)
    dist.all_reduce(x, group=inside)
    if leading:
        dist.all_reduce(x, group=leaders)


@wrong("hierarchical_all_reduce", "the sums of the first ranks alone", cure="inside each machine before")
def reduce_of_leaders(x, counts):
    inside, first, leaders, leading = groups_of(counts)
    if leading:
        dist.all_reduce(x, group=leaders)
    dist.broadcast(x, first, group=inside)


@wrong("hierarchical_all_reduce", "not the sum of all ranks' x", cure="three steps")
def reduce_twice(x, counts):
    inside, first, leaders, leading = groups_of(counts)
    dist.all_reduce(x, group=inside)
    dist.all_reduce(x, group=inside)
    if leading:
        dist.all_reduce(x, group=leaders)
    dist.broadcast(x, first, group=inside)


# The last one, since wrong answers share their ranks, and torch numbers groups in each process.
@wrong("hierarchical_all_reduce", "not every rank called dist.new_group", cure="in the same order")
def a_group_made_by_its_members_only(x, counts):
    starts = [sum(counts[:machine]) for machine in range(len(counts))]
    inside = [dist.new_group(list(range(start, start + count))) for start, count in zip(starts, counts, strict=True)]
    rank = dist.get_rank()
    mine = next(i for i, start in enumerate(starts) if start <= rank < start + counts[i])
    dist.all_reduce(x, group=inside[mine])
    if rank in starts:
        dist.all_reduce(x, group=dist.new_group(starts))
    dist.broadcast(x, starts[mine], group=inside[mine])


@pytest.mark.parametrize("answer", answers.parameters())
@pytest.mark.processes
def test_the_verdict_names_the_mistake(answer):
    judge(answer)


def test_every_exercise_has_answers():
    answers.complete("several_machines")
