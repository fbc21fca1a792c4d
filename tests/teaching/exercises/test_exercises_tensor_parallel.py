"""The exercises of lesson 06: right answers pass, and each typical mistake gets its own hint."""

from __future__ import annotations

import torch
import torch.distributed as dist
from answers import Answers
from store_exchange import through_the_store
from torch.nn.functional import linear

answers = Answers()

right, wrong, mutant = answers.of("column_backward")


class CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        return x.view_as(x)

    @staticmethod
    def backward(_, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


@right
def column_by_autograd(x, weight, grad):
    bias = torch.zeros(len(weight), dtype=x.dtype, requires_grad=True)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    linear(CopyIn.apply(x), weight, bias).backward(grad)
    return [x.grad, weight.grad, bias.grad]


@wrong("the ranks have not exchanged it")
def column_through_the_store(x, weight, grad):
    return sum(through_the_store(grad @ weight)), grad.T @ x, grad.sum(0)


GATHER = """parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, grad_x)
    grad_x = sum(parts[1:], parts[0])"""
SUM, GRADIENTS = "dist.all_reduce(grad_x)", "return grad_x, grad.T @ x, grad.sum(0)"
SUM_OF_WEIGHTS = f"""total = torch.zeros(10, 7, dtype=x.dtype)
    total[: len(weight)] = grad.T @ x
    dist.all_reduce(total)
    {GRADIENTS.replace("grad.T @ x", "total[: len(weight)]")}"""
mutant(SUM, GATHER)  # right
mutant(
    SUM,
    "pass",
    "grad_x is only this rank's part: x went into the columns of every rank",
    cure="the sum of what the ranks contribute",
)
mutant(SUM, f"{SUM}\n    grad_x /= dist.get_world_size()", "it is a sum, not a mean")
mutant(SUM, f"grad_x = {SUM}", "grad_x is a NoneType on rank 0, expected a tensor; dist.all_reduce works in place")
mutant("grad.T @ x", "(grad.T @ x).T", "grad_weight is transposed")
mutant(SUM, f"{SUM}\n    dist.all_reduce(torch.zeros(3, dtype=x.dtype))", "where 35 are enough")
mutant(GRADIENTS, SUM_OF_WEIGHTS, "grad_weight is the sum over the ranks")
mutant("grad.T @ x", "dist.get_world_size() * grad.T @ x", "grad_weight is 2 times what it should be")
mutant("grad.sum(0)", "grad.mean(0)", "need no other rank", cure="without communication")
mutant(
    "grad.sum(0)",
    "grad",
    "grad_bias has the shape (5, 5) on rank 0 of 2, expected (5,): one number per output, summed over the batch",
)
mutant("grad.sum(0)", "grad.sum(0) + grad.zero_()[0]", "grad was modified", cure="a new tensor")
mutant(", grad.sum(0)", "", "expected three gradients, (grad_x, grad_weight, grad_bias); rank 0 returned 2 values")


right, wrong, mutant = answers.of("row_linear")

CUT, PRODUCT = "CopyIn.apply(x).tensor_split(p, -1)[rank]", "SumOut.apply(F.linear(own, weight))"
OWN, RESULT = f"own = {CUT}", f"return {PRODUCT} + bias"
# Multiplies the whole x by a weight that is zero outside of this rank's columns.
PADDED = """own = CopyIn.apply(x)
    before = sum(map(len, torch.arange(x.shape[-1]).tensor_split(p)[:rank]))
    weight = F.pad(weight, (before, x.shape[-1] - before - weight.shape[1]))"""
SUMMING_BOTH_WAYS = """from torch.distributed.nn.functional import all_reduce
    return all_reduce(F.linear(own, weight)) + bias"""
mutant(OWN, PADDED)  # right
mutant(
    RESULT,
    "return SumOut.apply(F.linear(own, weight, bias))",
    "the bias was added on every rank before the sum, so it is in it once for each rank",
    cure="after the all_reduce",
)
mutant(" + bias", "", "the bias is missing")
mutant(PRODUCT, "F.linear(own, weight)", "the product of its own columns", cure="the sum over the ranks")
mutant(PRODUCT, f"{PRODUCT} / p", "the products were averaged")
mutant(CUT, "x.tensor_split(p, -1)[rank]", "zero outside of its own columns", cure="pass x through f")
mutant(
    RESULT,
    SUMMING_BOTH_WAYS,
    "the gradient of the weight is 2 times what it should be",
    cure="passes the gradient on as it is",
)
mutant(
    RESULT,
    "return SumOut.apply(F.linear(own, weight, bias / p))",
    "the gradient of the bias is 1/2 of what it should be",
    cure="after the sum",
)
mutant("F.linear(own", "F.linear(x", "has only some of its columns", cure="take the same columns")
mutant("tensor_split(p, -1)", "chunk(p, -1)", "has only some of its columns", cure="cuts into other sizes")
mutant("CopyIn.apply(x)", "CopyIn(x)", "an autograd function is applied", cure="CopyIn.apply(x)")
mutant(
    CUT,
    "CopyIn.apply(x.tensor_split(p, -1)[rank])",
    "Are these gradients of parts of x?",
    cure="pass x through f before you cut it",
)
mutant(" + bias", " + bias.detach()", "bias gets no gradient on rank 0")
mutant(f"return {PRODUCT}", PRODUCT, "it returned NoneType")


right, wrong, mutant = answers.of("my_heads")


@right
def my_heads_by_index(weight, heads):
    rank, ranks, hidden = dist.get_rank(), dist.get_world_size(), weight.shape[1]
    width, each, more = hidden // heads, heads // ranks, heads % ranks
    first = rank * each + min(rank, more)
    last = first + each + (rank < more)
    return torch.cat([weight[i * hidden + first * width : i * hidden + last * width] for i in range(3)])


ROWS = "return torch.cat([part.tensor_split(p)[rank].flatten(0, 1) for part in of_q_k_v])"
TOGETHER = "return weight.unflatten(0, (3, heads, -1)).transpose(0, 1).tensor_split(p)[rank].flatten(0, 2)"
CUT_THROUGH = "return torch.cat([part.tensor_split(p)[rank] for part in weight.chunk(3)])"
ROUNDED_DOWN = "part[rank * (heads // p) : (rank + 1) * (heads // p)]"
MINE = "part.tensor_split(p)[rank]"
mutant(
    ROWS,
    "return weight.tensor_split(p)[rank]",
    "as if the q, k and v of a head stood together",
    cure="cut q, k and v one by one",
)
mutant(ROWS, CUT_THROUGH, "rows were counted, not heads")
mutant("of_q_k_v])", "of_q_k_v[:1]])", "only the queries")
mutant(ROWS, "return weight.tensor_split(p, -1)[rank]", "split by its inputs")
mutant("of_q_k_v])", "of_q_k_v], 1)", "each row keeps its 20 numbers", cure="along dimension 0")
mutant(ROWS, TOGETHER, "all q first, then all k, then all v")
mutant(ROWS, "return weight", "every rank has all heads")
mutant(MINE, ROUNDED_DOWN, "heads // p rounds down", cure="the first heads % p ranks")
mutant("part.tensor_split(p)", "part.chunk(p)", "chunk(p) may return fewer than p parts", cure="tensor_split(p)")
mutant(
    ".flatten(0, 1) for part in of_q_k_v])",
    " for part in of_q_k_v], 1)",
    "expected two dimensions, (rows, hidden); rank 0 returned 3",
)
mutant(ROWS, f"return [{MINE} for part in of_q_k_v]", "expected a tensor with this rank's rows")
mutant(ROWS, f"{ROWS}.flip(0)", "these are not the rows of the rank's heads")


right, wrong, mutant = answers.of("bytes_per_step")


@right
def bytes_with_all_gather_and_reduce_scatter(layers, batch, sequence, hidden, ranks, value_bytes):
    piece = batch * sequence * hidden * value_bytes / ranks
    return sum((ranks - 1) * piece for _ in range(layers) for _ in ("attention", "mlp") for _ in range(4))


BYTES = "layers * 4 * 2 * (ranks - 1) / ranks * n"
TIMES_N, PIECES = "2(p − 1)/p times n bytes", "2(p − 1) pieces of n/p bytes, not of n bytes"
PARAMETERS = "layers * 12 * hidden**2 * value_bytes * 2 * (ranks - 1) / ranks"
mutant(BYTES, f"{BYTES} / 1e6", "not of kB or MB")
mutant(BYTES, "layers * 4 * n", "sends n bytes in an all_reduce of n bytes", cure=TIMES_N)
mutant(BYTES, "layers * 4 * 2 * n", "sends 2n bytes in an all_reduce of n bytes", cure=TIMES_N)
mutant("layers * 4", "layers * 2", "that is half", cure="and the backward pass has two more")
mutant("layers * 4", "4", "that is one layer")
mutant(" * value_bytes", "", "those are numbers, not bytes")
mutant("(ranks - 1) / ranks", "(ranks - 1)", "what all ranks send together", cure=PIECES)
mutant(BYTES, PARAMETERS, "those are the parameters", cure="batch × sequence × hidden")
mutant(BYTES, f"{BYTES} / ranks", "of the whole activation on every rank")
mutant("sequence * hidden", "hidden", "each example has `sequence` tokens")
mutant(BYTES, f"f'{{{BYTES}}} B'", "expected one number")
mutant(BYTES, f"3 * {BYTES}", "count the all_reduces of a layer")


test_the_verdict_fits_the_answer = answers.test_of_verdicts()
test_every_exercise_has_right_and_wrong_answers_here = answers.test_of_completeness("tensor_parallel")
