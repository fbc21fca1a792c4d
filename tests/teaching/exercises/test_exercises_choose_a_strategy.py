"""The exercises of lesson 14: right answers pass, and wrong ones get an explanation."""

from __future__ import annotations

from functools import partial

from answers import Answers

answers = Answers()

right, wrong, mutant = answers.of("strategy_memory")

OWN, UNDER_WAY = "(stages * tensor)", "min(micro_batches, stages)"
ACTIVATIONS = '"activations": under_way * layers / stages * layer_bytes'
mutant(UNDER_WAY, "sorted([stages, micro_batches])[0]")
mutant(UNDER_WAY, "micro_batches", "as GPipe does", cure="as many micro-batches as there are stages")
mutant(UNDER_WAY, "1", "which is so on the last stage", cure="before the first gradient comes back")
mutant("layers / stages", "layers", "activations of all layers")
mutant(OWN, f"{OWN}; zero = 3", "whatever the ZeRO stage", cure="2 also the gradients, 3 also the parameters")
mutant(OWN, f"{OWN}; zero = 0", "nothing is sharded here", cure="stage 1 shards the optimizer state")
mutant(OWN, "stages", "tensor parallelism divides parameters")
mutant(OWN, "tensor", "of its own stage only")
mutant(
    ACTIVATIONS,
    f"{ACTIVATIONS} / shards",
    "activations belong to a rank's own data",
    cure="do not divide the activations",
)
mutant('"optimizer": 12', '"optimizer": 8', "the bytes of the optimizer are not right", cure="12 for Adam")
mutant(ACTIVATIONS, f"{ACTIVATIONS} / tensor", "of the activations are not right", cure="of one rank already")
mutant(ACTIVATIONS, "", "activations is missing")


right, wrong, mutant = answers.of("mesh_for")


@right
def mesh_for_by_search(parameters, memory_gb, nodes, per_node):
    powers = [2**k for k in range(12)]
    fits = [
        (pp * tp, -tp, [pp, nodes * per_node // (pp * tp), tp])
        for tp in powers if tp <= per_node for pp in powers
        if pp * tp <= nodes * per_node and 16 * parameters / (pp * tp) <= memory_gb * 1e9
    ]  # fmt: skip
    return min(fits)[2]


TENSOR, SIZES = "tensor = min(parts, per_node)", "[parts // tensor, nodes * per_node // parts, tensor]"
mutant(TENSOR, "tensor = parts", "on several nodes", cure="at most per_node")
mutant(TENSOR, "tensor = 1", "into stages only", cure="it has no bubble")
mutant("16 *", "2 *", "the parameters alone", cure="gradients and Adam's state")
mutant("16 *", "4 *", "parameters and gradients only", cure="12 bytes more")
mutant(SIZES, "[nodes, 1, per_node]", "there is one replica", cure="every further rank is a replica")
mutant(SIZES, f"{SIZES}[::-1]", "in another order", cure="[pp, dp, tp]")
mutant("per_node // parts", "per_node", "ranks are not 128", cure="dp = nodes")
ROUND_UP = "it does not fit: a rank would hold 140 GB"
mutant(TENSOR, f"parts //= 2\n    {TENSOR}", ROUND_UP, cure="round up to a power of two")
mutant(TENSOR, f"parts *= 2\n    {TENSOR}", "among more ranks than it needs", cure="first tp")


right, wrong, mutant = answers.of("cheapest")

COST = "costs[index] = price * needed"
mutant("min(costs, key=costs.get)", "sorted(costs, key=costs.get)[0]")
mutant("cluster).fitting", "cluster).rows", "nothing fits", cure="it may be empty")
mutant("needed <= hours", "fitting", "finishes too late")
IN_TIME, TOO_LATE = "needed <= hours:\n            ", "lowest price per hour, and finishes too late"
mutant(IN_TIME + COST, "fitting: costs[index] = price", TOO_LATE, cure="multiply by the hours")
mutant(COST, "costs[index] = price", "lowest price per hour of those in time", cure="multiply by the hours")
mutant(COST, "costs[index] = needed", "the fastest")


right, wrong, mutant = answers.of("slow_part")

LONGEST, FACTOR = "max(parts, key=parts.get)", "row.step_s / (row.step_s - parts[longest])"
mutant(LONGEST, "sorted(parts, key=parts.get)[-1]")
mutant(LONGEST, "max(row.exposed_s, key=parts.get)", "compute takes longer")
mutant(LONGEST, '"compute"', "another part takes longer")
mutant(FACTOR, "parts[longest] / row.step_s", "the share of the step", cure="what is left of the step without it")
mutant(FACTOR, f"1 / ({FACTOR})", "upside down")
mutant(FACTOR, "row.step_s / parts[longest]", "divides the step by the part", cure="without the part")
mutant(FACTOR, "row.step_s - parts[longest]", "the seconds that are left")
mutant(f"longest, {FACTOR}", "longest", "expected a pair")
mutant(f"longest, {FACTOR}", '"network", 2.0', "is no part of this row")
mutant(FACTOR, "1.01", "the factor is not right", cure="old step divided by")
mutant(FACTOR, "None", "expected a number, how many times as fast")


right, wrong, mutant = answers.of("tensorflow_choices")

CHOICES = {
    "A": "MirroredStrategy", "B": "MultiWorkerMirroredStrategy", "C": "ParameterServerStrategy", "D": "OneDeviceStrategy",
    "E": "DTensor", "F": "PyTorch FSDP2",
}  # fmt: skip
right(partial(dict, CHOICES))
mutant(', "F": "PyTorch FSDP2"', "", "F is missing")
wrong("expected a dictionary", partial(list, [*CHOICES.values()]))

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
    wrong(words, partial(dict, CHOICES, **{letter: choice}))


test_the_verdict_fits_the_answer = answers.test_of_verdicts()
test_every_exercise_has_right_and_wrong_answers_here = answers.test_of_completeness("choose_a_strategy")
