"""The exercises of lesson 14: right answers pass, and wrong ones get an explanation."""

from __future__ import annotations

import math
from functools import partial

import pytest
from answers import Answers, judge

import labkit as lab

answers = Answers()
right, wrong = answers.right, answers.wrong


# Memory of a strategy: strategy_memory


def memory(own, zero, shards, activations):
    parts = [shards if zero >= least else 1 for least in (3, 2, 1)]
    return {
        "parameters": 2 * own / parts[0],
        "gradients": 2 * own / parts[1],
        "optimizer": 12 * own / parts[2],
        "activations": activations,
    }


@right("strategy_memory")
def strategy_memory(parameters, layers, layer_bytes, stages, tensor, shards, zero, micro_batches):
    kept = min(stages, micro_batches) * layers / stages
    return memory(parameters / stages / tensor, zero, shards, kept * layer_bytes)


@wrong("strategy_memory", "of all micro-batches, as GPipe does", cure="as many micro-batches as there are stages")
def strategy_memory_of_gpipe(parameters, layers, layer_bytes, stages, tensor, shards, zero, micro_batches):
    return memory(parameters / stages / tensor, zero, shards, micro_batches * layers / stages * layer_bytes)


@wrong("strategy_memory", "one micro-batch, which is so on the last stage", cure="before the first gradient comes back")
def strategy_memory_of_the_last_stage(parameters, layers, layer_bytes, stages, tensor, shards, zero, micro_batches):
    return memory(parameters / stages / tensor, zero, shards, layers / stages * layer_bytes)


@wrong("strategy_memory", "activations of all layers")
def strategy_memory_of_all_layers(parameters, layers, layer_bytes, stages, tensor, shards, zero, micro_batches):
    return memory(parameters / stages / tensor, zero, shards, min(stages, micro_batches) * layers * layer_bytes)


@wrong("strategy_memory", "whatever the ZeRO stage", cure="2 also the gradients, 3 also the parameters")
def strategy_memory_of_fsdp(parameters, layers, layer_bytes, stages, tensor, shards, zero, micro_batches):
    return strategy_memory(parameters, layers, layer_bytes, stages, tensor, shards, 3, micro_batches)


@wrong("strategy_memory", "nothing is sharded here", cure="stage 1 shards the optimizer state")
def strategy_memory_of_ddp(parameters, layers, layer_bytes, stages, tensor, shards, zero, micro_batches):
    return strategy_memory(parameters, layers, layer_bytes, stages, tensor, shards, 0, micro_batches)


@wrong("strategy_memory", "tensor parallelism divides parameters")
def strategy_memory_without_tensor(parameters, layers, layer_bytes, stages, tensor, shards, zero, micro_batches):
    return strategy_memory(parameters, layers, layer_bytes, stages, 1, shards, zero, micro_batches)


@wrong("strategy_memory", "of its own stage only")
def strategy_memory_of_all_stages(parameters, layers, layer_bytes, stages, tensor, shards, zero, micro_batches):
    kept = min(stages, micro_batches) * layers / stages
    return memory(parameters / tensor, zero, shards, kept * layer_bytes)


@wrong("strategy_memory", "activations belong to a rank's own data", cure="do not divide the activations")
def strategy_memory_with_sharded_activations(parameters, layers, layer_bytes, stages, tensor, shards, zero, micro_batches):
    kept = min(stages, micro_batches) * layers / stages
    return memory(parameters / stages / tensor, zero, shards, kept * layer_bytes / shards)


@wrong("strategy_memory", "the bytes of the optimizer are not right", cure="12 for Adam")
def strategy_memory_in_32_bits(parameters, layers, layer_bytes, stages, tensor, shards, zero, micro_batches):
    found = strategy_memory(parameters, layers, layer_bytes, stages, tensor, shards, zero, micro_batches)
    return found | {"optimizer": found["optimizer"] * 8 / 12}


@wrong("strategy_memory", "activations is missing")
def strategy_memory_of_the_state(parameters, layers, layer_bytes, stages, tensor, shards, zero, micro_batches):
    found = strategy_memory(parameters, layers, layer_bytes, stages, tensor, shards, zero, micro_batches)
    del found["activations"]
    return found


# A mesh for a cluster: mesh_for


def divided(parts, nodes, per_node, most_tensor):
    tensor = min(parts, most_tensor)
    return [parts // tensor, nodes * per_node // parts, tensor]


def parts_of(nbytes, memory_gb):
    return 2 ** max(0, math.ceil(math.log2(nbytes / 1e9 / memory_gb)))


@right("mesh_for")
def mesh_for(parameters, memory_gb, nodes, per_node):
    return divided(parts_of(16 * parameters, memory_gb), nodes, per_node, per_node)


@right("mesh_for")
def mesh_for_by_search(parameters, memory_gb, nodes, per_node):
    powers = [2**k for k in range(12)]
    fits = [
        (pp * tp, -tp, [pp, nodes * per_node // (pp * tp), tp])
        for tp in powers if tp <= per_node for pp in powers
        if pp * tp <= nodes * per_node and 16 * parameters / (pp * tp) <= memory_gb * 1e9
    ]  # fmt: skip
    return min(fits)[2]


@wrong("mesh_for", "on several nodes", cure="at most per_node")
def mesh_for_of_tensor_only(parameters, memory_gb, nodes, per_node):
    return divided(parts_of(16 * parameters, memory_gb), nodes, per_node, nodes * per_node)


@wrong("mesh_for", "into stages only", cure="it has no bubble")
def mesh_for_of_stages_only(parameters, memory_gb, nodes, per_node):
    return divided(parts_of(16 * parameters, memory_gb), nodes, per_node, 1)


@wrong("mesh_for", "the parameters alone", cure="gradients and Adam's state")
def mesh_for_parameters(parameters, memory_gb, nodes, per_node):
    return divided(parts_of(2 * parameters, memory_gb), nodes, per_node, per_node)


@wrong("mesh_for", "parameters and gradients only", cure="12 bytes more")
def mesh_for_sgd(parameters, memory_gb, nodes, per_node):
    return divided(parts_of(4 * parameters, memory_gb), nodes, per_node, per_node)


@wrong("mesh_for", "there is one replica", cure="every further rank is a replica")
def mesh_for_one_replica(parameters, memory_gb, nodes, per_node):
    return [nodes, 1, per_node]


@wrong("mesh_for", "in reverse order", cure="[pp, dp, tp]")
def mesh_for_reversed(parameters, memory_gb, nodes, per_node):
    return mesh_for(parameters, memory_gb, nodes, per_node)[::-1]


@wrong("mesh_for", "ranks are not 128", cure="dp = nodes")
def mesh_for_too_many(parameters, memory_gb, nodes, per_node):
    pp, _, tp = mesh_for(parameters, memory_gb, nodes, per_node)
    return [pp, nodes * per_node, tp]


@wrong("mesh_for", "it does not fit: a rank would hold 140 GB", cure="round up to a power of two")
def mesh_for_rounded_down(parameters, memory_gb, nodes, per_node):
    return divided(parts_of(16 * parameters, memory_gb) // 2, nodes, per_node, per_node)


@wrong("mesh_for", "among more ranks than it needs", cure="first tp")
def mesh_for_with_room(parameters, memory_gb, nodes, per_node):
    return divided(parts_of(16 * parameters, memory_gb) * 2, nodes, per_node, per_node)


# The cheapest cluster: cheapest


def seconds_and_price(offers, model, batch, steps):
    for index, (price, cluster) in enumerate(offers):
        found = lab.plan(model, batch, cluster)
        hours = steps * found.rows[0].step_s / 3600
        yield index, bool(found.fitting), hours, price


@right("cheapest")
def cheapest(offers, model, batch, steps, hours):
    costs = {}
    for index, (price, cluster) in enumerate(offers):
        fitting = lab.plan(model, batch, cluster).fitting
        if fitting and steps * fitting[0].step_s <= 3600 * hours:
            costs[index] = price * steps * fitting[0].step_s
    return min(costs, key=costs.get)


@wrong("cheapest", "nothing fits", cure="it may be empty")
def cheapest_without_memory(offers, model, batch, steps, hours):
    found = [offer for offer in seconds_and_price(offers, model, batch, steps) if offer[2] <= hours]
    return min(found, key=lambda offer: offer[2] * offer[3])[0]


@wrong("cheapest", "finishes too late")
def cheapest_whenever(offers, model, batch, steps, hours):
    found = [offer for offer in seconds_and_price(offers, model, batch, steps) if offer[1]]
    return min(found, key=lambda offer: offer[2] * offer[3])[0]


@wrong("cheapest", "lowest price per hour, and finishes too late", cure="multiply by the hours")
def cheapest_per_hour(offers, model, batch, steps, hours):
    found = [offer for offer in seconds_and_price(offers, model, batch, steps) if offer[1]]
    return min(found, key=lambda offer: offer[3])[0]


@wrong("cheapest", "lowest price per hour of those in time", cure="multiply by the hours")
def cheapest_per_hour_in_time(offers, model, batch, steps, hours):
    found = [offer for offer in seconds_and_price(offers, model, batch, steps) if offer[1] and offer[2] <= hours]
    return min(found, key=lambda offer: offer[3])[0]


@wrong("cheapest", "the fastest")
def cheapest_and_fastest(offers, model, batch, steps, hours):
    return min((offer for offer in seconds_and_price(offers, model, batch, steps) if offer[1]), key=lambda offer: offer[2])[0]


# What limits a plan: slow_part


def parts_of_row(row):
    return {"compute": row.compute_s, "bubble": row.bubble_s, **row.exposed_s}


@right("slow_part")
def slow_part(row):
    parts = parts_of_row(row)
    name = max(parts, key=parts.get)
    return name, row.step_s / (row.step_s - parts[name])


@wrong("slow_part", "compute takes longer")
def slow_part_of_communication(row):
    name = max(row.exposed_s, key=row.exposed_s.get)
    return name, row.step_s / (row.step_s - row.exposed_s[name])


@wrong("slow_part", "another part takes longer")
def slow_part_compute(row):
    return "compute", row.step_s / (row.step_s - row.compute_s)


@wrong("slow_part", "the share of the step", cure="what is left of the step without it")
def slow_part_share(row):
    name, _ = slow_part(row)
    return name, parts_of_row(row)[name] / row.step_s


@wrong("slow_part", "upside down")
def slow_part_upside_down(row):
    name, factor = slow_part(row)
    return name, 1 / factor


@wrong("slow_part", "divides the step by the part", cure="without the part")
def slow_part_divided(row):
    name, _ = slow_part(row)
    return name, row.step_s / parts_of_row(row)[name]


@wrong("slow_part", "the seconds that are left")
def slow_part_seconds(row):
    name, _ = slow_part(row)
    return name, row.step_s - parts_of_row(row)[name]


@wrong("slow_part", "expected a pair")
def slow_part_name(row):
    return slow_part(row)[0]


@wrong("slow_part", "is no part of this row")
def slow_part_of_another_row(row):
    return "network", 2.0


@wrong("slow_part", "the factor is not right", cure="old step divided by")
def slow_part_wrong_factor(row):
    return slow_part(row)[0], 1.01


# Choices for six situations: tensorflow_choices

CHOICES = {
    "A": "MirroredStrategy", "B": "MultiWorkerMirroredStrategy", "C": "ParameterServerStrategy", "D": "OneDeviceStrategy",
    "E": "DTensor", "F": "PyTorch FSDP2",
}  # fmt: skip


@right("tensorflow_choices")
def tensorflow_choices():
    return CHOICES


@wrong("tensorflow_choices", "F is missing")
def tensorflow_choices_of_five():
    return {letter: choice for letter, choice in CHOICES.items() if letter != "F"}


@wrong("tensorflow_choices", "expected a dictionary")
def tensorflow_choices_as_a_list():
    return list(CHOICES.values())


@wrong("tensorflow_choices", "did you mean 'MirroredStrategy'")
def tensorflow_choices_misspelt():
    return CHOICES | {"A": "MirrorStrategy"}


@wrong("tensorflow_choices", "C: OneDeviceStrategy is not the best choice: do the workers have the same speed")
def tensorflow_choices_without_a_reason():
    return CHOICES | {"C": "OneDeviceStrategy"}


for letter, choice, words in (
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
