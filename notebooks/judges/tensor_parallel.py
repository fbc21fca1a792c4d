"""The exercises of lesson 06 that run on ranks: a column split's backward, a row split, and the split of heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from labkit.errors.lists import counted
from labkit.teaching.exercises.calculations import Expected, calculation
from labkit.teaching.exercises.comparisons import compare, factor
from labkit.teaching.exercises.judging import AnswerError, Hint, OnRanks, exercise, explaining, judge_result, showing
from labkit.worker.comm.torch_internals import DISPATCH

LESSON = "06_tensor_parallel"
BATCH, INPUTS, OUTPUTS = 5, 7, 10  # neither features nor outputs can be divided by 2, 3 and 4
# What torch and labkit say after common mistakes in row_linear, and in my_heads.
IN_ROWS: dict[str, Hint] = {
    "shapes cannot be multiplied": (
        "x is whole on every rank, and this rank's weight has only some of its columns",
        "take the same columns, x.tensor_split(p, -1)[rank]; chunk(p) cuts into other sizes if p does not divide them",
    ),
    "'CopyIn' object": ("an autograd function is applied, not called", "write CopyIn.apply(x), not CopyIn(x)"),
    "'SumOut' object": ("an autograd function is applied, not called", "write SumOut.apply(y), not SumOut(y)"),
    "Collective number": (
        "the ranks add up tensors of different shapes. Are these gradients of parts of x?",
        "pass x through f before you cut it: each rank adds the gradient of the whole x",
    ),
}
IN_HEADS: dict[str, Hint] = {
    "tuple index out of range": (
        "chunk(p) may return fewer than p parts: of 5 heads on 4 ranks it makes 3",
        "tensor_split(p) always returns p",
    ),
}


_Mode: Any = DISPATCH["TorchDispatchMode"]


class _Collectives(_Mode):  # type: ignore[misc]  # looked up when the file is loaded
    """Counts the numbers that this rank puts into each collective."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note a collective, then carry it out."""
        if function.namespace in ("c10d", "_c10d_functional"):
            name = function.name().partition("::")[2].partition(".")[0].strip("_")
            if not name.startswith("wait"):
                given = args[1] if len(args) > 1 and isinstance(args[1], (Tensor, list)) else args[0]  # after the outputs
                self.seen.append((name, _count(given)))
        return function(*args, **(kwargs or {}))


def _count(given: Any) -> int:
    """Return how many numbers are in a tensor, or in lists of tensors."""
    return given.numel() if isinstance(given, Tensor) else sum(map(_count, given))


def _numbers(*shape: int) -> Tensor:
    """Random numbers; the generator is that of the process, which `_begin` seeds alike on all ranks."""
    return torch.randn(*shape, dtype=torch.float64)


def _rank() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


# ------------------------------------------------------------------------------------------------------ column_backward


def _column_case(ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """The input, and the whole weight and gradient of the output."""
    torch.manual_seed(ranks)
    return _numbers(BATCH, INPUTS), _numbers(OUTPUTS, INPUTS), _numbers(BATCH, OUTPUTS)


def _column_on_rank(answer: Callable[..., Any]) -> Any:
    """Return what the student's function gives, the rank's collectives, and whether it changed what it was given."""
    rank, ranks = _rank()
    x, weight, gradient = _column_case(ranks)
    own, part = weight.tensor_split(ranks)[rank].clone(), gradient.tensor_split(ranks, -1)[rank].clone()
    given = [t.clone() for t in (x, own, part)]
    with _Collectives() as collectives:
        result = answer(x, own, part)
    changed = [name for name, a, b in zip(("x", "weight", "grad"), (x, own, part), given, strict=True) if not torch.equal(a, b)]
    return _detached(result), collectives.seen, changed


def _detached(result: Any) -> Any:
    if isinstance(result, (tuple, list)):
        return [r.detach().numpy() if isinstance(r, Tensor) else type(r).__name__ for r in result]
    return type(result).__name__


@exercise(
    LESSON,
    "column_backward(x, weight, grad) runs on every rank: `weight` is its rows of nn.Linear's weight, `grad` the gradient of "
    "its part of the output, x of shape (batch, inputs) is the same on all ranks. Return (grad_x, grad_weight, grad_bias).",
    "On 1, 2, 3 and 4 ranks the gradients are those of one process, with one all_reduce of the size of x.",
)
def _column_backward(answer: Any, on: OnRanks) -> None:
    for ranks in (2, 3, 4, 1):
        with showing(f"column_backward(x, weight, grad) on {counted(ranks, 'rank')}"):
            _judge_column(on(ranks, _column_on_rank, answer), ranks)


def _judge_column(seen: Sequence[Any], ranks: int) -> None:
    x, weight, gradient = _column_case(ranks)
    parts = gradient.tensor_split(ranks, -1)
    for rank, (result, _, changed) in enumerate(seen):
        if not isinstance(result, list) or len(result) != 3:
            returned = result if isinstance(result, str) else counted(len(result), "value")
            raise AnswerError(f"expected three gradients, (grad_x, grad_weight, grad_bias); rank {rank} returned {returned}")
        for name, value in zip(("grad_x", "grad_weight", "grad_bias"), result, strict=True):
            if isinstance(value, str):
                hint = "; dist.all_reduce works in place and returns None" if value == "NoneType" else ""
                raise AnswerError(f"{name} is a {value} on rank {rank}, expected a tensor{hint}")
        if changed:
            raise AnswerError(
                f"{changed[0]} was modified, and autograd still needs it: dist.all_reduce works in place",
                cure="give it a new tensor",
            )
    own = [
        {"grad_weight": (g.T @ x).numpy(), "grad_bias": g.sum(0).numpy()} for g in parts
    ]  # each rank's part of the whole gradients
    for rank, (result, _, _) in enumerate(seen):
        names = {"grad_weight": result[1], "grad_bias": result[2]}
        _judge_own_gradients(names, own, rank, ranks)
    got = [{"grad_x": result[0]} for result, _, _ in seen]
    _judge_grad_x(
        got, (gradient @ weight).numpy(), [(g @ w).numpy() for g, w in zip(parts, weight.tensor_split(ranks), strict=True)]
    )
    _judge_messages([collectives for _, collectives, _ in seen], ranks, BATCH * INPUTS)


def _judge_own_gradients(got: dict[str, Any], own: Sequence[dict[str, Any]], rank: int, ranks: int) -> None:
    for name, value in got.items():
        if ranks > 1 and name == "grad_weight" and value.shape == own[rank][name].T.shape != own[rank][name].shape:
            raise AnswerError(
                "grad_weight is transposed: nn.Linear's weight, and so its gradient, has the shape (outputs, inputs)"
            )
        expected = own[rank][name]
        if value.shape != expected.shape:
            each = "one number per output, summed over the batch" if name == "grad_bias" else "the shape of this rank's weight"
            raise AnswerError(f"{name} has the shape {value.shape} on rank {rank} of {ranks}, expected {expected.shape}: {each}")
        times = factor([value], [expected])
        if times is not None and ranks > 1 and abs(times - ranks) < 1e-6:
            raise AnswerError(f"{name} is {ranks} times what it should be: each rank owns its part, nothing is added up")
        same_shape = [part[name] for part in own if part[name].shape == expected.shape]
        if ranks > 1 and len(same_shape) == ranks and _same(value, sum(same_shape)):
            raise AnswerError(f"{name} is the sum over the ranks: each rank owns its part, nothing is added up")
    try:
        compare([got], own[rank], subject=f"rank {rank} of {ranks}: the gradients", oracle="one process")
    except AnswerError as error:
        raise AnswerError(
            f"{error.message}. A rank's own weight and bias need no other rank",
            *error.details,
            cure="its part of the gradient of the output and the whole x suffice, without communication",
        ) from None


def _judge_grad_x(got: Sequence[dict[str, Any]], expected: Any, partial: Sequence[Any]) -> None:
    ranks = len(got)
    if ranks > 1 and all(_same(a["grad_x"], p) for a, p in zip(got, partial, strict=True)):
        raise AnswerError(
            "grad_x is only this rank's part: x went into the columns of every rank, and each contributes to its gradient",
            cure="the gradient of x is the sum of what the ranks contribute",
        )

    causes = {1 / ranks: "of x were averaged. Each rank adds what its own columns contribute: it is a sum, not a mean"}
    compare(got, {"grad_x": expected}, subject="the gradients", oracle="one process", causes=causes)


def _judge_messages(collectives: Sequence[list[tuple[str, int]]], ranks: int, numbers: int) -> None:
    sent = min(sum(count for _, count in own) for own in collectives)
    if ranks > 1 and sent < numbers:
        raise AnswerError(
            "the result is right, but the ranks have not exchanged it: how can a rank know what others contribute to grad_x?",
            f"a rank communicated {counted(sent, 'number')}; grad_x has {numbers}",
        )
    sent = sum(count for _, count in collectives[0])
    details = [f"{name} of {counted(count, 'number')}" for name, count in collectives[0]]
    if ranks > 1 and sent > numbers:
        raise AnswerError(
            f"the result is right, but rank 0 communicated {sent} numbers where {numbers} are enough: only the gradient of x is "
            "needed by other ranks",
            *details,
        )


def _same(a: Any, b: Any) -> bool:
    return a.shape == b.shape and bool(abs(a - b).max(initial=0.0) < 1e-9)


# ----------------------------------------------------------------------------------------------------------- row_linear


def _row_case(ranks: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The input, the whole weight, the bias, and the gradient of the output."""
    torch.manual_seed(10 + ranks)
    return _numbers(BATCH, INPUTS), _numbers(OUTPUTS, INPUTS), _numbers(OUTPUTS), _numbers(BATCH, OUTPUTS)


def _row_on_rank(answer: Callable[..., Any]) -> Any:
    """Return the student's output and gradients, and the collectives of forward and backward."""
    rank, ranks = _rank()
    x, weight, bias, gradient = _row_case(ranks)
    own = weight.tensor_split(ranks, -1)[rank].clone()
    leaves = [t.requires_grad_() for t in (x, own, bias)]
    with _Collectives() as collectives:
        y = answer(*leaves)
        if not isinstance(y, Tensor):
            return type(y).__name__
        shown = y.detach().clone().numpy()
        if y.shape == gradient.shape and y.requires_grad:
            y.backward(gradient)
    gradients = [None if t.grad is None else t.grad.numpy() for t in leaves]
    return shown, gradients, collectives.seen


@exercise(
    LESSON,
    "row_linear(x, weight, bias) runs on every rank: x and bias are whole, `weight` is this rank's columns of nn.Linear's "
    "weight, cut by tensor_split. Return the layer's whole output, with correct gradients of x, weight and bias.",
    "On 1, 2, 3 and 4 ranks, output and gradients are those of one process.",
)
def _row_linear(answer: Any, on: OnRanks) -> None:
    for ranks in (2, 3, 4, 1):
        with showing(f"row_linear(x, weight, bias) on {counted(ranks, 'rank')}"), explaining(IN_ROWS):
            _judge_row(on(ranks, _row_on_rank, answer), ranks)


def _judge_row(seen: Sequence[Any], ranks: int) -> None:
    x, weight, bias, gradient = _row_case(ranks)
    if isinstance(seen[0], str):
        raise AnswerError(f"expected a tensor, the output of the layer; it returned {seen[0]}")
    own = weight.tensor_split(ranks, -1)
    _judge_row_output([s[0] for s in seen], x, own, bias)
    _judge_row_gradients([s[1] for s in seen], x, own, gradient)


def _judge_row_output(got: Sequence[Any], x: Tensor, own: Sequence[Tensor], bias: Tensor) -> None:
    ranks = len(got)
    products = [part @ w.T for part, w in zip(x.tensor_split(ranks, -1), own, strict=True)]
    total = sum(products[1:], products[0])
    expected = [total + bias] * ranks
    mistakes = {
        (
            "the bias was added on every rank before the sum, so it is in it once for each rank",
            "add it after the all_reduce",
        ): [total + ranks * bias] * ranks,
        "the bias is missing": [total] * ranks,
        ("each rank returns only the product of its own columns", "the output is the sum over the ranks"): [
            p + bias for p in products
        ],
        "the products were averaged: each rank holds a part of the sum, so they must be added": [total / ranks + bias] * ranks,
    }
    judge_result(
        got, expected, mistakes, "", same=lambda a, b: all(_same(np.asarray(x), y.numpy()) for x, y in zip(a, b, strict=True))
    )
    compare([{"y": a} for a in got], {"y": expected[0].numpy()}, subject="the outputs", oracle="one process")


def _judge_row_gradients(got: Sequence[Sequence[Any]], x: Tensor, own: Sequence[Tensor], gradient: Tensor) -> None:
    ranks, whole = len(got), torch.cat(tuple(own), -1)
    for rank, gradients in enumerate(got):
        for name, value in zip(("x", "weight", "bias"), gradients, strict=True):
            if value is None:
                raise AnswerError(
                    f"the output is right, but {name} gets no gradient on rank {rank}: autograd must be able to follow the way "
                    "from it to the output"
                )
    for index, name in ((1, "weight"), (2, "bias")):
        right = [gradient.T @ part if index == 1 else gradient.sum(0) for part in x.tensor_split(ranks, -1)]
        times = factor([g[index] for g in got], [r.numpy() for r in right])
        if times is not None and abs(times - ranks) < 1e-6 and ranks > 1:
            raise AnswerError(
                f"the output is right, but the gradient of the {name} is {ranks} times what it should be: the backward of the "
                "sum adds up the gradients once more, as that of torch.distributed.nn's all_reduce does",
                cure="the backward of this sum passes the gradient on as it is",
            )
        if times is not None and abs(times * ranks - 1) < 1e-6 and ranks > 1:
            raise AnswerError(
                f"the output is right, but the gradient of the {name} is 1/{ranks} of what it should be: a bias divided among "
                "the ranks learns more slowly",
                cure="add the whole bias after the sum",
            )
        for rank, r in enumerate(right):
            compare(
                [{name: got[rank][index]}], {name: r.numpy()}, subject=f"rank {rank} of {ranks}: the gradients",
                oracle="one process",
            )  # fmt: skip
    expected = (gradient @ whole).numpy()
    alone = [(gradient @ w) for w in own]
    widths = [w.shape[1] for w in own]
    padded = []
    for rank, part in enumerate(alone):
        padded.append(torch.nn.functional.pad(part, (sum(widths[:rank]), sum(widths[rank + 1 :]))).numpy())
    if ranks > 1 and all(_same(g[0], p) for g, p in zip(got, padded, strict=True)):
        raise AnswerError(
            "the output is right, but each rank's gradient of x is zero outside of its own columns: x is whole on every rank, so "
            "its gradient must be too",
            cure="pass x through f before you cut it",
        )
    compare([{"x": g[0]} for g in got], {"x": expected}, subject="the gradients", oracle="one process")


# ------------------------------------------------------------------------------------------------------------- my_heads


def _heads_on_rank(answer: Callable[..., Any], weight: Tensor, heads: int) -> Any:
    result = answer(weight, heads)
    return result.detach().clone() if isinstance(result, Tensor) else type(result).__name__


@exercise(
    LESSON,
    "my_heads(weight, heads) runs on every rank: `weight`, of shape (3 · hidden, hidden), computes all queries, then all "
    "keys, then all values. Return the rows of this rank's heads in that order; tensor_split says which heads are whose.",
    "Every rank has whole heads, with their queries, keys and values, also where the heads cannot be divided evenly.",
)
def _my_heads(answer: Any, on: OnRanks) -> None:
    for ranks, heads, width in ((3, 5, 4), (2, 4, 3), (4, 6, 2), (4, 5, 3), (1, 4, 3)):
        hidden = heads * width
        torch.manual_seed(ranks)
        weight = torch.randn(3 * hidden, hidden)
        case = f"my_heads(weight, {heads}) on {counted(ranks, 'rank')}, heads of {width}"
        with showing(case), explaining(IN_HEADS):
            got = on(ranks, _heads_on_rank, answer, weight, heads)
        for rank, value in enumerate(got):
            if not isinstance(value, Tensor):
                raise AnswerError(f"{case}: expected a tensor with this rank's rows of the weight; rank {rank} returned {value}")
            if value.dim() != 2:
                raise AnswerError(
                    f"{case}: expected two dimensions, (rows, hidden); rank {rank} returned {value.dim()}, {tuple(value.shape)}"
                )
        q, k, v = weight.chunk(3)
        by_head = [part.unflatten(0, (heads, width)).tensor_split(ranks) for part in (q, k, v)]
        right = [torch.cat([part[rank].flatten(0, 1) for part in by_head]) for rank in range(ranks)]
        shapes = [
            f"rank {r}: given {tuple(a.shape)}, expected {tuple(b.shape)}"
            for r, (a, b) in enumerate(zip(got, right, strict=True))
            if a.shape != b.shape
        ]
        mistakes = {
            (
                "the weight was cut as if the q, k and v of a head stood together, but all queries are above all keys",
                "cut q, k and v one by one",
            ): weight.tensor_split(ranks),
            "the heads are cut through: rows were counted, not heads. A rank needs whole heads": [
                torch.cat([p.tensor_split(ranks)[r] for p in (q, k, v)]) for r in range(ranks)
            ],
            "only the queries: a rank needs the keys and values of its heads as well": [
                by_head[0][r].flatten(0, 1) for r in range(ranks)
            ],
            "the weight is split by its inputs, not by its outputs: nn.Linear's weight has the shape (outputs, inputs), so the "
            "outputs of a head are rows": weight.tensor_split(ranks, -1),
            "a head's q, k and v stand together, but the layer's output is cut into q, k and v by chunk(3): all q first, then "
            "all k, then all v": [torch.stack([p[r] for p in by_head], 1).flatten(0, 2) for r in range(ranks)],
            "every rank has all heads": [weight] * ranks,
        }
        rows = sum(len(value) for value in got)
        otherwise: Hint = "these are not the rows of the rank's heads, q then k then v, as tensor_split cuts them"
        if any(value.shape[1] != hidden for value in got):
            otherwise = f"each row keeps its {hidden} numbers", "join the rows of q, k and v along dimension 0"
        elif rows < len(weight):
            otherwise = (
                f"{len(weight) - rows} rows are on no rank: heads // p rounds down",
                "the first heads % p ranks have one head more",
            )
        judge_result(got, right, mistakes if ranks > 1 else {}, otherwise, case, *shapes)


RING = "a rank of a ring sends 2(p − 1)/p times n bytes, and alone it sends nothing"


@calculation(
    LESSON,
    "bytes_per_step(layers, batch, sequence, hidden, ranks, value_bytes) returns how many bytes each rank sends per training "
    "step of a transformer, if every layer is split as in Megatron-LM and all_reduce is a ring.",
    "Four all_reduces per layer, each of the whole activation: more ranks do not make it less.",
    # 4 ranks first: with 2, a rank of a ring sends n bytes, and half is what 1/p is.
    ((3, 10, 5, 7, 4, 8), (1, 64, 28, 128, 2, 4), (2, 4, 10, 6, 3, 4), (5, 3, 4, 8, 1, 2)),
    other=lambda random: (*(random.randint(2, 40) for _ in range(4)), random.randint(2, 8), random.choice([2, 4])),
)
def _bytes_per_step(layers: int, batch: int, sequence: int, hidden: int, ranks: int, value_bytes: int) -> Expected:
    ring, n = 2 * (ranks - 1) / ranks, batch * sequence * hidden * value_bytes
    right = layers * 4 * ring * n
    mistakes = {
        ("here a rank sends n bytes in an all_reduce of n bytes, however many ranks there are", RING): layers * 4 * n,
        ("here a rank sends 2n bytes in an all_reduce of n bytes, however many ranks there are", RING): layers * 4 * 2 * n,
        (
            "that is half: which passes have all_reduces, and how many?",
            "the forward pass has two all_reduces per layer, and the backward pass has two more",
        ): right / 2,
        "that is one layer; there are several": right / layers,
        "those are numbers, not bytes: each takes value_bytes": right / value_bytes,
        (
            "that is what all ranks send together, and one rank is asked for",
            "one rank passes on 2(p − 1) pieces of n/p bytes, not of n bytes",
        ): right * ranks,
        ("those are the parameters, as in data parallelism; here activations travel", "batch × sequence × hidden numbers"): (
            layers * 12 * hidden * hidden * value_bytes * ring
        ),
        "the all_reduce is of the whole activation on every rank, not of 1/p of it": right / ranks,
        "each example has `sequence` tokens": right / sequence,
    }

    def otherwise(given: float) -> str:
        if any(given and abs(given * unit - right) <= 0.01 * right for unit in (1e3, 1e6, 1 << 10, 1 << 20)):
            return "the number of bytes is asked for, not of kB or MB"
        return "count the all_reduces of a layer in forward and backward, and multiply by what a rank of a ring sends in each"

    return Expected(right, mistakes, otherwise)
