"""The exercises of lesson 09: right answers pass, and each typical mistake gets its own hint."""

from __future__ import annotations

from itertools import permutations
from math import prod

import numpy as np
import pytest
import torch
import torch.distributed as dist
from answers import Answers, judge
from torch.distributed.device_mesh import init_device_mesh

from labkit.teaching.exercises.hybrid_mesh import MESHES, _between_nodes, _orders

answers = Answers()
right, wrong = answers.right, answers.wrong


# coordinates


@right("coordinates")
def coordinates(rank, shape):
    places = []
    for size in reversed(shape):
        rank, place = divmod(rank, size)
        places = [place, *places]
    return places


@right("coordinates")
def coordinates_by_torch(rank, shape):
    return tuple((torch.arange(prod(shape)).reshape(shape) == rank).nonzero()[0].tolist())


@right("coordinates")
def coordinates_by_strides(rank, shape):
    return [rank // prod(shape[axis + 1 :]) % size for axis, size in enumerate(shape)]


@wrong("coordinates", "in reverse order", cure="belongs to the first axis")
def coordinates_reversed(rank, shape):
    return coordinates(rank, shape)[::-1]


@wrong("coordinates", "your first axis runs fastest", cure="begin with the last axis")
def coordinates_first_axis_fastest(rank, shape):
    return coordinates(rank, shape[::-1])[::-1]


@wrong("coordinates", "each coordinate is rank % size", cure="divide the rank by the size")
def coordinates_without_division(rank, shape):
    return [rank % size for size in shape]


@wrong("coordinates", "lies between 0 and the size of its axis minus 1", cure="the remainder (%)")
def coordinates_without_remainder(rank, shape):
    return [rank // prod(shape[axis + 1 :]) for axis in range(len(shape))]


@wrong("coordinates", "2 numbers in place of 3: expected a list of whole numbers, one for each axis")
def coordinates_of_two_axes(rank, shape):
    return list(divmod(rank, shape[-1]))


@wrong("coordinates", "count from 0", cure="rank 0 is at 0")
def coordinates_from_one(rank, shape):
    return [place + 1 for place in coordinates(rank, shape)]


@wrong("coordinates", "is not a whole number")
def coordinates_as_floats(rank, shape):
    return [place / 1 for place in coordinates(rank, shape)]


@wrong("coordinates", "after how many ranks does the one before it change", cure="the remainder is the last coordinate")
def coordinates_always_zero(rank, shape):
    return [0] * len(shape)


@right("coordinates")
def coordinates_by_numpy(rank, shape):
    return np.unravel_index(rank, shape)


# bytes_per_axis


@right("bytes_per_axis")
def bytes_per_axis(dp, pp, tp, blocks, tokens, hidden, value_bytes):
    activation, here = tokens / dp * hidden * value_bytes, blocks / pp
    gradients = here * 8 * hidden**2 * value_bytes / tp
    return {
        "dp": 2 * (dp - 1) / dp * gradients,
        "pp": activation if pp > 1 else 0,
        "tp": here * 2 * 2 * (tp - 1) / tp * activation,
    }


@right("bytes_per_axis")
def bytes_by_pieces(dp, pp, tp, blocks, tokens, hidden, value_bytes):
    def ring(ranks, n):
        return sum(n / ranks for _ in range(2 * (ranks - 1)))

    n = tokens * hidden * value_bytes // dp
    matrices = [hidden * 4 * hidden // tp, 4 * hidden * hidden // tp] * (blocks // pp)
    dp_bytes = sum(ring(dp, values * value_bytes) for values in matrices)
    tp_bytes = sum(ring(tp, n) for _ in range(blocks // pp) for _ in ("f", "g"))
    return {"tp": tp_bytes, "dp": dp_bytes, "pp": n * (pp > 1)}


@wrong("bytes_per_axis", "the blocks of other stages count as well", cure="blocks / pp")
def tp_bytes_of_all_stages(dp, pp, *rest):
    found = bytes_per_axis(dp, pp, *rest)
    return found | {"tp": pp * found["tp"]}


@wrong("bytes_per_axis", "those are numbers, not bytes")
def bytes_as_numbers(*args):
    return bytes_per_axis(*args[:-1], 1)


@wrong("bytes_per_axis", "`tokens` counts the whole batch", cure="tokens / dp")
def bytes_of_the_whole_batch(dp, pp, tp, blocks, tokens, *rest):
    return bytes_per_axis(dp, pp, tp, blocks, tokens * dp, *rest)


@wrong("bytes_per_axis", "only the blocks of its own stage", cure="blocks / pp")
def bytes_of_all_blocks(dp, pp, tp, blocks, *rest):
    return bytes_per_axis(dp, pp, tp, blocks * pp, *rest)


@wrong("bytes_per_axis", "the tensor-parallel split also divides the gradients", cure="1/tp")
def bytes_of_whole_gradients(dp, pp, tp, *rest):
    found = bytes_per_axis(dp, pp, tp, *rest)
    return found | {"dp": found["dp"] * tp}


@wrong("bytes_per_axis", "how many all-reduces does a block have", cure="a block has two all-reduces")
def bytes_of_the_forward_pass(*args):
    found = bytes_per_axis(*args)
    return found | {"tp": found["tp"] / 2}


@wrong("bytes_per_axis", "a rank sends n bytes in an all-reduce", cure="2(k − 1)/k · n bytes")
def bytes_without_a_ring(dp, pp, tp, blocks, tokens, hidden, value_bytes):
    n, here = tokens / dp * hidden * value_bytes, blocks / pp
    gradients = here * 8 * hidden**2 * value_bytes / tp
    return {"dp": gradients * (dp > 1), "pp": n * (pp > 1), "tp": here * 2 * n * (tp > 1)}


@wrong("bytes_per_axis", "a rank sends 2n bytes in an all-reduce", cure="2(k − 1)/k · n bytes")
def bytes_of_two_rounds(*args):
    found = bytes_without_a_ring(*args)
    return {"dp": 2 * found["dp"], "pp": found["pp"], "tp": 2 * found["tp"]}


@wrong("bytes_per_axis", "with a single stage there is no boundary")
def bytes_of_no_boundary(dp, pp, *rest):
    found = bytes_per_axis(dp, pp, *rest)
    return found | {"pp": bytes_per_axis(dp, 2, *rest)["pp"]}


@wrong("bytes_per_axis", "their gradients are what the second stage sends")
def bytes_of_both_directions(*args):
    found = bytes_per_axis(*args)
    return found | {"pp": 2 * found["pp"]}


@wrong("bytes_per_axis", "the gradients of this rank's weights", cure="8 · hidden²")
def bytes_of_one_matrix(*args):
    found = bytes_per_axis(*args)
    return found | {"dp": found["dp"] / 2}


@wrong("bytes_per_axis", "two all-reduces of an activation", cure="(tokens / dp) · hidden")
def bytes_of_weights_on_tp(*args):
    found = bytes_per_axis(*args)
    return found | {"tp": found["dp"]}


@wrong("bytes_per_axis", "expected a dictionary")
def bytes_as_a_tuple(*args):
    return tuple(bytes_per_axis(*args).values())


# build_mesh


def mesh_of(names, axes):
    return init_device_mesh("cpu", tuple(axes[name] for name in names), mesh_dim_names=tuple(names))


@right("build_mesh")
def build_mesh(axes, nbytes):
    return mesh_of(sorted(axes, key=lambda name: nbytes[name] / axes[name]), axes)


@right("build_mesh")
def build_mesh_by_trying(axes, nbytes):
    def crossing(names):
        layout = torch.arange(prod(axes.values())).reshape([axes[name] for name in names])
        return _between_nodes(layout, names, nbytes)

    return mesh_of(min(permutations(axes), key=crossing), axes)


@right("build_mesh")
def build_mesh_by_counting(axes, nbytes):
    """Counts the messages from one node to the other. A single rank, which no two nodes share, would divide by 0."""
    ranks = prod(axes.values())

    def crossing(names):
        layout = torch.arange(ranks).reshape([axes[name] for name in names])
        nodes = layout // (ranks // 2)
        return sum(nbytes[name] * float((nodes != nodes.roll(-1, axis)).sum()) for axis, name in enumerate(names))

    return mesh_of(min(permutations(axes), key=crossing), axes)


@wrong("build_mesh", "its ranks are the farthest apart", cure="reverse the order")
def mesh_with_the_busiest_first(axes, nbytes):
    return mesh_of(sorted(axes, key=nbytes.get, reverse=True), axes)


@wrong("build_mesh", "the order in which the axes were given", cure="look at their bytes")
def mesh_in_the_given_order(axes, nbytes):
    return mesh_of(list(axes), axes)


@wrong("build_mesh", "they differ in the last axis")
def mesh_with_dp_first(axes, nbytes):
    rest = sorted(set(axes) - {"dp"}, key=nbytes.get)
    order = ["dp", *rest] if len(axes) > 2 else sorted(axes, key=nbytes.get)
    return mesh_of(order, axes)


@wrong("build_mesh", "The bytes of a rank do not decide alone")
def mesh_by_bytes(axes, nbytes):
    order = sorted(axes, key=lambda name: nbytes[name])
    return init_device_mesh("cpu", tuple(axes[name] for name in order), mesh_dim_names=tuple(order))


@wrong("build_mesh", "sizes and names do not belong together")
def mesh_of_sorted_names(axes, nbytes):
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(sorted(axes, key=lambda name: nbytes[name])))


@wrong("build_mesh", "sizes and names do not belong together")
def mesh_with_mixed_sizes(axes, nbytes):
    names = sorted(axes, key=nbytes.get)
    return init_device_mesh("cpu", tuple(reversed([axes[name] for name in names])), mesh_dim_names=tuple(names))


@wrong("build_mesh", "the axes have no names", cure="mesh_dim_names")
def mesh_without_names(axes, nbytes):
    return init_device_mesh("cpu", tuple(axes.values()))


@wrong("build_mesh", "the mesh has the axes ['a0', 'a1'], expected ['dp', 'tp']")
def mesh_with_other_names(axes, nbytes):
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(f"a{i}" for i in range(len(axes))))


@wrong("build_mesh", "expected a DeviceMesh")
def mesh_as_a_tuple(axes, nbytes):
    return tuple(sorted(axes, key=nbytes.get))


# average_over_dp


@right("average_over_dp")
def average_over_dp(gradients, mesh):
    group = mesh.get_group("dp")
    for gradient in gradients:
        dist.all_reduce(gradient, group=group)
        gradient /= group.size()


@right("average_over_dp")
def average_in_one_message(gradients, mesh):
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat, group=mesh["dp"].get_group())
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient) / mesh["dp"].size())


@wrong("average_over_dp", "averaged over all ranks", cure='mesh.get_group("dp")')
def average_over_the_world(gradients, mesh):
    for gradient in gradients:
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()


@wrong("average_over_dp", "but not divided in place", cure="`g /= n`")
def sum_over_dp(gradients, mesh):
    for gradient in gradients:
        dist.all_reduce(gradient, group=mesh.get_group("dp"))


@wrong("average_over_dp", "divided by the number of all ranks", cure="the size of the axis")
def average_by_the_world_size(gradients, mesh):
    sum_over_dp(gradients, mesh)
    for gradient in gradients:
        gradient /= dist.get_world_size()


@wrong("average_over_dp", "the sum over all ranks is divided by the size of the dp axis", cure='mesh.get_group("dp")')
def world_by_the_axis_size(gradients, mesh):
    for gradient in gradients:
        dist.all_reduce(gradient)
        gradient /= mesh["dp"].size()


@wrong("average_over_dp", "added over all ranks", cure="divide by its size")
def sum_over_the_world(gradients, mesh):
    for gradient in gradients:
        dist.all_reduce(gradient)


@wrong("average_over_dp", "those are the means over the axis 'tp'", cure="by its name")
def average_over_the_first_axis(gradients, mesh):
    for gradient in gradients:
        dist.all_reduce(gradient, group=mesh.get_group(0))
        gradient /= mesh.size(0)


@wrong("average_over_dp", "it returns them", cure="copy_")
def average_returned(gradients, mesh):
    copies = [gradient.clone() for gradient in gradients]
    average_over_dp(copies, mesh)
    return copies


@wrong("average_over_dp", "the gradients are unchanged", cure="copy_")
def average_of_nothing(gradients, mesh):
    average_returned(gradients, mesh)


@wrong("average_over_dp", "the first gradient is right", cure="each of them")
def average_of_the_first(gradients, mesh):
    average_over_dp(gradients[:1], mesh)


@wrong("average_over_dp", "these are not the means", cure='mesh.get_group("dp")')
def average_of_neighbours(gradients, mesh):
    for gradient in gradients:
        gradient /= 3


@pytest.mark.parametrize("answer", answers.parameters())
@pytest.mark.processes
def test_the_verdict_names_the_mistake(answer):
    judge(answer)


def test_every_exercise_has_answers():
    answers.complete("hybrid_mesh")


@pytest.mark.parametrize(("axes", "nbytes"), MESHES)
def test_the_axis_with_the_fewest_bytes_per_ring_belongs_first(axes, nbytes):
    """The rule of the reference solution is the best order in each case of the exercise."""
    orders = dict(_orders(axes, nbytes))
    assert orders[tuple(sorted(axes, key=lambda name: nbytes[name] / axes[name]))] == min(orders.values())
