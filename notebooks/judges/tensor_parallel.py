"""The exercises of lesson 06: a column split's backward, a row split, the split of heads, bytes sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.errors.lists import counted
from labkit.recording.operations import type_of
from labkit.teaching.exercises.comparisons import AnswerError, Hint, compare, equal, expect, expect_numbers, factor, wrong_if
from labkit.teaching.exercises.exercise import Results, exercise

LESSON = "06_tensor_parallel"
BATCH, INPUTS, OUTPUTS = 5, 7, 10  # neither features nor outputs can be divided by 2, 3 and 4
WORLDS = (2,), (3,), (4,), (1,)


def _numbers(*shape: int) -> Tensor:
    """Random numbers; the generator is that of the process, which is seeded alike on all ranks."""
    return torch.randn(*shape, dtype=torch.float64)


def _rank() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


# column_backward


def _column_case(ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """The input, and the whole weight and gradient of the output."""
    torch.manual_seed(ranks)
    return _numbers(BATCH, INPUTS), _numbers(OUTPUTS, INPUTS), _numbers(BATCH, OUTPUTS)


def _column_on_rank(answer: Callable[..., Any]) -> tuple[Any, list[str]]:
    """Return what the student's function gives, and the names of the tensors that it changed."""
    rank, ranks = _rank()
    x, weight, gradient = _column_case(ranks)
    own, part = weight.tensor_split(ranks)[rank].clone(), gradient.tensor_split(ranks, -1)[rank].clone()
    given = {"x": x, "weight": own, "grad": part}
    before = {name: tensor.clone() for name, tensor in given.items()}
    result = answer(x, own, part)
    changed = [name for name, tensor in given.items() if not torch.equal(tensor, before[name])]
    if isinstance(result, (tuple, list)):
        return [r.detach().numpy() if isinstance(r, Tensor) else type(r).__name__ for r in result], changed
    return type(result).__name__, changed


@exercise(
    LESSON,
    "On 1, 2, 3 and 4 ranks the gradients are those of one process, with one all_reduce of the size of x.",
    WORLDS, on_ranks=_column_on_rank,
    call=lambda ranks: f"column_backward(x, weight, grad) on {counted(ranks, 'rank')}",
)
def column_backward(results: Results, ranks: int) -> None:
    """column_backward(x, weight, grad) runs on every rank: `weight` is its rows of nn.Linear's weight, `grad`
    the gradient of its part of the output, x of shape (batch, inputs) is the same on all ranks. Return
    (grad_x, grad_weight, grad_bias)."""
    x, weight, gradient = _column_case(ranks)
    for rank, (result, changed) in enumerate(results):
        returned = result if isinstance(result, str) else counted(len(result), "value")
        wrong_if(not isinstance(result, list) or len(result) != 3,
                 f"expected three gradients, (grad_x, grad_weight, grad_bias); rank {rank} returned "
                 f"{returned}")
        for name, value in zip(("grad_x", "grad_weight", "grad_bias"), result, strict=True):
            hint = "; dist.all_reduce works in place and returns None" if str(value) == "NoneType" else ""
            wrong_if(isinstance(value, str),
                     f"{name} is a {value} on rank {rank}, expected a tensor{hint}")
        for name in changed:
            wrong_if(True,
                     f"{name} was modified, and autograd still needs it: dist.all_reduce works in place",
                     "give it a new tensor")
    grad_xs, grad_weights, grad_biases = zip(*(result for result, _ in results), strict=True)
    parts = gradient.tensor_split(ranks, -1)
    _judge_own("grad_weight", grad_weights, [(g.T @ x).numpy() for g in parts])
    _judge_own("grad_bias", grad_biases, [g.sum(0).numpy() for g in parts])
    both = zip(parts, weight.tensor_split(ranks), strict=True)
    contributions = [(g @ w).numpy() for g, w in both]
    wrong_if(ranks > 1 and equal(grad_xs, contributions), "grad_x is only this rank's part: x went "
             "into the columns of every rank, and each contributes to its gradient",
             "the gradient of x is the sum of what the ranks contribute")
    compare([{"grad_x": grad_x} for grad_x in grad_xs], {"grad_x": (gradient @ weight).numpy()},
            subject="the gradients", oracle="one process", causes={
        1 / ranks: "of x were averaged. Each rank adds what its own columns contribute: it is a sum, not a "
        "mean",
    })
    _judge_messages(results, ranks, BATCH * INPUTS)


def _judge_own(name: str, given: Sequence[Any], own: Sequence[Any]) -> None:
    """Check a gradient of which each rank has its own part."""
    ranks = len(own)
    each = "one number per output, summed over the batch"
    if name == "grad_weight":
        each = "the shape of this rank's weight"
    for rank, (value, right) in enumerate(zip(given, own, strict=True)):
        wrong_if(ranks > 1 and value.shape == right.T.shape != right.shape,
                 f"{name} is transposed: nn.Linear's weight, and so its gradient, has the shape (outputs, "
                 "inputs)")
        wrong_if(value.shape != right.shape,
                 f"{name} has the shape {value.shape} on rank {rank} of {ranks}, expected {right.shape}: "
                 f"{each}")
        times = factor([value], [right])
        wrong_if(ranks > 1 and times is not None and abs(times - ranks) < 1e-6,
                 f"{name} is {ranks} times what it should be: each rank owns its part, nothing is added up")
        alike = [part for part in own if part.shape == right.shape]
        wrong_if(ranks > 1 and len(alike) == ranks and equal(value, sum(alike)),
                 f"{name} is the sum over the ranks: each rank owns its part, nothing is added up")
        try:
            compare([{name: value}], {name: right}, subject=f"rank {rank} of {ranks}: the gradients",
                    oracle="one process")
        except AnswerError as error:
            raise AnswerError(
                f"{error.message}. A rank's own weight and bias need no other rank", *error.details,
                cure="its part of the gradient of the output and the whole x suffice, without communication",
            ) from None


def _judge_messages(results: Results, ranks: int, numbers: int) -> None:
    """Check how many numbers each rank put into collectives; an all_gather records those of all ranks."""
    counts: list[list[tuple[str, int]]] = [[] for _ in range(ranks)]
    for span in results.trace.filter(kind="communication"):
        parts = ranks if type_of(span.name).name == "all_gather" else 1
        counts[span.rank].append((span.name, span.nbytes // 8 // parts))
    sent = [sum(count for _, count in own) for own in counts]
    wrong_if(ranks > 1 and min(sent) < numbers,
             "the result is right, but the ranks have not exchanged it: how can a rank know what others "
             "contribute to grad_x?", "",
             f"a rank communicated {counted(min(sent), 'number')}; grad_x has {numbers}")
    wrong_if(ranks > 1 and sent[0] > numbers,
             f"the result is right, but rank 0 communicated {sent[0]} numbers where {numbers} are enough: "
             "only the gradient of x is needed by other ranks", "",
             *(f"{name} of {counted(count, 'number')}" for name, count in counts[0]))


# row_linear


def _row_case(ranks: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The input, the whole weight, the bias, and the gradient of the output."""
    torch.manual_seed(10 + ranks)
    return _numbers(BATCH, INPUTS), _numbers(OUTPUTS, INPUTS), _numbers(OUTPUTS), _numbers(BATCH, OUTPUTS)


def _row_on_rank(answer: Callable[..., Any]) -> Any:
    """Return the student's output, and the gradients of x, weight and bias."""
    rank, ranks = _rank()
    x, weight, bias, gradient = _row_case(ranks)
    leaves = [t.requires_grad_() for t in (x, weight.tensor_split(ranks, -1)[rank].clone(), bias)]
    y = answer(*leaves)
    if not isinstance(y, Tensor):
        return type(y).__name__
    shown = y.detach().clone().numpy()
    if y.shape == gradient.shape and y.requires_grad:
        y.backward(gradient)
    return shown, [None if t.grad is None else t.grad.numpy() for t in leaves]


IN_ROWS: dict[str, Hint] = {  # what torch and labkit say after common mistakes
    "shapes cannot be multiplied": (
        "x is whole on every rank, and this rank's weight has only some of its columns",
        "take the same columns, x.tensor_split(p, -1)[rank]; chunk(p) cuts into other sizes if p does not "
        "divide them",
    ),
    "'CopyIn' object": ("an autograd function is applied, not called",
                        "write CopyIn.apply(x), not CopyIn(x)"),
    "'SumOut' object": ("an autograd function is applied, not called",
                        "write SumOut.apply(y), not SumOut(y)"),
    "Collective number": (
        "the ranks add up tensors of different shapes. Are these gradients of parts of x?",
        "pass x through f before you cut it: each rank adds the gradient of the whole x",
    ),
}


@exercise(
    LESSON, "On 1, 2, 3 and 4 ranks, output and gradients are those of one process.",
    WORLDS, on_ranks=_row_on_rank, errors=IN_ROWS,
    call=lambda ranks: f"row_linear(x, weight, bias) on {counted(ranks, 'rank')}",
)
def row_linear(results: Results, ranks: int) -> None:
    """row_linear(x, weight, bias) runs on every rank: x and bias are whole, `weight` is this rank's columns
    of nn.Linear's weight, cut by tensor_split. Return the layer's whole output, with correct gradients of x,
    weight and bias."""
    wrong_if(isinstance(results[0], str),
             f"expected a tensor, the output of the layer; it returned {results[0]}")
    given, gradients = zip(*results, strict=True)
    x, weight, bias, gradient = _row_case(ranks)
    own = weight.tensor_split(ranks, -1)
    products = [part @ w.T for part, w in zip(x.tensor_split(ranks, -1), own, strict=True)]
    total = sum(products[1:], products[0])
    expect(given, [total + bias] * ranks, [
        ([total + ranks * bias] * ranks,
         "the bias was added on every rank before the sum, so it is in it once for each rank",
         "add it after the all_reduce"),
        ([total] * ranks, "the bias is missing"),
        ([p + bias for p in products], "each rank returns only the product of its own columns",
         "the output is the sum over the ranks"),
        ([total / ranks + bias] * ranks,
         "the products were averaged: each rank holds a part of the sum, so they must be added"),
    ])
    compare([{"y": y} for y in given], {"y": (total + bias).numpy()}, subject="the outputs",
            oracle="one process")
    for rank, of_rank in enumerate(gradients):
        for name, value in zip(("x", "weight", "bias"), of_rank, strict=True):
            wrong_if(value is None,
                     f"the output is right, but {name} gets no gradient on rank {rank}: autograd must be "
                     "able to follow the way from it to the output")
    grad_xs, grad_weights, grad_biases = zip(*gradients, strict=True)
    _judge_row_gradient("weight", grad_weights, [gradient.T @ part for part in x.tensor_split(ranks, -1)])
    _judge_row_gradient("bias", grad_biases, [gradient.sum(0)] * ranks)
    columns = torch.arange(INPUTS).tensor_split(ranks)
    alone = [torch.zeros_like(x).index_add(-1, c, gradient @ w) for c, w in zip(columns, own, strict=True)]
    wrong_if(ranks > 1 and equal(grad_xs, alone),
             "the output is right, but each rank's gradient of x is zero outside of its own columns: x is "
             "whole on every rank, so its gradient must be too", "pass x through f before you cut it")
    compare([{"x": g} for g in grad_xs], {"x": (gradient @ weight).numpy()}, subject="the gradients",
            oracle="one process")


def _judge_row_gradient(name: str, given: Sequence[Any], own: Sequence[Tensor]) -> None:
    """Check the gradient of weight or bias on all ranks."""
    ranks, right = len(own), [gradient.numpy() for gradient in own]
    times = factor(given, right) or 1.0
    wrong_if(ranks > 1 and abs(times - ranks) < 1e-6,
             f"the output is right, but the gradient of the {name} is {ranks} times what it should be: the "
             "backward of the sum adds up the gradients once more, as that of torch.distributed.nn's "
             "all_reduce does", "the backward of this sum passes the gradient on as it is")
    wrong_if(ranks > 1 and abs(times * ranks - 1) < 1e-6,
             f"the output is right, but the gradient of the {name} is 1/{ranks} of what it should be: a bias "
             "divided among the ranks learns more slowly", "add the whole bias after the sum")
    for rank in range(ranks):
        compare([{name: given[rank]}], {name: right[rank]}, subject=f"rank {rank} of {ranks}: the gradients",
                oracle="one process")


# my_heads


def _whole_weight(ranks: int, hidden: int) -> Tensor:
    torch.manual_seed(ranks)
    return torch.randn(3 * hidden, hidden)


def _heads_on_rank(answer: Callable[..., Any], heads: int, width: int) -> Any:
    result = answer(_whole_weight(dist.get_world_size(), heads * width), heads)
    return result.detach().clone() if isinstance(result, Tensor) else type(result).__name__


@exercise(
    LESSON, "Every rank has whole heads, with their queries, keys and values, also where the heads cannot be "
    "divided evenly.",
    [(3, 5, 4), (2, 4, 3), (4, 6, 2), (4, 5, 3), (1, 4, 3)], on_ranks=_heads_on_rank,
    call=lambda ranks, heads, width: (
        f"my_heads(weight, {heads}) on {counted(ranks, 'rank')}, heads of {width}"
    ),
    errors={"tuple index out of range": (
        "chunk(p) may return fewer than p parts: of 5 heads on 4 ranks it makes 3",
        "tensor_split(p) always returns p",
    )},
)
def my_heads(results: Results, ranks: int, heads: int, width: int) -> None:
    """my_heads(weight, heads) runs on every rank: `weight`, of shape (3 · hidden, hidden), computes all
    queries, then all keys, then all values. Return the rows of this rank's heads in that order; tensor_split
    says which heads are whose."""
    for rank, value in enumerate(results):
        wrong_if(not isinstance(value, Tensor),
                 f"expected a tensor with this rank's rows of the weight; rank {rank} returned {value}")
        wrong_if(value.dim() != 2, f"expected two dimensions, (rows, hidden); rank {rank} returned "
                 f"{value.dim()}, {tuple(value.shape)}")
    hidden = heads * width
    weight = _whole_weight(ranks, hidden)
    q_k_v = weight.chunk(3)
    by_head = [part.unflatten(0, (heads, width)).tensor_split(ranks) for part in q_k_v]
    right = [torch.cat([part[rank].flatten(0, 1) for part in by_head]) for rank in range(ranks)]
    shapes = [
        f"rank {r}: given {tuple(a.shape)}, expected {tuple(b.shape)}"
        for r, (a, b) in enumerate(zip(results, right, strict=True))
        if a.shape != b.shape
    ]
    lost = len(weight) - sum(len(value) for value in results)
    otherwise = "these are not the rows of the rank's heads, q then k then v, as tensor_split cuts them", ""
    if any(value.shape[1] != hidden for value in results):
        otherwise = f"each row keeps its {hidden} numbers", "join the rows of q, k and v along dimension 0"
    elif lost > 0:
        otherwise = (f"{lost} rows are on no rank: heads // p rounds down",
                     "the first heads % p ranks have one head more")
    expect(results, right, [] if ranks == 1 else [
        (weight.tensor_split(ranks),
         "the weight was cut as if the q, k and v of a head stood together, but all queries are above all "
         "keys", "cut q, k and v one by one"),
        ([torch.cat([part.tensor_split(ranks)[r] for part in q_k_v]) for r in range(ranks)],
         "the heads are cut through: rows were counted, not heads. A rank needs whole heads"),
        ([by_head[0][r].flatten(0, 1) for r in range(ranks)],
         "only the queries: a rank needs the keys and values of its heads as well"),
        (weight.tensor_split(ranks, -1), "the weight is split by its inputs, not by its outputs: nn.Linear's "
         "weight has the shape (outputs, inputs), so the outputs of a head are rows"),
        ([torch.stack([part[r] for part in by_head], 1).flatten(0, 2) for r in range(ranks)],
         "a head's q, k and v stand together, but the layer's output is cut into q, k and v by chunk(3): all "
         "q first, then all k, then all v"),
        ([weight] * ranks, "every rank has all heads"),
    ], *otherwise, *shapes)


RING = "a rank of a ring sends 2(p − 1)/p times n bytes, and alone it sends nothing"


@exercise(
    LESSON, "Four all_reduces per layer, each of the whole activation: more ranks do not make it less.",
    # 4 ranks first: with 2, a rank of a ring sends n bytes, and half is what 1/p is.
    [(3, 10, 5, 7, 4, 8), (1, 64, 28, 128, 2, 4), (2, 4, 10, 6, 3, 4), (5, 3, 4, 8, 1, 2)],
    other=lambda random: (
        *(random.randint(2, 40) for _ in range(4)), random.randint(2, 8), random.choice([2, 4])
    ),
)
def bytes_per_step(
    answer: Any, layers: int, batch: int, sequence: int, hidden: int, ranks: int, value_bytes: int
) -> None:
    """bytes_per_step(layers, batch, sequence, hidden, ranks, value_bytes) returns how many bytes each rank
    sends per training step of a transformer, if every layer is split as in Megatron-LM and all_reduce is a
    ring."""
    ring, n = 2 * (ranks - 1) / ranks, batch * sequence * hidden * value_bytes
    right = layers * 4 * ring * n

    def otherwise(given: float) -> str:
        units = 1e3, 1e6, 1 << 10, 1 << 20
        if any(given and abs(given * unit - right) <= 0.01 * right for unit in units):
            return "the number of bytes is asked for, not of kB or MB"
        return ("count the all_reduces of a layer in forward and backward, and multiply by what a rank of a "
                "ring sends in each")

    expect_numbers(answer(layers, batch, sequence, hidden, ranks, value_bytes), right, [
        (layers * 4 * n,
         "here a rank sends n bytes in an all_reduce of n bytes, however many ranks there are", RING),
        (layers * 4 * 2 * n,
         "here a rank sends 2n bytes in an all_reduce of n bytes, however many ranks there are", RING),
        (right / 2, "that is half: which passes have all_reduces, and how many?",
         "the forward pass has two all_reduces per layer, and the backward pass has two more"),
        (right / layers, "that is one layer; there are several"),
        (right / value_bytes, "those are numbers, not bytes: each takes value_bytes"),
        (right * ranks, "that is what all ranks send together, and one rank is asked for",
         "one rank passes on 2(p − 1) pieces of n/p bytes, not of n bytes"),
        (layers * 12 * hidden * hidden * value_bytes * ring,
         "those are the parameters, as in data parallelism; here activations travel",
         "batch × sequence × hidden numbers"),
        (right / ranks, "the all_reduce is of the whole activation on every rank, not of 1/p of it"),
        (right / sequence, "each example has `sequence` tokens"),
    ], otherwise)
