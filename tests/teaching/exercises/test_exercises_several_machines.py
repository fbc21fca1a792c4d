"""The exercises of lesson 09b: right answers pass, and each typical mistake gets its own hint."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from answers import Answers

answers = Answers()

right, wrong, mutant = answers.of("crossing_bytes")


@right
def crossing_bytes_by_pieces(nbytes, machines, per_machine, two_level):
    if two_level:
        return sum(2 * (machines - 1) * (nbytes / per_machine / machines) for _ in range(per_machine))
    ranks = machines * per_machine
    crossing = sum(rank // per_machine != (rank + 1) % ranks // per_machine for rank in range(per_machine))
    return crossing * 2 * (ranks - 1) * nbytes / ranks


CROSSING, BYTES = "* nbytes", "0 if machines == 1 else 2 * (ranks - 1) / ranks * nbytes"
mutant(
    CROSSING,
    "* nbytes * per_machine ** (not two_level)",
    "what all ranks of a machine send",
    cure="one rank of each machine",
)
mutant(CROSSING, "* nbytes * per_machine ** two_level", "the whole of x to the other machine", cure="1/k of it")
mutant(CROSSING, "* nbytes / per_machine ** two_level", "share the cable with it", cure="all-reduces 1/k")
mutant(CROSSING, "* nbytes * 2", "what leaves a machine, not what arrives as well")
mutant(CROSSING, "* nbytes / 2", "half is missing", cure="not p − 1")
mutant("if two_level", "if not two_level", "the other kind of all-reduce", cure="look at `two_level`")
mutant(BYTES, "2 * nbytes", "that is 2n, however many take part", cure="the last piece")
mutant("0 if machines == 1 else ", "", "a single machine sends nothing")
ELSEWHERE, INSIDE = "in a ring, each rank sends 2(p − 1)/p · n", "inside the machines nothing crosses"
mutant(BYTES, f"{BYTES} if two_level else nbytes / 7", ELSEWHERE, cure="only one rank of each machine")
mutant(BYTES, f"nbytes / 7 if two_level else {BYTES}", INSIDE, cure="share the cable")


right, wrong, mutant = answers.of("once_per_machine")


@right
def once_by_the_last(make):
    if int(os.environ["LOCAL_RANK"]) == int(os.environ["LOCAL_WORLD_SIZE"]) - 1:
        make()
    dist.all_reduce(torch.ones(1))


FIRST, BARRIER = 'os.environ["LOCAL_RANK"] == "0"', "    dist.barrier()"
mutant(FIRST, "dist.get_rank() == 0", "On one machine, no rank called", cure="LOCAL_RANK is 0 on each")
mutant('"0"', "0", "nobody called make()", cure="LOCAL_RANK is text")
mutant(FIRST, "True", "every rank called make()", cure="begins again on each machine")
mutant(FIRST, f"{FIRST} or dist.get_rank() == 1", "more than once on a machine", cure="occurs once on each machine")
mutant(BARRIER, "", "returned before the file was there", cure="which collective")
MAKE = f"if {FIRST}:\n        make()"
mutant(f"{MAKE}\n{BARRIER}", f"dist.barrier()\n    {MAKE}", "returned before the file was there", cure="which collective")


right, wrong, mutant = answers.of("hierarchical_all_reduce")


@right
def hierarchical_by_messages(x, counts):
    starts = [sum(counts[:machine]) for machine in range(len(counts))]
    inside = [dist.new_group(list(range(start, start + count))) for start, count in zip(starts, counts, strict=True)]
    mine = max(machine for machine, start in enumerate(starts) if start <= dist.get_rank())
    dist.reduce(x, starts[mine], group=inside[mine])
    if dist.get_rank() == 0:
        parts = [torch.empty_like(x) for _ in starts[1:]]
        for part, rank in zip(parts, starts[1:], strict=True):
            dist.recv(part, rank)
            x += part
        for rank in starts[1:]:
            dist.send(x, rank)
    elif dist.get_rank() in starts:
        dist.send(x, 0)
        dist.recv(x, 0)
    dist.broadcast(x, starts[mine], group=inside[mine])


REDUCE = "dist.reduce(x, leader, group=inside)"
ALL_REDUCE = "dist.all_reduce(x, group=inside)"
BETWEEN = "\n    if rank == leader:\n        dist.all_reduce(x, group=between)\n    return"
BEGIN = "rank, first, firsts ="
OWN_SUM, LEADERS = "the others still have the sum of their machine", "the sums of the first ranks alone"
mutant(REDUCE, ALL_REDUCE)
mutant(BEGIN, f"return dist.all_reduce(x)\n    {BEGIN}", "not the first of its machine", cure="dist.new_group")
mutant(REDUCE, f"x = x.clone(); {REDUCE}", "x is unchanged", cure="on a copy")
mutant(REDUCE, f"return {ALL_REDUCE}", "the sums within each machine", cure="the first ranks")
mutant(REDUCE, f"{ALL_REDUCE}{BETWEEN}", OWN_SUM, cure="who still needs it")
mutant(REDUCE, "pass", LEADERS, cure="inside each machine before")
TWICE = f"{ALL_REDUCE}; {ALL_REDUCE}"
mutant(REDUCE, TWICE, "not the sum of all ranks' x", cure="three steps")
mutant("first += count", "first += counts[0]", "a group has a rank that does not exist", cure="sum(counts[:m])")

# The last one, since wrong answers share their ranks, and torch numbers groups in each process.
mutant(
    "dist.new_group(firsts)",
    "dist.new_group(firsts) if rank in firsts else None",
    "not every rank called dist.new_group",
    cure="in the same order",
)


test_the_verdict_fits_the_answer = answers.test_of_verdicts()
test_every_exercise_has_right_and_wrong_answers_here = answers.test_of_completeness("several_machines")
