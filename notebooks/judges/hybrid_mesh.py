"""The exercises of lesson 09: coordinates, the mesh for a network, averages along an axis, bytes per axis."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from labkit.errors.lists import counted
from labkit.teaching.exercises.comparisons import Hint, equal, expect, expect_numbers, wrong_if
from labkit.teaching.exercises.exercise import Results, exercise
from labkit.teaching.exercises.random_state import case_seed

LESSON = "09_hybrid_mesh"
Axes = dict[str, int]  # the size of each axis by its name, the slowest first
SHAPES_OF_MESHES = ((2, 2), (2, 3), (2, 2, 2), (3, 1, 4), (5,), (2, 3, 2, 2))


def _other_place(random: Random) -> tuple[int, tuple[int, ...]]:
    shape = tuple(random.randint(2, 5) for _ in range(random.randint(2, 4)))
    return random.randrange(math.prod(shape)), shape


@exercise(
    LESSON, "The last axis runs fastest, whatever the number of axes and their sizes.",
    # The first case tells a reversed answer from one whose first axis runs fastest.
    [(2, (2, 3)), *((rank, shape) for shape in SHAPES_OF_MESHES for rank in range(math.prod(shape)))],
    other=_other_place,
)
def coordinates(answer: Any, rank: int, shape: tuple[int, ...]) -> None:
    """coordinates(rank, shape) returns the rank's place in a mesh as a list of whole numbers, one for each
    axis. `shape` is a tuple with the size of each axis; the last axis runs fastest."""
    right = _unravel(rank, shape)

    def otherwise(given: list[int]) -> Hint:
        if any(not 0 <= at < size for at, size in zip(given, shape, strict=True)):
            return ("a coordinate lies between 0 and the size of its axis minus 1",
                    "the remainder (%) is missing")
        return ("from one rank to the next, the last coordinate changes: after how many ranks does the one "
                "before it change?",
                "divide the rank by the size of the last axis: the remainder is the last coordinate; go on "
                "with the quotient")

    expect_numbers(answer(rank, shape), right, [
        (right[::-1], "the numbers are right, but in reverse order",
         "the first coordinate belongs to the first axis"),
        (_unravel(rank, shape[::-1])[::-1], "your first axis runs fastest",
         "neighbouring ranks differ in the last coordinate: begin with the last axis"),
        ([rank % size for size in shape],
         "here each coordinate is rank % size, as if every axis ran as fast as the last one",
         "divide the rank by the size before you go to the next axis"),
        ([place + 1 for place in right], "coordinates count from 0, yours from 1",
         "rank 0 is at 0 on every axis"),
    ], otherwise, form="a list of whole numbers, one for each axis")


def _unravel(rank: int, shape: Sequence[int]) -> list[int]:
    places: list[int] = []
    for size in reversed(shape):
        places.insert(0, rank % size)
        rank //= size
    return places


# The axes as the student gets them, and what each rank sends along each. Two nodes share the ranks equally.
MESHES: tuple[tuple[Axes, dict[str, float]], ...] = (
    ({"dp": 2, "tp": 2}, {"dp": 1e6, "tp": 3e6}),
    ({"dp": 2, "tp": 2}, {"dp": 5e6, "tp": 2e6}),
    ({"tp": 2, "pp": 2, "dp": 2}, {"tp": 6e6, "pp": 1e6, "dp": 2e6}),
    ({"dp": 4, "tp": 2}, {"dp": 1e6, "tp": 4e6}),
    ({"tp": 2, "dp": 4}, {"tp": 4e6, "dp": 1e6}),
    # Two rings of dp, four of tp: the axis with fewer bytes stays inside.
    ({"tp": 2, "dp": 4}, {"tp": 2e6, "dp": 3e6}),
)


def _mesh_on_rank(answer: Callable[..., Any], axes: Axes, nbytes: dict[str, float]) -> Any:
    result = answer(dict(axes), dict(nbytes))
    if isinstance(result, DeviceMesh):
        return result.mesh.tolist(), result.mesh_dim_names
    return type(result).__name__


def _ranks_of(axes: Axes, *_: object) -> int:
    return math.prod(axes.values())


@exercise(
    LESSON, "In every case this order sends the fewest bytes between the nodes.", MESHES,
    on_ranks=_mesh_on_rank, ranks=_ranks_of,
    call=lambda axes, nbytes: f"build_mesh({axes}, {nbytes}) on {counted(_ranks_of(axes), 'rank')}",
)
def build_mesh(results: Results, axes: Axes, nbytes: dict[str, float]) -> None:
    """build_mesh(axes, nbytes) runs on every rank. `axes` has the size of each axis by its name, `nbytes`
    what each rank sends along it per step. Return a DeviceMesh with these axes, named, that sends the fewest
    bytes between two nodes."""
    given = results[0]
    wrong_if(isinstance(given, str),
             f"expected a DeviceMesh, as init_device_mesh returns it; it returned {given}")
    wrong_if(any(other != given for other in results),
             "the ranks built different meshes: each must call init_device_mesh alike")
    layout, names = torch.tensor(given[0]), given[1]
    wrong_if(names is None, "the axes have no names", "pass mesh_dim_names to init_device_mesh")
    wrong_if(set(names) != set(axes), f"the mesh has the axes {list(names)}, expected {list(axes)}")
    shape = dict(zip(names, layout.shape, strict=True))
    wrong_if(shape != axes, f"sizes and names do not belong together: the mesh is {shape}, expected {axes}")
    between, best = _between_nodes(layout, names, nbytes), min(_orders(axes, nbytes).values())
    why, cure = _why(names, axes, nbytes)
    wrong_if(between > best,
             f"with the order {', '.join(names)}, {_mb(between)} cross between the nodes per step, where "
             f"{_mb(best)} are enough. {why}", cure)


def _why(names: Sequence[str], axes: Axes, nbytes: Mapping[str, float]) -> tuple[str, str]:
    """Why an order of the axes is not the best one, as far as the order shows it, and what to do."""
    if list(names) == sorted(axes, key=lambda name: nbytes[name]) and len({*axes.values()}) > 1:
        return ("The bytes of a rank do not decide alone: how many rings of each axis cross, and how often "
                "does a ring cross?", "")
    if list(names) == list(axes) and len(names) > 1:
        return "This is the order in which the axes were given", "look at their bytes instead"
    if list(names) == sorted(axes, key=lambda name: -nbytes[name]):
        return ("The axis with the most bytes is the first, so its ranks are the farthest apart",
                "reverse the order")
    return "Consecutive ranks share a node, and they differ in the last axis", ""


def _orders(axes: Axes, nbytes: Mapping[str, float]) -> dict[tuple[str, ...], float]:
    """Return the bytes between the nodes for each order of the axes."""
    found = {}
    for names in itertools.permutations(axes):
        layout = torch.arange(_ranks_of(axes)).reshape([axes[name] for name in names])
        found[names] = _between_nodes(layout, names, nbytes)
    return found


def _between_nodes(layout: Tensor, names: Sequence[str], nbytes: Mapping[str, float]) -> float:
    """Return the bytes per step between two nodes, if each rank sends to the next one of its ring."""
    total, half = 0.0, layout.numel() / 2
    for axis, name in enumerate(names):
        if layout.shape[axis] > 1:
            here, there = layout, layout.roll(-1, axis)
            total += nbytes[name] * float(((here < half) != (there < half)).sum())
    return total


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:g} MB"


# The first tells all mistakes apart: axes of equal size do not, and dp must not be the first.
AVERAGES: tuple[Axes, ...] = (
    {"tp": 2, "dp": 3}, {"dp": 2, "tp": 2}, {"dp": 3, "tp": 1}, {"pp": 2, "tp": 1, "dp": 2}, {"dp": 1},
)
SHAPES = ((3, 4), (5,), (2, 1, 3))
DP_GROUP = 'pass mesh.get_group("dp") to all_reduce as its group'


def _gradients(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(case_seed(rank))
    return [torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in SHAPES]


def _average_on_rank(answer: Callable[..., Any], axes: Axes) -> Any:
    """Return the gradients after the student's function, and what it returned."""
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    gradients = _gradients(dist.get_rank())
    mine = list(gradients)
    returned = answer(gradients, mesh)
    usable = isinstance(returned, (list, tuple)) and all(isinstance(part, Tensor) for part in returned)
    return [g.detach() for g in mine], [g.detach() for g in returned] if usable else None


@exercise(
    LESSON, "On every mesh, the means are those over the dp axis alone, wherever it stands.",
    [(axes,) for axes in AVERAGES], on_ranks=_average_on_rank, ranks=_ranks_of,
    call="average_over_dp(gradients, mesh) with the mesh {axes}",
)
def average_over_dp(results: Results, axes: Axes) -> None:
    """average_over_dp(gradients, mesh) runs on every rank: `gradients` is a list of tensors, and one axis of
    the mesh is called "dp". Replace each gradient in place with its mean over that axis."""
    given, returned = map(list, zip(*results, strict=True))
    dp, ranks = axes["dp"], _ranks_of(axes)
    right = _combined(axes, ["dp"], divide=dp)
    mistakes: list[tuple[Any, ...]] = [
        (_combined(axes, [], divide=1), "the gradients are unchanged",
         "write the means into the given tensors, with copy_"),
        (_combined(axes, list(axes), divide=ranks),
         "the gradients are averaged over all ranks: those that differ in another axis hold other weights, "
         "or other parts", f"{DP_GROUP}, and its size is what to divide by"),
        (_combined(axes, ["dp"], divide=1),
         "the gradients are added over the dp axis, but not divided in place",
         "`g = g / n` makes a new tensor; `g /= n` changes the given one"),
        (_combined(axes, ["dp"], divide=ranks),
         "the sum over the dp axis is divided by the number of all ranks", "divide by the size of the axis"),
        (_combined(axes, list(axes), divide=1), "the gradients are added over all ranks",
         f"{DP_GROUP}; divide by its size afterwards"),
        (_combined(axes, list(axes), divide=dp),
         "the sum over all ranks is divided by the size of the dp axis",
         DP_GROUP),
    ]
    if dp == 1 or len(axes) == 1:  # several mistakes coincide; none is known that passed the meshes before
        mistakes = []
    for axis, size in axes.items():
        if axis != "dp" and size > 1:
            mistakes.append((_combined(axes, [axis], divide=size),
                             f"those are the means over the axis {axis!r}: dp need not be the first",
                             "ask for the axis by its name"))
    otherwise = "these are not the means over the ranks that differ in the dp axis alone", DP_GROUP
    if all(result is not None for result in returned) and equal(returned, right):
        otherwise = ("the means are right, but it returns them",
                     "write them into the given tensors, with copy_")
        mistakes = []
    if equal([g[:1] for g in given], [g[:1] for g in right]):
        otherwise = "the first gradient is right, the others are not", "average each of them"
    expect(given, right, mistakes, *otherwise)


def _combined(axes: Axes, over: Sequence[str], *, divide: int) -> list[list[Tensor]]:
    """Return for each rank the sums over its group along some axes, divided by a number."""
    layout = torch.arange(_ranks_of(axes)).reshape(tuple(axes.values()))
    sums: list[list[Tensor]] = []
    for rank in range(layout.numel()):
        place = _unravel(rank, tuple(axes.values()))
        where = tuple(slice(None) if name in over else at for name, at in zip(axes, place, strict=True))
        group = [_gradients(int(member)) for member in layout[where].flatten()]
        sums.append([torch.stack(same).sum(0) / divide for same in zip(*group, strict=True)])
    return sums


RING = "in a ring all-reduce of n bytes, each of k ranks sends 2(k − 1)/k · n bytes"


def _sizes(
    dp: int, pp: int, tp: int, blocks: int, tokens: int, hidden: int, value_bytes: int, *,
    per_all_reduce: float | None = None, passes: int = 2, shard: bool = True, stage: bool = True,
) -> dict[str, float]:
    """Return the bytes of each axis; the options are the mistakes that a hint knows."""

    def ring(size: int) -> float:
        return per_all_reduce if per_all_reduce is not None and size > 1 else 2 * (size - 1) / size

    here = blocks / pp if stage else blocks
    activation = tokens / dp * hidden * value_bytes
    gradient = here * 8 * hidden**2 * value_bytes / (tp if shard else 1)
    return {
        "dp": ring(dp) * gradient,
        "pp": activation if pp > 1 else 0.0,
        "tp": here * passes * ring(tp) * activation,
    }


def _other_axes(random: Random) -> tuple[int, ...]:
    dp, pp, tp = (random.randint(2, 6) for _ in range(3))
    blocks, tokens = pp * random.randint(1, 4), dp * random.randint(20, 90)
    return dp, pp, tp, blocks, tokens, tp * random.randint(4, 30), random.choice([2, 4])


@exercise(
    LESSON,
    "Tensor parallelism sends activations of every block, data parallelism gradients, the pipeline one "
    "activation.",
    # The first case has no pipeline; the second has sizes that tell all mistakes apart.
    [
        (3, 1, 4, 4, 1344, 128, 4), (5, 3, 4, 6, 240, 16, 2),
        (2, 2, 2, 4, 1344, 128, 4), (1, 4, 4, 8, 96, 8, 2),
    ],
    other=_other_axes,
)
def bytes_per_axis(
    answer: Any, dp: int, pp: int, tp: int, blocks: int, tokens: int, hidden: int, value_bytes: int
) -> None:
    """bytes_per_axis(dp, pp, tp, blocks, tokens, hidden, value_bytes) returns a dictionary with the keys dp,
    pp and tp: how many bytes a rank of the first stage sends per step along each axis."""
    case = dp, pp, tp, blocks, tokens, hidden, value_bytes
    right = _sizes(*case)

    def otherwise(given: dict[str, float]) -> Hint:
        if not equal(given["pp"], right["pp"]):
            return ("on the pp axis, the first stage sends its output once",
                    "(tokens / dp) · hidden values, in whatever micro-batches")
        if not equal(given["dp"], right["dp"]):
            return ("on the dp axis, an all-reduce carries the gradients of this rank's weights",
                    "a block has 8 · hidden² of them, divided by tp")
        return ("on the tp axis, each block has two all-reduces of an activation",
                "an activation has (tokens / dp) · hidden values")

    expect_numbers(answer(*case), right, [
        ({axis: n / value_bytes for axis, n in right.items()},
         "those are numbers, not bytes: each takes value_bytes"),
        (_sizes(dp, pp, tp, blocks, tokens * dp, hidden, value_bytes),
         "`tokens` counts the whole batch; a rank computes with those of its own share",
         "its share is tokens / dp"),
        (_sizes(*case, stage=False), "a rank has only the blocks of its own stage", "that is blocks / pp"),
        (_sizes(*case, shard=False), "the tensor-parallel split also divides the gradients",
         "each rank has 1/tp of them"),
        (_sizes(*case, passes=1),
         "half is missing: how many all-reduces does a block have, and how many pieces does a rank send in "
         "each?",
         "a block has two all-reduces, and in each, every one of k ranks sends 2(k − 1) pieces"),
        (_sizes(*case, per_all_reduce=1),
         "here a rank sends n bytes in an all-reduce of n bytes, however many ranks there are", RING),
        (_sizes(*case, per_all_reduce=2),
         "here a rank sends 2n bytes in an all-reduce of n bytes, however many ranks there are", RING),
        (right | {"pp": tokens / dp * hidden * value_bytes},
         "with a single stage there is no boundary to send over: the pp axis has 0 bytes"),
        (right | {"pp": 2 * right["pp"]},
         "on the pp axis, the first stage sends activations; their gradients are what the second stage "
         "sends"),
        (right | {"pp": right["pp"] / tp},
         "on the pp axis, each rank of a tp group sends the whole activation"),
        (right | {"tp": pp * right["tp"]}, "on the tp axis, the blocks of other stages count as well",
         "a rank has blocks / pp of them"),
    ], otherwise, form='a dictionary {"dp": ..., "pp": ..., "tp": ...}')
