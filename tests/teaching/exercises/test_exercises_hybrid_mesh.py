"""The exercises of lesson 09: right answers pass, and each typical mistake gets its own hint."""

from __future__ import annotations

from itertools import permutations
from math import prod

import numpy as np
import pytest
import torch
import torch.distributed as dist
from answers import Answers
from torch.distributed.device_mesh import init_device_mesh

from labkit.teaching.exercises.hybrid_mesh import MESHES, _orders

answers = Answers()

right, wrong, mutant = answers.of("coordinates")


@right
def coordinates_by_torch(rank, shape):
    return tuple((torch.arange(prod(shape)).reshape(shape) == rank).nonzero()[0].tolist())


@right
def coordinates_by_strides(rank, shape):
    return [rank // prod(shape[axis + 1 :]) % size for axis, size in enumerate(shape)]


@right
def coordinates_by_numpy(rank, shape):
    return np.unravel_index(rank, shape)


@wrong("your first axis runs fastest", cure="begin with the last axis")
def coordinates_first_axis_fastest(rank, shape):
    return coordinates_by_strides(rank, shape[::-1])[::-1]


@wrong("lies between 0 and the size of its axis minus 1", cure="the remainder (%)")
def coordinates_without_remainder(rank, shape):
    return [rank // prod(shape[axis + 1 :]) for axis in range(len(shape))]


CHANGES = "after how many ranks does the one before it change"
mutant("return places", "return places[::-1]", "in reverse order", cure="belongs to the first axis")
mutant("rank, place =", "_, place =", "each coordinate is rank % size", cure="divide the rank by the size")
mutant("return places", "return places[-2:]", "2 numbers in place of 3: expected a list of whole numbers, one for")
mutant("insert(0, place)", "insert(0, place + 1)", "count from 0", cure="rank 0 is at 0")
mutant("insert(0, place)", "insert(0, place / 1)", "is not a whole number")
mutant("insert(0, place)", "insert(0, 0)", CHANGES, cure="the remainder is the last coordinate")


right, wrong, mutant = answers.of("bytes_per_axis")


@right
def bytes_by_pieces(dp, pp, tp, blocks, tokens, hidden, value_bytes):
    def ring(ranks, n):
        return sum(n / ranks for _ in range(2 * (ranks - 1)))

    n = tokens * hidden * value_bytes // dp
    matrices = [hidden * 4 * hidden // tp, 4 * hidden * hidden // tp] * (blocks // pp)
    dp_bytes = sum(ring(dp, values * value_bytes) for values in matrices)
    tp_bytes = sum(ring(tp, n) for _ in range(blocks // pp) for _ in ("f", "g"))
    return {"tp": tp_bytes, "dp": dp_bytes, "pp": n * (pp > 1)}


RETURN, HERE, TP_BYTES = "    return {", "    here, activation", "2 * (tp - 1) / tp * here * 2 * activation"
ONE = '{"dp": gradients * (dp > 1), "pp": activation * (pp > 1), "tp": here * 2 * activation * (tp > 1)}'
RING, TWO = "2(k − 1)/k · n bytes", ONE.replace("gradients", "2 * gradients").replace("here * 2", "here * 4")
mutant("/ tp * here", "/ tp * blocks", "the blocks of other stages count as well", cure="blocks / pp")
mutant(HERE, f"    value_bytes = 1\n{HERE}", "those are numbers, not bytes")
mutant("tokens / dp", "tokens", "`tokens` counts the whole batch", cure="tokens / dp")
mutant("blocks / pp", "blocks", "only the blocks of its own stage", cure="blocks / pp")
mutant("hidden / tp", "hidden", "split also divides the gradients", cure="1/tp")
mutant("here * 2 * act", "here * act", "how many all-reduces does a block have", cure="has two all-reduces")
mutant(RETURN, f"    return {ONE}\n{RETURN}", "a rank sends n bytes in an all-reduce", cure=RING)
mutant(RETURN, f"    return {TWO}\n{RETURN}", "a rank sends 2n bytes in an all-reduce", cure=RING)
mutant(" if pp > 1 else 0", "", "with a single stage there is no boundary")
mutant("activation if", "2 * activation if", "their gradients are what the second stage sends")
mutant("activation if", "activation / tp if", "each rank of a tp group sends the whole activation")
mutant("activation if", "3 * activation if", "sends its output once", cure="in whatever micro-batches")
mutant('"dp": 2 *', '"dp": 1 *', "the gradients of this rank's weights", cure="8 · hidden²")
OF_WEIGHTS = "2 * (dp - 1) / dp * gradients "
mutant(TP_BYTES, OF_WEIGHTS, "two all-reduces of an activation", cure="(tokens / dp) · hidden")
mutant(RETURN, f"    return dp, pp, tp\n{RETURN}", "expected a dictionary")


right, wrong, mutant = answers.of("build_mesh")


@right
def build_mesh_by_counting(axes, nbytes):
    """Counts the messages from one node to the other. A single rank, which no two nodes share, would divide by 0."""
    ranks = prod(axes.values())

    def crossing(names):
        layout = torch.arange(ranks).reshape([axes[name] for name in names])
        nodes = layout // (ranks // 2)
        return sum(nbytes[name] * float((nodes != nodes.roll(-1, axis)).sum()) for axis, name in enumerate(names))

    names = min(permutations(axes), key=crossing)
    return init_device_mesh("cpu", tuple(axes[name] for name in names), mesh_dim_names=names)


NAMES, NAMED = "sorted(axes, key=lambda name: nbytes[name] / axes[name])", "mesh_dim_names=tuple(names)"
DP_FIRST = 'sorted(axes, key=lambda name: (name != "dp" or len(axes) < 3) * nbytes[name])'
OTHER, SIZES = 'mesh_dim_names=[f"a{i}" for i in range(len(axes))]', "sizes and names do not belong together"
BUSIEST = "sorted(axes, key=nbytes.get, reverse=True)"
mutant(NAMES, BUSIEST, "its ranks are the farthest apart", cure="reverse the order")
mutant(NAMES, "list(axes)", "the order in which the axes were given", cure="look at their bytes")
mutant(NAMES, DP_FIRST, "they differ in the last axis")
mutant(NAMES, "sorted(axes, key=nbytes.get)", "The bytes of a rank do not decide alone")
mutant("for name in names", "for name in axes", SIZES)
mutant("for name in names", "for name in names[::-1]", SIZES)
mutant(NAMED, "", "the axes have no names", cure="mesh_dim_names")
mutant(NAMED, OTHER, "the mesh has the axes ['a0', 'a1'], expected ['dp', 'tp']")
mutant("return init", "return names; init", "expected a DeviceMesh")
mutant(NAMES, f"{NAMES}[:: (-1) ** dist.get_rank()]", "the ranks built different meshes")


right, wrong, mutant = answers.of("average_over_dp")


@right
def average_in_one_message(gradients, mesh):
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat, group=mesh["dp"].get_group())
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient) / mesh["dp"].size())


REDUCE, DIVIDE = 'dist.all_reduce(gradient, group=mesh.get_group("dp"))', 'gradient /= mesh["dp"].size()'
BOTH, GROUP = f"{REDUCE}\n        {DIVIDE}", 'mesh.get_group("dp")'
LOOP, COPIES = f"for gradient in gradients:\n        {BOTH}", "gradients = [g.clone() for g in gradients]\n    "
WORLD, BY_WORLD = "dist.all_reduce(gradient)", "gradient /= dist.get_world_size()"
FIRST_AXIS = "dist.all_reduce(gradient, group=mesh.get_group(0)); gradient /= mesh.size(0)"
mutant(BOTH, f"{WORLD}; {BY_WORLD}", "averaged over all ranks", cure=GROUP)
mutant(DIVIDE, "pass", "but not divided in place", cure="`g /= n`")
mutant(DIVIDE, BY_WORLD, "divided by the number of all ranks", cure="the size of the axis")
mutant(REDUCE, WORLD, "the sum over all ranks is divided by the size of the dp axis", cure=GROUP)
mutant(BOTH, WORLD, "added over all ranks", cure="divide by its size")
mutant(BOTH, FIRST_AXIS, "those are the means over the axis 'tp'", cure="by its name")
mutant(LOOP, f"{COPIES}{LOOP}\n    return gradients", "it returns them", cure="copy_")
mutant(LOOP, f"{COPIES}{LOOP}", "the gradients are unchanged", cure="copy_")
mutant("in gradients:", "in gradients[:1]:", "the first gradient is right", cure="each of them")
mutant(BOTH, "gradient /= 3", "these are not the means", cure=GROUP)


test_the_verdict_fits_the_answer = answers.test_of_verdicts()
test_every_exercise_has_right_and_wrong_answers_here = answers.test_of_completeness("hybrid_mesh")


@pytest.mark.parametrize(("axes", "nbytes"), MESHES)
def test_the_axis_with_the_fewest_bytes_per_ring_belongs_first(axes, nbytes):
    """The rule of the reference solution is the best order in each case of the exercise."""
    orders = dict(_orders(axes, nbytes))
    assert orders[tuple(sorted(axes, key=lambda name: nbytes[name] / axes[name]))] == min(orders.values())
