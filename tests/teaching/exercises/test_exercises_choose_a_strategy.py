"""The exercises of lesson 14: right answers pass, and wrong ones get an explanation."""

from __future__ import annotations

from functools import partial

import pytest
from answers import Answers, judge

answers = Answers()
right, wrong, mutant = answers.right, answers.wrong, answers.mutant


# strategy_memory

OWN, UNDER_WAY = "(stages * tensor)", "min(micro_batches, stages)"
ACTIVATIONS = '"activations": under_way * layers / stages * layer_bytes'
mutant("strategy_memory", UNDER_WAY, "sorted([stages, micro_batches])[0]")
mutant("strategy_memory", UNDER_WAY, "micro_batches", "as GPipe does", cure="as many micro-batches as there are stages")
mutant("strategy_memory", UNDER_WAY, "1", "which is so on the last stage", cure="before the first gradient comes back")
mutant("strategy_memory", "layers / stages", "layers", "activations of all layers")
mutant("strategy_memory", OWN, f"{OWN}; zero = 3", "whatever the ZeRO stage", cure="2 also the gradients, 3 also the parameters")
mutant("strategy_memory", OWN, f"{OWN}; zero = 0", "nothing is sharded here", cure="stage 1 shards the optimizer state")
mutant("strategy_memory", OWN, "stages", "tensor parallelism divides parameters")
mutant("strategy_memory", OWN, "tensor", "of its own stage only")
mutant(
    "strategy_memory",
    ACTIVATIONS,
    f"{ACTIVATIONS} / shards",
    "activations belong to a rank's own data",
    cure="do not divide the activations",
)
mutant("strategy_memory", '"optimizer": 12', '"optimizer": 8', "the bytes of the optimizer are not right", cure="12 for Adam")
mutant("strategy_memory", ACTIVATIONS, "", "activations is missing")


# mesh_for


@right("mesh_for")
def mesh_for_by_search(parameters, memory_gb, nodes, per_node):
    powers = [2**k for k in range(12)]
    fits = [
        (pp * tp, -tp, [pp, nodes * per_node // (pp * tp), tp])
        for tp in powers if tp <= per_node for pp in powers
        if pp * tp <= nodes * per_node and 16 * parameters / (pp * tp) <= memory_gb * 1e9
    ]  # fmt: skip
    return min(fits)[2]


TENSOR, SIZES = "tensor = min(parts, per_node)", "[parts // tensor, nodes * per_node // parts, tensor]"
mutant("mesh_for", TENSOR, "tensor = parts", "on several nodes", cure="at most per_node")
mutant("mesh_for", TENSOR, "tensor = 1", "into stages only", cure="it has no bubble")
mutant("mesh_for", "16 *", "2 *", "the parameters alone", cure="gradients and Adam's state")
mutant("mesh_for", "16 *", "4 *", "parameters and gradients only", cure="12 bytes more")
mutant("mesh_for", SIZES, "[nodes, 1, per_node]", "there is one replica", cure="every further rank is a replica")
mutant("mesh_for", SIZES, f"{SIZES}[::-1]", "in reverse order", cure="[pp, dp, tp]")
mutant("mesh_for", "per_node // parts", "per_node", "ranks are not 128", cure="dp = nodes")
ROUND_UP = "it does not fit: a rank would hold 140 GB"
mutant("mesh_for", TENSOR, f"parts //= 2\n    {TENSOR}", ROUND_UP, cure="round up to a power of two")
mutant("mesh_for", TENSOR, f"parts *= 2\n    {TENSOR}", "among more ranks than it needs", cure="first tp")


# cheapest

COST = "costs[index] = price * needed"
mutant("cheapest", "min(costs, key=costs.get)", "sorted(costs, key=costs.get)[0]")
mutant("cheapest", "cluster).fitting", "cluster).rows", "nothing fits", cure="it may be empty")
mutant("cheapest", "needed <= hours", "fitting", "finishes too late")
IN_TIME, TOO_LATE = "needed <= hours:\n            ", "lowest price per hour, and finishes too late"
mutant("cheapest", IN_TIME + COST, "fitting: costs[index] = price", TOO_LATE, cure="multiply by the hours")
mutant("cheapest", COST, "costs[index] = price", "lowest price per hour of those in time", cure="multiply by the hours")
mutant("cheapest", COST, "costs[index] = needed", "the fastest")


# slow_part

LONGEST, FACTOR = "max(parts, key=parts.get)", "row.step_s / (row.step_s - parts[longest])"
mutant("slow_part", LONGEST, "sorted(parts, key=parts.get)[-1]")
mutant("slow_part", LONGEST, "max(row.exposed_s, key=parts.get)", "compute takes longer")
mutant("slow_part", LONGEST, '"compute"', "another part takes longer")
mutant("slow_part", FACTOR, "parts[longest] / row.step_s", "the share of the step", cure="what is left of the step without it")
mutant("slow_part", FACTOR, f"1 / ({FACTOR})", "upside down")
mutant("slow_part", FACTOR, "row.step_s / parts[longest]", "divides the step by the part", cure="without the part")
mutant("slow_part", FACTOR, "row.step_s - parts[longest]", "the seconds that are left")
mutant("slow_part", f"longest, {FACTOR}", "longest", "expected a pair")
mutant("slow_part", f"longest, {FACTOR}", '"network", 2.0', "is no part of this row")
mutant("slow_part", FACTOR, "1.01", "the factor is not right", cure="old step divided by")
mutant("slow_part", FACTOR, "None", "expected a number, how many times as fast")


# tensorflow_choices

CHOICES = {
    "A": "MirroredStrategy", "B": "MultiWorkerMirroredStrategy", "C": "ParameterServerStrategy", "D": "OneDeviceStrategy",
    "E": "DTensor", "F": "PyTorch FSDP2",
}  # fmt: skip
right("tensorflow_choices", partial(dict, CHOICES))
mutant("tensorflow_choices", ', "F": "PyTorch FSDP2"', "", "F is missing")
wrong("tensorflow_choices", "expected a dictionary", partial(list, [*CHOICES.values()]))

for letter, choice, words in (
    ("A", "MirrorStrategy", "did you mean 'MirroredStrategy'"),
    ("C", "OneDeviceStrategy", "C: OneDeviceStrategy is not the best choice: do the workers have the same speed"),
    ("A", "MultiWorkerMirroredStrategy", "needs no processes"),
    ("B", "MirroredStrategy", "one machine only"),
    ("B", "ParameterServerStrategy", "asynchronous"),
    ("C", "MultiWorkerMirroredStrategy", "wait for the slowest worker"),
    ("C", "MirroredStrategy", "copies the tables"),
    ("D", "MirroredStrategy", "nothing to mirror"),
    ("E", "MirroredStrategy", "copies the whole matrix"),
    ("E", "ParameterServerStrategy", "needs all of it to compute"),
    ("E", "PyTorch FSDP2", "gathers a layer"),
    ("F", "MirroredStrategy", "112 GB"),
    ("F", "DTensor", "your own work"),
):
    wrong("tensorflow_choices", words, partial(dict, CHOICES, **{letter: choice}))


@pytest.mark.parametrize("answer", answers.parameters())
@pytest.mark.processes
def test_the_verdict_fits_the_answer(answer) -> None:
    judge(answer)


def test_every_exercise_has_right_and_wrong_answers_here() -> None:
    answers.complete("choose_a_strategy")
