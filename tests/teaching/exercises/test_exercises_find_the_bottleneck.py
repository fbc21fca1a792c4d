"""The exercises of lesson 13: right answers pass, and each typical mistake gets its own hint."""

from __future__ import annotations

import torch
import torch.distributed as dist
from answers import Answers

from labkit.teaching.exercises.find_the_bottleneck import NUMBERS, PAYS_LINK, SIX

answers = Answers()

right, wrong, mutant = answers.of("longest_path")


@right
def longest_path_by_paths(tasks):
    paths = []
    for i, (ms, needs) in enumerate(tasks):
        before = max((paths[need] for need in needs), default=(0, ()))
        paths.append((before[0] + ms, (*before[1], i)))
    return max(paths)[1]


@wrong("ends at the longest task", cure="compute when each task ends")
def path_to_the_longest_task(tasks):
    path = [max(range(len(tasks)), key=lambda task: tasks[task][0])]
    while needs := tasks[path[0]][1]:
        path.insert(0, needs[0])
    return path


LAST, NEXT, PATH = "[ends.index(max(ends))]", "max(needs, key=lambda need: ends[need])", "return path"
mutant(PATH, "return path[::-1]", "the last one first", cure="begins with the task that needs nothing")
mutant(LAST, "[len(tasks) - 1]", "ends at the last task of the list", cure="compute when each task ends")
mutant("lambda need: ends[need]", "lambda need: tasks[need][0]", "the longest of them", cure="whatever its own duration")
mutant(NEXT, "needs[0]", "follows the first of them", cure="the one that ended last")
mutant(PATH, "return list(range(len(tasks)))", "those are all tasks", cure="go back from the task that ends last")
mutant(PATH, "return path[:-1]", "leaves out the task that ends last", cure="the path ends with it")
mutant(PATH, "return path[1:]", "leaves out the task that begins it", cure="until a task needs nothing")
mutant(PATH, "return [0, len(tasks) - 1]", "so it never waited for it")
mutant(PATH, "return [0]", "another path is longer", cure="go back from the last one")
mutant(PATH, "return max(ends)", "expected a list with the numbers of tasks")


right, wrong, mutant = answers.of("straggler")


@right
def straggler_by_the_end_of_work(spans):
    last = {}
    for rank, name, _, end in spans:
        if name == "backward":
            last.setdefault(rank, []).append(end)
    wins = [max(last, key=lambda rank: last[rank][k]) for k in range(len(last[0]))]
    return max(last, key=wins.count)


def time_in(spans, rank, names):
    return sum(end - start for one, name, start, end in spans if one == rank and name in names)


@wrong("it waits there. For whom?", cure="who arrives last does not wait")
def longest_in_all_reduces(spans):
    return max(range(4), key=lambda rank: time_in(spans, rank, ["all_reduce"]))


@wrong("computes longest in total", cure="for each all-reduce who arrives last")
def longest_in_compute(spans):
    return max(range(4), key=lambda rank: time_in(spans, rank, ["backward", "optimizer"]))


mutant("statistics.mode(last)", "last[-1]", "in the last all-reduce", cure="count over all of them")
mutant("statistics.mode(last)", "2", "which rank is that, most of the time?", cure="start of the k-th all_reduce")
mutant("return statistics.mode(last)", "print(last)", "the function returns nothing")


right, wrong, mutant = answers.of("virtual_speedup")

SAVED, SLOW = "step_ms({}) - step_ms(others) / factor", "dict.fromkeys(phases, factor)"
mutant("{phase: factor for phase in phases if phase != name}", f"{SLOW}; del others[name]")
mutant(SAVED, "step_ms(others) / factor", "not what the change saves", cure="subtract it from the step")
mutant("others) / factor", "others)", "take the factor times as long", cure="ran faster by the factor")
mutant(SAVED, f"-({SAVED})", "the wrong sign", cure="step now minus step after")
SLOWED, LOST = "step_ms({name: factor}) - step_ms({})", "step_ms(others) - step_ms({})"
mutant(SAVED, SLOWED, "the phase itself is slower", cure="slow all phases but this one")
mutant(SAVED, LOST, "how much the slowed program lost", cure="by the same clock")
mutant("step_ms(others)", f"step_ms({SLOW})", "only the clock has changed", cure="leave out the phase")
mutant(SAVED, "step_ms({}) - step_ms({name: 1 / factor})", "step_ms can only slow phases down")
mutant(SAVED, "step_ms({}) / 10", "By which clock?", cure="two measurements are needed")


right, wrong, mutant = answers.of("which_pays")

right("half the bytes")
wrong("how long do their bytes take", "one message", cure="16 ms")
wrong("for the rest of a step", "half the compute", cure="1.2 MB")
wrong("expected 'one message', 'half the bytes' or 'half the compute'", "a faster network")


def test_on_this_link_half_the_bytes_save_far_more_than_one_message():
    def cost_ms(messages, nbytes):
        return 1e3 * messages * PAYS_LINK.seconds("all_reduce", nbytes, 2)

    saved = {nbytes: cost_ms(SIX, 4 * NUMBERS) - cost_ms(SIX, nbytes * NUMBERS) for nbytes in (4, 2)}
    saved_latency = cost_ms(SIX, 4 * NUMBERS) - cost_ms(1, 4 * SIX * NUMBERS)
    assert 1 < saved_latency < saved[2] / 10


right, wrong, mutant = answers.of("exchange")


@right
def exchange_coalesced(gradients, loss):
    from torch.nn.utils import parameters_to_vector, vector_to_parameters

    parts = [*gradients, loss.view(1)]
    flat = parameters_to_vector(parts)
    dist.all_reduce(flat, op=dist.ReduceOp.SUM)
    averaged = [torch.empty_like(part) for part in parts]
    vector_to_parameters(flat / dist.get_world_size(), averaged)
    for part, mean in zip(parts, averaged, strict=True):
        part.copy_(mean)


@wrong("each operation pays the latency again", cure="how few operations")
def exchange_one_by_one(gradients, loss):
    for part in [*gradients, loss]:
        dist.all_reduce(part)
        part /= dist.get_world_size()


@wrong("the sums over the ranks", cure="divide by the number of ranks")
def exchange_sums(gradients, loss):
    for part in [*gradients, loss]:
        dist.all_reduce(part)


PARTS, ALL_REDUCE, COPY = "parts = [*gradients, loss]", "dist.all_reduce(flat)", "part.copy_(mean.view_as(part))"
COMMON = "dist.all_reduce(loss)\n    loss /= dist.get_world_size()\n    "
TO_ONE = "dist.reduce(flat, 0)\n    if dist.get_rank(): return"
CAT = "torch.cat([part.flatten() for part in parts])"
mutant(PARTS, f"{COMMON}parts = gradients", "what can travel together", cure="one more number")
mutant(CAT, f"{CAT}.double()", "more bytes than needed", cure="compare its bytes")
mutant(COPY, "pass", "unchanged", cure="with copy_")
mutant(PARTS, "parts = gradients", "the loss is that of this rank", cure="the loss travels with them")
mutant(PARTS, "parts = [loss]", "the gradients are those of this rank", cure="copy the means back")
mutant(COPY, COPY.replace("mean", "(mean / 2)"), "not the means over the ranks", cure="into its tensor")
mutant(ALL_REDUCE, TO_ONE, "other ranks do not")


test_the_verdict_fits_the_answer = answers.test_of_verdicts()
test_every_exercise_has_right_and_wrong_answers_here = answers.test_of_completeness("find_the_bottleneck")
